# SPDX-License-Identifier: Apache-2.0
"""Rules of failure detection: how long an amphora is silent, and what follows. Pure.

All times are of a monotonic clock.

Invariant: a blind controller finds no silent amphora. Silence is a time in which this process has read the last
heartbeat of an amphora without a pause and has found it unchanged, while a health manager received heartbeats. Every
interruption resets all timers: a gap between two reads, no health manager that proves reception, a duty just acquired.
No timer compares dates or the clocks of two processes. If no heartbeat arrives at all, another sign must show that the
network path to the amphorae works (`network_suspected`): a failed switch is invisible to this host.
"""

from __future__ import annotations

import datetime as dt
import operator
from collections.abc import Mapping
from enum import Enum
from itertools import compress, repeat, takewhile

import msgspec

from amphora_driver.store.amphorae import LIVENESS_WRITE_INTERVAL
from amphora_driver.store.failovers import Cause, FailoverTrigger
from amphora_driver.store.silent_amphorae import AmphoraLiveness, LivenessSnapshot, SilentAmphora

# Epoch and sequence of an amphora's last heartbeat; None before its first heartbeat.
Order = tuple[int, int] | None
# Differs from every order: the order of an amphora that the failure detector has not watched before.
_UNWATCHED = object()

# Silence, as a fraction of `silent_after`, before the controller probes an amphora. The result must arrive before
# `silent_after`.
_LATE = 0.65
# If the failure detector reads no heartbeats for longer than this fraction of `silent_after`, the silent periods of all
# amphorae start again.
_GAP = 0.25
# A gap between two reads of at most this number of seconds never restarts silent periods. A busy host may delay the
# process that long.
_LEAST_GAP = 1.0
# If the self-tests of all health managers fail for this fraction of `silent_after`, the silent periods of all amphorae
# start again. A self-test proves that heartbeats can arrive.
_DEAF = 0.4
# Self-tests that fail for a shorter time than this number of seconds never restart silent periods.
_LEAST_DEAF = 1.5
# Seconds for which the result of a probe stays valid, or twice the probe time-out if that is longer.
_FRESH = 8.0
# Longest delay in seconds between the receipt of a heartbeat and its read by the failure detector. The delay consists
# of the interval of writes and half a second between two reads. The callers add the flush interval of the health
# manager.
_SEEN_LATE = LIVENESS_WRITE_INTERVAL + 0.5
# Longest normal time between two heartbeats, as a multiple of the heartbeat interval.
_JITTER = 1.25
# Time without a heartbeat after which a heartbeat counts as missing, as a multiple of the heartbeat interval.
_MISSED = 1.5


class Phase(str, Enum):
    """Time of an amphora without a new heartbeat; each phase includes the later phases."""

    OVERDUE = "overdue"
    LATE = "late"
    SILENT = "silent"


class DetectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Options of [amp_failover] in seconds; the last two are of [amp_health]."""

    silent_after: float = 7.0
    mute_after: float = 120.0
    probe_timeout: float = 2.0
    interval: float = 3.0
    flush: float = 0.5

    def begins(self, phase: Phase) -> float:
        """Return the seconds without a heartbeat after which a phase begins.

        OVERDUE: a heartbeat is missing, and many amphorae may become silent. LATE: the controller probes the amphora.
        SILENT: the rules decide.
        """
        late = self.silent_after * _LATE
        if phase is Phase.OVERDUE:
            return min(_MISSED * self.interval + self.flush + _SEEN_LATE, late)
        return late if phase is Phase.LATE else self.silent_after

    @property
    def due_again(self) -> float:
        """Seconds after which a recorded heartbeat was certainly sent after a given moment."""
        return _JITTER * self.interval + self.flush + _SEEN_LATE

    @property
    def gap(self) -> float:
        """Seconds between two reads after which all timers restart."""
        return max(self.silent_after * _GAP, _LEAST_GAP)

    @property
    def deaf_after(self) -> float:
        """Seconds without a proof of reception after which no health manager counts as receiving."""
        return max(self.silent_after * _DEAF, _LEAST_DEAF)

    @property
    def fresh(self) -> float:
        """Seconds for which a probe result, positive or negative, stays valid."""
        return max(_FRESH, 2 * self.probe_timeout)


class SilentPeriod(msgspec.Struct, frozen=True, kw_only=True):
    """An amphora without a new heartbeat since a moment on this process's clock."""

    amphora_id: str
    since: float
    order: Order

    @property
    def ever_heard(self) -> bool:
        return self.order is not None


class HeartbeatWatch:
    """Observed heartbeats and silent periods of one process. For one thread.

    Attributes:
        last_heartbeat_at: time of the last new heartbeat of any amphora, on the clock passed to `observe`.
        blind_reason: why the process cannot judge silence; empty while it can.
    """

    def __init__(self, limits: DetectionLimits) -> None:
        self._limits = limits
        # The silent periods in the order of their starts, and the last heartbeats of the same amphorae.
        self._periods: dict[str, SilentPeriod] = {}
        self._orders: dict[str, Order] = {}
        self._beats: dict[str, int] = {}
        self._observed_at: float | None = None
        self._reception_at: float | None = None
        self._sees_since: float | None = None
        self.last_heartbeat_at: float | None = None
        self.blind_reason = "the detector has just started"

    def reset(self, reason: str) -> None:
        """Restart all timers: a reason outside the amphorae interrupted the observation."""
        self._restart_periods()
        self._beats.clear()
        self._observed_at = self._reception_at = self._sees_since = self.last_heartbeat_at = None
        self.blind_reason = reason

    def observe(self, orders: Mapping[str, Order], beats: Mapping[str, int], now: float) -> None:
        """Record the rows of one read at `now` (`time.monotonic()`).

        `orders` has the last heartbeat of every amphora that should send heartbeats. `beats` counts the proofs of
        reception of every health manager.
        """
        if self._observed_at is not None and not 0 <= now - self._observed_at <= self._limits.gap:
            self.reset(f"the detector did not read heartbeats for {now - self._observed_at:.1f} s")
        self._observed_at = now
        if any(beat != self._beats.get(name, beat) for name, beat in beats.items()):
            self._reception_at = now
        self._beats = dict(beats)
        if self._reception_at is None or now - self._reception_at > self._limits.deaf_after:
            # While no health manager proves that heartbeats can arrive, silence does not mean a failed amphora. So the
            # silent periods of all amphorae start again.
            self._restart_periods()
            self._sees_since = None
            blind = "no health manager proves that it receives heartbeats" if beats else "there is no health manager"
            self.blind_reason = blind
        elif self._sees_since is None:
            self._restart_periods()
            self._sees_since, self.blind_reason = now, ""
        self._update_periods(orders, now)

    def _restart_periods(self) -> None:
        self._periods.clear()
        self._orders.clear()

    def _update_periods(self, orders: Mapping[str, Order], now: float) -> None:
        """Restart the periods after a new heartbeat, and end those of amphorae without an order.

        A large fleet has few new heartbeats in one round. Only the comparison, which is in C, concerns all amphorae.
        """
        before = map(self._orders.get, orders, repeat(_UNWATCHED))
        changed = list(compress(orders, map(operator.ne, orders.values(), before)))
        if any(one in self._periods for one in changed):
            self.last_heartbeat_at = now
        for amphora_id in changed:
            self._periods.pop(amphora_id, None)
            self._periods[amphora_id] = SilentPeriod(amphora_id=amphora_id, since=now, order=orders[amphora_id])
        if len(self._periods) > len(orders):
            for amphora_id in self._periods.keys() - orders.keys():
                del self._periods[amphora_id]
        self._orders = dict(orders)

    def in_phase(self, phase: Phase, now: float) -> dict[str, SilentPeriod]:
        """Return the amphorae that have reached a phase, by id, the longest silence first.

        The result is empty while this process is blind.
        """
        if self.blind_reason:
            return {}
        seconds = self._limits.begins(phase)
        reached = takewhile(lambda item: now - item[1].since >= seconds, self._periods.items())
        return dict(reached)

    def sees_for(self, now: float) -> float:
        return 0.0 if self._sees_since is None else now - self._sees_since


class ProbeOutcome(str, Enum):
    """Outcome of one probe. INCONCLUSIVE: the controller's host could not make a valid probe."""

    ANSWERED = "answered"
    NO_ANSWER = "no answer"
    INCONCLUSIVE = "inconclusive"


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one probe, which began at `at` on the clock of this process.

    `inconclusive_at` is the start of the last inconclusive probe of the amphora.
    """

    outcome: ProbeOutcome
    at: float
    detail: str = ""
    inconclusive_at: float | None = None


class SilenceKind(str, Enum):
    """Kind of a silent amphora for operators (column `kind` of `silent_amphora`)."""

    SILENT = "silent"
    MUTE = "mute"
    NEVER_SPOKE = "never_spoke"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Decision of the rules about a silent amphora.

    Attributes:
        text: the next action, or why no action follows; for operators.
        cause: cause of the fail-over; None if the amphora is not replaced, or not yet.
        dead: the agent does not answer either, so the amphora serves no traffic.
        stale: the probe result is too old; a new probe must precede a fail-over.
    """

    kind: SilenceKind
    text: str
    cause: Cause | None = None
    dead: bool = False
    stale: bool = False


class PathEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Signs that the network path to the amphorae works.

    Attributes:
        watched: number of amphorae that should send heartbeats.
        answered_at: start of the last answered probe.
        has_witnesses: [amp_failover] witnesses is set; a probe without a reachable witness is inconclusive.
    """

    watched: int
    heard_at: float | None = None
    answered_at: float | None = None
    has_witnesses: bool = False


def network_suspected(period: SilentPeriod, evidence: PathEvidence, now: float, limits: DetectionLimits) -> str:
    """Return why the network may have failed instead of this amphora; empty with a sign that it works.

    A dead amphora and a failed path look the same to the controller. A sign counts only if it is newer than the due
    time of the amphora's next heartbeat: an older heartbeat may have arrived just before the path failed.
    """
    since = period.since + limits.due_again
    works = any(at is not None and at >= since for at in (evidence.heard_at, evidence.answered_at))
    if works or evidence.has_witnesses:
        return ""
    # With one watched amphora, no other amphora shows whether the management network works. A wait of twice
    # `silent_after` is safe, because the amphora is deleted only after its replacement serves.
    wait = 2 * limits.silent_after
    if evidence.watched > 1:
        wait = max(limits.mute_after, wait)
    if now - period.since >= wait:
        return ""
    return (
        f"no amphora sends heartbeats and [amp_failover] witnesses is empty, so the network may have failed; "
        f"the amphora counts as dead after {wait:g} s of silence"
    )


def is_current(result: ProbeResult | None, period: SilentPeriod, now: float, limits: DetectionLimits) -> bool:
    """Return whether a probe result belongs to this silence and is still valid."""
    return result is not None and result.at >= period.since and now - result.at <= limits.fresh


def judge_silence(
    period: SilentPeriod, result: ProbeResult | None, now: float, limits: DetectionLimits, suspicion: str = ""
) -> Verdict:
    """Return the verdict on an amphora that has been silent for `silent_after`.

    `suspicion` is why the network may have failed (`network_suspected`); empty if the network works.
    """
    kind = SilenceKind.SILENT if period.ever_heard else SilenceKind.NEVER_SPOKE
    if result is None or result.at < period.since:
        return Verdict(kind=kind, text="waiting for the probe of its agent")
    stale = not is_current(result, period, now, limits)
    if result.outcome is ProbeOutcome.INCONCLUSIVE:
        return Verdict(kind=kind, text=f"no fail-over: the controller cannot probe its agent ({result.detail})")
    if result.outcome is ProbeOutcome.ANSWERED:
        kind = SilenceKind.MUTE if period.ever_heard else SilenceKind.NEVER_SPOKE
        over = now - period.since >= limits.mute_after
        answers = f"its agent answers ({result.detail})" if result.detail else "its agent answers"
        text = f"{answers}; it is replaced after {limits.mute_after:g} s of silence"
        # An amphora whose agent answers may still serve traffic. So the cause of its fail-over is MUTE, even if the
        # amphora never sent a heartbeat.
        return Verdict(kind=kind, text=text, cause=Cause.MUTE if over else None, stale=stale)
    if result.inconclusive_at is not None and now - result.inconclusive_at < limits.silent_after:
        # A recent probe was inconclusive, for example because the controller's network had failed. After the network
        # returns, heartbeats need some time to arrive.
        return Verdict(kind=kind, text="no fail-over yet: a moment ago the controller could not probe its agent")
    if suspicion:
        return Verdict(kind=kind, text=f"no fail-over yet: its agent does not answer, but {suspicion}")
    cause = Cause.SILENT if period.ever_heard else Cause.NEVER_SPOKE
    text = f"its agent does not answer ({result.detail})"
    return Verdict(kind=kind, text=text, cause=cause, dead=not stale, stale=stale)


class JudgedAmphora(msgspec.Struct, frozen=True, kw_only=True):
    """One silent amphora: its row, its silent period and the verdict."""

    liveness: AmphoraLiveness
    period: SilentPeriod
    verdict: Verdict


def outage_reason(snapshot: LivenessSnapshot, load_balancer_id: str, found: list[JudgedAmphora]) -> str:
    """Return why no amphora serves a load balancer; empty if an amphora may serve."""
    dead = {one.liveness.amphora_id for one in found if one.verdict.dead}
    if not dead or not snapshot.watched.of_load_balancer(load_balancer_id) <= dead:
        return ""
    if len(dead) == 1:
        return f"amphora {next(iter(dead))} sends no heartbeats and does not answer"
    return f"all amphorae send no heartbeats and do not answer: {', '.join(sorted(dead))}"


def silence_row(one: JudgedAmphora, refusal: str, snapshot: LivenessSnapshot, now: float) -> SilentAmphora:
    """Return the row that operators see; `refusal` is why the fail-over must wait."""
    text = one.verdict.text
    if one.verdict.cause is not None:
        text += f"; fail-over held: {refusal}" if refusal else "; it is replaced"
    return SilentAmphora(
        amphora_id=one.liveness.amphora_id,
        load_balancer_id=one.liveness.load_balancer_id,
        kind=one.verdict.kind.value,
        since=snapshot.at - (now - one.period.since),
        verdict=text,
    )


def failover_cause(one: JudgedAmphora, heard_at: float | None) -> FailoverTrigger:
    """Return cause and reason of a fail-over; `heard_at`, the time of the last heartbeat, is for display."""
    cause = one.verdict.cause or Cause.SILENT
    reason = {
        Cause.SILENT: "it sends no heartbeats and does not answer",
        Cause.MUTE: "it answers and sends no heartbeats",
        Cause.NEVER_SPOKE: "it has never sent a heartbeat",
    }[cause]
    return FailoverTrigger(cause=cause, reason=reason, silent_since=heard_at)


def finding(one: JudgedAmphora, heard_at: float | None, now: float) -> str:
    """Return the text of the event that opens a fail-over; see `failover_cause`."""
    at = heard_at
    date = "" if at is None else dt.datetime.fromtimestamp(at, dt.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    ready = f"no heartbeat since it became ready at {date or 'an unknown time'}"
    last = f"last heartbeat at {date}" if one.period.ever_heard else ready
    return f"{last}, silent for {now - one.period.since:.1f} s; {one.verdict.text}"
