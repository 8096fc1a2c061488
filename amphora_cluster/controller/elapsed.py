# SPDX-License-Identifier: Apache-2.0
"""How long ago recorded times are, and which of them are old, although the database clock may be set.

A drain that ends too early costs the requests of clients. So the elapsed time is the larger one of two lower bounds:

* the time for which this process has seen the recorded time, by its monotonic clock. A drain that begins again has
  another recorded time.
* the age by the database clock, as far as this process has watched the clock without a jump.

So a jump of the clock never shortens a drain. A drain of which this process saw neither the begin nor enough of the
clock, after its start or after a jump, lasts longer: at most `drain_seconds` from the moment at which it sees the
drain first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from amphora_driver.database.clock import JUMP_SECONDS, OFFSET_VALID_SECONDS

# Seconds after a jump in which other processes may still record times of the old clock, because of old measurements or
# open transactions.
_OLD_TIMES_SECONDS = OFFSET_VALID_SECONDS + 30.0
# The process forgets the times of a group after _UNUSED_SECONDS seconds without a pass, and checks this every
# _CLEAN_SECONDS seconds.
_UNUSED_SECONDS, _CLEAN_SECONDS = 3600.0, 60.0


class ElapsedTimes:
    """The recorded times that this process sees. Its methods are safe for threads.

    Args:
        since_jump: seconds since this process last saw the database clock jump; infinity if it saw none.
        monotonic: a clock that is never set, in seconds.
    """

    def __init__(self, since_jump: Callable[[], float], monotonic: Callable[[], float] = time.monotonic) -> None:
        self._since_jump = since_jump
        self._monotonic = monotonic
        self._started = monotonic()
        self._lock = threading.Lock()
        # For each group: the time of the last pass, and when this process first saw each recorded time of a server.
        self._seen: dict[str, tuple[float, dict[tuple[str, float], float]]] = {}
        self._cleaned_at = self._started

    def of_group(self, group_id: str, now: float) -> Callable[[str, float], float]:
        """Return `Moment.elapsed` for one pass over a group.

        Args:
            group_id: the group. The process forgets the times of it that this pass does not ask for.
            now: the database clock.
        """
        moment = self._monotonic()
        reliable = min(moment - self._started, self._since_jump()) - _OLD_TIMES_SECONDS
        found: dict[tuple[str, float], float] = {}
        with self._lock:
            before = self._seen.get(group_id, (0.0, {}))[1]
            self._seen[group_id] = moment, found
            if moment - self._cleaned_at > _CLEAN_SECONDS:
                self._seen = {one: seen for one, seen in self._seen.items() if moment - seen[0] < _UNUSED_SECONDS}
                self._cleaned_at = moment

        def elapsed(server_id: str, recorded: float) -> float:
            key = server_id, recorded
            first = found[key] = before.get(key, moment)
            return max(moment - first, min(now - recorded - JUMP_SECONDS, reliable), 0.0)

        return elapsed


class PurgeClock:
    """The database clock for deletions of old rows. Not safe for threads.

    A jump forward counts only after `delay` seconds. If the clock was set wrongly and is set back soon, no row is
    deleted too early. The time since the jump is that of a monotonic clock, so other rows are deleted as before.

    Args:
        now: the database clock.
        delay: seconds until a jump forward counts.
        monotonic: a clock that is never set, in seconds.
    """

    def __init__(self, now: Callable[[], float], delay: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._delay = delay
        self._monotonic = monotonic
        # Measurements: the time of the monotonic clock, and the seconds by which the database clock was ahead of that
        # clock.
        self._offsets: list[tuple[float, float]] = []

    def now(self) -> float:
        """Return the earliest present time by the positions of the clock in the last `delay` seconds."""
        ahead, moment = self._now(), self._monotonic()
        self._offsets = [one for one in self._offsets if moment - one[0] < self._delay]
        self._offsets.append((moment, ahead - moment))
        return moment + min(offset for _, offset in self._offsets)
