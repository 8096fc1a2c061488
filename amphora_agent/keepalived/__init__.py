# SPDX-License-Identifier: Apache-2.0
"""keepalived: several amphorae that agree on which one has the VIPs (VRRP, RFC 9568).

Invariant: a single amphora runs no keepalived; its VIPs are plain addresses set by `amphora_agent.network`.
"""
