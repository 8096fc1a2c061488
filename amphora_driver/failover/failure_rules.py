# SPDX-License-Identifier: Apache-2.0
"""Rules of failure detection: how long an amphora is silent, and what follows. Pure.

All times are on a monotonic clock.

Invariant: a blind controller finds no silent amphora. Silence is the time during which this process has read an
amphora's heartbeat position without a pause, has found it unchanged, and has seen that a health manager receives
heartbeats. Every interruption resets all timers: a gap between two reads, no health manager that proves reception, a
duty just acquired. No timer compares dates or the clocks of two processes. When no heartbeat arrives at all, another
sign must show that the network path to the amphorae works (`network_suspected`): a failed switch is invisible to this
host.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import msgspec

from amphora_driver.store.failovers import Cause

# (epoch, sequence) of the last recorded heartbeat; None before the first one.
Order = tuple[int, int] | None

# Fractions of `silent_after`. A late amphora is probed early, so that the result exists when the time is over.
_LATE = 0.65
_GAP = 0.25
_DEAF = 0.4
# Shorter pauses are scheduling delays, not gaps (seconds).
_LEAST_GAP = 1.0
_LEAST_DEAF = 1.5
# A probe result is valid for these seconds, or for twice the probe time-out.
_FRESH = 8.0
# Seconds between a heartbeat and its position being visible here, in addition to the flush: health managers write
# positions once a second, and the detector reads every half second.
_SEEN_LATE = 1.5
# Fractions of an interval: a heartbeat later than `_MISSED` was not sent or was lost.
_JITTER = 1.25
_MISSED = 1.5


class Phase(str, Enum):
    """How long an amphora has been without a new heartbeat; each phase includes the phases after it."""

    OVERDUE = "overdue"
    LATE = "late"
    SILENT = "silent"


class DetectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Options of [amp_failover], in seconds; the last two are of [amp_health]."""

    silent_after: float = 7.0
    mute_after: float = 120.0
    probe_timeout: float = 2.0
    interval: float = 3.0
    flush: float = 0.5

    def begins(self, phase: Phase) -> float:
        """Seconds without a heartbeat after which a phase begins.

        OVERDUE: a heartbeat is missing, and the amphora may be the next of many to fall silent. LATE: the amphora is
        probed. SILENT: the rules decide.
        """
        late = self.silent_after * _LATE
        if phase is Phase.OVERDUE:
            return min(_MISSED * self.interval + self.flush + _SEEN_LATE, late)
        return late if phase is Phase.LATE else self.silent_after

    @property
    def due_again(self) -> float:
        """Heartbeats recorded after this delay were sent after the moment in question."""
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
        """Seconds a probe result, positive or negative, stays valid."""
        return max(_FRESH, 2 * self.probe_timeout)


class SilentPeriod(msgspec.Struct, frozen=True, kw_only=True):
    """An amphora without a new heartbeat since a moment on this process's clock."""

    amphora_id: str
    since: float
    order: Order

    @property
    def ever_heard(self) -> bool:
        """Whether any heartbeat of the amphora was ever recorded."""
        return self.order is not None


class HeartbeatWatch:
    """What one process has observed so far. For one thread.

    Args:
        limits: the durations.

    Attributes:
        last_heartbeat_at: when a new heartbeat of any amphora was seen last, on the clock passed to `observe`.
        blind_reason: why the process cannot judge silence; empty while it can.
    """

    def __init__(self, limits: DetectionLimits) -> None:
        self._limits = limits
        self._periods: dict[str, SilentPeriod] = {}
        self._beats: dict[str, int] = {}
        self._observed_at: float | None = None
        self._reception_at: float | None = None
        self._sees_since: float | None = None
        self.last_heartbeat_at: float | None = None
        self.blind_reason = "the detector has just started"

    def reset(self, reason: str) -> None:
        """Restart all timers: the observation was interrupted for a reason outside the amphorae."""
        self._periods.clear()
        self._beats.clear()
        self._observed_at = self._reception_at = self._sees_since = self.last_heartbeat_at = None
        self.blind_reason = reason

    def observe(self, orders: Mapping[str, Order], beats: Mapping[str, int], now: float) -> None:
        """Take in the rows of one read.

        Args:
            orders: of every amphora that should send heartbeats, the position of its last one.
            beats: of every health manager, how often it has proven reception.
            now: when the rows were read, on `time.monotonic()`'s clock.
        """
        if self._observed_at is not None and not 0 <= now - self._observed_at <= self._limits.gap:
            self.reset(f"the detector did not read heartbeats for {now - self._observed_at:.1f} s")
        self._observed_at = now
        if any(beat != self._beats.get(name, beat) for name, beat in beats.items()):
            self._reception_at = now
        self._beats = dict(beats)
        if self._reception_at is None or now - self._reception_at > self._limits.deaf_after:
            # This includes amphorae with a new heartbeat: from now on no reception is proven.
            self._periods.clear()
            self._sees_since = None
            self.blind_reason = _no_reception(beats)
        elif self._sees_since is None:
            self._periods.clear()
            self._sees_since, self.blind_reason = now, ""
        before = self._periods
        if any((known := before.get(one)) is not None and known.order != order for one, order in orders.items()):
            self.last_heartbeat_at = now
        self._periods = {
            amphora_id: known
            if (known := before.get(amphora_id)) is not None and known.order == order
            else SilentPeriod(amphora_id=amphora_id, since=now, order=order)
            for amphora_id, order in orders.items()
        }

    def in_phase(self, phase: Phase, now: float) -> dict[str, SilentPeriod]:
        """Amphorae that have reached a phase, by id; empty while this process is blind."""
        if self.blind_reason:
            return {}
        seconds = self._limits.begins(phase)
        return {one.amphora_id: one for one in self._periods.values() if now - one.since >= seconds}

    def sees_for(self, now: float) -> float:
        """Seconds since this process was last blind."""
        return 0.0 if self._sees_since is None else now - self._sees_since


def _no_reception(beats: Mapping[str, int]) -> str:
    return "no health manager proves that it receives heartbeats" if beats else "there is no health manager"


class ProbeOutcome(str, Enum):
    """Outcome of one probe of an agent. INCONCLUSIVE: the controller's host could not make a valid probe."""

    ANSWERED = "answered"
    NO_ANSWER = "no answer"
    INCONCLUSIVE = "inconclusive"


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one probe.

    Attributes:
        outcome: of the probe.
        at: when the probe began, on this process's clock.
        detail: the reason, as a text.
        inconclusive_at: when the last inconclusive probe of this amphora began; None if there was none.
    """

    outcome: ProbeOutcome
    at: float
    detail: str = ""
    inconclusive_at: float | None = None


class SilenceKind(str, Enum):
    """Kind of a silent amphora, as shown to operators (column `kind` of `silent_amphora`)."""

    SILENT = "silent"
    MUTE = "mute"
    NEVER_SPOKE = "never_spoke"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Decision of the rules about a silent amphora.

    Attributes:
        kind: as shown to operators.
        text: what follows, or why nothing follows; shown to operators.
        cause: of the fail-over; None if the amphora is not replaced, or not yet.
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
        heard_at: when a heartbeat of any amphora was seen last; None if never.
        answered_at: when the last answered probe began; None if no agent answered.
        has_witnesses: [amp_failover] witnesses is set; a probe is then inconclusive while no witness is reachable.
    """

    watched: int
    heard_at: float | None = None
    answered_at: float | None = None
    has_witnesses: bool = False


def network_suspected(period: SilentPeriod, evidence: PathEvidence, now: float, limits: DetectionLimits) -> str:
    """Return why the network may have failed instead of this amphora; empty with a sign that it works.

    A dead amphora and a failed path look the same from here. A sign counts only if it is newer than the moment at which
    this amphora's next heartbeat was due: an older heartbeat may have arrived just before the path failed.
    """
    since = period.since + limits.due_again
    works = any(at is not None and at >= since for at in (evidence.heard_at, evidence.answered_at))
    if works or evidence.has_witnesses:
        return ""
    # A single amphora has no peer that shows that the management network works. The replacement serves before the
    # silent amphora is deleted.
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
    """Whether a probe result belongs to this silence and is still valid."""
    return result is not None and result.at >= period.since and now - result.at <= limits.fresh


def judge_silence(
    period: SilentPeriod, result: ProbeResult | None, now: float, limits: DetectionLimits, suspicion: str = ""
) -> Verdict:
    """Return the verdict on an amphora that has been silent for `silent_after`.

    Args:
        period: its silence.
        result: of its last probe.
        now: the moment.
        limits: the durations.
        suspicion: why the network may have failed (`network_suspected`); empty if it works.
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
        # MUTE also applies to an amphora without any heartbeat: it may serve traffic and must not count as dead.
        return Verdict(kind=kind, text=text, cause=Cause.MUTE if over else None, stale=stale)
    if result.inconclusive_at is not None and now - result.inconclusive_at < limits.silent_after:
        # Just after the network of this host returns, neither heartbeats nor probe answers arrive yet.
        return Verdict(kind=kind, text="no fail-over yet: a moment ago the controller could not probe its agent")
    if suspicion:
        return Verdict(kind=kind, text=f"no fail-over yet: its agent does not answer, but {suspicion}")
    cause = Cause.SILENT if period.ever_heard else Cause.NEVER_SPOKE
    return Verdict(
        kind=kind, text=f"its agent does not answer ({result.detail})", cause=cause, dead=not stale, stale=stale
    )
