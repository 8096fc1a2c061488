# SPDX-License-Identifier: Apache-2.0
"""Operating statuses that follow from a confirmed configuration, before any amphora has reported on it.

Invariant: a pure function of the load balancer, by the rules of `status.operating_statuses`: a report that agrees
changes nothing. No status of something that failed, or that is served without something that failed, is among them.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from amphora_driver.health.status import (
    ListenerReport,
    PoolReport,
    Report,
    Statuses,
    StatusOfObject,
    operating_statuses,
    used_pools,
)
from amphora_driver.model.enums import Operating
from amphora_driver.model.loadbalancer import Listener, LoadBalancer, Pool

_REASON = "its amphorae confirmed it"
_OPEN, _UP, _NO_CHECK = "OPEN", "UP", "no check"


class Unmeasured(msgspec.Struct, frozen=True):
    """Operating statuses by object id.

    Attributes:
        certain: no measurement changes them while this configuration is served.
        first: they are true until the first measurement, and replace none.
    """

    certain: Statuses
    first: Statuses


def unmeasured(load_balancer: LoadBalancer, failed: Collection[str] = ()) -> Unmeasured:
    """Decide which operating statuses are known when every amphora has confirmed a load balancer.

    A member with an enabled monitor has none: HAProxy checks it first. A pool with such members, a listener (which may
    be full) and the load balancer have a first status.

    Args:
        load_balancer: the complete tree that was confirmed.
        failed: ids of the objects it is served without.
    """
    lost = set(failed)
    served = [one for one in load_balancer.listeners if one.admin_state_up and _whole(one, lost)]
    used = used_pools(served)
    pools = [one for one in load_balancer.pools if one.id in used and not lost.intersection(_ids(one))]
    said = Report(
        listeners={one.id: ListenerReport(status=_OPEN) for one in served},
        pools={one.id: PoolReport(status=_UP, members=_unchecked(one)) for one in pools},
    )
    found = operating_statuses(load_balancer, [said])
    measured = {load_balancer.id, *said.listeners, *(one.id for one in pools if _is_measured(one))}
    named = {*said.listeners, *(member_id for pool in said.pools.values() for member_id in pool.members)}
    certain: Statuses = {}
    first: Statuses = {}
    for object_id in found.keys() - lost:
        one = found[object_id]
        # What is OFFLINE here follows from the model alone.
        online = one.status is not Operating.OFFLINE
        reason = _REASON if online and object_id in named else one.reason
        known = first if online and object_id in measured else certain
        known[object_id] = StatusOfObject(one.kind, one.status, reason)
    return Unmeasured(certain, first)


def _whole(listener: Listener, lost: set[str]) -> bool:
    """Whether it is served as it was wanted, apart from its pools."""
    ids = {listener.id, *(policy.id for policy in listener.l7policies)}
    ids.update(rule.id for policy in listener.l7policies for rule in policy.rules)
    return not ids & lost


def _ids(pool: Pool) -> set[str]:
    return {pool.id} if pool.healthmonitor is None else {pool.id, pool.healthmonitor.id}


def _is_monitored(pool: Pool) -> bool:
    return pool.healthmonitor is not None and pool.healthmonitor.admin_state_up


def _is_measured(pool: Pool) -> bool:
    return _is_monitored(pool) and any(member.admin_state_up for member in pool.members)


def _unchecked(pool: Pool) -> dict[str, str]:
    return {} if _is_monitored(pool) else {member.id: _NO_CHECK for member in pool.members if member.admin_state_up}
