# SPDX-License-Identifier: Apache-2.0
"""The interface between the checker and the engine that forwards packets of virtual servers.

There is one engine, on nftables. The checker's tests use a second implementation that records its calls.

Invariant: `check_servers` refuses everything that the engine does not support, before anything is changed. `apply`
disturbs no flow of a member that stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from amphora_agent.l4.model import Host, VirtualServer


@dataclass(frozen=True)
class Counters:
    """Counters of a virtual server since the kernel began to count; bytes as clients see them."""

    active_connections: int = 0
    total_connections: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    request_errors: int = 0


@dataclass(frozen=True)
class MemberCounters:
    """Counters of a member since the engine's process began to count; bytes as in `Counters`."""

    active_connections: int = 0
    total_connections: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


MemberPlace = tuple[str, Host, int]
"""A member by the id of its virtual server, its address and its port."""


class Engine(Protocol):
    """Used by one thread at a time, in the inner namespace. Methods raise `AgentError`."""

    def check_servers(self, servers: Sequence[VirtualServer]) -> None:
        """Refuse virtual servers that this engine or this kernel does not support; changes nothing."""

    def apply(
        self, servers: Sequence[VirtualServer], up: Mapping[tuple[str, str], bool], *, paired: bool = False
    ) -> None:
        """Forward exactly for these, and end the flows of removed, disabled and failed members.

        Args:
            servers: all wanted virtual servers.
            up: health by virtual server id and member id. A member without an entry is up.
            paired: whether another amphora may have to continue the flows of this one.
        """

    def find_drift(
        self, servers: Sequence[VirtualServer], up: Mapping[tuple[str, str], bool], *, paired: bool = False
    ) -> list[str]:
        """Return the differences from the state that `apply` would leave, as sentences; changes nothing."""

    def rebalance(
        self, servers: Sequence[VirtualServer], up: Mapping[tuple[str, str], bool], *, paired: bool = False
    ) -> None:
        """Adjust LEAST_CONNECTIONS to the present flows; called about once a second."""

    def counters(self) -> Mapping[str, Counters]:
        """Return the counters by virtual server id."""

    def member_counters(self) -> Mapping[MemberPlace, MemberCounters]:
        """Return the counters of members. Slower than `counters`; meant for occasional calls."""

    def release(self) -> None:
        """Remove everything that `apply` made."""
