# SPDX-License-Identifier: Apache-2.0
"""When an operation has to be over.

Invariant: there is one for each operation, made when it begins and handed down. Whoever waits for something takes the
least of its own patience and of what is left. It may be brought forward, also from another thread, and never put off.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from amphora_driver.errors import DeadlinePassed

if TYPE_CHECKING:
    from collections.abc import Iterator


class Deadline:
    """A moment on the clock that only goes forward, and how far away it is.

    Args:
        seconds: from now.
        wanted: what has to be done by then, as an infinitive; for the error.
        part_of: the operation this is a part of; it ends with that one at the latest.
    """

    def __init__(self, seconds: float, wanted: str = "finish", part_of: Deadline | None = None) -> None:
        self._wanted = wanted
        self._whole = part_of
        self._seconds = seconds
        self._at = time.monotonic() + seconds
        # Why it was brought forward.
        self._reason = ""

    def left(self) -> float:
        """Seconds until then; zero or less when it has passed."""
        own = self._at - time.monotonic()
        return own if self._whole is None else min(own, self._whole.left())

    def passed(self) -> bool:
        """Whether nothing is left."""
        return self.left() <= 0

    def least(self, seconds: float) -> float:
        """How long somebody may wait that would wait for so many seconds; more than 0.

        Raises:
            DeadlinePassed: nothing is left.
        """
        left = self.left()
        if left <= 0:
            raise DeadlinePassed(self._wanted, self.why())
        return min(seconds, left)

    def within(self, seconds: float) -> Deadline:
        """A part of this operation, that has so many seconds at the most."""
        return Deadline(seconds, self._wanted, self)

    def cut(self, reason: str, grace: float = 0.0) -> None:
        """Bring it forward: nothing is left after `grace` seconds."""
        self._reason = self._reason or reason
        self._at = min(self._at, time.monotonic() + grace)

    def why(self) -> str:
        """Why nothing is left."""
        if self._reason:
            return self._reason
        if self._whole is not None and self._whole.passed():
            return self._whole.why()
        return f"it was not done in {self._seconds:g} s"


_CURRENT: ContextVar[Deadline | None] = ContextVar("_CURRENT", default=None)


@contextmanager
def kept(deadline: Deadline) -> Iterator[None]:
    """Have whatever this thread calls keep the deadline: backends whose interfaces do not speak of time."""
    token = _CURRENT.set(deadline)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def least(seconds: float) -> float:
    """How long whoever would wait for so many seconds may wait in the operation this thread is in.

    Raises:
        DeadlinePassed: it has no time left.
    """
    current = _CURRENT.get()
    return seconds if current is None else current.least(seconds)
