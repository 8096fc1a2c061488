# SPDX-License-Identifier: Apache-2.0
"""The schedule of health checks: each member is checked once in its interval, and checks are spread."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from amphora_agent.l4.event_loop import EventLoop, Timer
from amphora_agent.l4.stderr_log import log
from amphora_agent.l4_checks.check import Check, CheckType, Factories, Target, error_text, is_local_error
from amphora_agent.l4_checks.member_state import MemberKey

# Maximum number of first checks per second. Without the limit, the checks of all new members would start at once.
_STARTS_PER_SECOND = 200
_LATE_SECONDS, _CATCH_UP_SHARE = 1.0, 0.2

OnCheckResult = Callable[[MemberKey, bool, str], None]


@dataclass(eq=False)
class _ScheduledCheck:
    """The schedule of one member. Times are from the monotonic clock."""

    key: MemberKey
    target: Target
    when: float
    started: float = 0.0
    check: Check | None = None
    timer: Timer | None = None


class Schedule:
    """Starts the checks of all members. ``factories`` create the checks of a monitor type when needed."""

    def __init__(self, loop: EventLoop, factories: Factories, on_result: OnCheckResult) -> None:
        self._loop = loop
        self._factories = factories
        self._on_result = on_result
        self._check_types: dict[str, CheckType] = {}
        self._jobs: dict[MemberKey, _ScheduledCheck] = {}
        self._last_error = ""

    def set_targets(self, targets: Mapping[MemberKey, Target]) -> None:
        """Check these targets from now on. An unchanged target keeps its schedule."""
        # Most targets are the same objects as before, and a comparison of their values takes longer.
        other = [key for key, job in self._jobs.items() if targets.get(key) is not job.target]
        for key in [key for key in other if targets.get(key) != self._jobs[key].target]:
            self._end(self._jobs.pop(key))
        new = [key for key in targets if key not in self._jobs]
        random.shuffle(new)
        now = time.monotonic()
        for number, key in enumerate(new):
            span = min(targets[key].monitor.interval, len(new) / _STARTS_PER_SECOND)
            share = (number + random.random()) / len(new)  # noqa: S311 (not a secret)
            job = self._jobs[key] = _ScheduledCheck(key, targets[key], now + span * share)
            job.timer = self._loop.call_at(job.when, partial(self._start, job))
        needed = {target.monitor.type for target in targets.values()}
        for name in [name for name in self._check_types if name not in needed]:
            self._check_types.pop(name).close()

    def _start(self, job: _ScheduledCheck) -> None:
        now = time.monotonic()
        if now - job.when > _LATE_SECONDS:
            share = _CATCH_UP_SHARE * random.random()  # noqa: S311 (not a secret)
            self._schedule_next(job, now + share * job.target.monitor.interval)
            return
        job.started = now
        if job.check is not None:
            job.check.end()
            job.check = None
        job.timer = self._loop.call_at(now + job.target.monitor.timeout, partial(self._expire, job))
        try:
            kind = job.target.monitor.type
            if kind not in self._check_types:
                self._check_types[kind] = self._factories[kind](self._loop)
            job.check = self._check_types[kind].start(job.target, partial(self._finish, job))
        except OSError as error:
            if is_local_error(error):
                if str(error) != self._last_error:
                    log(f"the L4 daemon cannot start a health check, and retries after the check's interval: {error}")
                self._last_error = str(error)
                self._schedule_next(job)
            else:
                self._finish(job, False, error_text(error))

    def _expire(self, job: _ScheduledCheck) -> None:
        if job.check is not None:
            self._finish(job, *job.check.expire())

    def _finish(self, job: _ScheduledCheck, good: bool, reason: str) -> None:
        if self._jobs.get(job.key) is job:
            self._schedule_next(job)
            self._on_result(job.key, good, reason)

    def _schedule_next(self, job: _ScheduledCheck, when: float | None = None) -> None:
        if job.timer is not None:
            job.timer.cancel()
        job.when = max(time.monotonic(), job.started + job.target.monitor.interval) if when is None else when
        job.timer = self._loop.call_at(job.when, partial(self._start, job))

    def _end(self, job: _ScheduledCheck) -> None:
        if job.timer is not None:
            job.timer.cancel()
        if job.check is not None:
            job.check.end()

    def close(self) -> None:
        self.set_targets({})
