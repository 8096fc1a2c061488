# SPDX-License-Identifier: Apache-2.0
"""Conntrack marks: the numbers of the virtual server and the member of each flow.

Invariant: wanted objects keep their number. A change reuses no free number, because old flows may still have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from amphora_agent.l4.model import VirtualServer

_MEMBER_BITS = 20
SERVER_MASK = 0xFFFFFFFF ^ (1 << _MEMBER_BITS) - 1
MAX_SERVERS = (1 << 32 - _MEMBER_BITS) - 1
MAX_MEMBERS = (1 << _MEMBER_BITS) - 1

MemberMarks = Mapping[str, str]
"""Whole marks of the members of a virtual server in the notation of nft, by `Member.place`."""


@dataclass(frozen=True)
class Marks:
    """Numbers of virtual servers by id, shifted to their bits; marks of members by virtual server id."""

    servers: Mapping[str, int]
    members: Mapping[str, MemberMarks]

    @property
    def whole(self) -> set[int]:
        """The marks of all members."""
        return {int(mark, 16) for marks in self.members.values() for mark in marks.values()}


NO_MARKS = Marks({}, {})


def notation(mark: int) -> str:
    """Return a mark as nft writes it."""
    return f"{mark:#010x}"


def assign_marks(before: Marks, servers: Sequence[VirtualServer]) -> Marks:
    """Return marks for all virtual servers and members; ``before`` are the present marks.

    The marks of a virtual server whose members have the same addresses are the same object as before.
    """
    known = {one: mark >> _MEMBER_BITS for one, mark in before.servers.items()}
    numbers = _numbers(known, [server.id for server in servers])
    members = {}
    for server in servers:
        base = numbers[server.id] << _MEMBER_BITS
        former = before.members.get(server.id, {}) if before.servers.get(server.id) == base else {}
        members[server.id] = _member_marks(former, base, [member.place for member in server.members])
    return Marks({one: number << _MEMBER_BITS for one, number in numbers.items()}, members)


def _member_marks(former: MemberMarks, base: int, places: Sequence[str]) -> MemberMarks:
    new = [place for place in dict.fromkeys(places) if place not in former]
    if not new and len(former) == len({*places}):
        return former
    taken = {*former.values()}
    free = (mark for number in count(1) if (mark := notation(base | number)) not in taken)
    added = {place: next(free) for place in new}
    return {place: former.get(place) or added[place] for place in places}


def _numbers(before: Mapping[str, int], wanted: Iterable[str]) -> dict[str, int]:
    taken = {*before.values()}
    free = (number for number in count(1) if number not in taken)
    return {one: before[one] if one in before else next(free) for one in dict.fromkeys(wanted)}
