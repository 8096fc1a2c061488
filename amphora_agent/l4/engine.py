# SPDX-License-Identifier: Apache-2.0
"""What forwards the packets of virtual servers: the interface of an engine.

Invariant: whatever an engine cannot do it refuses in `check`, by name, before anything is changed; `bring_about`
disturbs no flow of a member that stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from amphora_agent.l4.model import Host, VirtualServer


@dataclass(frozen=True)
class Counters:
    """What one virtual server has done since the kernel began to count; bytes as clients sent and got them."""

    active_connections: int = 0
    total_connections: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    request_errors: int = 0


@dataclass(frozen=True)
class MemberCounters:
    """What one member has been given since the engine's process began to count; bytes as in `Counters`."""

    active_connections: int = 0
    total_connections: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


Place = tuple[str, Host, int]
"""A member by the id of its virtual server, its address and its port."""


class Engine(Protocol):
    """Used by one thread at a time, in the inner namespace. Methods raise `AgentError`."""

    def check(self, servers: Sequence[VirtualServer]) -> None:
        """Refuse what this engine, or this kernel, cannot do; touches nothing."""

    def bring_about(
        self, servers: Sequence[VirtualServer], up: Mapping[tuple[str, str], bool], *, paired: bool = False
    ) -> None:
        """Make the kernel forward exactly so, and end the flows of members that are gone, disabled or down.

        Args:
            servers: all that are wanted.
            up: by id of the virtual server and of the member, who may be given clients as far as checks say. Who is
                not named is up.
            paired: whether another amphora may have to go on with the flows that this one has.
        """

    def differs(
        self, servers: Sequence[VirtualServer], up: Mapping[tuple[str, str], bool], *, paired: bool = False
    ) -> list[str]:
        """What the kernel has otherwise than `bring_about` would leave it, as sentences; changes nothing."""

    def balance(
        self, servers: Sequence[VirtualServer], up: Mapping[tuple[str, str], bool], *, paired: bool = False
    ) -> None:
        """Look who has the fewest flows, where that decides; called about once a second with what was brought about."""

    def counters(self) -> Mapping[str, Counters]:
        """By id of the virtual server."""

    def member_counters(self) -> Mapping[Place, MemberCounters]:
        """By place; for whoever asks now and then."""

    def release(self) -> None:
        """Take away all that `bring_about` ever made."""
