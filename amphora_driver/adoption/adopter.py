# SPDX-License-Identifier: Apache-2.0
"""Performs adoptions, step by step.

Invariant: one controller at a time holds the duty `adoption`. It acquires the duty again before each step, and reads
the row again. Each step can be repeated from its beginning, and the next step is recorded before its effect begins.
Until `COMMIT`, a failure, a time-out or a request of the operator leads to `RESTORE`: the former amphorae serve again.
From `COMMIT` on, only a request of the operator does. The new amphorae take the VIPs in `TAKE`, before the adopter
disables the ports of the former ones in `CUT`. `RESTORE` enables the former ports before it disables the new ones. So
amphorae serve at each moment, also while no controller runs.

Until `COMMIT`, the adopter compares the load balancer with its state before the lock. octavia-lib locks without a
condition, so Octavia's own worker may still perform a change that it began earlier.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import sqlalchemy as sa

from amphora_driver import failpoints
from amphora_driver.adoption import octavia_state, records, survey
from amphora_driver.adoption.new_amphorae import NewAmphorae
from amphora_driver.adoption.octavia_state import LOCKED, OctaviaState
from amphora_driver.adoption.records import Adoption, Progress, Step
from amphora_driver.adoption.step_results import AdoptionContext, Move, Wait
from amphora_driver.adoption.survey import Surveyor
from amphora_driver.adoption.way_back import WayBack
from amphora_driver.deadline import Deadline, apply_deadline
from amphora_driver.errors import AmphoraDriverError, Conflict, ModelError, RequestError, UnknownObject
from amphora_driver.maintenance.duty_loop import run_duty
from amphora_driver.model.network import VipRequest
from amphora_driver.network.interface import NotYet
from amphora_driver.queue.jobs import acquire_duty, release_duty
from amphora_driver.store import desired_objects

if TYPE_CHECKING:
    from amphora_driver.model.loadbalancer import Vip

LOG = logging.getLogger(__name__)
DUTY = "adoption"
# Seconds between two rounds, of the lease of the duty, and of the limit of a step. The calls of a step have time-outs,
# so a step ends before the lease expires. A process that is suspended within a step can send its last call later. This
# is harmless: that process cannot record the step, and each write to Octavia's tables first checks their rows.
_EVERY, _DUTY_SECONDS, _STEP_SECONDS = 0.5, 20.0, 10.0
# After `COMMIT`, Octavia's health manager may still process a heartbeat of a former amphora, and write statuses. The
# adopter waits this number of seconds before it reports statuses to Octavia, so that its report is the last.
_SETTLE_SECONDS = 2.0
# Seconds between a failed attempt of a step and the next attempt. The number doubles up to the limit, except in steps
# that move the VIPs: meanwhile clients may have the MAC address of an amphora that is cut off.
_RETRY_SECONDS, _MOST_RETRY_SECONDS = 2.0, 30.0
_MOVING_VIPS = (Step.TAKE, Step.CUT, Step.RESTORE, Step.RETURN)
# Seconds until the next attempt for a row that this controller cannot process, for example a damaged one. Each attempt
# writes a stack trace to the log.
_DEFECT_SECONDS = 60.0
# Seconds between two checks of an adopted load balancer whose former amphorae still exist.
_KEEP_SECONDS = 10.0
_STARTED = (Step.LOCK, Step.PREPARE, Step.TAKE, Step.CUT, Step.COMMIT, Step.REPORT)
_BACK = (Step.RELOCK, Step.REJOIN, Step.RESTORE, Step.RETURN, Step.DISCARD)
_FAILED = "the controller failed in step %s of the adoption of load balancer %s, and tries again in %g s: %s"


class Adopter:
    """Performs the steps of all adoptions; `owner` is the name of the controller."""

    def __init__(self, context: AdoptionContext, owner: str) -> None:
        self._context = context
        self._database = context.database
        self._octavia = context.octavia
        self._options = context.conf.amp_adoption
        self._new = NewAmphorae(context.database, context.agents)
        self._owner = owner
        self._surveyor = Surveyor(context.conf, context.database, context.catalogue, context.octavia, context.library)
        self._holds_duty = self._lacks_sockets = False
        # The keys are load balancer ids. The values are the monotonic times of the next attempts.
        self._not_before: dict[str, float] = {}
        # The step that failed last of each load balancer, and the seconds until its next attempt.
        self._back_off: dict[str, tuple[Step, float]] = {}
        self._handlers: dict[Step, Callable[[Adoption, OctaviaState], Move | Wait]] = {
            Step.LOCK: self._lock,
            Step.PREPARE: self._prepare,
            Step.TAKE: self._take,
            Step.CUT: self._cut,
            Step.COMMIT: self._commit,
            Step.REPORT: self._report,
            Step.KEEP: self._keep,
            Step.REMOVE: self._remove,
            **WayBack(context).handlers,
        }

    def run(self, stopping: threading.Event, draining: threading.Event) -> None:
        run_duty(DUTY, _EVERY, stopping, draining, work=self.advance, release=self.release)

    def release(self) -> None:
        if self._holds_duty:
            self._holds_duty = False
            release_duty(self._database, DUTY, self._owner)

    def advance(self) -> None:
        """Perform the next steps of all adoptions."""
        opened = self._database.read(lambda c: records.list_adoptions(c, only_open=True))
        missing = survey.missing_sockets(self._context.conf) if opened else []
        if missing and not self._lacks_sockets:
            text = "this controller performs no adoption, because octavia-driver-agent's socket %s is not on this host"
            LOG.warning(text, ", ".join(missing))
        self._lacks_sockets = bool(missing)
        if not opened or missing:
            # Another controller, on a host with the sockets, can then acquire the duty at once.
            self.release()
            return
        self._holds_duty = acquire_duty(self._database, DUTY, self._owner, _DUTY_SECONDS)
        if not self._holds_duty:
            return
        self._not_before = {one: at for one, at in self._not_before.items() if at > time.monotonic()}
        for one in opened:
            requested = one.step is Step.KEEP and one.revert
            if one.step is not Step.WAITING and (requested or one.load_balancer_id not in self._not_before):
                self._guard(one, partial(self._advance_one, one))
        self._start_next()

    def _guard(self, found: Adoption, work: Callable[[], object]) -> None:
        """Perform steps of one adoption. An error must not stop the others."""
        of = found.load_balancer_id
        try:
            work()
        except AmphoraDriverError as error:
            LOG.warning(_FAILED, found.step.value, of, self._put_off(found), error)
        except Exception as error:
            # `_attempt` handles the errors of a step. Other errors concern the row of one adoption, for example a
            # damaged row.
            self._not_before[of] = time.monotonic() + _DEFECT_SECONDS
            reason = _describe_defect(error)
            LOG.exception(_FAILED, found.step.value, of, _DEFECT_SECONDS, reason)
            with suppress(AmphoraDriverError):
                self._database.write(lambda c: records.set_reason(c, found, reason))

    def _put_off(self, found: Adoption) -> float:
        """Postpone the next attempt of a failed step; return the seconds."""
        of = found.load_balancer_id
        step, seconds = self._back_off.get(of, (found.step, 0.0))
        grows = step is found.step and step not in _MOVING_VIPS
        seconds = min(2 * seconds, _MOST_RETRY_SECONDS) if grows and seconds else _RETRY_SECONDS
        self._back_off[of] = found.step, seconds
        self._not_before[of] = time.monotonic() + seconds
        return seconds

    def _start_next(self) -> None:
        opened = self._database.read(lambda c: records.list_adoptions(c, only_open=True))
        started = sum(one.step in _STARTED for one in opened)
        ready = (one for one in opened if one.step is Step.WAITING and not one.paused)
        waiting = next((one for one in ready if one.load_balancer_id not in self._not_before), None)
        if waiting is None or started >= waiting.max_in_progress:
            return
        self._guard(waiting, lambda: self._attempt(waiting, lambda: self._start(waiting)))

    def _start(self, found: Adoption) -> Move | Wait:
        if unfit := self._database.read(records.list_unfit_controllers):
            return Wait(reason=f"controllers of an earlier version must be upgraded or stopped: {', '.join(unfit)}")
        surveyed = self._surveyor.survey(found.load_balancer_id, found.remove_after)
        if surveyed.plan.refusals:
            return Move(step=Step.REFUSED, reason="; ".join(surveyed.plan.refusals))
        return Move(step=Step.LOCK, values={"state": msgspec.json.encode(surveyed.state).decode()})

    def _advance_one(self, found: Adoption) -> None:
        """Perform steps until one must wait."""
        before = msgspec.json.decode(found.state or "", type=OctaviaState)
        current: Adoption | None = found
        while current is not None and current.step in self._handlers:
            current = self._attempt(current, partial(self._handlers[current.step], current, before))

    def _attempt(self, found: Adoption, work: Callable[[], Move | Wait]) -> Adoption | None:
        """Perform one step and record the result; return the adoption if it has moved."""
        if not self._may_act(found):
            return None
        failpoints.reach_step(f"Adopt-{found.step.value}", failpoints.Moment.BEFORE)
        try:
            with apply_deadline(Deadline(_STEP_SECONDS, f"adopt load balancer {found.load_balancer_id}")):
                result = work()
            self._back_off.pop(found.load_balancer_id, None)
        except AmphoraDriverError as error:
            result = self._handle_failure(found, error, final=error.final)
        except Exception as error:
            # An unexpected error leads to the way back. Otherwise the load balancer would stay locked.
            text = "an unexpected error occurred in step %s of the adoption of load balancer %s"
            LOG.exception(text, found.step.value, found.load_balancer_id)
            failure = AmphoraDriverError(f"perform step {found.step.value}", _describe_defect(error))
            result = self._handle_failure(found, failure, final=True)
        failpoints.reach_step(f"Adopt-{found.step.value}", failpoints.Moment.DONE)
        if isinstance(result, Wait):
            # On the way back, the row keeps the reason for which the adoption ended.
            if result.reason != found.reason and (result.reason or found.step not in _BACK):
                self._database.write(lambda c: records.set_reason(c, found, result.reason))
            return None
        return self._record(found, result)

    def _may_act(self, found: Adoption) -> bool:
        """Acquire the duty for the next step; return False without it, or if the adoption has changed."""
        self._holds_duty = acquire_duty(self._database, DUTY, self._owner, _DUTY_SECONDS)
        if not self._holds_duty:
            return False
        return self._database.read(lambda c: records.get_adoption(c, found.load_balancer_id)) == found

    def _handle_failure(self, found: Adoption, error: AmphoraDriverError, *, final: bool) -> Move | Wait:
        text = "load balancer %s: adoption step %s failed; the controller repeats the step or ends the adoption: %s"
        LOG.warning(text, found.load_balancer_id, found.step.value, error)
        self._put_off(found)
        if found.step is Step.WAITING:
            return (
                Move(step=Step.REFUSED, reason=str(error))
                if isinstance(error, RequestError | UnknownObject | ModelError)
                else Wait(reason=str(error))
            )
        preparing = found.step is Step.PREPARE
        limit = self._options.prepare_timeout if preparing else self._options.take_timeout
        late = self._seconds_in_step(found) > limit
        if found.step in (Step.LOCK, Step.PREPARE, Step.TAKE, Step.CUT) and (final or late):
            return Move(step=Step.RESTORE, reason=str(error))
        return Wait(reason=str(error))

    def _record(self, found: Adoption, result: Move) -> Adoption | None:
        # From `RESTORE` on, the former amphorae serve, so a push gives the new amphorae no VIPs.
        held = {"vips_held": True} if result.step is Step.RESTORE else {}

        def write(connection: sa.Connection) -> Adoption | None:
            if not records.move(connection, found, result.step, result.reason, **{**result.values, **held}):
                return None
            if result.change is not None:
                result.change(connection)
            if result.step is Step.RESTORE and not found.revert:
                # After a failure, no further load balancer starts until an operator has read the reason.
                records.set_paused(connection, paused=True)
            return records.get_adoption(connection, found.load_balancer_id)

        moved = self._database.write(write)
        failpoints.reach_step(f"Adopt-{found.step.value}", failpoints.Moment.MARKED)
        if moved is not None:
            self._not_before.pop(found.load_balancer_id, None)
            self._back_off.pop(found.load_balancer_id, None)
            text = "adoption of load balancer %s: step %s is finished, the next step is %s%s"
            reason = f" ({result.reason})" if result.reason else ""
            LOG.info(text, found.load_balancer_id, found.step.value, result.step.value, reason)
            if result.change is not None:
                self._context.on_due()
        return moved

    def _lock(self, found: Adoption, before: OctaviaState) -> Move | Wait:
        of = found.load_balancer_id
        now = self._octavia.read(of)
        if now is not None and now.status == before.status and not found.revert:
            if problem := octavia_state.describe_change(before, msgspec.structs.replace(now, status=LOCKED)):
                return Move(step=Step.REVERTED, reason=problem)
            survey.set_status(self._context.library(), of, LOCKED)
        if problem := self._problem(found, before):
            return Move(step=Step.RESTORE, reason=problem)
        tree, contents = self._surveyor.read_tree(before)
        if problem := self._problem(found, before):
            return Move(step=Step.RESTORE, reason=problem)
        return Move(step=Step.PREPARE, change=lambda c: records.record_load_balancer(c, tree, contents))

    def _prepare(self, found: Adoption, before: OctaviaState) -> Move | Wait:
        if problem := self._problem(found, before):
            return Move(step=Step.RESTORE, reason=problem)
        progress = self._progress(found)
        if progress.attempts >= self._context.conf.amp_controller.give_up_after:
            return Move(step=Step.RESTORE, reason=f"the new amphorae do not serve: {progress.error}")
        reason = progress.error
        if progress.served and progress.amphorae == len(before.amphorae):
            # A refusal of Neutron must come before the new amphorae take the VIPs.
            claimed = None if before.vip_owned else self._claim_vip_port(before)
            if not isinstance(claimed, NotYet):
                return self._begin_take(found)
            reason = claimed.reason
        if self._seconds_in_step(found) > self._options.prepare_timeout:
            return Move(step=Step.RESTORE, reason=f"the new amphorae do not serve in time: {reason}")
        return Wait(reason=reason)

    def _claim_vip_port(self, before: OctaviaState) -> tuple[Vip, ...] | NotYet:
        """Mark the VIP port of the user as in use. Octavia does not mark it, and keeps a port of its own."""
        of = before.load_balancer_id
        tree = self._database.read(lambda c: desired_objects.load_tree(c, of))
        wanted = [
            VipRequest(subnet_id=vip.subnet_id, network_id=vip.network_id, address=vip.address, port_id=vip.port_id)
            for vip in tree.vips
        ]
        network = self._context.catalogue.network(tree.profile.network)
        return network.allocate_vip(of, before.project_id, wanted)

    def _begin_take(self, found: Adoption) -> Move:
        return Move(step=Step.TAKE, change=lambda c: records.lift_hold(c, found.load_balancer_id))

    def _take(self, found: Adoption, before: OctaviaState) -> Move | Wait:
        if problem := self._problem(found, before):
            return Move(step=Step.RESTORE, reason=problem)
        progress = self._progress(found)
        if progress.served and self._new.have_vips(found.load_balancer_id):
            return Move(step=Step.CUT)
        if self._seconds_in_step(found) > self._options.take_timeout:
            return Move(step=Step.RESTORE, reason=f"the new amphorae did not take the VIPs in time: {progress.error}")
        return Wait(reason=progress.error)

    def _cut(self, found: Adoption, before: OctaviaState) -> Move | Wait:
        if problem := self._problem(found, before):
            return Move(step=Step.RESTORE, reason=problem)
        if found.vips_held:
            # In release 0.1.0, `CUT` is before `TAKE`.
            return self._begin_take(found)
        self._context.cloud.enable_old_ports(before, enabled=False)
        self._new.announce_vips(found.load_balancer_id)
        return Move(step=Step.COMMIT)

    def _commit(self, _found: Adoption, before: OctaviaState) -> Move | Wait:
        try:
            self._octavia.take_over(before, self._context.conf.amp_octavia.provider)
        except Conflict as error:
            return Move(step=Step.RESTORE, reason=str(error))
        return Move(step=Step.REPORT, values={"committed_at": self._database.now()})

    def _report(self, found: Adoption, _before: OctaviaState) -> Move | Wait:
        if found.revert:
            return Move(step=Step.RELOCK)
        if self._seconds_in_step(found) < _SETTLE_SECONDS:
            return Wait()
        of = found.load_balancer_id
        tree = self._database.read(lambda c: desired_objects.load_tree(c, of))
        return Move(step=Step.KEEP, values={"reporting": True}, change=lambda c: records.begin_reports(c, of, tree))

    def _keep(self, found: Adoption, _before: OctaviaState) -> Move | Wait:
        progress = self._progress(found)
        if not progress.recorded:
            return Move(step=Step.REMOVE, reason="the load balancer is deleted")
        if found.revert:
            return Move(step=Step.RELOCK)
        ends = (found.committed_at or found.step_at) + found.remove_after
        left = ends - self._database.now()
        if left <= 0 and progress.served and not progress.pending:
            return Move(step=Step.REMOVE)
        if left > 0:
            self._not_before[found.load_balancer_id] = time.monotonic() + min(_KEEP_SECONDS, left)
        return Wait(reason=found.reason)

    def _remove(self, _found: Adoption, before: OctaviaState) -> Move | Wait:
        return Move(step=Step.DONE) if self._context.cloud.remove(before) else Wait()

    def _problem(self, found: Adoption, before: OctaviaState) -> str:
        """Return why the load balancer is not locked as before; empty if it is."""
        if found.revert:
            return "the operator reverts the adoption"
        now = self._octavia.read(found.load_balancer_id)
        return "Octavia does not know it, or deletes it" if now is None else octavia_state.describe_change(before, now)

    def _progress(self, found: Adoption) -> Progress:
        return self._database.read(lambda c: records.read_progress(c, found.load_balancer_id))

    def _seconds_in_step(self, found: Adoption) -> float:
        return self._database.now() - found.step_at


def _describe_defect(error: Exception) -> str:
    return f"an unexpected error occurred ({type(error).__name__}), see the log of the controller"
