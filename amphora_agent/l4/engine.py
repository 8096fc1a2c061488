# SPDX-License-Identifier: Apache-2.0
"""The counters of the engine that forwards packets of virtual servers (`l4_nftables.engine`)."""

from __future__ import annotations

from dataclasses import dataclass

from amphora_agent.l4.model import Host


@dataclass(frozen=True)
class MemberCounters:
    """Counters of a member since the engine's process began to count; bytes as clients see them."""

    active_connections: int = 0
    total_connections: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


@dataclass(frozen=True)
class Counters(MemberCounters):
    """Counters of a virtual server since the kernel began to count."""

    request_errors: int = 0


MemberPlace = tuple[str, Host, int]
"""A member by the id of its virtual server, its address and its port."""
