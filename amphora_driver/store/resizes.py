# SPDX-License-Identifier: Apache-2.0
"""Rows of a resize: another profile for an existing load balancer.

Invariant: a resize is refused while an amphora of the load balancer is being replaced or the load balancer is being
created. So a load balancer has amphorae of two topologies at most.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import sqlalchemy as sa

from amphora_driver.database.tables import amphora, job
from amphora_driver.errors import Conflict, UnknownObject
from amphora_driver.model.amphora import AmphoraState
from amphora_driver.model.loadbalancer import LoadBalancer
from amphora_driver.store import desired_objects, failovers

_WAIT = "Wait until that is done."


class Resize(msgspec.Struct, frozen=True, kw_only=True):
    """One resize.

    Attributes:
        former: the load balancer before it; `tree` is the load balancer after it, both with all children.
        replaced: ids of the amphorae that are to be replaced; empty if a new configuration suffices.
    """

    former: LoadBalancer
    tree: LoadBalancer
    replaced: tuple[str, ...]


def prepare_resize(
    connection: sa.Connection,
    load_balancer_id: str,
    choose: Callable[[LoadBalancer], LoadBalancer],
    needs_new_amphorae: Callable[[LoadBalancer, LoadBalancer], bool],
) -> Resize:
    """Return the resize of a load balancer without writing it.

    Args:
        choose: returns the load balancer with the new profile, or raises UnsupportedOption.
        needs_new_amphorae: returns whether the change needs other machines.

    Raises:
        UnknownObject: the load balancer is not recorded.
        Conflict: the load balancer cannot be resized now, or has this profile already.
    """
    attempt = f"resize load balancer {load_balancer_id}"
    state = sa.select(job.c.op, job.c.applied).where(job.c.load_balancer_id == load_balancer_id)
    row = connection.execute(state).first()
    if row is None:
        raise UnknownObject(attempt, "this provider has no record of it")
    if row.op != "apply":
        raise Conflict(attempt, "the load balancer is being deleted", "No action is needed.")
    query = sa.select(amphora.c.id, amphora.c.state).where(amphora.c.load_balancer_id == load_balancer_id)
    machines = connection.execute(query.order_by(amphora.c.created_at, amphora.c.id)).all()
    if not row.applied or not machines:
        raise Conflict(attempt, "the load balancer is being created", _WAIT)
    if any(one.state == AmphoraState.RETIRING.value for one in machines):
        numbers = [str(one.id) for one in failovers.list_open_failovers_of(connection, load_balancer_id)]
        detail = f" (fail-over {', '.join(numbers)})" if numbers else ""
        raise Conflict(attempt, f"one of its amphorae is being replaced already{detail}", _WAIT)
    former = desired_objects.load_tree(connection, load_balancer_id)
    tree = choose(former)
    if tree.profile == former.profile:
        raise Conflict(attempt, "the load balancer has these values already", "No action is needed.")
    replaced = tuple(one.id for one in machines) if needs_new_amphorae(former, tree) else ()
    return Resize(former=former, tree=tree, replaced=replaced)
