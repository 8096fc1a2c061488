# SPDX-License-Identifier: Apache-2.0
"""A cache of values that a service of the cloud returned.

Invariant: no value is older than the cache time. An error is not cached, so that a mistake can be corrected at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class TimedCache:
    """Values by key. Its methods are safe for threads.

    Args:
        seconds: time for which a value is kept after it was read.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._values: dict[tuple[str, ...], tuple[float, Any]] = {}

    def get(self, key: tuple[str, ...], read: Callable[[], T]) -> T:
        """Return a value that was read less than the cache time ago, or read it."""
        now = time.monotonic()
        with self._lock:
            until, value = self._values.get(key, (0.0, None))
        if now < until:
            found: T = value
            return found
        return self.refresh(key, read)

    def refresh(self, key: tuple[str, ...], read: Callable[[], T]) -> T:
        """Read a value, and keep it."""
        now = time.monotonic()
        value = read()
        with self._lock:
            # The cache drops all expired values here. Otherwise, values of deleted objects would stay in memory,
            # because no call reads these values again.
            self._values = {one: kept for one, kept in self._values.items() if now < kept[0]}
            self._values[key] = (now + self._seconds, value)
        return value

    def forget(self, *keys: tuple[str, ...]) -> None:
        """Remove values."""
        with self._lock:
            for key in keys:
                self._values.pop(key, None)
