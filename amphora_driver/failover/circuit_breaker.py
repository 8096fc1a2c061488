# SPDX-License-Identifier: Apache-2.0
"""Circuit breaker and rate limits of automatic fail-overs. Pure.

Invariant: many amphorae that become silent together indicate a network fault. The breaker then opens, and no automatic
fail-over begins. The breaker closes without an operator after heartbeats of the amphorae, or after a trial fail-over
that shows their death. An operator can hold the breaker open or close it. All times are of `time.monotonic()`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import Enum

import msgspec


class BreakerState(str, Enum):
    """Column `state` of the table `circuit_breaker`."""

    CLOSED = "closed"
    OPEN = "open"
    TRIAL = "trial"


class BreakerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Options breaker_* of [amp_failover]; times in seconds."""

    percent: float = 20.0
    min: int = 3
    max: int = 50
    window: float = 120.0
    close_after: float = 30.0
    trial_after: float = 600.0


class Breaker(msgspec.Struct, frozen=True, kw_only=True):
    """State, start and reason; `few_since` is the start of the time with few silent amphorae."""

    state: BreakerState = BreakerState.CLOSED
    since: float = 0.0
    reason: str = ""
    few_since: float | None = None


class SilenceCount(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of amphorae; `recent` became silent within the window, without a later heartbeat."""

    watched: int
    silent: int
    recent: int


def restore_breaker(
    state: BreakerState, reason: str, limits: BreakerLimits, now: float, remaining: float | None
) -> Breaker:
    """Return the breaker that the previous holder of the duty recorded.

    `remaining` is the number of seconds until the trial according to the recorded date; None without a trial. The clock
    may have been set, so the wait is limited to one full wait.
    """
    waited = 0.0
    if state is BreakerState.OPEN and remaining is not None:
        waited = limits.trial_after - min(max(remaining, 0.0), limits.trial_after)
    return Breaker(state=state, since=now - waited, reason=reason)


def excess_reason(number: int, watched: int, limits: BreakerLimits) -> str:
    """Return why too many amphorae are silent for all to be dead; empty for a plausible number.

    `watched` is the number of all amphorae, including the silent ones.
    """
    if number > limits.max:
        return f"{number} amphorae fell silent within {limits.window:g} s, more than {limits.max}"
    if number >= limits.min and number * 100 > watched * limits.percent:
        return f"{number} of {watched} amphorae fell silent within {limits.window:g} s, more than {limits.percent:g} %"
    return ""


def next_breaker(
    breaker: Breaker, count: SilenceCount, limits: BreakerLimits, now: float, *, trial: bool | None = None
) -> Breaker:
    """Return the breaker after one observation. A blind detector must not call this function.

    `trial` is the result of the trial fail-over; None during or without a trial fail-over.
    """
    if breaker.state is BreakerState.CLOSED:
        reason = excess_reason(count.recent, count.watched, limits)
        return Breaker(state=BreakerState.OPEN, since=now, reason=reason) if reason else breaker
    if excess_reason(count.silent, count.watched, limits):
        breaker = msgspec.structs.replace(breaker, few_since=None)
    else:
        since = now if breaker.few_since is None else breaker.few_since
        if now - since >= limits.close_after:
            return Breaker(since=now, reason=f"few amphorae have been silent for {limits.close_after:g} s")
        breaker = msgspec.structs.replace(breaker, few_since=since)
    if breaker.state is BreakerState.TRIAL and trial is False:
        return msgspec.structs.replace(breaker, state=BreakerState.OPEN, since=now)
    if breaker.state is BreakerState.OPEN and now - breaker.since >= limits.trial_after:
        return msgspec.structs.replace(breaker, state=BreakerState.TRIAL, since=now)
    return breaker


class SilenceWindow:
    """Amphorae that became silent within the window, also if they were replaced later.

    A heartbeat removes its amphora from the window.
    """

    def __init__(self, window: float) -> None:
        self._window = window
        self._at: dict[str, float] = {}
        self._accepted: set[str] = set()

    def observe(self, silent: Collection[str], watched: Collection[str], now: float) -> int:
        """Record the silent ones of the watched amphorae; return how many became silent within the window."""
        self._accepted.intersection_update(silent)
        for one in silent:
            if one not in self._accepted:
                self._at.setdefault(one, now)
        heard = set(watched) - set(silent)
        self._at = {
            one: at for one, at in self._at.items() if one not in heard and (one in silent or now - at <= self._window)
        }
        return self.recent(now)

    def recent(self, now: float) -> int:
        return sum(now - at <= self._window for at in self._at.values())

    def population(self, watched: Collection[str]) -> int:
        """Return the number of watched amphorae plus the silent ones that are being replaced."""
        return len(self._at.keys() | set(watched))

    def count_unaccepted(self, silent: Iterable[str]) -> int:
        """Return the number of silent amphorae that no operator has accepted as dead."""
        return sum(one not in self._accepted for one in silent)

    def accept(self, silent: Collection[str]) -> None:
        self._accepted = set(silent)
        self._at.clear()

    def expire_all(self) -> None:
        """Restart the window: amphorae that are silent now count as silent since before the window."""
        self._at = dict.fromkeys(self._at, float("-inf"))


class _LastFailover(msgspec.Struct, frozen=True):
    """Last automatic fail-over: consecutive count, time, back-off, amphorae present."""

    count: int
    at: float
    back_off: float
    present: frozenset[str]


class FailoverBackoff:
    """Back-off of a load balancer before its next automatic fail-over. For one thread.

    Each fail-over doubles the back-off, from `first` to `most` seconds. The back-off applies only to amphorae that
    joined with or after the last fail-over. The older partner of a dead amphora is replaced without a delay.
    """

    def __init__(self, first: float, most: float) -> None:
        self._first = first
        self._most = most
        self._last: dict[str, _LastFailover] = {}

    def record(self, load_balancer_id: str, present: Iterable[str], now: float) -> None:
        """Record the start of a fail-over; `present` are the amphorae of the load balancer at this moment."""
        last = self._last.get(load_balancer_id)
        # After a calm period of twice the last back-off, the next fail-over of this load balancer counts as its first
        # one.
        count = 1 if last is None or now - last.at > 2 * last.back_off else last.count + 1
        back_off = min(self._first * 2.0 ** min(count - 1, 60), self._most)
        self._last[load_balancer_id] = _LastFailover(count, now, back_off, frozenset(present))

    def restore(self, load_balancer_id: str, ages: Iterable[float], present: Collection[str], now: float) -> None:
        """Load earlier fail-overs, by their ages in seconds; `present` existed at the start of the last one.

        The maximum back-off limits the error of a clock that was set.
        """
        self._last.pop(load_balancer_id, None)
        for age in sorted(ages, reverse=True):
            self.record(load_balancer_id, present, now - max(age, 0.0))

    def remaining(self, load_balancer_id: str, amphora_id: str, now: float) -> float:
        """Return the seconds until the amphora may be replaced."""
        last = self._last.get(load_balancer_id)
        if last is None or amphora_id in last.present:
            return 0.0
        return max(0.0, last.at + last.back_off - now)

    def length(self, load_balancer_id: str) -> float:
        last = self._last.get(load_balancer_id)
        return 0.0 if last is None else last.back_off

    def is_replacement(self, load_balancer_id: str, amphora_id: str) -> bool:
        last = self._last.get(load_balancer_id)
        return last is not None and amphora_id not in last.present

    def retain(self, load_balancer_ids: Collection[str]) -> None:
        self._last = {one: last for one, last in self._last.items() if one in load_balancer_ids}


class FailoverPermit(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions for the next automatic fail-over.

    Attributes:
        held: reason of an operator that holds the breaker open; None if no operator does.
        late: why the number of late amphorae delays fail-overs; empty if they do not.
        in_progress: number of automatic fail-overs in progress.
        on_trial: the trial fail-over is in progress.
    """

    automatic: bool = True
    held: str | None = None
    state: BreakerState = BreakerState.CLOSED
    late: str = ""
    in_progress: int = 0
    most_at_once: int = 5
    on_trial: bool = False

    def refusal(self) -> str:
        """Return why the next fail-over must wait; empty if the fail-over may begin."""
        if not self.automatic:
            return "[amp_failover] automatic is off"
        if self.held is not None:
            return f"an operator holds the breaker open ({self.held})" if self.held else "the breaker is held open"
        if self.state is BreakerState.OPEN:
            return "the breaker is open"
        if self.state is BreakerState.TRIAL and self.on_trial:
            return "the trial fail-over of the breaker is in progress"
        if self.late:
            return "many amphorae are late and may fall silent too"
        if self.in_progress >= self.most_at_once:
            return f"{self.most_at_once} automatic fail-overs are in progress"
        return ""

    def after_start(self) -> FailoverPermit:
        trial = self.on_trial or self.state is BreakerState.TRIAL
        return msgspec.structs.replace(self, in_progress=self.in_progress + 1, on_trial=trial)
