# SPDX-License-Identifier: Apache-2.0
"""The state of a member, and how each check changes it.

Invariant: pure. A member changes its state after exactly `fall` failed checks in a row, or `rise` successful ones. The
first check of a member decides at once. Before the first check, the member gets no clients while other members serve.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from amphora_agent.l4.model import Member, VirtualServer

MemberKey = tuple[str, str]
"""Pool id and member id: listeners with the same pool share its checks."""
NOT_CHECKED = "not checked yet"


class Status:
    """The status words of heartbeats, as in HAProxy (management guide 9.1, field 17)."""

    UP = "UP"
    DOWN = "DOWN"
    DRAIN = "DRAIN"
    MAINT = "MAINT"
    NO_CHECK = "no check"
    # Status of a member without a check result.
    UNKNOWN = "NOLB"
    OPEN = "OPEN"
    FULL = "FULL"


@dataclass(frozen=True)
class State:
    """Result of the checks of one member.

    ``up`` is whether the member may get clients, ``proven`` whether there was a check. ``against`` counts the latest
    consecutive checks that contradict ``up``. ``since`` is in seconds since 1970.
    """

    up: bool
    proven: bool
    against: int
    since: float
    reason: str

    @cached_property
    def document_text(self) -> str:
        """The state in JSON. It is cached, because a change of one member writes the states of all members."""
        return json.dumps(asdict(self), separators=(",", ":"))


States = Mapping[MemberKey, State]


def initial_state(now: float, *, others: bool) -> State:
    """Return the state of an unchecked member; it gets clients if there are no others."""
    return State(up=not others, proven=False, against=0, since=now, reason=NOT_CHECKED)


def next_state(state: State, *, good: bool, reason: str, rise: int, fall: int, now: float) -> State:
    """Return the state after one more check. ``reason`` is the result in a few words."""
    if not state.proven:
        return State(up=good, proven=True, against=0, since=now, reason=reason)
    if good == state.up:
        return replace(state, against=0, reason=reason)
    against = state.against + 1
    if against < (fall if state.up else rise):
        return replace(state, against=against, reason=reason)
    return State(up=good, proven=True, against=0, since=now, reason=reason)


def checked_members(servers: Iterable[VirtualServer]) -> dict[MemberKey, tuple[VirtualServer, Member]]:
    """Return the members that need checks, each with a virtual server of its pool."""
    found: dict[MemberKey, tuple[VirtualServer, Member]] = {}
    for server in servers:
        if server.monitor is not None and server.pool_id is not None:
            for member in server.members:
                if member.enabled:
                    found.setdefault((server.pool_id, member.id), (server, member))
    return found


def carry_over(
    known: States, before: Sequence[VirtualServer], wanted: Sequence[VirtualServer], now: float
) -> dict[MemberKey, State]:
    """Return states for new virtual servers. A member that served without checks counts as up."""
    pools = {server.pool_id for server in wanted if server.monitor is not None}
    unchecked = (server for server in before if server.monitor is None and server.pool_id in pools)
    serving = {(server.pool_id, member.id) for server in unchecked for member in server.members if member.enabled}
    served = State(up=True, proven=True, against=0, since=now, reason="served before the first check")
    found, new, with_others = {}, [], set()
    for key, (_, member) in checked_members(wanted).items():
        state = known.get(key) or (served if key in serving else None)
        if state is None:
            new.append(key)
            continue
        found[key] = state
        if state.up and member.weight > 0:
            with_others.add(key[0])
    return {**found, **{key: initial_state(now, others=key[0] in with_others) for key in new}}


def member_health(servers: Iterable[VirtualServer], states: States) -> dict[tuple[str, str], bool]:
    """Return whether each checked member is up, by virtual server id and member id."""
    return {
        (server.id, member.id): state.up
        for server in servers
        if server.monitor is not None
        for member in server.members
        if (state := _state_of(server, member, states)) is not None
    }


def _state_of(server: VirtualServer, member: Member, states: States) -> State | None:
    if server.monitor is None or server.pool_id is None or not member.enabled:
        return None
    return states.get((server.pool_id, member.id))


def member_status(server: VirtualServer, member: Member, states: States) -> str:
    """Return the status word of a member for heartbeats."""
    if not member.enabled:
        return Status.MAINT
    state = _state_of(server, member, states)
    if state is None:
        return Status.NO_CHECK
    if not state.proven:
        return Status.UNKNOWN
    if not state.up:
        return Status.DOWN
    return Status.UP if member.weight else Status.DRAIN


def pool_status(server: VirtualServer, states: States) -> str:
    """Return the status word of a pool: as in HAProxy, it is down if none of its members can serve."""
    up = member_health((server,), states)
    usable = any(one.enabled and one.weight > 0 and up.get((server.id, one.id), True) for one in server.members)
    return Status.UP if usable or not server.members else Status.DOWN


def last_change(server: VirtualServer, member: Member, states: States) -> tuple[float | None, str]:
    """Return the time and the reason of a member's latest change; None and empty without a check."""
    state = _state_of(server, member, states)
    return (None, "") if state is None else (state.since, state.reason)


def to_json(states: States) -> str:
    """Return the states in JSON. Ids of pools and members are UUIDs, which need no quoting."""
    rows = [f'["{pool}","{member}",{state.document_text}]' for (pool, member), state in states.items()]
    return f"[{','.join(rows)}]"


def from_document(value: Any) -> dict[MemberKey, State]:
    """Return the states of a document of `to_json`; raises KeyError, TypeError or ValueError."""
    types = {"up": bool, "proven": bool, "against": int, "since": float, "reason": str}
    return {
        (str(pool), str(member)): State(**{name: kind(plain[name]) for name, kind in types.items()})
        for pool, member, plain in value
    }
