# SPDX-License-Identifier: Apache-2.0
"""Sockets and times that one thread waits for.

Invariant: what has arrived is handed out before what is late: a process that was held up for a while does not take
answers that have been here for long for missing ones.
"""

from __future__ import annotations

import fcntl
import heapq
import selectors
import socket
import time
from collections.abc import Callable

# libnftables waits with select(2), which cannot wait for larger numbers: those below are left to it.
_SCARCE, _PLENTY = 512, 1024
# epoll counts milliseconds in 32 bits: who waits for longer looks in between.
_LONGEST_SECONDS = 3600.0


class Timer:
    """Something that is done at a time, unless it is cancelled."""

    __slots__ = ("action", "order", "when")

    def __init__(self, when: float, order: int, action: Callable[[], None]) -> None:
        self.when = when
        self.order = order
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        self.action = None

    def __lt__(self, other: Timer) -> bool:
        return (self.when, self.order) < (other.when, other.order)


class Loop:
    """Who waits for what. Used by one thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[Timer] = []
        self._order = 0

    def at(self, when: float, action: Callable[[], None]) -> Timer:
        """Have something done at a time of the monotonic clock."""
        self._order += 1
        timer = Timer(when, self._order, action)
        heapq.heappush(self._timers, timer)
        return timer

    def read(self, one: socket.socket, action: Callable[[], None]) -> None:
        """Have something done whenever a socket has something to read, or an error."""
        self._selector.register(one, selectors.EVENT_READ, [action])

    def written(self, one: socket.socket, action: Callable[[], None]) -> None:
        """The same when a socket can be written to."""
        self._selector.register(one, selectors.EVENT_WRITE, [action])

    def forget(self, one: socket.socket) -> None:
        """Wait for this socket no longer; no error if nobody does."""
        try:
            self._selector.unregister(one)
        except (KeyError, ValueError):
            return

    def turn(self, longest: float | None = None) -> None:
        """Wait for the next thing, at most for so many seconds, and do all that is due."""
        for key, _ in self._selector.select(self._patience(longest)):
            # An event before this one may have closed it; another socket may have its number by now.
            present = self._selector.get_map().get(key.fileobj) if _is_open(key.fileobj) else None
            if present is not None and present.data is key.data:
                key.data[0]()
        now = time.monotonic()
        while self._timers and self._timers[0].when <= now:
            action = heapq.heappop(self._timers).action
            if action is not None:
                action()

    def _patience(self, longest: float | None) -> float | None:
        while self._timers and self._timers[0].action is None:
            heapq.heappop(self._timers)
        if not self._timers:
            return longest
        until = min(max(0.0, self._timers[0].when - time.monotonic()), _LONGEST_SECONDS)
        return until if longest is None else min(until, longest)

    def close(self) -> None:
        self._selector.close()


def _is_open(one: object) -> bool:
    return isinstance(one, socket.socket) and one.fileno() >= 0


def roomy(one: socket.socket) -> socket.socket:
    """The same socket that does not block, under a large number if small ones are about to be scarce."""
    one.setblocking(False)
    if one.fileno() < _SCARCE:
        return one
    try:
        number = fcntl.fcntl(one.fileno(), fcntl.F_DUPFD_CLOEXEC, _PLENTY)
    except OSError:
        return one  # there is no large one
    with one:
        moved = socket.socket(fileno=number)
    moved.setblocking(False)
    return moved
