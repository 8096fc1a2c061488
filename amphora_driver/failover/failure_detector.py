# SPDX-License-Identifier: Apache-2.0
"""The detector: finds silent amphorae and has them replaced. A duty of one controller at a time.

Invariant: this thread looks, decides (`detection`, `breaker`: pure) and writes; it waits for no agent. Whatever keeps
it from looking (a database that is away, a process that was stopped, a duty that others had) is time in which nobody
was silent. A fail-over begins in one transaction in which the amphora is found as silent as it was thought to be.
"""

from __future__ import annotations

import datetime as dt
import logging
import time
from typing import TYPE_CHECKING

import msgspec

from amphora_driver import failpoints
from amphora_driver.errors import AmphoraDriverError
from amphora_driver.failover import circuit_breaker as breaking
from amphora_driver.failover.circuit_breaker import Allowance, Breaker, Count, Fallen, Pauses, resumed, too_many
from amphora_driver.failover.detector_records import Findings
from amphora_driver.failover.failure_rules import (
    Company,
    How,
    Judgement,
    Kind,
    Limits,
    Quiet,
    Watch,
    doubt,
    is_good,
    judge,
)
from amphora_driver.failover.reachability_probe import Witnesses
from amphora_driver.queue import local_socket
from amphora_driver.queue.jobs import drop_duty, hold_duty
from amphora_driver.store import circuit_breaker, failovers, silent_amphorae
from amphora_driver.store.amphorae import State
from amphora_driver.store.failovers import Cause, Event, FailoverTrigger
from amphora_driver.store.silent_amphorae import SilentAmphora

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    import sqlalchemy as sa
    from oslo_config.cfg import ConfigOpts

    from amphora_driver.database.engine import Database
    from amphora_driver.failover.reachability_probe import Agents
    from amphora_driver.store.circuit_breaker import BreakerRow
    from amphora_driver.store.silent_amphorae import AmphoraLiveness, LivenessSnapshot

LOG = logging.getLogger(__name__)
# Seconds between two looks, or an eighth of the silence that is looked for.
_LOOK_EVERY = 0.5
# Seconds for which the duty is held, and between two times it is renewed.
_DUTY = 6.0
_RENEWED_EVERY = 1.5
# Seconds after something went wrong that nobody thought of.
_TROUBLE = 1.0
# Load balancers whose status is written in one turn: each is a transaction, in which nobody looks.
_MOST_SAID = 20


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One silent amphora, and what is thought of it."""

    sight: silent_amphorae.AmphoraLiveness
    quiet: Quiet
    judgement: Judgement


class Detector:
    """One thread of a controller.

    Args:
        conf: our options.
        database: where the rows are.
        agents: who talks to agents.
        owner: name of this process.
        tell: called with a doorbell's role when there is something to do for it.
    """

    def __init__(
        self, conf: ConfigOpts, database: Database, agents: Agents, owner: str, tell: Callable[[str], None]
    ) -> None:
        options = conf.failover
        self._automatic: bool = options.automatic
        self._most_at_once: int = options.most_at_once
        self._patience: float = conf.controller.boot_timeout
        self._limits = Limits(
            silent_after=options.silent_after,
            mute_after=max(options.mute_after, options.silent_after),
            probe_timeout=options.probe_timeout,
            interval=conf.health.interval,
            flush=conf.health.flush_interval,
        )
        self._breaking = breaking.Limits(
            percent=options.breaker_percent,
            floor=options.breaker_floor,
            most=options.breaker_most,
            window=options.breaker_window,
            calm=options.breaker_calm,
            trial=options.breaker_trial,
        )
        self._database = database
        self._owner = owner
        self._tell = tell
        self._every = min(_LOOK_EVERY, options.silent_after / 8)
        self._history: float = max(4 * options.pause_most, 60.0)
        self._witnessed = bool(options.witnesses)
        self._watch = Watch(self._limits)
        self._witnesses = Witnesses(agents, options.probe_timeout, options.witnesses)
        self._pauses = Pauses(options.pause_first, options.pause_most)
        self._fallen = Fallen(options.breaker_window)
        self._breaker = Breaker()
        self._findings = Findings(database, conf.controller.orphan_grace)
        self._renew_at = 0.0
        self._mine = False
        # The duty's, when it was ours last: as long as it stays nobody else has had it.
        self._epoch: int | None = None
        # Why nobody is believed to be dead now, though somebody is silent.
        self._doubted = ""
        # When this process saw a fail-over first, and for which load balancer the one on trial is.
        self._going: dict[int, float] = {}
        self._trial: tuple[str, float] | None = None

    def run(self, stopping: threading.Event, draining: threading.Event) -> None:
        """Look until told to stop, but for the time in which nothing new is to be taken up."""
        pause = self._every
        while not stopping.wait(pause):
            pause = self._every
            try:
                if draining.is_set():
                    self.leave("this controller takes up nothing new")
                else:
                    self.turn()
            except (AmphoraDriverError, OSError) as error:
                if self._mine:
                    LOG.warning("who is silent cannot be seen, everybody is counted anew: %s", error)
                self._lose("the database is away")
            except Exception:
                # Without this thread nobody would be replaced any more, and nobody would notice.
                LOG.exception("looking for silent amphorae failed, and goes on")
                self._lose("something went wrong")
                pause = _TROUBLE
        self._witnesses.close()
        try:
            self.leave("this controller ends")
        except (AmphoraDriverError, OSError) as error:
            LOG.info("the duty of detection is left to run out: %s", error)

    def leave(self, why: str) -> None:
        """Give the duty to whoever wants it, if it is ours.

        Raises:
            StoreError: the database is away.
        """
        if self._mine:
            self._lose(why)
            self._renew_at = 0.0
            drop_duty(self._database, silent_amphorae.DUTY, self._owner)

    def turn(self) -> None:
        """One look, and what follows from it.

        Raises:
            StoreError: the database is away.
        """
        if time.monotonic() >= self._renew_at:
            held = hold_duty(self._database, silent_amphorae.DUTY, self._owner, _DUTY)
            self._renew_at = time.monotonic() + _RENEWED_EVERY
            if not held:
                self._lose("another controller has the duty")
                return
        elif not self._mine:
            return
        begun = time.monotonic()
        look, rows = self._database.read(
            lambda c: (silent_amphorae.load_liveness_snapshot(c), circuit_breaker.read_breaker_rows(c))
        )
        if look.owner != self._owner:
            self._lose("another controller has the duty")
            return
        if not self._mine:
            self._take_up(look, rows)
        self._watch.look({one.amphora_id: one.order for one in look.amphorae}, look.beats, time.monotonic())
        self._decide(look, rows, begun)

    def _lose(self, why: str) -> None:
        self._mine = False
        self._renew_at = max(self._renew_at, time.monotonic() + self._every)
        self._watch.forget(why)

    def _take_up(self, look: LivenessSnapshot, rows: dict[str, BreakerRow]) -> None:
        """Begin with the duty: how long anybody is silent is not known.

        What the one before has found is. Who had it himself until a moment ago forgets nothing else: what an operator
        has accepted, and what is on trial.
        """
        mine = self._epoch == look.epoch
        self._watch.forget("it has just begun to look")
        if not mine:
            LOG.info("this controller looks for silent amphorae now")
            self._learn(look, rows)
        self._findings.take_up(None if mine else rows)
        self._epoch, self._mine = look.epoch, True

    def _learn(self, look: LivenessSnapshot, rows: dict[str, BreakerRow]) -> None:
        """What the one before has found."""
        self._pauses.keep(())
        begun = self._database.read(lambda connection: silent_amphorae.load_recent_failovers(connection, self._history))
        now = time.monotonic()
        for load_balancer_id, known in begun.items():
            self._pauses.resume(load_balancer_id, known.ages, known.there, now)
        self._fallen = Fallen(self._breaking.window)
        self._going.clear()
        self._trial = None
        known_row = rows.get(circuit_breaker.AUTOMATIC)
        if known_row is None:
            self._breaker = Breaker(since=now)
            return
        remaining = None if known_row.trial_at is None else known_row.trial_at - look.at
        state = breaking.State(known_row.state)
        self._breaker = resumed(state, known_row.reason or "", self._breaking, now, remaining)
        if state is breaking.State.TRIAL and look.going:
            # The last one that began was let through by it: until it has ended the next one waits.
            self._trial = max(look.going, key=lambda one: one.id).load_balancer_id, now

    def _decide(self, look: LivenessSnapshot, rows: dict[str, BreakerRow], now: float) -> None:
        there = {one.amphora_id: one for one in look.amphorae}
        watched = {one for one, sight in there.items() if sight.state is State.READY}
        late = self._watch.quiet(now, self._limits.late_after)
        self._witnesses.keep(late)
        self._ask(late, there, now)
        company = self._company(late, len(watched))
        self._doubted = ""
        cases = [
            Case(sight=there[one], quiet=quiet, judgement=self._judge(there[one], quiet, company, now))
            for one, quiet in late.items()
            if now - quiet.since >= self._limits.silent_after
        ]
        silent = {case.sight.amphora_id for case in cases} & watched
        self._count(rows, watched, silent, cases, now)
        missing = self._watch.quiet(now, self._limits.quiet_after)
        only_late = len((missing.keys() & watched) - silent)
        verdicts = self._act(look, cases, self._allowance(look, rows, self._fallen.of(watched), only_late, now), now)
        self._pauses.keep({one.load_balancer_id for one in look.amphorae})
        self._findings.say(verdicts, self._words(look, now, len(silent), len(watched)))

    def _ask(self, late: dict[str, Quiet], there: dict[str, AmphoraLiveness], now: float) -> None:
        """The longest silent first; those nobody asked in this silence before those that are asked again."""
        waiting = []
        for one, quiet in late.items():
            answer = self._witnesses.answer(one)
            if not is_good(answer, quiet, now + self._limits.fresh / 2, self._limits):
                again = answer is not None and answer.at >= quiet.since
                waiting.append((again, answer.at if again and answer else quiet.since, one))
        for _, _, one in sorted(waiting):
            address = there[one].address
            if address is not None:
                self._witnesses.ask(one, address)

    def _company(self, late: dict[str, Quiet], watched: int) -> Company:
        """What speaks for the way to the amphorae being there."""
        answers = [self._witnesses.answer(one) for one in late]
        answered = [said.at for said in answers if said is not None and said.how is How.ANSWERS]
        return Company(
            watched=watched,
            heard_at=self._watch.moved_at,
            answered_at=max(answered, default=None),
            witnesses=self._witnessed,
        )

    def _judge(self, sight: AmphoraLiveness, quiet: Quiet, company: Company, now: float) -> Judgement:
        if sight.address is None:
            kind = Kind.SILENT if quiet.spoke else Kind.NEVER_SPOKE
            return Judgement(kind=kind, words="nothing follows: it has no address to be asked at")
        answer = self._witnesses.answer(sight.amphora_id)
        doubted = doubt(quiet, company, now, self._limits)
        if doubted and answer is not None and answer.how is How.UNANSWERED:
            self._doubted = doubted
        return judge(quiet, answer, now, self._limits, doubted)

    def _count(
        self, rows: dict[str, BreakerRow], watched: set[str], silent: set[str], cases: list[Case], now: float
    ) -> None:
        """Have the breaker open and close."""
        if not self._sees_enough(now):
            # Nobody can be silent yet: that is no calm, nobody who was silent before was heard, and whom an operator
            # takes for dead is not known again.
            return
        if self._findings.closed_by_operator(rows):
            LOG.warning("an operator has closed the breaker: those that are silent now are replaced")
            self._fallen.accept(silent)
            self._breaker = Breaker(since=now, reason="an operator has closed it")
            self._trial = None
        recent = self._fallen.note(silent, watched, now)
        count = Count(watched=self._fallen.of(watched), silent=self._fallen.open_count(silent), recent=recent)
        before = self._breaker
        self._breaker = breaking.after(before, count, self._breaking, now, trial=self._tried(cases, now))
        if self._breaker.state is before.state:
            return
        if self._breaker.state is breaking.State.OPEN:
            self._trial = None
            LOG.error("the breaker is open, no amphora is replaced unasked: %s", self._breaker.reason)
        elif self._breaker.state is breaking.State.TRIAL:
            LOG.warning("the breaker lets one fail-over through at a time, for a trial: %s", before.reason)
        else:
            self._fallen.forgive()
            self._trial = None
            LOG.warning("the breaker is closed again: %s", self._breaker.reason)

    def _sees_enough(self, now: float) -> bool:
        """Whether it has seen for so long that somebody could be silent."""
        return not self._watch.blind and self._watch.sees_for(now) >= self._limits.silent_after

    def _tried(self, cases: list[Case], now: float) -> bool | None:
        """How the fail-over on trial ended; None while it goes on, or where there is none."""
        if self._trial is None:
            return None
        load_balancer_id, since = self._trial
        again = any(
            case.judgement.dead
            and case.sight.state is State.READY
            and case.sight.load_balancer_id == load_balancer_id
            and self._pauses.is_replacement(load_balancer_id, case.sight.amphora_id)
            for case in cases
        )
        if again or now - since > self._patience:
            self._trial = None
            return False
        return None

    def _allowance(
        self, look: LivenessSnapshot, rows: dict[str, BreakerRow], watched: int, late: int, now: float
    ) -> Allowance:
        self._going = {one.id: self._going.get(one.id, now) for one in look.going}
        # One that does not come to its end holds up the others for so long only.
        going = {one.load_balancer_id for one in look.going if now - self._going[one.id] < self._patience}
        goes_on = {one.load_balancer_id for one in look.going}
        if self._trial is not None and self._trial[0] not in goes_on and self._sees_enough(now):
            LOG.warning("the fail-over on trial has ended well: load balancer %s", self._trial[0])
            self._trial = None
        held = rows.get(circuit_breaker.OPERATOR)
        return Allowance(
            automatic=self._automatic,
            held=None if held is None else held.reason or "",
            state=self._breaker.state,
            late=too_many(late + self._fallen.counted(now), watched, self._breaking) if late else "",
            going_on=len(going),
            most_at_once=self._most_at_once,
            on_trial=self._trial is not None,
        )

    def _act(self, look: LivenessSnapshot, cases: list[Case], allowance: Allowance, now: float) -> list[SilentAmphora]:
        """Begin what may begin; returns what is to be shown of everybody who is silent."""
        said, told = [], 0
        by_load_balancer: dict[str, list[Case]] = {}
        for case in cases:
            by_load_balancer.setdefault(case.sight.load_balancer_id, []).append(case)
        # Who waits longest is first.
        for load_balancer_id, mine in sorted(by_load_balancer.items(), key=lambda one: one[1][0].quiet.since):
            ready = [case for case in mine if case.sight.state is State.READY]
            refusals = {case.sight.amphora_id: self._refusal(case, allowance, now) for case in ready}
            due = [case for case in ready if case.judgement.cause and not refusals[case.sight.amphora_id]]
            dead = _all_dead(look, load_balancer_id, mine)
            if due and self._begin(look, load_balancer_id, due, dead, now):
                allowance = allowance.taken(1)
            elif ready and dead and not due and told < _MOST_SAID and self._is_believed(allowance):
                orders = {case.sight.amphora_id: case.quiet.order for case in ready}
                told += self._findings.not_served(load_balancer_id, self._owner, orders, dead)
            said += [_shown(case, refusals[case.sight.amphora_id], look, now) for case in ready]
        return said

    def _is_believed(self, allowance: Allowance) -> bool:
        """Whether those that are silent are dead, and not everybody behind something that is gone."""
        return self._breaker.state is breaking.State.CLOSED and not allowance.late

    def _refusal(self, case: Case, allowance: Allowance, now: float) -> str:
        """Why an amphora that is to be replaced is not, yet; empty if it is."""
        sight = case.sight
        if refusal := allowance.refusal():
            return refusal
        if self._pauses.left(sight.load_balancer_id, sight.amphora_id, now) > 0:
            return f"the pause of {self._pauses.length(sight.load_balancer_id):g} s after the last one is not over"
        return "it is asked once more" if case.judgement.stale else ""

    def _begin(self, look: LivenessSnapshot, load_balancer_id: str, due: list[Case], dead: str, now: float) -> bool:
        """Have amphorae of one load balancer replaced; False if none is, because it was heard meanwhile."""
        orders = {case.sight.amphora_id: case.quiet.order for case in due}
        there = {one.amphora_id for one in look.amphorae if one.load_balancer_id == load_balancer_id}
        at = self._database.now()

        def write(connection: sa.Connection) -> list[str]:
            still = silent_amphorae.lock_still_silent(connection, load_balancer_id, orders, self._owner)
            begun = [
                case.sight.amphora_id
                for case in due
                if case.sight.amphora_id in still and self._retire(connection, case, at, now)
            ]
            if dead and len(begun) == len(due):
                silent_amphorae.mark_not_served(connection, load_balancer_id, dead)
            return begun

        begun = self._database.write(write)
        if begun:
            failpoints.reach(failpoints.Point.FAILOVER_BEGUN)
        for amphora_id in begun:
            LOG.warning("load balancer %s: amphora %s is silent and is replaced", load_balancer_id, amphora_id)
        if not begun:
            return False
        self._pauses.begun(load_balancer_id, there, now)
        if self._breaker.state is breaking.State.TRIAL:
            self._trial = load_balancer_id, now
        self._tell(local_socket.CONTROLLER)
        if dead:
            self._tell(local_socket.REPORTER)
        return True

    def _retire(self, connection: sa.Connection, case: Case, at: float, now: float) -> bool:
        load_balancer_id, amphora_id = case.sight.load_balancer_id, case.sight.amphora_id
        found = _found(case, now)
        if self._pauses.is_replacement(load_balancer_id, amphora_id):
            # What goes on for this load balancer already did not lead to one that is heard.
            failovers.record_event(connection, load_balancer_id, Event.FAILED, at, amphora_id, found)
        if not failovers.open_failovers(connection, load_balancer_id, [amphora_id], _why(case), at):
            return False
        failovers.record_event(connection, load_balancer_id, Event.FOUND, at, amphora_id, found)
        return True

    def _words(self, look: LivenessSnapshot, now: float, silent: int, watched: int) -> list[circuit_breaker.BreakerRow]:
        """The rows of the breaker, as they are to be."""
        since = look.at - (now - self._breaker.since)
        trial = since + self._breaking.trial if self._breaker.state is breaking.State.OPEN else None
        blind = self._watch.blind or self._doubted
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
                since=look.at - self._watch.sees_for(now),
                reason=blind or None,
                **counts,
            ),
        ]


def _all_dead(look: LivenessSnapshot, load_balancer_id: str, cases: list[Case]) -> str:
    """Why nobody serves a load balancer; empty where somebody may."""
    dead = {case.sight.amphora_id for case in cases if case.judgement.dead}
    there = {one.amphora_id for one in look.amphorae if one.load_balancer_id == load_balancer_id}
    if not dead or not there <= dead:
        return ""
    if len(dead) == 1:
        return f"amphora {next(iter(dead))} is not heard and does not answer"
    return f"none of its amphorae is heard, and none answers: {', '.join(sorted(dead))}"


def _shown(case: Case, refusal: str, look: LivenessSnapshot, now: float) -> SilentAmphora:
    words = case.judgement.words
    if case.judgement.cause is not None:
        words += f"; it waits: {refusal}" if refusal else "; it is replaced"
    return SilentAmphora(
        amphora_id=case.sight.amphora_id,
        load_balancer_id=case.sight.load_balancer_id,
        kind=case.judgement.kind.value,
        since=look.at - (now - case.quiet.since),
        verdict=words,
    )


def _why(case: Case) -> FailoverTrigger:
    cause = case.judgement.cause or Cause.SILENT
    reason = {
        Cause.SILENT: "it is not heard and does not answer",
        Cause.MUTE: "it answers and is not heard",
        Cause.NEVER_SPOKE: "it was never heard",
    }[cause]
    return FailoverTrigger(cause=cause, reason=reason, silent_since=case.sight.heard_at)


def _found(case: Case, now: float) -> str:
    at = case.sight.heard_at
    heard = "" if at is None else dt.datetime.fromtimestamp(at, dt.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    last = f"heard last at {heard}" if case.quiet.spoke else f"never heard, ready since {heard or 'long ago'}"
    return f"{last}, silent for {now - case.quiet.since:.1f} s; {case.judgement.words}"
