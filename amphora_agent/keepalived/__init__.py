# SPDX-License-Identifier: Apache-2.0
"""keepalived: several amphorae elect the one that has the VIPs (VRRP, RFC 9568).

Invariant: a single amphora runs no keepalived; its VIPs are plain addresses set by `amphora_agent.network`.
"""
