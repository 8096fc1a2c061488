# SPDX-License-Identifier: Apache-2.0
"""The queue of a target: bounded by bytes. A full queue drops new lines and counts them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

# Bytes of memory that a queued line needs in addition to its text.
_OVERHEAD = 64


class LineQueue:
    """Lines from one thread for another thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lines: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self.bytes = 0
        self.dropped = 0

    @property
    def is_full(self) -> bool:
        return self.bytes >= self._limit

    def put(self, lines: Sequence[bytes]) -> None:
        """Add lines. Never waits: lines above the limit are dropped."""
        with self._changed:
            for number, line in enumerate(lines):
                if self.bytes >= self._limit:
                    self.dropped += len(lines) - number
                    break
                self._lines.append(line)
                self.bytes += len(line) + _OVERHEAD
            self._changed.notify()

    def drop(self, number: int) -> None:
        """Count lines that were not even rendered, because the queue is full."""
        with self._changed:
            self.dropped += number

    def take(self, most: int) -> list[bytes]:
        """Wait for lines and return some of at most ``most`` bytes, or one longer line; empty after `close`."""
        with self._changed:
            while not self._lines and not self._closed:
                self._changed.wait()
            found: list[bytes] = []
            size = 0
            while self._lines and not self._closed and (not found or size + len(self._lines[0]) <= most):
                line = self._lines.popleft()
                size += len(line)
                self.bytes -= len(line) + _OVERHEAD
                found.append(line)
            return found

    def hand_over(self) -> list[bytes]:
        """Return all lines for another queue, and end the wait of the reader."""
        with self._changed:
            self._closed = True
            found = list(self._lines)
            self._lines.clear()
            self.bytes = 0
            self._changed.notify_all()
            return found

    def close(self) -> None:
        """Discard all lines and end the wait of the reader."""
        with self._changed:
            self._closed = True
            self.dropped += len(self._lines)
            self._lines.clear()
            self.bytes = 0
            self._changed.notify_all()
