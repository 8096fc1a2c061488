# SPDX-License-Identifier: Apache-2.0
"""Jobs of controllers (rows with leases) and notifications between processes."""
