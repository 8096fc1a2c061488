# SPDX-License-Identifier: Apache-2.0
"""The way back of an adoption: the former amphorae serve again, and the new ones are removed.

Invariant: amphorae serve at each moment, also while no controller runs. The former ports are enabled before the new
ones are disabled. The steps up to `RETURN` follow a request of the operator after `COMMIT`. After a failure before
`COMMIT`, the way back has `RESTORE` and `DISCARD` only.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from amphora_driver.adoption import octavia_state, records, survey
from amphora_driver.adoption.octavia_state import LOCKED, OctaviaState
from amphora_driver.adoption.records import Adoption, Progress, Step
from amphora_driver.adoption.step_results import AdoptionContext, Move, Wait
from amphora_driver.errors import Conflict
from amphora_driver.reconcile.vip_allocation import vip_ports
from amphora_driver.store import amphorae, desired_objects

# Octavia's health manager processes a heartbeat within this number of seconds, also on a busy host. `REJOIN` waits for
# the end of heartbeats that arrived before the insertion of the amphorae.
_HEARTBEAT_SECONDS = 10.0
# The status PENDING_UPDATE does not show whether the adopter or a request to Octavia has set it. After this number of
# seconds without an unfinished object, the adopter releases the lock as its own.
_UNLOCK_SECONDS = 120.0
# Seconds until the new amphora is removed although Octavia still performs the update, in which the former amphora
# announces the VIPs.
_ANNOUNCEMENT_SECONDS = 30.0
_CHANGED = "the configuration has changed since the adoption, and the former amphorae do not have the change"


class WayBack:
    """Performs the steps of the way back."""

    def __init__(self, context: AdoptionContext) -> None:
        self._context = context
        self._database = context.database
        self._octavia = context.octavia
        # The keys are load balancer ids with the times of their steps `REJOIN`, because an adoption can reach this step
        # again. The values are the monotonic times at which this process first saw the inserted amphorae.
        self._inserted_at: dict[tuple[str, float], float] = {}
        # The load balancers whose announcement this process has requested: the times of their steps `DISCARD`, and the
        # monotonic times of the requests.
        self._announced: dict[str, tuple[float, float]] = {}
        self.handlers: dict[Step, Callable[[Adoption, OctaviaState], Move | Wait]] = {
            Step.RELOCK: self._relock,
            Step.REJOIN: self._rejoin,
            Step.RESTORE: self._restore,
            Step.RETURN: self._return,
            Step.DISCARD: self._discard,
        }

    def _relock(self, found: Adoption, before: OctaviaState) -> Move | Wait:
        of = found.load_balancer_id
        # The adopter reads the status after the progress. If no report is pending, no report can then replace the lock.
        progress = self._progress(found)
        now = self._octavia.read(of)
        if now is None:
            return Move(step=Step.REMOVE, reason="the load balancer is deleted")
        busy = progress.pending or not progress.served or bool(now.unsettled)
        if found.reporting and not busy and now.status == LOCKED and self._seconds_in_step(found) < _UNLOCK_SECONDS:
            return Wait(reason="the lock may be the one of a request that octavia-api has not delivered yet")
        if now.fingerprint != before.fingerprint:
            if found.reporting and not busy and now.status == LOCKED:
                # No report will change the status, and an earlier attempt of this step has set the lock.
                survey.set_status(self._context.library(), of, before.status)
            back = Step.KEEP if found.reporting else Step.REPORT
            return Move(step=back, reason=f"no revert: {_CHANGED}", values={"revert": False})
        if busy:
            return Wait(reason="a change of the load balancer is in progress")
        if now.status != LOCKED:
            survey.set_status(self._context.library(), of, LOCKED)
            now = self._octavia.read(of)
        expected = msgspec.structs.replace(now or before, fingerprint=before.fingerprint, amphorae=(), member_ports=())
        if now is None or octavia_state.describe_change(expected, now):
            return Wait(reason="a change of the load balancer is in progress")
        return Move(step=Step.REJOIN, values={"reporting": False}, change=lambda c: records.stop_reports(c, of))

    def _rejoin(self, found: Adoption, before: OctaviaState) -> Move | Wait:
        provider, key = self._context.conf.amp_octavia.provider, (found.load_balancer_id, found.step_at)
        self._lock_again(before)
        try:
            self._octavia.insert_amphorae(before, provider)
        except Conflict as error:
            # `RELOCK` does not continue while Octavia's tables have amphorae of the load balancer.
            self._octavia.remove_inserted(before, provider)
            return Move(step=Step.RELOCK, reason=str(error))
        # The wait begins when this process first sees the inserted amphorae. The beginning of the step is too early,
        # because the first insertion may have failed.
        others = {one: at for one, at in self._inserted_at.items() if one[0] != key[0]}
        inserted_at = self._inserted_at.get(key, time.monotonic())
        self._inserted_at = {**others, key: inserted_at}
        if time.monotonic() - inserted_at < _HEARTBEAT_SECONDS:
            return Wait()
        self._inserted_at = others
        return Move(step=Step.RESTORE)

    def _lock_again(self, before: OctaviaState) -> None:
        """Lock the load balancer if a late report has replaced the lock, and nothing has changed."""
        of, ours = before.load_balancer_id, self._context.conf.amp_octavia.provider
        now = self._octavia.read(of)
        same = now is not None and (now.provider, now.status) == (ours, before.status) and not now.unsettled
        if now is not None and same and now.fingerprint == before.fingerprint:
            survey.set_status(self._context.library(), of, LOCKED)

    def _restore(self, found: Adoption, before: OctaviaState) -> Move | Wait:
        self._context.cloud.enable_old_ports(before, enabled=True)
        if not _announces_late(found, before):
            self._disable_new_ports(found.load_balancer_id)
        if found.committed_at is not None:
            return Move(step=Step.RETURN)
        return self._unlock_and_discard(found, before)

    def _disable_new_ports(self, load_balancer_id: str) -> None:
        new = self._database.read(lambda c: amphorae.load_amphorae(c, load_balancer_id))
        if new:
            tree = self._database.read(lambda c: desired_objects.load_tree(c, load_balancer_id))
            self._context.cloud.enable_new_ports(vip_ports(tree, new), enabled=False)

    def _return(self, found: Adoption, before: OctaviaState) -> Move | Wait:
        self._lock_again(before)
        self._octavia.give_back(before, self._context.conf.amp_octavia.provider)
        return self._unlock_and_discard(found, before)

    def _unlock_and_discard(self, found: Adoption, before: OctaviaState) -> Move | Wait:
        of = found.load_balancer_id
        now = self._octavia.read(of)
        if now is not None and now.status == LOCKED:
            change = octavia_state.describe_change(before, now)
            if change and (now.unsettled or self._seconds_in_step(found) < _UNLOCK_SECONDS):
                return Wait(reason=f"the lock may be the one of another change: {change}")
            survey.set_status(self._context.library(), of, before.status)
        if not self._progress(found).recorded:
            return Move(step=Step.REVERTED)
        return Move(step=Step.DISCARD, values={"reporting": False}, change=lambda c: records.stop_reports(c, of))

    def _discard(self, found: Adoption, before: OctaviaState) -> Move | Wait:
        of = found.load_balancer_id
        if self._announced.get(of, (0.0,))[0] != found.step_at:
            # The announcement makes Octavia lock the load balancer for its worker. A repetition of the previous step
            # would release that lock. After a crash, another controller repeats the announcement.
            self._context.cloud.announce(before)
            self._announced[of] = found.step_at, time.monotonic()
        progress = self._progress(found)
        if progress.recorded and not progress.removing:
            if _announces_late(found, before) and not self._is_announced(of):
                return Wait(reason=found.reason)
            self._disable_new_ports(of)
            self._database.write(lambda c: records.discard(c, of))
            return Wait(reason=found.reason)
        if progress.recorded and (progress.amphorae or not progress.served):
            return Wait(reason=progress.error)
        self._announced.pop(of, None)
        return Move(step=Step.REVERTED, change=lambda c: records.forget(c, of))

    def _is_announced(self, load_balancer_id: str) -> bool:
        """Return whether Octavia has finished the update, in which the former amphora announces the VIPs."""
        if time.monotonic() - self._announced[load_balancer_id][1] > _ANNOUNCEMENT_SECONDS:
            return True
        now = self._octavia.read(load_balancer_id)
        return now is None or now.status != LOCKED

    def _progress(self, found: Adoption) -> Progress:
        return self._database.read(lambda c: records.read_progress(c, found.load_balancer_id))

    def _seconds_in_step(self, found: Adoption) -> float:
        return self._database.now() - found.step_at


def _announces_late(found: Adoption, before: OctaviaState) -> bool:
    """Return whether the former amphora announces the VIPs only in `DISCARD`.

    Until then, the new amphora serves. keepalived of a former pair announces the VIPs when its ports are enabled.
    Before `COMMIT`, the new amphora may be the reason of the way back.
    """
    return found.committed_at is not None and len(before.amphorae) == 1
