# SPDX-License-Identifier: Apache-2.0
"""When which member is checked.

Invariant: each is checked once in its monitor's interval, at its own time: a thousand members are a thousand moments.
A check that is late because this process was held up is not made up for in a burst.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial

from amphora_agent.l4.event_loop import Loop, Timer
from amphora_agent.l4_checks.check import Check, Kind, Target, is_ours, words
from amphora_agent.l4_checks.member_state import Key

# How many new members are asked in a second, at most; one that comes alone is asked at once.
_AT_A_TIME = 200
_LATE_SECONDS, _CATCH_UP = 1.0, 0.2

Verdict = Callable[[Key, bool, str], None]


class _Job:
    """One member that is checked."""

    __slots__ = ("begun", "check", "key", "target", "timer", "when")

    def __init__(self, key: Key, target: Target, when: float) -> None:
        self.key = key
        self.target = target
        self.when = when
        self.begun = when
        self.check: Check | None = None
        self.timer: Timer | None = None


class Schedule:
    """Checks whom it is told to.

    Args:
        kinds: by a monitor's type, what makes its kind of checks. It is made when there is a member to check so,
            and closed when there is none.
        verdict: hears of each check.
    """

    def __init__(self, loop: Loop, kinds: Mapping[str, Callable[[Loop], Kind]], verdict: Verdict) -> None:
        self._loop = loop
        self._makers = kinds
        self._verdict = verdict
        self._kinds: dict[str, Kind] = {}
        self._jobs: dict[Key, _Job] = {}
        self._trouble = ""

    def want(self, targets: Mapping[Key, Target]) -> None:
        """Check these from now on. Whose check is the same as before goes on as it was."""
        for key in [key for key, job in self._jobs.items() if targets.get(key) != job.target]:
            self._end(self._jobs.pop(key))
        fresh = [key for key in targets if key not in self._jobs]
        random.shuffle(fresh)
        now = time.monotonic()
        for place, key in enumerate(fresh):
            span = min(targets[key].monitor.interval, len(fresh) / _AT_A_TIME)
            share = (place + random.random()) / len(fresh)  # noqa: S311 (nobody has to guess it)
            job = self._jobs[key] = _Job(key, targets[key], now + span * share)
            job.timer = self._loop.at(job.when, partial(self._begin, job))
        needed = {target.monitor.type for target in targets.values()}
        for name in [name for name in self._kinds if name not in needed]:
            self._kinds.pop(name).close()

    def _begin(self, job: _Job) -> None:
        now = time.monotonic()
        if now - job.when > _LATE_SECONDS:
            self._next(job, now + _CATCH_UP * job.target.monitor.interval * random.random())  # noqa: S311 (as above)
            return
        job.begun = now
        if job.check is not None:
            job.check.end()
            job.check = None
        job.timer = self._loop.at(now + job.target.monitor.timeout, partial(self._expire, job))
        try:
            job.check = self._kind(job.target.monitor.type).begin(job.target, partial(self._said, job))
        except OSError as error:
            if is_ours(error):
                self._complain(str(error))
                self._next(job)
            else:
                self._said(job, False, words(error))

    def _kind(self, name: str) -> Kind:
        if name not in self._kinds:
            self._kinds[name] = self._makers[name](self._loop)
        return self._kinds[name]

    def _expire(self, job: _Job) -> None:
        if job.check is not None:
            self._said(job, *job.check.expire())

    def _said(self, job: _Job, good: bool, seen: str) -> None:
        if self._jobs.get(job.key) is job:
            self._next(job)
            self._verdict(job.key, good, seen)

    def _next(self, job: _Job, when: float | None = None) -> None:
        if job.timer is not None:
            job.timer.cancel()
        job.when = max(time.monotonic(), job.begun + job.target.monitor.interval) if when is None else when
        job.timer = self._loop.at(job.when, partial(self._begin, job))

    def _complain(self, text: str) -> None:
        if text != self._trouble:
            sys.stderr.write(f"checker: members cannot be checked: {text}\n")
            sys.stderr.flush()
        self._trouble = text

    def _end(self, job: _Job) -> None:
        if job.timer is not None:
            job.timer.cancel()
        if job.check is not None:
            job.check.end()

    def close(self) -> None:
        self.want({})
