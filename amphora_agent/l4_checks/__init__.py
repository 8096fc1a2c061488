# SPDX-License-Identifier: Apache-2.0
"""Health checks of the members of UDP and SCTP listeners."""
