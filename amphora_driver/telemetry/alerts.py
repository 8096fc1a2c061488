# SPDX-License-Identifier: Apache-2.0
"""Finds the conditions of the fleet that need an operator's attention.

Invariant: the functions do no I/O. A condition is CRITICAL only if no automatic action will repair it, or if users are
not served. An amphora that is being replaced is WARNING. Every notice names the object and the condition in one line.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import msgspec

from amphora_driver.model.amphora import describe_resources
from amphora_driver.store.circuit_breaker import BLIND
from amphora_driver.store.process_registry import ProcessKind
from amphora_driver.telemetry.process_groups import LOOP_SECONDS, group_processes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from amphora_driver.telemetry.fleet_snapshot import AmphoraInfo, FleetSnapshot, LoadBalancerInfo

# A job, a status report or a confirmation that is _LATE seconds late causes a notice. After _VERY_LATE seconds, the
# notice becomes more severe.
_LATE = 30.0
_VERY_LATE = 300.0
# An unknown amphora causes a notice for this number of seconds after its last heartbeat.
_UNKNOWN_FOR = 300.0
_DAY = 86_400.0
# A CA that expires within this number of seconds causes a notice that its rotation is overdue.
MONTH = 30 * _DAY
# Part of an amphora certificate's validity after which its renewal is overdue.
RENEWAL_OVERDUE = 0.75
_WITHOUT_PROCESS = {
    ProcessKind.CONTROLLER.value: "no controller runs: load balancers are not changed, and amphorae not replaced",
    ProcessKind.HEALTH_MANAGER.value: "no health manager runs: heartbeats of amphorae are not received",
    ProcessKind.PROVIDER_AGENT.value: "no provider agent runs: Octavia gets no statuses",
}
# More than _MAX_UNGROUPED notices of one sort form a group. A group shows its first _SHOWN_OF_GROUP notices and the
# number of the others.
_MAX_UNGROUPED = 4
_SHOWN_OF_GROUP = 2
_PLURALS = {"load balancer": "load balancers", "amphora": "amphorae"}
_SORTS = {
    "silence": "send no heartbeats",
    "unheard": "no heartbeat for ten intervals",
    "drift": "drift from their configuration",
    "expired": "certificates have expired",
    "expiry": "certificates were not renewed",
    "error": "in ERROR",
    "failing": "jobs failed and are retried",
    "waiting": "users wait for a change",
    "down": "serve no clients",
    "two": "several amphorae hold the VIPs",
    "none": "no amphora holds the VIPs",
    "limit": "near a limit",
    "tls expired": "certificates for clients or members have expired",
    "tls expiry": "certificates for clients or members expire soon",
}


class Level(IntEnum):
    """Severity of a notice."""

    OK = 0
    WARNING = 1
    CRITICAL = 2


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """A condition that an operator should know.

    Attributes:
        kind: kind of the affected object: fleet, load balancer, amphora.
        sort: one word for all conditions of the same sort.
        text: the condition and its consequence.
        since: start of the condition (seconds since 1970), if known.
    """

    level: Level
    kind: str
    text: str
    sort: str = ""
    id: str | None = None
    name: str | None = None
    since: float | None = None


def find_notices(fleet: FleetSnapshot, interval: float) -> tuple[Notice, ...]:
    """Return all notices, the most severe first; `interval` is the time between two heartbeats in seconds."""
    found = [*_control_plane_notices(fleet), *_queue_notices(fleet)]
    replaced = {one.amphora_id for one in fleet.failovers if one.ended_at is None}
    for amphora in fleet.amphorae:
        found += _amphora_notices(amphora, fleet.at, interval, replaced=amphora.id in replaced)
    found += _limit_notices(fleet)
    found += _expiry_notices(fleet)
    by_balancer = fleet.amphorae_by_balancer()
    for balancer in fleet.balancers:
        found += _balancer_notices(balancer, by_balancer.get(balancer.id, []), fleet.at)
    return tuple(sorted(found, key=lambda one: -one.level))


def group_notices(found: tuple[Notice, ...]) -> tuple[tuple[Notice, ...], int]:
    """Replace many notices of one sort by the first ones and the number of the others.

    Returns:
        The notices to show, and their number with each group counted once.
    """
    groups: dict[tuple[Level, str, str], list[Notice]] = {}
    for one in found:
        groups.setdefault((one.level, one.kind, one.sort or one.text), []).append(one)
    shown: list[Notice] = []
    count = 0
    for (level, kind, sort), ones in groups.items():
        if len(ones) <= _MAX_UNGROUPED:
            shown += ones
            count += len(ones)
            continue
        more = len(ones) - _SHOWN_OF_GROUP
        since = min((one.since for one in ones if one.since is not None), default=None)
        text = f"{more} more {_PLURALS.get(kind, kind)}: {_SORTS.get(sort, sort)}"
        shown += [*ones[:_SHOWN_OF_GROUP], Notice(level=level, kind="more", text=text, since=since)]
        count += 1
    return tuple(shown), count


def worst_level(found: tuple[Notice, ...]) -> Level:
    """Return the highest level of these notices."""
    return max((one.level for one in found), default=Level.OK)


def _fleet_notice(level: Level, text: str, since: float | None = None) -> Notice:
    return Notice(level=level, kind="fleet", text=text, since=since)


def _control_plane_notices(fleet: FleetSnapshot) -> Iterator[Notice]:
    yield from _breaker_notices(fleet)
    if fleet.sight.state == BLIND:
        reason = fleet.sight.reason or "no reason is recorded"
        text = f"the failure detector is blind, no automatic fail-overs: {reason}"
        yield _fleet_notice(Level.WARNING, text, fleet.sight.since)
    yield from _process_notices(fleet)
    for rotation in fleet.rotations:
        if rotation.state == "paused":
            reason = rotation.reason or "by an operator"
            yield _fleet_notice(Level.WARNING, f"image rotation {rotation.id} is paused: {reason}")
    for authority in fleet.authorities:
        left = authority.expires_at - fleet.at
        if left < MONTH and authority.state == "current":
            level = Level.CRITICAL if left < _DAY else Level.WARNING
            yield _fleet_notice(level, f"the CA of {authority.kind} certificates expires in {left / _DAY:.1f} days")
    for unknown in (one for one in fleet.unknown_amphorae if fleet.at - one.last_at <= _UNKNOWN_FOR):
        text = f"{unknown.address} sends heartbeats with the unknown amphora id {unknown.amphora_id}"
        yield _fleet_notice(Level.WARNING, f"{text}: {unknown.verdict}" if unknown.verdict else text, unknown.first_at)
    for pool in fleet.pools:
        if pool.error:
            yield _fleet_notice(Level.WARNING, f"spare pool {pool.id}: {pool.error}")
    if fleet.orphans:
        text = f"{fleet.orphans} orphaned machines, ports or VIPs; cleanup deletes them later"
        yield _fleet_notice(Level.WARNING, text)


def _breaker_notices(fleet: FleetSnapshot) -> Iterator[Notice]:
    breaker = fleet.breaker
    if breaker.held:
        reason = breaker.reason or "no reason is recorded"
        text = f"an operator holds the circuit breaker open, no automatic fail-overs: {reason}"
        yield _fleet_notice(Level.WARNING, text, breaker.since)
    elif breaker.state == "open":
        silent = f"{breaker.silent} of {breaker.watched} amphorae are silent"
        text = f"the circuit breaker is open, no automatic fail-overs: {silent}"
        yield _fleet_notice(Level.CRITICAL, text, breaker.since)
    elif breaker.state != "closed":
        text = "the circuit breaker permits one automatic fail-over at a time"
        yield _fleet_notice(Level.WARNING, text, breaker.since)


def _process_notices(fleet: FleetSnapshot) -> Iterator[Notice]:
    groups = group_processes(fleet.processes, fleet.at)
    alive = {one.kind for one in groups if one.alive}
    for kind, text in _WITHOUT_PROCESS.items():
        if kind not in alive:
            yield _fleet_notice(Level.CRITICAL, text)
    for group in groups:
        if group.missing and group.kind in alive:
            number = "" if len(group.missing) == 1 else f" ({len(group.missing)} processes)"
            text = f"{group.kind} on host {group.host} sends no heartbeats and was not replaced{number}"
            yield _fleet_notice(Level.WARNING, text, group.missing[0].seen_at)
        if group.alive and group.restarts_repeatedly(fleet.at):
            times = f"{group.recent_deaths(fleet.at)} times in the last {LOOP_SECONDS / 60:.0f} minutes"
            text = f"{group.kind} on host {group.host} ended without a shutdown and was replaced {times}: see its log"
            yield _fleet_notice(Level.WARNING, text)
    controllers = [one for group in groups if group.kind == ProcessKind.CONTROLLER.value for one in group.alive]
    if controllers and all(one.draining for one in controllers):
        yield _fleet_notice(Level.CRITICAL, "every controller is draining: no new jobs are started")


def _queue_notices(fleet: FleetSnapshot) -> Iterator[Notice]:
    oldest = oldest_due(fleet)
    if oldest is not None and fleet.at - oldest > _LATE:
        level = Level.CRITICAL if fleet.at - oldest > _VERY_LATE else Level.WARNING
        yield _fleet_notice(level, "a load balancer is due and no controller starts its job", oldest)
    outbox = fleet.outbox
    if outbox.oldest is not None and fleet.at - outbox.oldest > _LATE:
        yield _fleet_notice(Level.WARNING, f"{outbox.waiting} statuses are not reported to Octavia yet", outbox.oldest)


def _amphora_notices(amphora: AmphoraInfo, now: float, interval: float, *, replaced: bool) -> Iterator[Notice]:
    def notice(level: Level, sort: str, text: str, since: float | None = None) -> Notice:
        return Notice(level=level, kind="amphora", sort=sort, id=amphora.id, text=text, since=since)

    if amphora.silence is not None:
        texts = {
            "silent": "is silent",
            "mute": "sends no heartbeats, but its agent answers",
            "never_spoke": "has never sent a heartbeat",
        }
        text = texts.get(amphora.silence, amphora.silence)
        text += f": {amphora.verdict}" if amphora.verdict else ""
        yield notice(Level.WARNING if replaced else Level.CRITICAL, "silence", text, amphora.silent_since)
    elif amphora.state == "ready" and not replaced and amphora.last_heartbeat < now - 10 * interval:
        yield notice(Level.WARNING, "unheard", "sent no heartbeat for ten intervals", amphora.last_heartbeat)
    if amphora.drifts:
        details = amphora.drift or "no details are recorded"
        yield notice(Level.WARNING, "drift", f"drifts from its configuration: {details}")
    expires, issued = amphora.certificate_expires_at, amphora.certificate_issued_at
    if expires is not None and expires <= now:
        yield notice(Level.CRITICAL, "expired", "its certificate has expired: controllers refuse its agent", expires)
    elif expires is not None and issued is not None and now > issued + RENEWAL_OVERDUE * (expires - issued):
        left = f"{(expires - now) / _DAY:.1f} days"
        yield notice(Level.WARNING, "expiry", f"its certificate expires in {left} and was not renewed")


def _limit_notices(fleet: FleetSnapshot) -> Iterator[Notice]:
    near = [one for one in fleet.amphorae if one.near_limit]
    names = {one.id: one.name for one in fleet.balancers} if near else {}
    for one in near:
        of = _name_load_balancer(one.load_balancer_id, names)
        text = f"of {of} is near its limit of: {describe_resources(one.near_limit)}"
        yield Notice(level=Level.WARNING, kind="amphora", sort="limit", id=one.id, text=text)


def _expiry_notices(fleet: FleetSnapshot) -> Iterator[Notice]:
    names = {one.id: one.name for one in fleet.balancers} if fleet.expiring else {}
    for one in fleet.expiring:
        left = one.expires_at - fleet.at
        expires = f"expires in {left / _DAY:.1f} days" if left > 0 else "has expired"
        yield Notice(
            level=Level.WARNING,
            kind="load balancer",
            sort="tls expiry" if left > 0 else "tls expired",
            id=one.load_balancer_id,
            name=names.get(one.load_balancer_id),
            text=f"the certificate of {one.kind} {one.object_id} {expires}; its user must replace it",
            since=one.expires_at if left <= 0 else None,
        )


def _name_load_balancer(load_balancer_id: str, names: Mapping[str, str | None]) -> str:
    name = names.get(load_balancer_id)
    return f"load balancer {load_balancer_id} ({name})" if name else f"load balancer {load_balancer_id}"


def _balancer_notices(balancer: LoadBalancerInfo, amphorae: list[AmphoraInfo], now: float) -> Iterator[Notice]:
    def notice(level: Level, sort: str, text: str, since: float | None = None) -> Notice:
        of = {"id": balancer.id, "name": balancer.name}
        return Notice(level=level, kind="load balancer", sort=sort, **of, text=text, since=since)

    reason = balancer.error or balancer.reason or "no reason is recorded"
    if balancer.state == "ERROR":
        yield notice(Level.CRITICAL, "error", f"is in ERROR: {reason}")
    elif balancer.attempts:
        text = f"its job failed {balancer.attempts} times and is retried: {reason}"
        yield notice(Level.WARNING, "failing", text, balancer.accepted_at)
    elif balancer.accepted_at is not None and now - balancer.accepted_at > _LATE:
        level = Level.CRITICAL if now - balancer.accepted_at > _VERY_LATE else Level.WARNING
        yield notice(level, "waiting", f"a user waits for generation {balancer.generation}", balancer.accepted_at)
    if balancer.operating == "ERROR" and balancer.state != "ERROR":
        yield notice(Level.WARNING, "down", f"serves no clients: {balancer.reason or 'its members are down'}")
    if len(balancer.holders) > 1 and not any(one.state == "retiring" for one in amphorae):
        yield notice(Level.CRITICAL, "two", f"{len(balancer.holders)} amphorae report that they hold the VIPs")
    # An overloaded health manager reads only the times of heartbeats, so `holds_vip` of an amphora may be unknown
    # (None).
    said = [one.holds_vip for one in amphorae if one.state == "ready" and one.heard_at is not None]
    if said and None not in said and not balancer.holders and balancer.state == "ACTIVE":
        yield notice(Level.CRITICAL, "none", "no amphora reports that it holds the VIPs")


def oldest_due(fleet: FleetSnapshot) -> float | None:
    """Return since when the longest waiting load balancer is due; None if none waits for a controller.

    A due time of zero means immediately. Then the time of the oldest unconfirmed request counts, if there is one.
    """
    return min((one.due_at or one.accepted_at or fleet.at for one in due_now(fleet)), default=None)


def due_now(fleet: FleetSnapshot) -> list[LoadBalancerInfo]:
    """Return the load balancers that wait for a controller."""
    return [one for one in fleet.balancers if one.due and one.owner is None and one.due_at <= fleet.at]
