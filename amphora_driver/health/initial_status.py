# SPDX-License-Identifier: Apache-2.0
"""Computes operating statuses from a confirmed configuration, before the first report about it.

Invariant: a pure function of the load balancer with the rules of `status.operating_statuses`, so that a report that
agrees changes nothing. The result contains no failed object, and no object with a failed part.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from amphora_driver.health.status import (
    ListenerReport,
    ObjectStatus,
    PoolReport,
    Report,
    Statuses,
    operating_statuses,
    used_pools,
)
from amphora_driver.model.enums import Operating
from amphora_driver.model.loadbalancer import Listener, LoadBalancer, Pool

_REASON = "confirmed by its amphorae"
_OPEN, _UP, _NO_CHECK = "OPEN", "UP", "no check"


class InitialStatuses(msgspec.Struct, frozen=True):
    """Operating statuses by object id.

    Attributes:
        certain: no measurement changes these statuses while the amphorae serve this configuration.
        first: valid until the first measurement; a first status never replaces a measured one.
    """

    certain: Statuses
    first: Statuses


def initial_statuses(load_balancer: LoadBalancer, failed: Collection[str] = ()) -> InitialStatuses:
    """Return the operating statuses that are known when every amphora has confirmed a load balancer.

    A member with an enabled monitor has no known status before the first check of HAProxy. A pool with such members, a
    listener (which may be full) and the load balancer have a first status only. No amphora serves the `failed` objects.
    """
    missing = set(failed)
    served = [one for one in load_balancer.listeners if one.admin_state_up and _is_complete(one, missing)]
    used = used_pools(served)
    pools = [one for one in load_balancer.pools if one.id in used and not missing.intersection(_ids(one))]
    report = Report(
        listeners={one.id: ListenerReport(status=_OPEN) for one in served},
        pools={one.id: PoolReport(status=_UP, members=_unchecked_members(one)) for one in pools},
    )
    found = operating_statuses(load_balancer, [report])
    checked = (one for one in pools if _is_monitored(one) and any(member.admin_state_up for member in one.members))
    measured = {load_balancer.id, *report.listeners, *(one.id for one in checked)}
    named = {*report.listeners, *(member_id for pool in report.pools.values() for member_id in pool.members)}
    certain: Statuses = {}
    first: Statuses = {}
    for object_id in found.keys() - missing:
        one = found[object_id]
        # An object is OFFLINE here only because its configuration disables it. No report of an amphora can change that.
        online = one.status is not Operating.OFFLINE
        reason = _REASON if online and object_id in named else one.reason
        target = first if online and object_id in measured else certain
        target[object_id] = ObjectStatus(one.kind, one.status, reason)
    return InitialStatuses(certain, first)


def _is_complete(listener: Listener, missing: set[str]) -> bool:
    ids = {listener.id, *(policy.id for policy in listener.l7policies)}
    ids.update(rule.id for policy in listener.l7policies for rule in policy.rules)
    return not ids & missing


def _ids(pool: Pool) -> set[str]:
    return {pool.id} if pool.healthmonitor is None else {pool.id, pool.healthmonitor.id}


def _is_monitored(pool: Pool) -> bool:
    return pool.healthmonitor is not None and pool.healthmonitor.admin_state_up


def _unchecked_members(pool: Pool) -> dict[str, str]:
    return {} if _is_monitored(pool) else {member.id: _NO_CHECK for member in pool.members if member.admin_state_up}
