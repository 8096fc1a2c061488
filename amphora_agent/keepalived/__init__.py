# SPDX-License-Identifier: Apache-2.0
"""keepalived: two amphorae that share a VIP.

Invariant: a single amphora runs no keepalived; its VIPs are plain addresses set by `amphora_agent.network`.
The rooms for VRRP configuration, the tracked file and the process belong here once amphorae come in pairs.
"""
