# SPDX-License-Identifier: Apache-2.0
"""What certificates and revocation lists say, as far as the agent reads them itself."""
