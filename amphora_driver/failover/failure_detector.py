# SPDX-License-Identifier: Apache-2.0
"""The failure detector: finds silent amphorae and requests their fail-over.

Invariant: one controller at a time runs the detector. Its thread reads, decides (`failure_rules`, `circuit_breaker`:
pure) and writes; it never waits for an agent. No amphora counts as silent for a time in which the detector could not
read: the database was not available, the process was stopped, or another controller held the duty. One transaction
repeats the check of the silence and opens the fail-over.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import sqlalchemy as sa
from oslo_config.cfg import ConfigOpts

from amphora_driver import failpoints
from amphora_driver.errors import AmphoraDriverError
from amphora_driver.failover import circuit_breaker as breaker_rules
from amphora_driver.failover import failure_rules as rules
from amphora_driver.failover.circuit_breaker import Breaker, BreakerState, FailoverPermit
from amphora_driver.failover.detector_records import DetectorRecords
from amphora_driver.failover.failure_rules import (
    JudgedAmphora,
    PathEvidence,
    Phase,
    ProbeOutcome,
    SilentPeriod,
    Verdict,
)
from amphora_driver.failover.reachability_probe import ReachabilityProbe
from amphora_driver.model.amphora import AmphoraState
from amphora_driver.queue import local_socket
from amphora_driver.queue.jobs import acquire_duty, release_duty
from amphora_driver.store import circuit_breaker, failovers, silent_amphorae
from amphora_driver.store.circuit_breaker import BreakerRow
from amphora_driver.store.failovers import Event
from amphora_driver.store.silent_amphorae import AmphoraLiveness, LivenessSnapshot, SilentAmphora

if TYPE_CHECKING:
    from amphora_driver.agent.client import AgentClient
    from amphora_driver.database.engine import Database

LOG = logging.getLogger(__name__)
# Longest pause in seconds between two reads of heartbeats. The pause is also at most one eighth of `silent_after`.
_READ_EVERY = 0.5
# Seconds after which the lease of failure detection expires without a renewal. One controller at a time holds this
# lease.
_DUTY_LEASE = 6.0
# Seconds between two renewals of the lease of failure detection.
_RENEW_EVERY = 1.5
# Longest time in seconds for which the failure detector uses the amphorae of an earlier round without a new read.
_REREAD_EVERY = 30.0
# Pause in seconds after an unexpected error.
_ERROR_BACKOFF = 1.0
# Maximum number of load balancers that are set to ERROR in one turn. Each load balancer needs a transaction, during
# which the failure detector reads no heartbeats.
_MOST_STATUSES = 20


class FailureDetector:
    """One thread of a controller; calls `notify` with the role of a process that has new work."""

    def __init__(
        self, conf: ConfigOpts, database: Database, agents: AgentClient, owner: str, notify: Callable[[str], None]
    ) -> None:
        options = conf.amp_failover
        self._automatic: bool = options.automatic
        self._most_at_once: int = options.most_at_once
        self._boot_timeout: float = conf.amp_controller.boot_timeout
        self._limits = rules.DetectionLimits(
            silent_after=options.silent_after,
            mute_after=max(options.mute_after, options.silent_after),
            probe_timeout=options.probe_timeout,
            interval=conf.amp_health.interval,
            flush=conf.amp_health.flush_interval,
        )
        names = breaker_rules.BreakerLimits.__struct_fields__
        self._breaker_limits = breaker_rules.BreakerLimits(**{one: options[f"breaker_{one}"] for one in names})
        self._database = database
        self._owner = owner
        self._notify = notify
        self._every = min(_READ_EVERY, options.silent_after / 8)
        self._history: float = max(4 * options.backoff_max, 60.0)
        self._has_witnesses = bool(options.witnesses)
        self._watch = rules.HeartbeatWatch(self._limits)
        self._watched: silent_amphorae.WatchedAmphorae | None = None
        self._reread_at = 0.0
        self._probe = ReachabilityProbe(agents, options.probe_timeout, options.witnesses)
        self._backoff = breaker_rules.FailoverBackoff(options.backoff_first, options.backoff_max)
        self._window = breaker_rules.SilenceWindow(options.breaker_window)
        self._breaker = Breaker()
        self._records = DetectorRecords(database, conf.amp_controller.orphan_grace)
        self._renew_at = 0.0
        self._holds_duty = False
        # Epoch of the lease when this process held it last. Another epoch means that another process has held the lease
        # since.
        self._epoch: int | None = None
        # Why the network, and not an amphora, may have failed; empty without a suspicion.
        self._suspicion = ""
        # Ids of unfinished fail-overs, and the times when this process first read them.
        self._in_progress: dict[int, float] = {}
        # The load balancer of the circuit breaker's trial fail-over, and the time when this process started or first
        # read the trial.
        self._trial: tuple[str, float] | None = None

    def run(self, stopping: threading.Event, draining: threading.Event) -> None:
        pause = self._every
        while not stopping.wait(pause):
            pause = self._every
            try:
                if draining.is_set():
                    self.release_duty("this controller is draining")
                else:
                    self.run_once()
            except (AmphoraDriverError, OSError) as error:
                if self._holds_duty:
                    LOG.warning(
                        "the failure detector cannot read heartbeats from the database, so the detector measures the "
                        "silent periods of all amphorae from zero again: %s",
                        error,
                    )
                self._suspend("the database is not available")
            except Exception:
                # An error must not end this thread. Otherwise, no controller would replace silent amphorae, and no
                # component would report the failure.
                LOG.exception("the failure detector failed unexpectedly and tries again in %g s", _ERROR_BACKOFF)
                self._suspend("failure detection failed")
                pause = _ERROR_BACKOFF
        self._probe.close()
        try:
            self.release_duty("this controller is stopping")
        except (AmphoraDriverError, OSError) as error:
            LOG.info(
                "the controller could not hand over the failure detection; another controller starts the failure "
                "detection after the lease expires: %s",
                error,
            )

    def release_duty(self, reason: str) -> None:
        if self._holds_duty:
            self._suspend(reason)
            self._renew_at = 0.0
            release_duty(self._database, silent_amphorae.DUTY, self._owner)

    def run_once(self) -> None:
        if time.monotonic() >= self._renew_at:
            held = acquire_duty(self._database, silent_amphorae.DUTY, self._owner, _DUTY_LEASE)
            self._renew_at = time.monotonic() + _RENEW_EVERY
            if not held:
                self._suspend("another controller holds the duty")
                return
        elif not self._holds_duty:
            return
        begun = time.monotonic()
        known = self._watched if begun < self._reread_at else None
        snapshot, rows = self._database.read(
            lambda c: (silent_amphorae.load_liveness_snapshot(c, known), circuit_breaker.read_breaker_rows(c))
        )
        if snapshot.owner != self._owner:
            self._suspend("another controller holds the duty")
            return
        if not self._holds_duty:
            self._assume_duty(snapshot, rows)
        if snapshot.watched is not known:
            self._watched, self._reread_at = snapshot.watched, begun + _REREAD_EVERY
        self._watch.observe(snapshot.orders, snapshot.beats, time.monotonic())
        self._decide(snapshot, rows, begun)

    def _suspend(self, reason: str) -> None:
        self._holds_duty = False
        self._renew_at = max(self._renew_at, time.monotonic() + self._every)
        self._watch.reset(reason)

    def _assume_duty(self, snapshot: LivenessSnapshot, rows: dict[str, BreakerRow]) -> None:
        """Restart all timers.

        If this process held the duty last, it keeps operator acknowledgements and the trial. Otherwise it loads the
        breaker and the back-offs from the database.
        """
        held_last = self._epoch == snapshot.epoch
        self._watch.reset("the detector has just started")
        if not held_last:
            LOG.info(
                "this controller starts the failure detection for all load balancers, and replaces silent amphorae"
            )
            self._restore_state(snapshot, rows)
        self._records.load(None if held_last else rows)
        self._epoch, self._holds_duty = snapshot.epoch, True

    def _restore_state(self, snapshot: LivenessSnapshot, rows: dict[str, BreakerRow]) -> None:
        self._backoff.retain(())
        begun = self._database.read(lambda c: silent_amphorae.load_recent_failovers(c, self._history))
        now = time.monotonic()
        for load_balancer_id, known in begun.items():
            self._backoff.restore(load_balancer_id, known.ages, known.present, now)
        self._window = breaker_rules.SilenceWindow(self._breaker_limits.window)
        self._in_progress.clear()
        self._trial = None
        row = rows.get(circuit_breaker.AUTOMATIC)
        if row is None:
            self._breaker = Breaker(since=now)
            return
        remaining = None if row.trial_at is None else row.trial_at - snapshot.at
        state = BreakerState(row.state)
        self._breaker = breaker_rules.restore_breaker(state, row.reason or "", self._breaker_limits, now, remaining)
        if state is BreakerState.TRIAL and snapshot.unserved:
            # In the TRIAL state, the circuit breaker permits one fail-over at a time. So the newest unfinished
            # fail-over is the trial fail-over.
            self._trial = max(snapshot.unserved, key=lambda one: one.id).load_balancer_id, now

    def _decide(self, snapshot: LivenessSnapshot, rows: dict[str, BreakerRow], now: float) -> None:
        known, watched = snapshot.watched.by_id, snapshot.watched.ready
        late = self._watch.in_phase(Phase.LATE, now)
        self._probe.retain(late)
        self._probe_late(late, known, now)
        evidence = self._path_evidence(late, len(watched))
        self._suspicion = ""
        found = [
            JudgedAmphora(liveness=known[one], period=period, verdict=self._judge(known[one], period, evidence, now))
            for one, period in self._watch.in_phase(Phase.SILENT, now).items()
        ]
        silent = {one.liveness.amphora_id for one in found} & watched
        self._update_breaker(rows, watched, silent, found, now)
        overdue = len((self._watch.in_phase(Phase.OVERDUE, now).keys() & watched) - silent)
        permit = self._permit(snapshot, rows, self._window.population(watched), overdue, now)
        silences = self._request_failovers(snapshot, found, permit, now)
        self._backoff.retain(snapshot.watched.load_balancers)
        self._records.write_changes(silences, self._breaker_rows(snapshot, now, len(silent), len(watched)))

    def _probe_late(self, late: dict[str, SilentPeriod], known: dict[str, AmphoraLiveness], now: float) -> None:
        """Start probes: amphorae without a probe in this silence first, then by age."""
        waiting = []
        for one, period in late.items():
            result = self._probe.result(one)
            if not rules.is_current(result, period, now + self._limits.fresh / 2, self._limits):
                again = result is not None and result.at >= period.since
                waiting.append((again, result.at if again and result else period.since, one))
        for _, _, one in sorted(waiting):
            address = known[one].address
            if address is not None:
                self._probe.start(one, address)

    def _path_evidence(self, late: dict[str, SilentPeriod], watched: int) -> PathEvidence:
        results = [self._probe.result(one) for one in late]
        answered = [result.at for result in results if result and result.outcome is ProbeOutcome.ANSWERED]
        heard, newest = self._watch.last_heartbeat_at, max(answered, default=None)
        return PathEvidence(watched=watched, heard_at=heard, answered_at=newest, has_witnesses=self._has_witnesses)

    def _judge(self, liveness: AmphoraLiveness, period: SilentPeriod, evidence: PathEvidence, now: float) -> Verdict:
        if liveness.address is None:
            kind = rules.SilenceKind.SILENT if period.ever_heard else rules.SilenceKind.NEVER_SPOKE
            return Verdict(kind=kind, text="no fail-over: it has no address for a probe")
        result = self._probe.result(liveness.amphora_id)
        suspicion = rules.network_suspected(period, evidence, now, self._limits)
        if suspicion and result is not None and result.outcome is ProbeOutcome.NO_ANSWER:
            self._suspicion = suspicion
        return rules.judge_silence(period, result, now, self._limits, suspicion)

    def _update_breaker(
        self, rows: dict[str, BreakerRow], watched: set[str], silent: set[str], found: list[JudgedAmphora], now: float
    ) -> None:
        if not self._observed_long_enough(now):
            # After a short observation, the failure detector does not know which amphorae are silent. So the breaker's
            # state and the silent amphorae that an operator has accepted do not change.
            return
        if self._records.closed_by_operator(rows):
            LOG.warning(
                "an operator closed the circuit breaker, so the controller replaces the amphorae that are silent now"
            )
            self._window.accept(silent)
            self._breaker = Breaker(since=now, reason="an operator has closed it")
            self._trial = None
        recent = self._window.observe(silent, watched, now)
        population, unaccepted = self._window.population(watched), self._window.count_unaccepted(silent)
        count = breaker_rules.SilenceCount(watched=population, silent=unaccepted, recent=recent)
        before = self._breaker
        trial = self._trial_result(found, now)
        self._breaker = breaker_rules.next_breaker(before, count, self._breaker_limits, now, trial=trial)
        if self._breaker.state is before.state:
            return
        if self._breaker.state is BreakerState.OPEN:
            self._trial = None
            LOG.error(
                "the circuit breaker opened, so no automatic fail-over begins until the circuit breaker closes or an "
                "operator runs `amphoractl circuit-breaker close`: %s",
                self._breaker.reason,
            )
        elif self._breaker.state is BreakerState.TRIAL:
            LOG.warning(
                "the circuit breaker for fail-overs is half-open, and permits one automatic fail-over at "
                "a time; the reason for its opening was: %s",
                before.reason,
            )
        else:
            self._window.expire_all()
            self._trial = None
            LOG.info(
                "the circuit breaker for fail-overs closed, so automatic fail-overs may begin again: %s",
                self._breaker.reason,
            )

    def _observed_long_enough(self, now: float) -> bool:
        return not self._watch.blind_reason and self._watch.sees_for(now) >= self._limits.silent_after

    def _trial_result(self, found: list[JudgedAmphora], now: float) -> bool | None:
        """Return False if the trial fail-over failed; None during or without a trial fail-over."""
        if self._trial is None:
            return None
        load_balancer_id, since = self._trial
        again = any(
            one.verdict.dead
            and one.liveness.state is AmphoraState.READY
            and one.liveness.load_balancer_id == load_balancer_id
            and self._backoff.is_replacement(load_balancer_id, one.liveness.amphora_id)
            for one in found
        )
        if again or now - since > self._boot_timeout:
            self._trial = None
            return False
        return None

    def _permit(
        self, snapshot: LivenessSnapshot, rows: dict[str, BreakerRow], watched: int, overdue: int, now: float
    ) -> FailoverPermit:
        self._in_progress = {one.id: self._in_progress.get(one.id, now) for one in snapshot.unserved}
        # An unfinished fail-over may never end. So each one delays other fail-overs only for the boot time-out of an
        # amphora.
        recent = {
            one.load_balancer_id for one in snapshot.unserved if now - self._in_progress[one.id] < self._boot_timeout
        }
        in_progress = {one.load_balancer_id for one in snapshot.unserved}
        if self._trial is not None and self._trial[0] not in in_progress and self._observed_long_enough(now):
            LOG.info(
                "the trial fail-over of load balancer %s succeeded, so the circuit breaker permits the next fail-over",
                self._trial[0],
            )
            self._trial = None
        held = rows.get(circuit_breaker.OPERATOR)
        silent = overdue + self._window.recent(now)
        return FailoverPermit(
            automatic=self._automatic,
            held=None if held is None else held.reason or "",
            state=self._breaker.state,
            late=breaker_rules.excess_reason(silent, watched, self._breaker_limits) if overdue else "",
            in_progress=len(recent),
            most_at_once=self._most_at_once,
            on_trial=self._trial is not None,
        )

    def _request_failovers(
        self, snapshot: LivenessSnapshot, found: list[JudgedAmphora], permit: FailoverPermit, now: float
    ) -> list[SilentAmphora]:
        """Request every fail-over that may begin; return the rows of all silent amphorae that remain."""
        shown, reported = [], 0
        # If many amphorae are silent, the network has probably failed, and the load balancers still serve. So none of
        # them is set to ERROR.
        plausible = self._breaker.state is BreakerState.CLOSED and not permit.late
        by_load_balancer: dict[str, list[JudgedAmphora]] = {}
        for one in found:
            by_load_balancer.setdefault(one.liveness.load_balancer_id, []).append(one)
        # The load balancer with the longest silence is handled first.
        for load_balancer_id, mine in sorted(by_load_balancer.items(), key=lambda item: item[1][0].period.since):
            ready = [one for one in mine if one.liveness.state is AmphoraState.READY]
            refusals = {one.liveness.amphora_id: self._refusal(one, permit, now) for one in ready}
            due = [one for one in ready if one.verdict.cause and not refusals[one.liveness.amphora_id]]
            outage = rules.outage_reason(snapshot, load_balancer_id, mine)
            if due and self._request_failover(snapshot, load_balancer_id, due, outage, now):
                permit = permit.after_start()
            elif ready and outage and not due and reported < _MOST_STATUSES and plausible:
                orders = {one.liveness.amphora_id: one.period.order for one in ready}
                reported += self._records.write_not_served(load_balancer_id, self._owner, orders, outage)
            shown += [rules.silence_row(one, refusals[one.liveness.amphora_id], snapshot, now) for one in ready]
        return shown

    def _refusal(self, one: JudgedAmphora, permit: FailoverPermit, now: float) -> str:
        """Return why the fail-over of an amphora must wait; empty if the fail-over may begin."""
        load_balancer_id = one.liveness.load_balancer_id
        if refusal := permit.refusal():
            return refusal
        if self._backoff.remaining(load_balancer_id, one.liveness.amphora_id, now) > 0:
            return f"the back-off of {self._backoff.length(load_balancer_id):g} s after the last fail-over is not over"
        return "a new probe must confirm it" if one.verdict.stale else ""

    def _request_failover(
        self, snapshot: LivenessSnapshot, load_balancer_id: str, due: list[JudgedAmphora], outage: str, now: float
    ) -> bool:
        """Open fail-overs of one load balancer; return False after a heartbeat of all its amphorae."""
        orders = {one.liveness.amphora_id: one.period.order for one in due}
        present = snapshot.watched.of_load_balancer(load_balancer_id)
        at = self._database.now()

        def write(connection: sa.Connection) -> list[str]:
            still = silent_amphorae.lock_still_silent(connection, load_balancer_id, orders, self._owner)
            heard = silent_amphorae.read_last_heard(connection, still)
            begun = [
                one.liveness.amphora_id
                for one in due
                if (mine := one.liveness.amphora_id) in still
                and self._open_failover(connection, one, heard.get(mine), at, now)
            ]
            if outage and len(begun) == len(due):
                silent_amphorae.mark_not_served(connection, load_balancer_id, outage)
            return begun

        begun = self._database.write(write)
        if not begun:
            return False
        failpoints.reach(failpoints.Point.FAILOVER_BEGUN)
        for amphora_id in begun:
            LOG.warning(
                "load balancer %s: amphora %s is silent, so the controller replaces this amphora",
                load_balancer_id,
                amphora_id,
            )
        self._backoff.record(load_balancer_id, present, now)
        if self._breaker.state is BreakerState.TRIAL:
            self._trial = load_balancer_id, now
        self._notify(local_socket.CONTROLLER)
        if outage:
            self._notify(local_socket.REPORTER)
        return True

    def _open_failover(
        self, connection: sa.Connection, one: JudgedAmphora, heard_at: float | None, at: float, now: float
    ) -> bool:
        load_balancer_id, amphora_id = one.liveness.load_balancer_id, one.liveness.amphora_id
        detail = rules.finding(one, heard_at, now)
        if self._backoff.is_replacement(load_balancer_id, amphora_id):
            # If the silent amphora is the replacement of an earlier fail-over, this event marks that fail-over as
            # failed.
            failovers.record_event(connection, load_balancer_id, Event.FAILED, at, amphora_id, detail)
        if not failovers.open_failovers(
            connection, load_balancer_id, [amphora_id], rules.failover_cause(one, heard_at), at
        ):
            return False
        failovers.record_event(connection, load_balancer_id, Event.FOUND, at, amphora_id, detail)
        return True

    def _breaker_rows(
        self, snapshot: LivenessSnapshot, now: float, silent: int, watched: int
    ) -> list[circuit_breaker.BreakerRow]:
        since = snapshot.at - (now - self._breaker.since)
        trial = since + self._breaker_limits.trial_after if self._breaker.state is BreakerState.OPEN else None
        blind = self._watch.blind_reason or self._suspicion
        counts = {"silent": silent, "watched": watched}
        return [
            circuit_breaker.BreakerRow(
                name=circuit_breaker.AUTOMATIC,
                state=self._breaker.state.value,
                since=since,
                trial_at=trial,
                reason=self._breaker.reason or None,
                **counts,
            ),
            circuit_breaker.BreakerRow(
                name=circuit_breaker.SIGHT,
                state=circuit_breaker.BLIND if blind else circuit_breaker.SEEING,
                since=snapshot.at - self._watch.sees_for(now),
                reason=blind or None,
                **counts,
            ),
        ]
