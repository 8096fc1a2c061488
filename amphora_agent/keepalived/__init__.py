# SPDX-License-Identifier: Apache-2.0
"""keepalived elects the amphora that has the VIPs (VRRP, RFC 9568). A single amphora runs none."""
