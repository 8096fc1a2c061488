# SPDX-License-Identifier: Apache-2.0
"""Conntrack marks: the numbers of the virtual server and the member of each flow.

Invariant: wanted objects keep their number. A change reuses no free number, because old flows may still have it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

from amphora_agent.l4.model import Host, VirtualServer

_MEMBER_BITS = 20
SERVER_MASK = 0xFFFFFFFF ^ (1 << _MEMBER_BITS) - 1
MAX_SERVERS = (1 << 32 - _MEMBER_BITS) - 1
MAX_MEMBERS = (1 << _MEMBER_BITS) - 1

Place = tuple[Host, int]
"""Address and port of a member."""
_T = TypeVar("_T", bound=Hashable)


@dataclass(frozen=True)
class Marks:
    """Numbers of virtual servers by id, shifted to their bits; whole marks by virtual server id and place."""

    servers: Mapping[str, int]
    members: Mapping[tuple[str, Place], int]


NO_MARKS = Marks({}, {})


def assign_marks(before: Marks, servers: Sequence[VirtualServer]) -> Marks:
    """Return marks for all virtual servers and members; ``before`` are the present marks."""
    known = {one: mark >> _MEMBER_BITS for one, mark in before.servers.items()}
    numbers = _numbers(known, [server.id for server in servers])
    members = {}
    for server in servers:
        base = numbers[server.id] << _MEMBER_BITS
        former = {
            place: mark ^ base
            for (owner, place), mark in before.members.items()
            if owner == server.id and mark & SERVER_MASK == base
        }
        found = _numbers(former, [(member.address, member.port) for member in server.members])
        members.update({(server.id, place): base | number for place, number in found.items()})
    return Marks({one: number << _MEMBER_BITS for one, number in numbers.items()}, members)


def _numbers(before: Mapping[_T, int], wanted: Iterable[_T]) -> dict[_T, int]:
    taken = {*before.values()}
    free = (number for number in count(1) if number not in taken)
    return {one: before[one] if one in before else next(free) for one in dict.fromkeys(wanted)}
