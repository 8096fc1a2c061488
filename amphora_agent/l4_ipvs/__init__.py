# SPDX-License-Identifier: Apache-2.0
"""The forwarding engine on IPVS."""
