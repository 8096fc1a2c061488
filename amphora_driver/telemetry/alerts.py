# SPDX-License-Identifier: Apache-2.0
"""What of the fleet needs an operator, and why.

Invariant: pure. What the automatic has in hand is not trouble: an amphora that is being replaced is *watched*, and is
*trouble* only where nothing will happen by itself, or where users are not served. Every notice says what is wrong of
what, in one line, and what to do where an operator can do something.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import msgspec

from amphora_driver.store.circuit_breaker import BLIND
from amphora_driver.store.process_registry import HEARTBEAT_INTERVAL, ProcessKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amphora_driver.telemetry.fleet_snapshot import Balancer, Fleet, Machine

# Seconds after which a process that has said nothing is taken for gone.
_GONE_AFTER = 5 * HEARTBEAT_INTERVAL
# Seconds a job may be due, a status may wait for Octavia, and a user for a change, before somebody should look.
_LATE = 30.0
_VERY_LATE = 300.0
# Seconds before its end that a certificate, or an authority, should have been renewed long ago.
_DAY = 86_400.0
_MONTH = 30 * _DAY
# The part of its life after which an amphora's certificate is late.
_OLD = 0.75
_GONE = {
    ProcessKind.CONTROLLER.value: "no controller runs: nothing is changed, replaced or repaired",
    ProcessKind.HEALTH_MANAGER.value: "no health manager runs: nobody hears the amphorae",
    ProcessKind.PROVIDER_AGENT.value: "no provider agent runs: Octavia is told nothing",
}
# So many alike are shown one by one; of more than that, so many.
_MOST_ALIKE = 4
_OF_MANY = 2
_PLURALS = {"load balancer": "load balancers", "amphora": "amphorae"}
_SORTS = {
    "silence": "not heard",
    "unheard": "not heard for ten intervals",
    "drift": "differ from what is wanted",
    "expired": "their certificates have expired",
    "expiry": "their certificates were not renewed",
    "error": "in ERROR",
    "failing": "failed, and are tried again",
    "waiting": "users wait for a change",
    "down": "serve nobody",
    "two": "the VIPs are in more than one place",
    "none": "nobody has the VIPs",
}


class Level(IntEnum):
    """How bad it is."""

    WELL = 0
    WATCH = 1
    TROUBLE = 2


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """Something an operator should know.

    Attributes:
        level: how bad it is.
        kind: of what it is about: fleet, load balancer, amphora.
        sort: one word, the same for all that are wrong in the same way.
        id: of that, where it has one.
        name: of that, where somebody gave it one.
        text: what is wrong, and what follows from that.
        since: when it began (seconds since 1970), where that is known.
    """

    level: Level
    kind: str
    text: str
    sort: str = ""
    id: str | None = None
    name: str | None = None
    since: float | None = None


def notices(fleet: Fleet, interval: float) -> tuple[Notice, ...]:
    """Everything that needs attention, the worst first.

    Args:
        fleet: as it is.
        interval: seconds between two heartbeats of an amphora.
    """
    found = [*_control_plane(fleet), *_queue(fleet)]
    replaced = {one.amphora_id for one in fleet.failovers if one.ended_at is None}
    machines: dict[str, list[Machine]] = {}
    for machine in fleet.amphorae:
        machines.setdefault(machine.load_balancer_id, []).append(machine)
        found += _machine(machine, fleet.at, interval, replaced=machine.id in replaced)
    for balancer in fleet.balancers:
        found += _balancer(balancer, machines.get(balancer.id, []), fleet.at)
    # Sorting is stable: what was found first of a level stays first.
    return tuple(sorted(found, key=lambda one: -one.level))


def gathered(found: tuple[Notice, ...]) -> tuple[tuple[Notice, ...], int]:
    """The same, but of many alike only the first ones and how many more there are.

    Returns:
        What is to be shown, and how many things that is: many alike are one.
    """
    alike: dict[tuple[Level, str, str], list[Notice]] = {}
    for one in found:
        alike.setdefault((one.level, one.kind, one.sort or one.text), []).append(one)
    shown: list[Notice] = []
    things = 0
    for (level, kind, sort), ones in alike.items():
        if len(ones) <= _MOST_ALIKE:
            shown += ones
            things += len(ones)
            continue
        more = len(ones) - _OF_MANY
        since = min((one.since for one in ones if one.since is not None), default=None)
        text = f"{more} more {_PLURALS.get(kind, kind)}: {_SORTS.get(sort, sort)}"
        shown += [*ones[:_OF_MANY], Notice(level=level, kind="more", text=text, since=since)]
        things += 1
    return tuple(shown), things


def worst(found: tuple[Notice, ...]) -> Level:
    """The level of the whole."""
    return max((one.level for one in found), default=Level.WELL)


def _fleet(level: Level, text: str, since: float | None = None) -> Notice:
    return Notice(level=level, kind="fleet", text=text, since=since)


def _control_plane(fleet: Fleet) -> Iterator[Notice]:
    yield from _breaker(fleet)
    if fleet.sight.state == BLIND:
        why = fleet.sight.reason or "no reason was written down"
        yield _fleet(Level.WATCH, f"the detector is blind: nobody is replaced unasked ({why})", fleet.sight.since)
    yield from _processes(fleet)
    for rotation in fleet.rotations:
        if rotation.state == "paused":
            why = rotation.reason or "somebody has asked for that"
            yield _fleet(Level.WATCH, f"rotation {rotation.id} is paused: {why}")
    for authority in fleet.authorities:
        left = authority.expires_at - fleet.at
        if left < _MONTH and authority.state == "current":
            level = Level.TROUBLE if left < _DAY else Level.WATCH
            yield _fleet(level, f"the authority of {authority.kind}s ends in {left / _DAY:.1f} days")
    for zombie in fleet.zombies:
        text = f"{zombie.address} sends heartbeats as {zombie.amphora_id}, which nobody has"
        yield _fleet(Level.WATCH, f"{text}: {zombie.verdict}" if zombie.verdict else text, zombie.first_at)
    for pool in fleet.pools:
        if pool.error:
            yield _fleet(Level.WATCH, f"spare pool {pool.id}: {pool.error}")
    if fleet.orphans:
        yield _fleet(Level.WATCH, f"{fleet.orphans} machines, ports or VIPs belong to nobody; they are removed later")


def _breaker(fleet: Fleet) -> Iterator[Notice]:
    breaker = fleet.breaker
    if breaker.held:
        why = breaker.reason or "no reason was given"
        text = f"the breaker is held open by an operator: {why}; no amphora is replaced unasked"
        yield _fleet(Level.WATCH, text, breaker.since)
    elif breaker.state == "open":
        silent = f"{breaker.silent} of {breaker.watched} amphorae are silent"
        yield _fleet(Level.TROUBLE, f"the breaker is open: {silent}, none is replaced unasked", breaker.since)
    elif breaker.state != "closed":
        yield _fleet(Level.WATCH, "the breaker lets one fail-over through at a time", breaker.since)


def _processes(fleet: Fleet) -> Iterator[Notice]:
    alive = {one.kind for one in fleet.processes if fleet.at - one.seen_at <= _GONE_AFTER}
    for kind, text in _GONE.items():
        if kind not in alive:
            yield _fleet(Level.TROUBLE, text)
    for process in fleet.processes:
        if fleet.at - process.seen_at > _GONE_AFTER and process.kind in alive:
            yield _fleet(Level.WATCH, f"{process.kind} {process.name} has said nothing more", process.seen_at)
    controllers = [one for one in fleet.processes if one.kind == ProcessKind.CONTROLLER.value]
    if controllers and all(one.draining for one in controllers):
        yield _fleet(Level.TROUBLE, "every controller is draining: nothing new is taken up")


def _queue(fleet: Fleet) -> Iterator[Notice]:
    oldest = oldest_due(fleet)
    if oldest is not None and fleet.at - oldest > _LATE:
        level = Level.TROUBLE if fleet.at - oldest > _VERY_LATE else Level.WATCH
        yield _fleet(level, "a load balancer is due and no controller takes it up", oldest)
    waiting = fleet.outbox
    if waiting.oldest is not None and fleet.at - waiting.oldest > _LATE:
        yield _fleet(Level.WATCH, f"statuses wait for Octavia to take them: {waiting.waiting}", waiting.oldest)


def _machine(machine: Machine, now: float, interval: float, *, replaced: bool) -> Iterator[Notice]:
    def notice(level: Level, sort: str, text: str, since: float | None = None) -> Notice:
        return Notice(level=level, kind="amphora", sort=sort, id=machine.id, text=text, since=since)

    if machine.silence is not None:
        words = {"silent": "is silent", "mute": "sends no heartbeats, its agent answers", "never_spoke": "never spoke"}
        text = words.get(machine.silence, machine.silence)
        text += f": {machine.verdict}" if machine.verdict else ""
        yield notice(Level.WATCH if replaced else Level.TROUBLE, "silence", text, machine.silent_since)
    elif machine.state == "ready" and not replaced and (machine.heard_at or machine.created_at) < now - 10 * interval:
        yield notice(Level.WATCH, "unheard", "was not heard for ten intervals", machine.heard_at or machine.created_at)
    if machine.drifts:
        yield notice(Level.WATCH, "drift", f"differs from what is wanted: {machine.drift or 'nobody has said in what'}")
    expires, issued = machine.certificate_expires_at, machine.certificate_issued_at
    if expires is not None and expires <= now:
        yield notice(Level.TROUBLE, "expired", "its certificate has expired: its agent is trusted no more", expires)
    elif expires is not None and issued is not None and now > issued + _OLD * (expires - issued):
        left = f"{(expires - now) / _DAY:.1f} days"
        yield notice(Level.WATCH, "expiry", f"its certificate ends in {left} and was not renewed")


def _balancer(balancer: Balancer, machines: list[Machine], now: float) -> Iterator[Notice]:
    def notice(level: Level, sort: str, text: str, since: float | None = None) -> Notice:
        of = {"id": balancer.id, "name": balancer.name}
        return Notice(level=level, kind="load balancer", sort=sort, **of, text=text, since=since)

    why = balancer.error or balancer.reason or "no reason was written down"
    if balancer.state == "ERROR":
        yield notice(Level.TROUBLE, "error", f"is in ERROR: {why}")
    elif balancer.attempts:
        tried = f"failed {balancer.attempts} times, is tried again: {why}"
        yield notice(Level.WATCH, "failing", tried, balancer.accepted_at)
    elif balancer.accepted_at is not None and now - balancer.accepted_at > _LATE:
        level = Level.TROUBLE if now - balancer.accepted_at > _VERY_LATE else Level.WATCH
        yield notice(level, "waiting", f"a user waits for generation {balancer.generation}", balancer.accepted_at)
    if balancer.operating == "ERROR" and balancer.state != "ERROR":
        yield notice(Level.WATCH, "down", f"serves nobody: {balancer.reason or 'its members are down'}")
    if len(balancer.holders) > 1 and not any(one.state == "retiring" for one in machines):
        yield notice(Level.TROUBLE, "two", f"{len(balancer.holders)} amphorae say that they have the VIPs")
    pair = [one for one in machines if one.holds_vip is not None]
    if pair and not balancer.holders and balancer.state == "ACTIVE":
        yield notice(Level.TROUBLE, "none", "no amphora says that it has the VIPs")


def oldest_due(fleet: Fleet) -> float | None:
    """Since when the load balancer that has waited longest for a controller is due; None if none waits.

    Zero in the rows means at once: then what a user waits for says since when, if a user does.
    """
    since = [
        one.due_at or one.accepted_at or fleet.at
        for one in fleet.balancers
        if one.due and one.owner is None and one.due_at <= fleet.at
    ]
    return min(since, default=None)
