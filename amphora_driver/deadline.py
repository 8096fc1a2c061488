# SPDX-License-Identifier: Apache-2.0
"""Deadlines of operations.

Invariant: each operation has one deadline, created at its start and passed to all its parts. Every wait uses the
shorter of its own time-out and the remaining time. Any thread may bring a deadline forward; nothing extends it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from amphora_driver.errors import DeadlinePassed


class Deadline:
    """A moment on the monotonic clock.

    `wanted` is the purpose of the operation, as an infinitive, for the error. `part_of` is the deadline of the
    enclosing operation, which also limits this one.
    """

    def __init__(self, seconds: float, wanted: str = "finish", part_of: Deadline | None = None) -> None:
        self._wanted, self._whole, self._seconds = wanted, part_of, seconds
        self._at = time.monotonic() + seconds
        self._reason = ""

    def left(self) -> float:
        """Return the remaining seconds; zero or less after the deadline."""
        own = self._at - time.monotonic()
        return own if self._whole is None else min(own, self._whole.left())

    def passed(self) -> bool:
        return self.left() <= 0

    def limit_wait(self, seconds: float) -> float:
        """Return the shorter of a time-out and the remaining time, or raise `DeadlinePassed`."""
        left = self.left()
        if left <= 0:
            raise DeadlinePassed(self._wanted, self.reason())
        return min(seconds, left)

    def within(self, seconds: float) -> Deadline:
        """Return the deadline of a part of this operation, at most this many seconds from now."""
        return Deadline(seconds, self._wanted, self)

    def bring_forward(self, reason: str, grace: float = 0.0) -> None:
        """Bring the deadline forward to `grace` seconds from now."""
        self._reason = self._reason or reason
        self._at = min(self._at, time.monotonic() + grace)

    def reason(self) -> str:
        if self._reason:
            return self._reason
        if self._whole is not None and self._whole.passed():
            return self._whole.reason()
        return f"it did not finish in {self._seconds:g} s"


_CURRENT: ContextVar[Deadline | None] = ContextVar("_CURRENT", default=None)


@contextmanager
def apply_deadline(deadline: Deadline) -> Iterator[None]:
    """Apply the deadline to all calls of this thread: backend interfaces have no deadline argument."""
    token = _CURRENT.set(deadline)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def part_of_current(seconds: float, wanted: str) -> Deadline:
    """Return the deadline of a part of this thread's operation, at most this many seconds from now."""
    return Deadline(seconds, wanted, _CURRENT.get())


def limit_wait(seconds: float) -> float:
    """Return the shorter of a time-out and the remaining time of this thread, or raise `DeadlinePassed`."""
    current = _CURRENT.get()
    return seconds if current is None else current.limit_wait(seconds)
