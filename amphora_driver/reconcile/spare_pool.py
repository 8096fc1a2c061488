# SPDX-License-Identifier: Apache-2.0
"""Steps that adopt warm spares and maintain their pool.

Invariant: a job queries the agent of a spare before it adopts the spare, in one transaction under the load balancer's
lease. After a short time-out without an answer, the job queries the next spare. Without a usable spare, the job boots
an amphora.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from amphora_driver.compute.interface import Location, Placement
from amphora_driver.compute.placement import boot_partners, order_by_placement
from amphora_driver.errors import AgentError, AmphoraDriverError
from amphora_driver.model.amphora import Amphora
from amphora_driver.reconcile import steps
from amphora_driver.reconcile.context import ReconcileContext, WriteUnderLease
from amphora_driver.reconcile.job import Job
from amphora_driver.store import circuit_breaker, failovers, spare_pools
from amphora_driver.store.failovers import Event
from amphora_driver.store.spare_pools import Spare, SparePoolSpec, SparePoolState

LOG = logging.getLogger(__name__)
# Time-out in seconds of a query to a spare amphora.
_QUERY_TIMEOUT = 2.0
_DAY = 86_400.0


class SpareSteps:
    """The spares of one load balancer, or of one pool, in one job.

    Attributes:
        adoption_failed: no spare could be adopted, so this job adopts no spare.
        queried: spares whose agents were queried in this job.
        absent: queried spares without an answer.
    """

    def __init__(self, context: ReconcileContext, job: Job, write: WriteUnderLease) -> None:
        self.adoption_failed = False
        self.queried: frozenset[str] = frozenset()
        self.absent: frozenset[str] = frozenset()
        self._context = context
        self._job = job
        self._write = write
        # Spare amphorae that were ready at the last read of the pool.
        self._ready: tuple[Spare, ...] = ()
        # Current image of each spare pool; None if it is unknown.
        self._images: dict[str, str | None] = {}

    def find_spec(self, row: Any, tree: Any) -> SparePoolSpec | None:
        if tree is None:
            return None
        number = self._context.conf.amp_spares.number
        return spare_pools.spec_of(tree.profile, row.compute, row.network, number)

    def list_adoptable(self, connection: sa.Connection, pool_id: str | None) -> tuple[str, ...]:
        """Return ids of ready spares, the best one first; `without_unfit` removes the unfit ones."""
        self._ready = (
            () if pool_id is None or self.adoption_failed else spare_pools.list_ready_spares(connection, pool_id)
        )
        return tuple(one.id for one in self._ready)

    def read_pool_state(self, connection: sa.Connection, row: Any) -> SparePoolState:
        spec = msgspec.json.decode(row.spares, type=SparePoolSpec)
        users = spare_pools.count_users(connection, row.load_balancer_id)
        number = self._context.conf.amp_spares.number if spec.number is None else spec.number
        self._ready = spare_pools.list_ready_spares(connection, row.load_balancer_id)
        works = _detection_works(circuit_breaker.read_breaker_rows(connection))
        at = spare_pools.last_heartbeat_at(connection)
        number = number if users else 0
        return SparePoolState(spec=spec, number=number, users=users, last_heartbeat_at=at, detection_works=works)

    def without_unfit(self, view: steps.AnyView, observed: Sequence[Amphora]) -> steps.AnyView:
        """Return the observation with the unfit spares removed, or marked in the state of a pool.

        The remaining spares are in the order of their placement relative to the load balancer's amphorae.

        Call this method outside a transaction: the query of the compute backend for its current image takes time.
        """
        if isinstance(view, steps.SparePoolView):
            unfit = self._unfit(view.stock.spec, view.now)
            return msgspec.structs.replace(view, stock=msgspec.structs.replace(view.stock, unfit=unfit))
        if view.spec is None or not view.spares:
            return view
        unfit = self._unfit(view.spec, view.now)
        fit = [
            (one.id, Location(host=one.host, zone=one.zone))
            for one in self._ready
            if one.id in view.spares and one.id not in unfit
        ]
        placement = Placement(self._context.conf.amp_compute.placement)
        return msgspec.structs.replace(view, spares=order_by_placement(fit, boot_partners(observed), placement))

    def _unfit(self, spec: SparePoolSpec, now: float) -> dict[str, str]:
        if not self._ready:
            return {}
        image = self._current_image(spec)
        # Certificates are normally renewed after half of their validity. If less than a third is left, the renewals
        # have failed, and the amphora is not used.
        lasting = self._context.conf.amp_certificates.validity_days * _DAY / 3
        return {one.id: why for one in self._ready if (why := spare_pools.unfit_reason(one, image, now, lasting))}

    def _current_image(self, spec: SparePoolSpec) -> str | None:
        """Return the image of a new machine; None if unknown. A job queries the backend once."""
        if spec.id not in self._images:
            try:
                compute = self._context.catalogue.compute(spec.compute, spec.network)
                self._images[spec.id] = compute.image(spec.image_tag)
            except AmphoraDriverError as error:
                LOG.warning(
                    "the controller could not read the current image of spare pool %s and keeps all its "
                    "spare amphorae: %s",
                    spec.id,
                    error,
                )
                self._images[spec.id] = None
        return self._images[spec.id]

    def adopt(self, step: steps.Adopt, view: steps.LoadBalancerView, now: float) -> None:
        """Adopt the first spare that answers; without one, this job adopts no spare."""
        of, pool_id = view.load_balancer_id, str(view.pool)
        ready = self._context.database.read(lambda c: spare_pools.list_ready_spares(c, pool_id))
        known = {one.id: one for one in ready}
        for amphora_id in step.amphora_ids:
            if amphora_id not in known or not self._answers(amphora_id, known[amphora_id].management_address):
                continue
            self._job.ensure_may_act()
            taken: list[bool] = []

            def take(connection: sa.Connection, spare: str = amphora_id, taken: list[bool] = taken) -> None:
                taken[:] = [spare_pools.assign_spare(connection, spare, pool_id, of, step.role)]
                if taken[0] and view.replacing:
                    failovers.record_event(connection, of, Event.ADOPTED, now, spare)

            self._write(take)
            if taken[0]:
                return
        LOG.warning(
            "load balancer %s: the controller boots a new amphora, because spare pool %s has no usable spare amphora",
            of,
            pool_id,
        )
        self.adoption_failed = True

    def query(self, step: steps.QuerySpares, by_id: dict[str, Amphora]) -> None:
        """Query the agents of spares and record the ones without an answer."""
        for amphora_id in step.amphora_ids:
            self._job.ensure_may_act()
            if not self._answers(amphora_id, by_id[amphora_id].management_address):
                self.absent |= {amphora_id}
            self.queried |= {amphora_id}

    def delete_pool(self, pool_id: str) -> None:

        def write(connection: sa.Connection) -> None:
            self._job.row_deleted = spare_pools.delete_unused_pool(connection, pool_id)

        self._write(write)

    def _answers(self, amphora_id: str, address: str | None) -> bool:
        if address is None:
            return False
        try:
            self._context.agents.info(amphora_id, address, deadline=self._job.deadline.within(_QUERY_TIMEOUT))
        except AgentError as error:
            self._job.ensure_may_act()
            LOG.warning(
                "spare amphora %s does not answer, so the controller gives this amphora to no load balancer: %s",
                amphora_id,
                error,
            )
            return False
        return True


def _detection_works(rows: dict[str, circuit_breaker.BreakerRow]) -> bool:
    """Return whether missing heartbeats mean silent amphorae: heartbeats arrive, and no breaker is open."""
    sight, automatic, operator = (
        rows.get(one) for one in (circuit_breaker.SIGHT, circuit_breaker.AUTOMATIC, circuit_breaker.OPERATOR)
    )
    closed = all(one is None or one.state == circuit_breaker.CLOSED for one in (automatic, operator))
    return sight is not None and sight.state == circuit_breaker.SEEING and closed
