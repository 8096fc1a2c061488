# SPDX-License-Identifier: Apache-2.0
"""Event loop of one thread: it handles events of sockets before expired timers."""

from __future__ import annotations

import fcntl
import heapq
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

# Range of file descriptors that sockets leave free for libnftables, which calls select(2) and therefore needs
# descriptors below 1024.
_RESERVED_FROM, _RESERVED_BELOW = 512, 1024
# Longest wait in seconds, because epoll_wait(2) accepts at most 2^31 milliseconds.
_MAX_WAIT_SECONDS = 3600.0


@dataclass(order=True)
class Timer:
    """A call at a time, unless the timer is cancelled."""

    when: float
    order: int
    action: Callable[[], None] | None = field(compare=False)

    def cancel(self) -> None:
        self.action = None


class EventLoop:
    """Registered sockets and timers. Used by one thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[Timer] = []
        self._order = 0

    def call_at(self, when: float, action: Callable[[], None]) -> Timer:
        """Call an action once at a time of the monotonic clock."""
        self._order += 1
        timer = Timer(when, self._order, action)
        heapq.heappush(self._timers, timer)
        return timer

    def add_reader(self, one: socket.socket, action: Callable[[], None]) -> None:
        """Call an action whenever a socket is readable or has an error."""
        self._selector.register(one, selectors.EVENT_READ, [action])

    def add_writer(self, one: socket.socket, action: Callable[[], None]) -> None:
        self._selector.register(one, selectors.EVENT_WRITE, [action])

    def remove(self, one: socket.socket) -> None:
        """Stop watching a socket; no error if the loop does not watch it."""
        with suppress(KeyError, ValueError):
            self._selector.unregister(one)

    def run_once(self, longest: float | None = None) -> None:
        """Wait for the next event, at most for this number of seconds, and handle everything that is due."""
        for key, _ in self._selector.select(self._timeout(longest)):
            # An earlier event may have closed this socket, and a new socket may have got the same descriptor. The loop
            # must not call the old socket's function, or deliver the event to the new socket.
            is_open = isinstance(key.fileobj, socket.socket) and key.fileobj.fileno() >= 0
            present = self._selector.get_map().get(key.fileobj) if is_open else None
            if present is not None and present.data is key.data:
                key.data[0]()
        now = time.monotonic()
        while self._timers and self._timers[0].when <= now:
            action = heapq.heappop(self._timers).action
            if action is not None:
                action()

    def _timeout(self, longest: float | None) -> float | None:
        while self._timers and self._timers[0].action is None:
            heapq.heappop(self._timers)
        if not self._timers:
            return longest
        until = min(max(0.0, self._timers[0].when - time.monotonic()), _MAX_WAIT_SECONDS)
        return until if longest is None else min(until, longest)

    def close(self) -> None:
        self._selector.close()


def make_nonblocking(one: socket.socket) -> socket.socket:
    """Return the socket in non-blocking mode, with a high descriptor if the low ones are reserved."""
    one.setblocking(False)
    if one.fileno() < _RESERVED_FROM:
        return one
    try:
        number = fcntl.fcntl(one.fileno(), fcntl.F_DUPFD_CLOEXEC, _RESERVED_BELOW)
    except OSError:
        # If the process may open at most 1024 files, fcntl() fails, and the socket keeps its low descriptor.
        return one
    with one:
        moved = socket.socket(fileno=number)
    moved.setblocking(False)
    return moved
