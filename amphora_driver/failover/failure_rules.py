# SPDX-License-Identifier: Apache-2.0
"""Who is silent, and what that is taken for: pure, by a clock that only goes forward.

Invariant: blind is never dead. An amphora's silence is the time for which this process has looked at its place in the
row of heartbeats without a pause, has found it unchanged, and has known that some health manager hears. Whatever breaks
that (a gap between two looks, no health manager that proves its hearing, a duty just taken) has everybody counted anew
from zero. No date and no other process's clock is compared with anything. And where nobody at all is heard, somebody
else has to say that the way to the amphorae is there (`doubt`): a switch that is gone says nothing to this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import msgspec

from amphora_driver.store.failovers import Cause

# (epoch, sequence) of the last heartbeat that was written down; None if there never was one.
Order = tuple[int, int] | None

# Parts of `silent_after`. Who is late is asked already, so that the answer is there when the time is over.
_LATE = 0.65
_GAP = 0.25
_DEAF = 0.4
# Nothing shorter is taken for a gap: a process that is not scheduled for so long is not blind yet (seconds).
_LEAST_GAP = 1.0
_LEAST_DEAF = 1.5
# Seconds for which an answer is good, or twice the time it may take.
_FRESH = 8.0
# Seconds between a heartbeat and its place being seen here, beside the flush: health managers write places down once a
# second, and a look comes every half.
_SEEN_LATE = 1.5
# Of an interval: a heartbeat that comes later than that was not sent, or was lost.
_JITTER = 1.25
_MISSED = 1.5


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Options of [failover], in seconds; the last two are of [health]."""

    silent_after: float = 7.0
    mute_after: float = 120.0
    probe_timeout: float = 2.0
    interval: float = 3.0
    flush: float = 0.5

    @property
    def late_after(self) -> float:
        """From when on somebody is late: suspected and asked, but not silent yet."""
        return self.silent_after * _LATE

    @property
    def quiet_after(self) -> float:
        """From when on somebody has missed a heartbeat, and may be the next of many to fall silent."""
        return min(_MISSED * self.interval + self.flush + _SEEN_LATE, self.late_after)

    @property
    def due_again(self) -> float:
        """After so long the next heartbeat would have been seen: whoever is heard from then on was heard after it."""
        return _JITTER * self.interval + self.flush + _SEEN_LATE

    @property
    def gap(self) -> float:
        """So much later than the one before a look makes everybody count anew."""
        return max(self.silent_after * _GAP, _LEAST_GAP)

    @property
    def deaf_after(self) -> float:
        """If no health manager proved its hearing for so long, nobody hears."""
        return max(self.silent_after * _DEAF, _LEAST_DEAF)

    @property
    def fresh(self) -> float:
        """For so long an answer is good, and so is none."""
        return max(_FRESH, 2 * self.probe_timeout)


class Quiet(msgspec.Struct, frozen=True, kw_only=True):
    """An amphora of which nothing new was heard since a moment on this process's clock."""

    amphora_id: str
    since: float
    order: Order

    @property
    def spoke(self) -> bool:
        """Whether anything was ever heard of it."""
        return self.order is not None


class Watch:
    """What one process has seen so far. For one thread.

    Args:
        limits: how long is long.

    Attributes:
        moved_at: when anybody's heartbeat was seen last, on the clock that `look` is given.
        blind: why it sees nobody; empty while it sees.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._quiet: dict[str, Quiet] = {}
        self._beats: dict[str, int] = {}
        self._looked: float | None = None
        self._heard: float | None = None
        self._sees_since: float | None = None
        self.moved_at: float | None = None
        self.blind = "it has just begun to look"

    def forget(self, why: str) -> None:
        """Count everybody anew: something else than amphorae was the matter."""
        self._quiet.clear()
        self._beats.clear()
        self._looked = self._heard = self._sees_since = self.moved_at = None
        self.blind = why

    def look(self, orders: Mapping[str, Order], beats: Mapping[str, int], now: float) -> None:
        """Take in what the tables say.

        Args:
            orders: of every amphora that is to be heard, the place of its last heartbeat.
            beats: of every health manager, how often it has proven that it hears.
            now: when that was read, on `time.monotonic()`'s clock.
        """
        if self._looked is not None and not 0 <= now - self._looked <= self._limits.gap:
            self.forget(f"it did not look for {now - self._looked:.1f} s")
        self._looked = now
        if any(beat != self._beats.get(name, beat) for name, beat in beats.items()):
            self._heard = now
        self._beats = dict(beats)
        if self._heard is None or now - self._heard > self._limits.deaf_after:
            # Also those that changed just now: from here on nobody is known to hear.
            self._quiet.clear()
            self._sees_since = None
            self.blind = _deaf(beats)
        elif self._sees_since is None:
            self._quiet.clear()
            self._sees_since, self.blind = now, ""
        before = self._quiet
        if any((known := before.get(one)) is not None and known.order != order for one, order in orders.items()):
            self.moved_at = now
        self._quiet = {
            amphora_id: known
            if (known := before.get(amphora_id)) is not None and known.order == order
            else Quiet(amphora_id=amphora_id, since=now, order=order)
            for amphora_id, order in orders.items()
        }

    def quiet(self, now: float, seconds: float) -> dict[str, Quiet]:
        """Those of whom nothing was heard for so many seconds; nobody while this process is blind."""
        if self.blind:
            return {}
        return {one.amphora_id: one for one in self._quiet.values() if now - one.since >= seconds}

    def sees_for(self, now: float) -> float:
        """Seconds for which it has not been blind."""
        return 0.0 if self._sees_since is None else now - self._sees_since


def _deaf(beats: Mapping[str, int]) -> str:
    return "no health manager proves that it hears" if beats else "there is no health manager"


class How(str, Enum):
    """What came of asking an agent."""

    ANSWERS = "answers"
    UNANSWERED = "unanswered"
    BLIND = "blind"


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the second witness said.

    Attributes:
        how: it.
        at: when it was asked, on this process's clock.
        words: why.
        blind_at: when it could not be asked from here, the last time; None if it always could.
    """

    how: How
    at: float
    words: str = ""
    blind_at: float | None = None


class Kind(str, Enum):
    """As what somebody silent is shown (column `kind` of `silence`)."""

    SILENT = "silent"
    MUTE = "mute"
    NEVER_SPOKE = "never_spoke"


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """What is thought of a silent amphora.

    Attributes:
        kind: as what it is shown.
        cause: for what it is to be replaced; None if it is not to be, or not yet.
        dead: it does not answer either: it serves nobody.
        stale: that was so some time ago; it has to be asked again before anything follows.
        words: what follows from that, or why nothing does.
    """

    kind: Kind
    words: str
    cause: Cause | None = None
    dead: bool = False
    stale: bool = False


class Company(msgspec.Struct, frozen=True, kw_only=True):
    """What else is known of the way to the amphorae than that one of them is silent.

    Attributes:
        watched: how many amphorae there are to be heard.
        heard_at: when anybody's heartbeat was seen last; None if never.
        answered_at: when an agent that answered was asked, the last time; None if none did.
        witnesses: there are some, so that no agent counts as not answering while none of them can be reached.
    """

    watched: int
    heard_at: float | None = None
    answered_at: float | None = None
    witnesses: bool = False


def doubt(quiet: Quiet, company: Company, now: float, limits: Limits) -> str:
    """Why it may be the way to all amphorae that is gone, and not this one; empty if somebody shows that it is there.

    What is silent and does not answer looks the same in both cases. Heard by then has to be somebody after this one's
    next heartbeat was due: the last one of another may be of just before the way was gone.
    """
    since = quiet.since + limits.due_again
    shown = any(at is not None and at >= since for at in (company.heard_at, company.answered_at))
    if shown or company.witnesses:
        return ""
    # Of one on its own nobody else can be heard. The old one goes only when the new one serves.
    patience = 2 * limits.silent_after
    if company.watched > 1:
        patience = max(limits.mute_after, patience)
    if now - quiet.since >= patience:
        return ""
    return f"nobody at all is heard, and [failover] witnesses is empty: it is believed after {patience:g} s of silence"


def is_good(answer: Answer | None, quiet: Quiet, now: float, limits: Limits) -> bool:
    """Whether an answer says something of this silence, and is not too old."""
    return answer is not None and answer.at >= quiet.since and now - answer.at <= limits.fresh


def judge(quiet: Quiet, answer: Answer | None, now: float, limits: Limits, doubted: str = "") -> Judgement:
    """What to think of an amphora that has been silent for long enough.

    Args:
        quiet: its silence.
        answer: what came of asking it.
        now: the moment.
        limits: how long is long.
        doubted: why it may be the way to it (`doubt`); empty if it is not.
    """
    kind = Kind.SILENT if quiet.spoke else Kind.NEVER_SPOKE
    if answer is None or answer.at < quiet.since:
        return Judgement(kind=kind, words="its agent is being asked")
    stale = not is_good(answer, quiet, now, limits)
    if answer.how is How.BLIND:
        return Judgement(kind=kind, words=f"nothing follows: its agent cannot be asked from here ({answer.words})")
    if answer.how is How.ANSWERS:
        kind = Kind.MUTE if quiet.spoke else Kind.NEVER_SPOKE
        over = now - quiet.since >= limits.mute_after
        said = f"its agent answers ({answer.words})" if answer.words else "its agent answers"
        words = f"{said}; it is replaced after {limits.mute_after:g} s of silence"
        # Also one that was never heard: it may well serve, and must not be taken for dead.
        return Judgement(kind=kind, words=words, cause=Cause.MUTE if over else None, stale=stale)
    if answer.blind_at is not None and now - answer.blind_at < limits.silent_after:
        # Who has just got its own network back hears nobody yet, and reaches nobody either.
        return Judgement(kind=kind, words="nothing follows yet: a moment ago its agent could not be asked from here")
    if doubted:
        return Judgement(kind=kind, words=f"nothing follows yet: its agent does not answer, but {doubted}")
    cause = Cause.SILENT if quiet.spoke else Cause.NEVER_SPOKE
    words = f"its agent does not answer ({answer.words})"
    return Judgement(kind=kind, words=words, cause=cause, dead=not stale, stale=stale)
