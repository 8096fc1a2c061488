# SPDX-License-Identifier: Apache-2.0
"""How many jobs a controller does at once.

Invariant: a job that only waits for somebody takes no hand away from those that could go on. Whoever has been in one
step for longer than `STALL` counts as waiting: another job may begin in its place. What is tried again, having failed
before, never takes more than half of the hands. So one black hole costs the others a hand for `STALL` seconds each time
it is tried, and many of them never all hands.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amphora_driver.reconcile.job import Turn

# Seconds after which a step counts as waiting for somebody. Most steps take some 20 ms, a boot some hundreds.
STALL = 1.0
# How many jobs there are at the most for each hand, with those that wait.
CROWD = 4


class Hands:
    """The jobs of this process; for any thread.

    Args:
        number: how many work at once.
    """

    def __init__(self, number: int) -> None:
        self.most = number * CROWD
        self._number = number
        self._turns: set[Turn] = set()
        self._lock = threading.Lock()

    def free(self) -> bool:
        """Whether another job may begin."""
        turns = self.turns()
        return len(turns) < self.most and len(_working(turns)) < self._number

    def only_fresh(self) -> bool:
        """Whether the next job is to be one that has not failed before."""
        failed = [turn for turn in self.turns() if turn.lease.attempts]
        return len(_working(failed)) >= max(self._number // 2, 1) or len(failed) >= self.most // 2

    def take(self, turn: Turn) -> None:
        """A job begins."""
        with self._lock:
            self._turns.add(turn)

    def lay_down(self, turn: Turn) -> None:
        """A job has ended."""
        with self._lock:
            self._turns.discard(turn)

    def turns(self) -> list[Turn]:
        """All jobs there are now."""
        with self._lock:
            return list(self._turns)


def _working(turns: list[Turn]) -> list[Turn]:
    now = time.monotonic()
    return [turn for turn in turns if now - turn.since < STALL]
