# SPDX-License-Identifier: Apache-2.0
"""Computes operating statuses of the API from the reports of amphorae.

Invariant: a pure function of the load balancer and the reports of its live amphorae. Silence is never a reason for a
status. An object without a report has no entry: unknown is not the same as down. Statuses that follow from the model
alone (a disabled object, an unused pool) need no report.

Rules for several reports about one object:

* One amphora, several listeners with one pool: each listener has its own backend with its own checks. The best state of
  the member counts, because a check that fails in one backend only has not reached its threshold in the others yet.
* An active-standby pair: only the report of the amphora with the VIPs counts, because it serves the clients
  (`AmphoraReports.authoritative_amphora`).
* Other sets of amphorae: a member is DEGRADED if one amphora cannot reach it and another amphora can. ERROR would hide
  that clients are served. ONLINE would hide that no amphora serves clients after a failover.
* A pool is ERROR only if every enabled member is *known* to be ERROR. A pool is DEGRADED if members are ERROR or
  DEGRADED.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from amphora_driver.model.enums import Kind, Operating
from amphora_driver.model.loadbalancer import L7Policy, L7Rule, Listener, LoadBalancer, Member, Pool

# The garbage collector does not examine the structures of reports (`gc=False`), because no cycle is possible.

# All reports must keep these limits, which protect the health manager from an amphora that an attacker controls. The
# reports of an unmodified agent stay below the limits.
Name = Annotated[str, Meta(max_length=80)]
"""An id, or two ids with a colon between them."""
Word = Annotated[str, Meta(max_length=64)]
Words = Annotated[tuple[Word, ...], Meta(max_length=32)]
Sentences = Annotated[tuple[Annotated[str, Meta(max_length=2048)], ...], Meta(max_length=16)]
Usage = Annotated[dict[Word, Annotated[int, Meta(ge=0, le=100)]], Meta(max_length=16)]
"""Percentage in use of each limited resource, see `model.amphora.Resource`."""
# A version contains only characters that every database can store: printable ASCII.
Version = Annotated[str, Meta(max_length=64, pattern=r"^[\x20-\x7e]*\Z")]


class ListenerReport(msgspec.Struct, frozen=True, gc=False):
    """HAProxy's status word of a listener, and its counters since the amphora was created."""

    status: Word
    active_connections: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    request_errors: int = 0
    total_connections: int = 0


class PoolReport(msgspec.Struct, frozen=True, gc=False):
    """HAProxy's status words of a pool of one listener, and of its members by member id."""

    status: Word
    members: dict[Name, Word] = {}


class LastDrift(msgspec.Struct, frozen=True, gc=False):
    """The last drift that an agent found (time in seconds since 1970), one sentence per difference."""

    at: float = 0.0
    sentences: Sentences = ()
    repaired: bool = False


class Report(msgspec.Struct, frozen=True, gc=False):
    """The document of a heartbeat (docs/reference/heartbeat.md); objects that it omits keep their state.

    Attributes:
        generation: the configuration that the amphora serves; None before the first one.
        listeners: by listener id.
        pools: by `<pool id>:<listener id>`.
        holds_vip: whether the amphora holds the VIPs; None in a topology without VRRP.
        drift: kinds of drift that the agent could not repair.
        drifted: the last drift; None if the agent has found or reports none.
        usage: percentage in use of limited resources; agents of earlier versions send none.
        full: of a difference, the sequence of the complete report to which it refers; None for a complete report, and
            from agents of earlier versions.
        amphora_id: not part of the document; the receiver sets it from the verified header.
    """

    generation: int | None = None
    listeners: dict[Name, ListenerReport] = {}
    pools: dict[Name, PoolReport] = {}
    amphora_id: str = ""
    holds_vip: bool | None = None
    drift: Words = ()
    drifted: LastDrift | None = None
    agent_version: Version | None = None
    usage: Usage = {}
    full: int | None = None


class ObjectStatus(msgspec.Struct, frozen=True):
    """An operating status and a short reason."""

    kind: Kind
    status: Operating
    reason: str


Statuses = dict[str, ObjectStatus]
"""Statuses by object id."""


class _View(msgspec.Struct, frozen=True):
    """The status of one object in the report of one amphora."""

    status: Operating
    word: str
    amphora_id: str

    @property
    def rank(self) -> int:
        return _BEST_FIRST.index(self.status)

    def describe(self) -> str:
        return f"{self.word} reported by amphora {self.amphora_id}" if self.amphora_id else f"{self.word} reported"


# The first word of HAProxy's server status (management guide 9.1, field 17), for example `UP` in `UP 1/3`. The table
# omits `NOLB` and `RESTARTING`, which do not describe the health.
_MEMBER_WORDS = {
    "UP": Operating.ONLINE,
    "DOWN": Operating.ERROR,
    "DRAIN": Operating.DRAINING,
    "MAINT": Operating.OFFLINE,
    "no": Operating.NO_MONITOR,
}
_LISTENER_WORDS = {"OPEN": Operating.ONLINE, "FULL": Operating.DEGRADED}

_BEST_FIRST = (
    Operating.ONLINE,
    Operating.DRAINING,
    Operating.NO_MONITOR,
    Operating.DEGRADED,
    Operating.ERROR,
    Operating.OFFLINE,
)


def operating_statuses(load_balancer: LoadBalancer, reports: Sequence[Report]) -> Statuses:
    """Return the operating statuses of a load balancer and all its objects.

    An object without information in the reports has no entry, and keeps its status. The reports of one amphora may have
    several parts.
    """
    result: Statuses = {}
    enabled = load_balancer.admin_state_up
    used = used_pools(load_balancer.listeners)
    views = _member_views(reports)
    for listener in load_balancer.listeners:
        _set_listener_status(listener, reports, result, parent_up=enabled)
        _set_policy_statuses(listener, result, parent_up=enabled and listener.admin_state_up)
    for pool in load_balancer.pools:
        _set_pool_statuses(pool, views.get(pool.id), result, parent_up=enabled, used=pool.id in used)
    top = _load_balancer_status(load_balancer, reports, result)
    if top is not None:
        result[load_balancer.id] = top
    return result


def used_pools(listeners: Iterable[Listener]) -> set[str]:
    """Return the pools that an enabled listener may send requests to."""
    enabled = [listener for listener in listeners if listener.admin_state_up]
    policies = (policy for listener in enabled for policy in listener.l7policies if policy.admin_state_up)
    # An L7 policy without an enabled rule never matches, so its pool does not count as used.
    matching = (policy for policy in policies if any(rule.admin_state_up for rule in policy.rules))
    named = [*(listener.default_pool_id for listener in enabled), *(policy.redirect_pool_id for policy in matching)]
    return {pool_id for pool_id in named if pool_id}


def _member_views(reports: Iterable[Report]) -> dict[str, dict[str, list[_View]]]:
    """Return views by pool and member. A reported pool without members has an empty entry."""
    views: dict[str, dict[str, list[_View]]] = {}
    for report in reports:
        for name, pool_report in report.pools.items():
            pool = views.setdefault(name.partition(":")[0], {})
            for member_id, word in pool_report.members.items():
                status = _MEMBER_WORDS.get(word.split(" ", 1)[0])
                if status is not None:
                    pool.setdefault(member_id, []).append(_View(status, word, report.amphora_id))
    return views


def _set_listener_status(listener: Listener, reports: Iterable[Report], result: Statuses, *, parent_up: bool) -> None:
    if not (parent_up and listener.admin_state_up):
        result[listener.id] = _disabled(Kind.LISTENER, own=not listener.admin_state_up)
        return
    words = [(one.listeners[listener.id].status, one.amphora_id) for one in reports if listener.id in one.listeners]
    views = [_View(_LISTENER_WORDS[word], word, amphora_id) for word, amphora_id in words if word in _LISTENER_WORDS]
    if views:
        # If two amphorae report different statuses of a listener, the worse status applies. For example, an amphora
        # with traffic reports FULL and its idle peer OPEN.
        worst = max(views, key=lambda view: view.rank)
        result[listener.id] = ObjectStatus(Kind.LISTENER, worst.status, worst.describe())


def _set_policy_statuses(listener: Listener, result: Statuses, *, parent_up: bool) -> None:
    """Set the statuses of policies and rules from their listener, because HAProxy reports none for them."""
    served = listener.id in result
    for policy in listener.l7policies:
        up = parent_up and policy.admin_state_up
        objects: list[tuple[L7Policy | L7Rule, Kind, bool]] = [
            (policy, Kind.L7POLICY, up),
            *((rule, Kind.L7RULE, up and rule.admin_state_up) for rule in policy.rules),
        ]
        for one, kind, one_up in objects:
            if not one_up:
                result[one.id] = _disabled(kind, own=not one.admin_state_up)
            elif served:
                result[one.id] = ObjectStatus(kind, Operating.ONLINE, "served with its listener")


def _set_pool_statuses(
    pool: Pool, views: Mapping[str, list[_View]] | None, result: Statuses, *, parent_up: bool, used: bool
) -> None:
    enabled = parent_up and pool.admin_state_up
    for member in pool.members:
        status = _member_status(member, pool, (views or {}).get(member.id, ()), pool_up=enabled, used=used)
        if status is not None:
            result[member.id] = status
    if not enabled:
        result[pool.id] = _disabled(Kind.POOL, own=not pool.admin_state_up)
    elif not used:
        result[pool.id] = ObjectStatus(Kind.POOL, Operating.OFFLINE, "no enabled listener uses it")
    elif views is not None:
        result[pool.id] = _served_pool_status(pool, result)
    monitor = pool.healthmonitor
    if monitor is None:
        return
    if not (enabled and monitor.admin_state_up):
        result[monitor.id] = _disabled(Kind.HEALTH_MONITOR, own=not monitor.admin_state_up)
    elif pool.id in result:
        result[monitor.id] = ObjectStatus(Kind.HEALTH_MONITOR, Operating.ONLINE, "enabled")


def _member_status(
    member: Member, pool: Pool, views: Sequence[_View], *, pool_up: bool, used: bool
) -> ObjectStatus | None:
    if not (pool_up and member.admin_state_up):
        return _disabled(Kind.MEMBER, own=not member.admin_state_up)
    if not used:
        # Octavia shows NO_MONITOR for a member without a health monitor, even if no listener uses the pool.
        monitored = pool.healthmonitor is not None and pool.healthmonitor.admin_state_up
        status = Operating.OFFLINE if monitored else Operating.NO_MONITOR
        return ObjectStatus(Kind.MEMBER, status, "no enabled listener uses its pool")
    by_amphora: dict[str, _View] = {}
    for view in views:
        other = by_amphora.get(view.amphora_id)
        by_amphora[view.amphora_id] = view if other is None or view.rank < other.rank else other
    if not by_amphora:
        return None
    best = min(by_amphora.values(), key=lambda view: view.rank)
    down = next((view for view in by_amphora.values() if view.status is Operating.ERROR), None)
    if down is not None and best.status is not Operating.ERROR:
        return ObjectStatus(Kind.MEMBER, Operating.DEGRADED, f"{down.describe()}, {best.describe()}")
    if member.weight == 0 and best.status in (Operating.ONLINE, Operating.NO_MONITOR):
        # HAProxy reports DRAIN only for servers with health checks. But any server with weight 0 gets no new
        # connections, so its member is draining.
        return ObjectStatus(Kind.MEMBER, Operating.DRAINING, f"weight 0, {best.describe()}")
    return ObjectStatus(Kind.MEMBER, best.status, best.describe())


def _served_pool_status(pool: Pool, result: Statuses) -> ObjectStatus:
    enabled = [member for member in pool.members if member.admin_state_up]
    known = [result[member.id].status for member in enabled if member.id in result]
    down = known.count(Operating.ERROR)
    if enabled and down == len(enabled):
        return ObjectStatus(Kind.POOL, Operating.ERROR, "all enabled members are down")
    if down:
        return ObjectStatus(Kind.POOL, Operating.DEGRADED, f"{down} of {len(enabled)} enabled members are down")
    partly = known.count(Operating.DEGRADED)
    if partly:
        reason = f"{partly} of {len(enabled)} enabled members are down on some amphorae"
        return ObjectStatus(Kind.POOL, Operating.DEGRADED, reason)
    return ObjectStatus(Kind.POOL, Operating.ONLINE, "no enabled member is down")


def _load_balancer_status(
    load_balancer: LoadBalancer, reports: Sequence[Report], below: Statuses
) -> ObjectStatus | None:
    if not load_balancer.admin_state_up:
        return _disabled(Kind.LOAD_BALANCER, own=True)
    served = [listener.id for listener in load_balancer.listeners if listener.admin_state_up]
    if not reports or (served and not any(listener_id in below for listener_id in served)):
        return None
    for status, kind in itertools.product((Operating.ERROR, Operating.DEGRADED), (Kind.POOL, Kind.LISTENER)):
        for object_id, entry in below.items():
            if entry.kind is kind and entry.status is status:
                reason = f"{kind.value[:-1]} {object_id}: {entry.reason}"
                return ObjectStatus(Kind.LOAD_BALANCER, status, reason)
    return ObjectStatus(Kind.LOAD_BALANCER, Operating.ONLINE, "served by an amphora")


def _disabled(kind: Kind, *, own: bool) -> ObjectStatus:
    return ObjectStatus(kind, Operating.OFFLINE, "disabled" if own else "its parent object is disabled")
