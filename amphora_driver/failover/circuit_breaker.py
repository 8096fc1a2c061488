# SPDX-License-Identifier: Apache-2.0
"""Circuit breaker and rate limits of automatic fail-overs. Pure.

Invariant: many amphorae that fall silent together indicate a network fault. The breaker then opens, and no automatic
fail-over begins. The breaker closes without an operator: when the amphorae are heard again, or after a trial fail-over
has shown that they were dead. An operator can hold the breaker open or close it. All times are on `time.monotonic()`'s
clock.
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
    floor: int = 3
    most: int = 50
    window: float = 120.0
    calm: float = 30.0
    trial: float = 600.0


class Breaker(msgspec.Struct, frozen=True, kw_only=True):
    """State, start and reason; `calm_since` is the start of the time with few silent amphorae."""

    state: BreakerState = BreakerState.CLOSED
    since: float = 0.0
    reason: str = ""
    calm_since: float | None = None


class SilenceCount(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of amphorae; `recent` fell silent within the window, without a later heartbeat."""

    watched: int
    silent: int
    recent: int


def restore_breaker(
    state: BreakerState, reason: str, limits: BreakerLimits, now: float, remaining: float | None
) -> Breaker:
    """Return the breaker that the previous holder of the duty recorded.

    Args:
        state: as recorded.
        reason: as recorded.
        limits: of the breaker.
        now: the moment.
        remaining: seconds until the trial, computed from the recorded date; None without one. The result is between
            no wait and one full wait, because the clock may have been set.
    """
    waited = 0.0
    if state is BreakerState.OPEN and remaining is not None:
        waited = limits.trial - min(max(remaining, 0.0), limits.trial)
    return Breaker(state=state, since=now - waited, reason=reason)


def excess_reason(number: int, watched: int, limits: BreakerLimits) -> str:
    """Why too many amphorae are silent for all of them to be dead; empty if the number is plausible.

    Args:
        number: of silent amphorae.
        watched: number of all amphorae, including the silent ones.
        limits: of the breaker.
    """
    if number > limits.most:
        return f"{number} amphorae fell silent within {limits.window:g} s, more than {limits.most}"
    if number >= limits.floor and number * 100 > watched * limits.percent:
        return f"{number} of {watched} amphorae fell silent within {limits.window:g} s, more than {limits.percent:g} %"
    return ""


def next_breaker(
    breaker: Breaker, count: SilenceCount, limits: BreakerLimits, now: float, *, trial: bool | None = None
) -> Breaker:
    """Return the breaker after one observation.

    Args:
        breaker: before it.
        count: of this observation. A blind detector must not call this function.
        limits: of the breaker.
        now: the moment.
        trial: result of the trial fail-over; None if there is none or it is in progress.
    """
    if breaker.state is BreakerState.CLOSED:
        reason = excess_reason(count.recent, count.watched, limits)
        return Breaker(state=BreakerState.OPEN, since=now, reason=reason) if reason else breaker
    if excess_reason(count.silent, count.watched, limits):
        breaker = msgspec.structs.replace(breaker, calm_since=None)
    else:
        since = now if breaker.calm_since is None else breaker.calm_since
        if now - since >= limits.calm:
            return Breaker(since=now, reason=f"few amphorae have been silent for {limits.calm:g} s")
        breaker = msgspec.structs.replace(breaker, calm_since=since)
    if breaker.state is BreakerState.TRIAL and trial is False:
        return msgspec.structs.replace(breaker, state=BreakerState.OPEN, since=now)
    if breaker.state is BreakerState.OPEN and now - breaker.since >= limits.trial:
        return msgspec.structs.replace(breaker, state=BreakerState.TRIAL, since=now)
    return breaker


class SilenceWindow:
    """Amphorae that fell silent within the window. Replaced amphorae count; amphorae heard again do not."""

    def __init__(self, window: float) -> None:
        self._window = window
        self._at: dict[str, float] = {}
        self._accepted: set[str] = set()

    def observe(self, silent: Collection[str], watched: Collection[str], now: float) -> int:
        """Take in the silent ones of the watched amphorae; return how many fell silent within the window."""
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
        """Return how many of the observed amphorae fell silent within the window."""
        return sum(now - at <= self._window for at in self._at.values())

    def population(self, watched: Collection[str]) -> int:
        """Return the number of watched amphorae plus the silent ones that are being replaced."""
        return len(self._at.keys() | set(watched))

    def count_unaccepted(self, silent: Iterable[str]) -> int:
        """Return how many silent amphorae count while the breaker is open: all that no operator has accepted."""
        return sum(one not in self._accepted for one in silent)

    def accept(self, silent: Collection[str]) -> None:
        """Record that an operator considers these amphorae dead."""
        self._accepted = set(silent)
        self._at.clear()

    def expire_all(self) -> None:
        """Restart the window: amphorae that are silent now count as silent since before it."""
        self._at = dict.fromkeys(self._at, float("-inf"))


class _LastFailover(msgspec.Struct, frozen=True):
    """Last automatic fail-over: consecutive count, time, back-off, amphorae present."""

    count: int
    at: float
    back_off: float
    present: frozenset[str]


class FailoverBackoff:
    """How long a load balancer waits for its next automatic fail-over. For one thread.

    The back-off applies only to amphorae that joined with or after the last fail-over. The older partner of a dead
    amphora is replaced without a delay.

    Args:
        first: seconds of the first back-off; each one doubles it.
        most: the longest back-off.
    """

    def __init__(self, first: float, most: float) -> None:
        self._first = first
        self._most = most
        self._last: dict[str, _LastFailover] = {}

    def record(self, load_balancer_id: str, present: Iterable[str], now: float) -> None:
        """Record the start of a fail-over; `present` are the amphorae of the load balancer at this moment."""
        last = self._last.get(load_balancer_id)
        # The count restarts when as much time as the back-off has passed after its end.
        count = 1 if last is None or now - last.at > 2 * last.back_off else last.count + 1
        back_off = min(self._first * 2.0 ** min(count - 1, 60), self._most)
        self._last[load_balancer_id] = _LastFailover(count, now, back_off, frozenset(present))

    def restore(self, load_balancer_id: str, ages: Iterable[float], present: Collection[str], now: float) -> None:
        """Load earlier fail-overs. The back-off itself bounds the error of a clock that was set.

        Args:
            load_balancer_id: of the fail-overs.
            ages: how many seconds ago each began.
            present: the amphorae that existed when the last one began.
            now: the moment.
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
        """Return the seconds of the current or last back-off."""
        last = self._last.get(load_balancer_id)
        return 0.0 if last is None else last.back_off

    def is_replacement(self, load_balancer_id: str, amphora_id: str) -> bool:
        """Whether an amphora joined with or after the last fail-over."""
        last = self._last.get(load_balancer_id)
        return last is not None and amphora_id not in last.present

    def retain(self, load_balancer_ids: Collection[str]) -> None:
        """Forget all other load balancers."""
        self._last = {one: last for one, last in self._last.items() if one in load_balancer_ids}


class FailoverPermit(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions for the next automatic fail-over.

    Attributes:
        automatic: option of that name.
        held: reason of an operator that holds the breaker open; None if none does.
        state: of the breaker.
        late: why the number of late amphorae delays fail-overs until more is known; empty if it does not.
        in_progress: number of automatic fail-overs in progress.
        most_at_once: option of that name.
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
        """Return why the next fail-over must wait; empty if it may begin."""
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

    def after_start(self, number: int) -> FailoverPermit:
        """Return the permit after the start of a fail-over that replaces this number of amphorae."""
        trial = self.on_trial or self.state is BreakerState.TRIAL
        return msgspec.structs.replace(self, in_progress=self.in_progress + number, on_trial=trial)
