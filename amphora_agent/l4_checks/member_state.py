# SPDX-License-Identifier: Apache-2.0
"""What is known of a member, and how it changes with each check.

Invariant: pure. A member changes its state after exactly `fall` bad checks in a row, or `rise` good ones; one that
was never checked is decided by its first check. Until then it gets no clients that others could have served.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from amphora_agent.l4.model import Member, VirtualServer

# By pool and member: listeners that share a pool share its checks.
Key = tuple[str, str]
NOT_YET = "not checked yet"


class Status:
    """The words of heartbeats, as HAProxy says them (management guide 9.1, field 17)."""

    UP = "UP"
    DOWN = "DOWN"
    DRAIN = "DRAIN"
    MAINT = "MAINT"
    NO_CHECK = "no check"
    # It says nothing of the member's health: nobody has asked yet.
    UNKNOWN = "NOLB"
    OPEN = "OPEN"
    FULL = "FULL"


@dataclass(frozen=True)
class State:
    """One member, as checks have found it.

    ``up`` is whether it may be given clients, ``proven`` whether there was a check at all. ``against`` counts the last
    checks in a row that said the opposite of ``up``. ``since`` is in seconds since 1970.
    """

    up: bool
    proven: bool
    against: int
    since: float
    reason: str


States = Mapping[Key, State]


def first(now: float, *, others: bool) -> State:
    """A member that nobody has checked; it gets clients if there are no others."""
    return State(up=not others, proven=False, against=0, since=now, reason=NOT_YET)


def after(state: State, *, good: bool, reason: str, rise: int, fall: int, now: float) -> State:
    """The state after one more check. ``reason`` is what was seen, as a few words."""
    if not state.proven:
        return State(up=good, proven=True, against=0, since=now, reason=reason)
    if good == state.up:
        return replace(state, against=0, reason=reason)
    against = state.against + 1
    if against < (fall if state.up else rise):
        return replace(state, against=against, reason=reason)
    return State(up=good, proven=True, against=0, since=now, reason=reason)


def checked(servers: Iterable[VirtualServer]) -> dict[Key, tuple[VirtualServer, Member]]:
    """Who has to be checked, each once."""
    found: dict[Key, tuple[VirtualServer, Member]] = {}
    for server in servers:
        if server.monitor is not None and server.pool_id is not None:
            for member in server.members:
                if member.enabled:
                    found.setdefault((server.pool_id, member.id), (server, member))
    return found


def carried(
    known: States, before: Sequence[VirtualServer], wanted: Sequence[VirtualServer], now: float
) -> dict[Key, State]:
    """States for what is wanted now: who was there keeps what is known; who served unchecked counts as up."""
    serving = {
        (server.pool_id, member.id)
        for server in before
        if server.monitor is None
        for member in server.members
        if member.enabled
    }
    unchecked = State(up=True, proven=True, against=0, since=now, reason="it served before it was checked")
    found, new, with_others = {}, [], set()
    for key, (_, member) in checked(wanted).items():
        state = known.get(key) or (unchecked if key in serving else None)
        if state is None:
            new.append(key)
            continue
        found[key] = state
        if state.up and member.weight > 0:
            with_others.add(key[0])
    return {**found, **{key: first(now, others=key[0] in with_others) for key in new}}


def may_serve(servers: Iterable[VirtualServer], states: States) -> dict[tuple[str, str], bool]:
    """By virtual server and member, who may be given clients as far as checks say; of unchecked pools nobody."""
    return {
        (server.id, member.id): state.up
        for server in servers
        for member in server.members
        if (state := _of(server, member, states)) is not None
    }


def _of(server: VirtualServer, member: Member, states: States) -> State | None:
    if server.monitor is None or server.pool_id is None or not member.enabled:
        return None
    return states.get((server.pool_id, member.id))


def word(server: VirtualServer, member: Member, states: States) -> str:
    """A member's status as heartbeats say it."""
    if not member.enabled:
        return Status.MAINT
    state = _of(server, member, states)
    if state is None:
        return Status.NO_CHECK
    if not state.proven:
        return Status.UNKNOWN
    if not state.up:
        return Status.DOWN
    return Status.UP if member.weight else Status.DRAIN


def pool_word(server: VirtualServer, states: States) -> str:
    """As HAProxy has it: a pool is down if it has members, and none of them may be given a client."""
    up = may_serve((server,), states)
    usable = any(one.enabled and one.weight > 0 and up.get((server.id, one.id), True) for one in server.members)
    return Status.UP if usable or not server.members else Status.DOWN


def reason(server: VirtualServer, member: Member, states: States) -> tuple[float | None, str]:
    """Since when a member has been so (None: nobody has looked), and why."""
    state = _of(server, member, states)
    return (None, "") if state is None else (state.since, state.reason)


def document(states: States) -> list[list[Any]]:
    """For the disk."""
    return [[pool, member, asdict(state)] for (pool, member), state in states.items()]


def restored(value: Any) -> dict[Key, State]:
    """What `document` made.

    Raises:
        KeyError, TypeError, ValueError: it is something else.
    """
    found = {}
    for pool, member, plain in value:
        state = State(
            up=bool(plain["up"]),
            proven=bool(plain["proven"]),
            against=int(plain["against"]),
            since=float(plain["since"]),
            reason=str(plain["reason"]),
        )
        found[str(pool), str(member)] = state
    return found
