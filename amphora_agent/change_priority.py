# SPDX-License-Identifier: Apache-2.0
"""The priority of configuration changes over background work.

Statistics and heartbeats of 10,000 members take 100 ms of processor time. A change that meets this work would be served
that much later. So background work consists of short steps, and waits between two steps while a change runs.

Invariant: background work waits for a limited time only, so heartbeats are in time also during long changes. A change
never waits for background work that waits for the change.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

GiveWay = Callable[[], None]
"""A function that background work calls between two steps."""


def never_wait() -> None:
    """Continue at once: for work that a change itself does."""


class ChangePriority:
    """The running changes, and the background work that waits for them. Thread-safe."""

    def __init__(self) -> None:
        self._state = threading.Condition()
        # The threads with a change that is not served yet.
        self._changing: set[int] = set()
        self._waiting_for_background = 0

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Give the calling thread priority within the block, until `served`.

        The garbage collector pauses meanwhile. Among the objects of 10,000 servers it needs 4 to 20 ms.
        """
        with self._state:
            self._changing.add(threading.get_ident())
            gc.disable()
        try:
            yield
        finally:
            self.served()

    def served(self) -> None:
        """End the priority of the calling thread, because its change is served. Repeated calls do nothing."""
        with self._state:
            self._changing.discard(threading.get_ident())
            if not self._changing:
                gc.enable()
                self._state.notify_all()

    @contextmanager
    def waiting_for_background(self) -> Iterator[None]:
        """Let background work continue within the block, because a change waits for its end."""
        with self._state:
            self._waiting_for_background += 1
            self._state.notify_all()
        try:
            yield
        finally:
            with self._state:
                self._waiting_for_background -= 1

    def background(self, seconds: float) -> BackgroundWork:
        """Return the priority of one piece of background work, which waits for this number of seconds at most."""
        return BackgroundWork(self, seconds)

    def wait_for_changes(self, seconds: float) -> None:
        """Wait until no change has priority, or until background work has to continue."""
        # The first test needs no lock: background work makes it after each step.
        if self._changing:
            with self._state:
                self._state.wait_for(lambda: not self._changing or self._waiting_for_background, seconds)


class BackgroundWork:
    """One piece of background work; ``waited`` is the number of seconds that it has waited for changes."""

    def __init__(self, priority: ChangePriority, seconds: float) -> None:
        self._priority = priority
        self._seconds = seconds
        self.waited = 0.0

    def give_way(self) -> None:
        """Wait while a change runs, if the time for waiting is not used up."""
        left = self._seconds - self.waited
        if left > 0:
            begun = time.monotonic()
            self._priority.wait_for_changes(left)
            self.waited += time.monotonic() - begun
