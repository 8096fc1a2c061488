# SPDX-License-Identifier: Apache-2.0
"""Whether amphorae are replaced unasked: the circuit breaker, and how often at most. Pure.

Invariant: many that fall silent together are taken for a fault of the way to them, not of theirs: then nothing is
replaced unasked. It ends by itself: when they are heard again, or when one replaced for a trial shows that they were
dead. An operator can hold it open, or close it. Every time here is on `time.monotonic()`'s clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import Enum

import msgspec


class State(str, Enum):
    """Column `state` of the table `breaker`."""

    CLOSED = "closed"
    OPEN = "open"
    TRIAL = "trial"


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Options of [failover]; seconds where they are times."""

    percent: float = 20.0
    floor: int = 3
    most: int = 50
    window: float = 120.0
    calm: float = 30.0
    trial: float = 600.0


class Breaker(msgspec.Struct, frozen=True, kw_only=True):
    """What it is, since when, why; `calm_since` is since when so few are silent that it may close."""

    state: State = State.CLOSED
    since: float = 0.0
    reason: str = ""
    calm_since: float | None = None


class Count(msgspec.Struct, frozen=True, kw_only=True):
    """How many amphorae are watched, are silent now, and fell silent within the window and did not come back."""

    watched: int
    silent: int
    recent: int


def resumed(state: State, reason: str, limits: Limits, now: float, remaining: float | None) -> Breaker:
    """What another process has left.

    Args:
        state: as it was left.
        reason: why.
        limits: when it opens and closes.
        now: the moment.
        remaining: seconds until its trial by what that one wrote; None if it did not. A clock that was moved makes it
            neither longer than a whole wait nor shorter than none.
    """
    waited = 0.0
    if state is State.OPEN and remaining is not None:
        waited = limits.trial - min(max(remaining, 0.0), limits.trial)
    return Breaker(state=state, since=now - waited, reason=reason)


def too_many(number: int, watched: int, limits: Limits) -> str:
    """Why so many silent amphorae are not believed to be dead; empty if they are.

    Args:
        number: of silent ones.
        watched: of all, the silent ones among them.
        limits: when it is too many.
    """
    if number > limits.most:
        return f"{number} amphorae fell silent within {limits.window:g} s, more than {limits.most}"
    if number >= limits.floor and number * 100 > watched * limits.percent:
        return f"{number} of {watched} amphorae fell silent within {limits.window:g} s, more than {limits.percent:g} %"
    return ""


def after(breaker: Breaker, count: Count, limits: Limits, now: float, *, trial: bool | None = None) -> Breaker:
    """What it becomes.

    Args:
        breaker: what it is.
        count: as it is seen now; not to be called by who is blind.
        limits: when it opens and closes.
        now: the moment.
        trial: how the fail-over ended that was let through for a trial; None if none did.
    """
    if breaker.state is State.CLOSED:
        reason = too_many(count.recent, count.watched, limits)
        return Breaker(state=State.OPEN, since=now, reason=reason) if reason else breaker
    if too_many(count.silent, count.watched, limits):
        breaker = msgspec.structs.replace(breaker, calm_since=None)
    else:
        since = now if breaker.calm_since is None else breaker.calm_since
        if now - since >= limits.calm:
            return Breaker(since=now, reason=f"fewer are silent for {limits.calm:g} s")
        breaker = msgspec.structs.replace(breaker, calm_since=since)
    if breaker.state is State.TRIAL and trial is False:
        return msgspec.structs.replace(breaker, state=State.OPEN, since=now)
    if breaker.state is State.OPEN and now - breaker.since >= limits.trial:
        return msgspec.structs.replace(breaker, state=State.TRIAL, since=now)
    return breaker


class Fallen:
    """Who fell silent within the window: those that were heard again do not count, those that were replaced do."""

    def __init__(self, window: float) -> None:
        self._window = window
        self._at: dict[str, float] = {}
        self._accepted: set[str] = set()

    def note(self, silent: Collection[str], watched: Collection[str], now: float) -> int:
        """Take in who is silent now, of whom is watched; returns how many fell silent within the window."""
        self._accepted.intersection_update(silent)
        for one in silent:
            if one not in self._accepted:
                self._at.setdefault(one, now)
        back = set(watched) - set(silent)
        self._at = {
            one: at for one, at in self._at.items() if one not in back and (one in silent or now - at <= self._window)
        }
        return self.counted(now)

    def counted(self, now: float) -> int:
        """How many fell silent within the window, as far as that was taken in."""
        return sum(now - at <= self._window for at in self._at.values())

    def of(self, watched: Collection[str]) -> int:
        """Of how many: those that are watched, and those that fell silent and are being replaced."""
        return len(self._at.keys() | set(watched))

    def open_count(self, silent: Iterable[str]) -> int:
        """How many of those that are silent count while the breaker is open: not those an operator has accepted."""
        return sum(one not in self._accepted for one in silent)

    def accept(self, silent: Collection[str]) -> None:
        """These are believed to be dead: an operator says so."""
        self._accepted = set(silent)
        self._at.clear()

    def forgive(self) -> None:
        """Begin anew with the window; who is silent still has its time behind it."""
        self._at = dict.fromkeys(self._at, float("-inf"))


class _Past(msgspec.Struct, frozen=True):
    """The last fail-over nobody asked for: the how manieth without calm between, when, and who was there then."""

    times: int
    at: float
    pause: float
    there: frozenset[str]


class Pauses:
    """How long a load balancer waits for the next fail-over nobody asked for; for one thread.

    Only amphorae wait that came after the last one: that one partner dies soon after the other is no storm.

    Args:
        first: seconds of the first pause; doubles.
        most: the longest one.
    """

    def __init__(self, first: float, most: float) -> None:
        self._first = first
        self._most = most
        self._past: dict[str, _Past] = {}

    def begun(self, load_balancer_id: str, there: Iterable[str], now: float) -> None:
        """One begins; `there` are the amphorae of the load balancer at this moment."""
        past = self._past.get(load_balancer_id)
        # Calm is as long as the pause, after it.
        times = 1 if past is None or now - past.at > 2 * past.pause else past.times + 1
        pause = min(self._first * 2.0 ** min(times - 1, 60), self._most)
        self._past[load_balancer_id] = _Past(times, now, pause, frozenset(there))

    def resume(self, load_balancer_id: str, ages: Iterable[float], there: Collection[str], now: float) -> None:
        """Learn of earlier ones.

        What a clock that was moved says wrong is bounded by the pause itself.

        Args:
            load_balancer_id: whose.
            ages: how many seconds ago each began.
            there: the amphorae that were there when the last one began.
            now: the moment.
        """
        self._past.pop(load_balancer_id, None)
        for age in sorted(ages, reverse=True):
            self.begun(load_balancer_id, there, now - max(age, 0.0))

    def left(self, load_balancer_id: str, amphora_id: str, now: float) -> float:
        """Seconds an amphora has to wait."""
        past = self._past.get(load_balancer_id)
        if past is None or amphora_id in past.there:
            return 0.0
        return max(0.0, past.at + past.pause - now)

    def length(self, load_balancer_id: str) -> float:
        """Seconds of the pause it is in, or was in last."""
        past = self._past.get(load_balancer_id)
        return 0.0 if past is None else past.pause

    def is_replacement(self, load_balancer_id: str, amphora_id: str) -> bool:
        """Whether an amphora came with or after the last one."""
        past = self._past.get(load_balancer_id)
        return past is not None and amphora_id not in past.there

    def keep(self, load_balancer_ids: Collection[str]) -> None:
        """Forget all others."""
        self._past = {one: past for one, past in self._past.items() if one in load_balancer_ids}


class Allowance(msgspec.Struct, frozen=True, kw_only=True):
    """What is allowed at this moment.

    Attributes:
        automatic: option of that name.
        held: an operator holds the breaker open: why.
        state: the breaker's.
        late: why so many are late that it is waited whether they fall silent too.
        going_on: fail-overs nobody asked for that go on.
        most_at_once: how many may.
        on_trial: the one that was let through for a trial goes on.
    """

    automatic: bool = True
    held: str | None = None
    state: State = State.CLOSED
    late: str = ""
    going_on: int = 0
    most_at_once: int = 5
    on_trial: bool = False

    def refusal(self) -> str:
        """Why the next one may not begin; empty if it may."""
        if not self.automatic:
            return "[failover] automatic is off"
        if self.held is not None:
            return f"an operator holds the breaker open ({self.held})" if self.held else "the breaker is held open"
        if self.state is State.OPEN:
            return "the breaker is open"
        if self.state is State.TRIAL and self.on_trial:
            return "the breaker waits how the one ends that is replaced for a trial"
        if self.late:
            return "so many are late that it is waited whether they fall silent too"
        if self.going_on >= self.most_at_once:
            return f"{self.most_at_once} fail-overs nobody asked for go on already"
        return ""

    def taken(self, number: int) -> Allowance:
        """What is allowed after one began that replaces so many amphorae."""
        trial = self.on_trial or self.state is State.TRIAL
        return msgspec.structs.replace(self, going_on=self.going_on + number, on_trial=trial)
