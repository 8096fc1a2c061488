# SPDX-License-Identifier: Apache-2.0
"""Steps that remove an amphora: VIP handover, drain of its connections, and deletion of its resources.

Invariant: no answer or error of an amphora prevents its removal. If the machine cannot be deleted, the ports are
deleted, the row stays, and a later job retries the removal.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec
import sqlalchemy as sa

from amphora_driver.compute.interface import Compute
from amphora_driver.deadline import Deadline, apply_deadline
from amphora_driver.errors import AgentError, AmphoraDriverError, ComputeError, DeadlinePassed
from amphora_driver.model.amphora import Amphora
from amphora_driver.network.interface import Network
from amphora_driver.reconcile import steps
from amphora_driver.reconcile.context import ReconcileContext, WriteUnderLease
from amphora_driver.reconcile.job import Job
from amphora_driver.store import amphorae, failovers
from amphora_driver.store.failovers import Event

if TYPE_CHECKING:
    from amphora_driver.agent.responses import Vrrp

LOG = logging.getLogger(__name__)
# The new VIP holder can forward connections of the draining amphora for this number of seconds longer than the drain
# time.
_DRAIN_MARGIN = 5.0
# Time-out in seconds of a query to an amphora about its VIPs and its drain.
_QUERY_TIMEOUT = 5.0
# Time-out in seconds of the first attempt to delete the machine of a dead amphora. The push to the other amphora waits
# for this attempt.
_FENCING_TIMEOUT = 20.0


class AmphoraRemoval:
    """Drain and removal of the amphorae of one load balancer, in one job.

    `holder_queried` is set after this job has queried the amphorae for the VIP holder.
    """

    def __init__(self, context: ReconcileContext, job: Job, write: WriteUnderLease) -> None:
        self._conf = context.conf
        self._database = context.database
        self._agents = context.agents
        self._job = job
        self._write = write
        self.holder_queried = False
        # For each amphora that has answered: whether it holds the VIPs, and the time of its last heartbeat before the
        # answer.
        self._answers: dict[str, tuple[bool, float | None]] = {}

    def query_holder(self, step: steps.QueryVipHolder, by_id: dict[str, Amphora]) -> None:
        """Query the amphorae for the VIPs; without an answer, the last heartbeat counts."""
        deadline = self._job.deadline.within(_QUERY_TIMEOUT)
        for one in (by_id[amphora_id] for amphora_id in step.amphora_ids):
            said = self._query(one, deadline)
            if said is not None and said.holds_vip is not None:
                self._answers[one.id] = (said.holds_vip, one.heard_at)
        self.holder_queried = True

    def _query(self, amphora: Amphora, deadline: Deadline) -> Vrrp | None:
        try:
            return self._agents.vrrp(amphora.id, str(amphora.management_address), deadline=deadline)
        except AgentError as error:
            # A more urgent job may have interrupted the query. Then `ensure_may_act` ends this job, because the missing
            # answer says nothing about the amphora.
            self._job.ensure_may_act()
            LOG.info(
                "the controller could not ask amphora %s whether it holds the VIPs or drains connections, and "
                "continues without the answer: %s",
                amphora.id,
                error,
            )
            return None

    def with_answers(self, observed: tuple[Amphora, ...]) -> tuple[Amphora, ...]:
        """Return the amphorae with their answers; a heartbeat with values replaces an older answer."""
        for one in observed:
            if one.id in self._answers and one.holds_vip is not None and one.heard_at != self._answers[one.id][1]:
                del self._answers[one.id]
        return tuple(
            msgspec.structs.replace(one, holds_vip=self._answers[one.id][0]) if one.id in self._answers else one
            for one in observed
        )

    def hand_over_vips(self, amphora: Amphora, partner: Amphora, *, direct_answers: bool) -> None:
        """Hand the VIPs over to the partner, which forwards open connections to the amphora.

        An error does not prevent the removal: the amphora then keeps the VIPs until its deletion. Without
        `direct_answers` the ports drop answers that leave the amphora directly. An amphora that cannot send them
        through the tunnel then ends its connections.
        """
        drain = float(self._conf.amp_controller.drain_timeout)
        try:
            if drain:
                address = str(partner.management_address)
                self._agents.expect_vips(partner.id, address, drain + _DRAIN_MARGIN, deadline=self._job.deadline)
        except AgentError as error:
            # A more urgent job may have interrupted the request. Then `ensure_may_act` ends this job, and a later job
            # repeats the request.
            self._job.ensure_may_act()
            message = (
                "amphora %s cannot forward open connections to amphora %s, so the VIP handover ends these "
                "connections: %s"
            )
            LOG.warning(message, partner.id, amphora.id, error)
            drain = 0.0
        left = self._release_vips(amphora, drain, direct_answers=direct_answers)
        self._record_handover(amphora, left, "it may still have the VIPs" if left is None else f"to {partner.id}")

    def _record_handover(self, amphora: Amphora, left: float | None, detail: str) -> None:
        until = None if left is None else self._database.now() + left
        now, of = self._database.now(), self._job.lease.load_balancer_id

        def write(connection: sa.Connection) -> None:
            amphorae.update_amphora(connection, amphora.id, handed_over=True, drains_until=until)
            if self._job.replacing:
                failovers.record_event(connection, of, Event.HANDED_OVER, now, amphora.id, detail)

        self._write(write)

    def _release_vips(self, amphora: Amphora, drain: float, *, direct_answers: bool) -> float | None:
        """Make an amphora release the VIPs; return the seconds of its drain, or None if it may keep the VIPs."""
        address, deadline = str(amphora.management_address), self._job.deadline
        for seconds in dict.fromkeys((drain, 0.0)):
            self._job.ensure_may_act()
            try:
                self._agents.release_vips(
                    amphora.id, address, seconds, direct_answers=direct_answers, deadline=deadline
                )
            except AgentError as error:
                self._job.ensure_may_act()
                LOG.warning(
                    "amphora %s did not confirm the release of the VIPs, so the controller asks the amphora "
                    "whether it still holds the VIPs: %s",
                    amphora.id,
                    error,
                )
            else:
                return seconds
            said = self._query(amphora, deadline)
            if said is None:
                return None
            if said.holds_vip is False:
                # An earlier request made the amphora hand over the VIPs, but the answer was lost or the controller
                # crashed.
                return float(said.draining or 0.0)
        return None

    def check_drain(self, step: steps.CheckDrain, amphora: Amphora) -> None:
        """Record the end of a drain; without an answer, only a silent amphora counts as drained."""
        said = self._query(amphora, self._job.deadline.within(_QUERY_TIMEOUT))
        over, why = step.silent, "it sends no heartbeats and does not answer"
        if said is not None:
            over, why = said.draining is None or bool(said.holds_vip), str(said)
        if over:
            LOG.info(
                "the controller ends the wait for open connections of amphora %s, which is being replaced: %s",
                amphora.id,
                why,
            )
            self._write(lambda c: amphorae.update_amphora(c, amphora.id, drains_until=0.0))

    def _finds_unrecorded_drain(self, amphora: Amphora, view: steps.LoadBalancerView) -> bool:
        """Return whether an amphora drains without a record: a controller may crash after a handover."""
        heard = not amphora.dead and amphora.heard_at is not None and view.now - amphora.heard_at < view.silence_limit
        in_vrrp = amphora.role in view.priorities
        if view.gone or not in_vrrp or amphora.handed_over or not (amphora.confirmed and heard):
            return False
        said = self._query(amphora, self._job.deadline.within(_QUERY_TIMEOUT))
        if said is None or said.draining is None or said.holds_vip is not False:
            return False
        self._record_handover(amphora, said.draining, "its connections drain")
        return True

    def delete_amphora(self, amphora: Amphora, view: steps.AnyView, compute: Compute, network: Network) -> None:
        """Delete an amphora with its machine and its ports.

        The ports are deleted even if the machine cannot be deleted: the amphora is then fenced from the network.

        Raises:
            ComputeError: the machine still exists.
            NetworkError: a port still exists.
            DeadlinePassed: the compute backend exceeded its time-out.
        """
        if isinstance(view, steps.LoadBalancerView) and self._finds_unrecorded_drain(amphora, view):
            return
        # The push to the partner waits until the machine of a dead amphora is deleted. So the first attempt of this
        # deletion has a short time-out.
        hurry = amphora.dead and not view.attempts
        deadline = self._job.deadline.within(_FENCING_TIMEOUT) if hurry else self._job.deadline
        left: AmphoraDriverError | None = None
        try:
            with apply_deadline(deadline):
                compute.destroy(amphora.id)
        except (ComputeError, DeadlinePassed) as error:
            left = error
        for port in network.ports(amphora.id):
            self._job.ensure_may_act()
            network.delete_port(port.id)
        if left is not None:
            # The addresses of deleted ports may belong to other ports soon, so the row must not list the deleted ports.
            self._job.ensure_may_act()
            self._write(lambda c: amphorae.update_amphora(c, amphora.id, plugged=()))
            raise left
        now = self._database.now()

        def forget(connection: sa.Connection) -> None:
            amphorae.delete_amphora(connection, amphora.id)
            if self._job.replacing:
                failovers.record_release(connection, self._job.lease.load_balancer_id, amphora.id, now)

        self._write(forget)
