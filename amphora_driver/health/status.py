# SPDX-License-Identifier: Apache-2.0
"""Operating statuses: what the amphorae see, in the words of the API.

Invariant: a pure function of the load balancer and the reports of its live amphorae, and never a conclusion
from silence.  An object that nobody reports on has no entry, whatever the generation of the reports: unknown
is not the same as down.  What follows from the model alone (something is disabled, a pool is not used) needs
no report.

How views are put together:

* One amphora, several listeners in front of one pool: each has its own backend and checks the member itself.
  The member is as well as the best of them says: a check that fails for one backend only has not reached its
  threshold in the others yet.
* A pair: the word of the one with the VIPs is what clients meet, and the only one that counts (`Ledger.speaker`).
* Several amphorae otherwise: if one cannot reach a member that another can use, the member is DEGRADED.  Calling it
  ERROR would hide that clients are served, calling it ONLINE that they are not after a failover.
* A pool is ERROR only if every enabled member is *known* to be ERROR; DEGRADED if some are, or some are
  DEGRADED.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from amphora_driver.model.enums import Kind, Operating
from amphora_driver.model.loadbalancer import L7Policy, Listener, LoadBalancer, Member, Pool

# Limits of a report, longer than anything an agent sends: an attacker may control the amphora.
Name = Annotated[str, Meta(max_length=80)]
"""An id, or two with a colon in between."""
Word = Annotated[str, Meta(max_length=64)]
Words = Annotated[tuple[Word, ...], Meta(max_length=32)]
Sentences = Annotated[tuple[Annotated[str, Meta(max_length=2048)], ...], Meta(max_length=16)]
# Also what every database can hold.
Version = Annotated[str, Meta(max_length=64, pattern=r"^[\x20-\x7e]*\Z")]


class ListenerReport(msgspec.Struct, frozen=True):
    """What an amphora says of a listener: HAProxy's status word and counters since the amphora was born."""

    status: Word
    active_connections: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    request_errors: int = 0
    total_connections: int = 0


class PoolReport(msgspec.Struct, frozen=True):
    """What an amphora says of a pool behind one listener: HAProxy's status words, members' by member id."""

    status: Word
    members: dict[Name, Word] = {}


class Drifted(msgspec.Struct, frozen=True):
    """What an amphora found of itself last that was not as confirmed: when (seconds since 1970), and in sentences."""

    at: float = 0.0
    what: Sentences = ()
    mended: bool = False


class Report(msgspec.Struct, frozen=True):
    """A heartbeat's document (docs/reference/heartbeat.md); what it does not name it says nothing about.

    Attributes:
        generation: the configuration the amphora serves; None before its first.
        listeners: by listener id.
        pools: by `<pool id>:<listener id>`.
        holds_vip: whether it has the VIPs; None where that is no question.
        drift: words for what is not as confirmed and could not be mended.
        drifted: what was found last; None if nothing ever was, or the agent is too old to say.
        agent_version: of the agent that says so; None of one that does not say.
        amphora_id: who says so. Not part of the document: the receiver sets it, from the header it has
            verified.
    """

    generation: int | None = None
    listeners: dict[Name, ListenerReport] = {}
    pools: dict[Name, PoolReport] = {}
    amphora_id: str = ""
    holds_vip: bool | None = None
    drift: Words = ()
    drifted: Drifted | None = None
    agent_version: Version | None = None


class StatusOfObject(msgspec.Struct, frozen=True):
    """An operating status, and why, in a few words."""

    kind: Kind
    status: Operating
    reason: str


class _View(msgspec.Struct, frozen=True):
    """What one amphora says of one object."""

    status: Operating
    word: str
    amphora_id: str


# The first word of HAProxy's status of a server (management guide 9.1, field 17): `UP 1/3`, `DOWN (agent)`.
# Words that are not here (`NOLB`, `RESTARTING`) say nothing about health.
_MEMBER_WORDS = {
    "UP": Operating.ONLINE,
    "DOWN": Operating.ERROR,
    "DRAIN": Operating.DRAINING,
    "MAINT": Operating.OFFLINE,
    "no": Operating.NO_MONITOR,  # "no check"
}
_LISTENER_WORDS = {"OPEN": Operating.ONLINE, "FULL": Operating.DEGRADED}

# Best first.
_RANK = {
    status: rank
    for rank, status in enumerate(
        (
            Operating.ONLINE,
            Operating.DRAINING,
            Operating.NO_MONITOR,
            Operating.DEGRADED,
            Operating.ERROR,
            Operating.OFFLINE,
        )
    )
}

Statuses = dict[str, StatusOfObject]


def operating_statuses(load_balancer: LoadBalancer, reports: Sequence[Report]) -> Statuses:
    """Operating statuses of a load balancer and everything below it.

    Args:
        load_balancer: the wanted state.
        reports: the last report of each of its live amphorae; parts of a split one may follow each other.

    Returns:
        Status by object id. What cannot be known from these reports has no entry and keeps the status it has.
    """
    result: Statuses = {}
    alive = load_balancer.admin_state_up
    used = used_pools(load_balancer.listeners)
    views = _member_views(reports)
    for listener in load_balancer.listeners:
        _listener(listener, reports, result, parent_up=alive)
        _policies(listener, result, parent_up=alive and listener.admin_state_up)
    for pool in load_balancer.pools:
        _pool(pool, views.get(pool.id), result, parent_up=alive, used=pool.id in used)
    top = _load_balancer(load_balancer, reports, result)
    if top is not None:
        result[load_balancer.id] = top
    return result


def used_pools(listeners: Iterable[Listener]) -> set[str]:
    """Pools that an enabled listener may send requests to."""
    used: set[str] = set()
    for listener in listeners:
        if listener.admin_state_up:
            policies = [policy for policy in listener.l7policies if _matches_sometimes(policy)]
            wanted = (listener.default_pool_id, *(policy.redirect_pool_id for policy in policies))
            used.update(pool_id for pool_id in wanted if pool_id)
    return used


def _matches_sometimes(policy: L7Policy) -> bool:
    """Whether a policy is served: without a rule that is enabled it never matches anything."""
    return policy.admin_state_up and any(rule.admin_state_up for rule in policy.rules)


def _member_views(reports: Iterable[Report]) -> dict[str, dict[str, list[_View]]]:
    """Views by pool and member; a pool that is named without members is there, without views."""
    views: dict[str, dict[str, list[_View]]] = {}
    for report in reports:
        for name, said in report.pools.items():
            pool = views.setdefault(name.partition(":")[0], {})
            for member_id, word in said.members.items():
                status = _MEMBER_WORDS.get(word.split(" ", 1)[0])
                if status is not None:
                    pool.setdefault(member_id, []).append(_View(status, word, report.amphora_id))
    return views


def _listener(listener: Listener, reports: Iterable[Report], result: Statuses, *, parent_up: bool) -> None:
    if not (parent_up and listener.admin_state_up):
        result[listener.id] = _disabled(Kind.LISTENER, own=not listener.admin_state_up)
        return
    views = []
    for report in reports:
        said = report.listeners.get(listener.id)
        status = _LISTENER_WORDS.get(said.status) if said is not None else None
        if said is not None and status is not None:
            views.append(_View(status, said.status, report.amphora_id))
    if views:
        # The one that is full is the one with the traffic: of a pair, the other is idle and says OPEN.
        worst = max(views, key=_rank)
        result[listener.id] = StatusOfObject(Kind.LISTENER, worst.status, _seen(worst))


def _policies(listener: Listener, result: Statuses, *, parent_up: bool) -> None:
    """Enter a listener's policies and their rules: HAProxy says nothing of them, they are served with the listener."""
    served = listener.id in result
    for policy in listener.l7policies:
        up = parent_up and policy.admin_state_up
        if not up:
            result[policy.id] = _disabled(Kind.L7POLICY, own=not policy.admin_state_up)
        elif served:
            result[policy.id] = StatusOfObject(Kind.L7POLICY, Operating.ONLINE, "served with its listener")
        for rule in policy.rules:
            if not (up and rule.admin_state_up):
                result[rule.id] = _disabled(Kind.L7RULE, own=not rule.admin_state_up)
            elif served:
                result[rule.id] = StatusOfObject(Kind.L7RULE, Operating.ONLINE, "served with its listener")


def _pool(
    pool: Pool, views: Mapping[str, list[_View]] | None, result: Statuses, *, parent_up: bool, used: bool
) -> None:
    """Enter a pool, its members and its monitor."""
    enabled = parent_up and pool.admin_state_up
    for member in pool.members:
        status = _member(member, pool, (views or {}).get(member.id, ()), pool_up=enabled, used=used)
        if status is not None:
            result[member.id] = status
    if not enabled:
        result[pool.id] = _disabled(Kind.POOL, own=not pool.admin_state_up)
    elif not used:
        result[pool.id] = StatusOfObject(Kind.POOL, Operating.OFFLINE, "no enabled listener uses it")
    elif views is not None:
        result[pool.id] = _of_members(pool, result)
    monitor = pool.healthmonitor
    if monitor is None:
        return
    if not (enabled and monitor.admin_state_up):
        result[monitor.id] = _disabled(Kind.HEALTH_MONITOR, own=not monitor.admin_state_up)
    elif pool.id in result:
        result[monitor.id] = StatusOfObject(Kind.HEALTH_MONITOR, Operating.ONLINE, "enabled")


def _member(member: Member, pool: Pool, views: Sequence[_View], *, pool_up: bool, used: bool) -> StatusOfObject | None:
    if not (pool_up and member.admin_state_up):
        return _disabled(Kind.MEMBER, own=not member.admin_state_up)
    if not used:
        # As Octavia has it: without a monitor nobody ever asks, so that it is not served changes nothing.
        monitored = pool.healthmonitor is not None and pool.healthmonitor.admin_state_up
        status = Operating.OFFLINE if monitored else Operating.NO_MONITOR
        return StatusOfObject(Kind.MEMBER, status, "no enabled listener uses its pool")
    by_amphora: dict[str, _View] = {}
    for view in views:
        other = by_amphora.get(view.amphora_id)
        by_amphora[view.amphora_id] = view if other is None else min(other, view, key=_rank)
    if not by_amphora:
        return None
    best = min(by_amphora.values(), key=_rank)
    down = next((view for view in by_amphora.values() if view.status is Operating.ERROR), None)
    if down is not None and best.status is not Operating.ERROR:
        return StatusOfObject(Kind.MEMBER, Operating.DEGRADED, f"{_seen(down)}, {_seen(best)}")
    if member.weight == 0 and best.status in (Operating.ONLINE, Operating.NO_MONITOR):
        # HAProxy says DRAIN only of servers it checks; the others get no new connections either.
        return StatusOfObject(Kind.MEMBER, Operating.DRAINING, f"weight 0, {_seen(best)}")
    return StatusOfObject(Kind.MEMBER, best.status, _seen(best))


def _of_members(pool: Pool, result: Statuses) -> StatusOfObject:
    """A used, enabled pool that some amphora serves, by its enabled members."""
    enabled = [member for member in pool.members if member.admin_state_up]
    known = [result[member.id].status for member in enabled if member.id in result]
    down = known.count(Operating.ERROR)
    if enabled and down == len(enabled):
        return StatusOfObject(Kind.POOL, Operating.ERROR, "all enabled members are down")
    if down:
        return StatusOfObject(Kind.POOL, Operating.DEGRADED, f"{down} of {len(enabled)} enabled members are down")
    partly = known.count(Operating.DEGRADED)
    if partly:
        reason = f"{partly} of {len(enabled)} enabled members are down for some amphorae"
        return StatusOfObject(Kind.POOL, Operating.DEGRADED, reason)
    return StatusOfObject(Kind.POOL, Operating.ONLINE, "no enabled member is down")


def _load_balancer(load_balancer: LoadBalancer, reports: Sequence[Report], below: Statuses) -> StatusOfObject | None:
    if not load_balancer.admin_state_up:
        return _disabled(Kind.LOAD_BALANCER, own=True)
    served = [listener.id for listener in load_balancer.listeners if listener.admin_state_up]
    if not reports or (served and not any(listener_id in below for listener_id in served)):
        # Nobody says anything, or nobody says anything of what is wanted now.
        return None
    for wanted in (Operating.ERROR, Operating.DEGRADED):
        for kind in (Kind.POOL, Kind.LISTENER):
            for object_id, entry in below.items():
                if entry.kind is kind and entry.status is wanted:
                    reason = f"{kind.value[:-1]} {object_id}: {entry.reason}"
                    return StatusOfObject(Kind.LOAD_BALANCER, wanted, reason)
    return StatusOfObject(Kind.LOAD_BALANCER, Operating.ONLINE, "served by an amphora")


def _disabled(kind: Kind, *, own: bool) -> StatusOfObject:
    return StatusOfObject(kind, Operating.OFFLINE, "disabled" if own else "what it belongs to is disabled")


def _rank(view: _View) -> int:
    return _RANK[view.status]


def _seen(view: _View) -> str:
    return f"{view.word} seen by amphora {view.amphora_id}" if view.amphora_id else f"{view.word} seen"
