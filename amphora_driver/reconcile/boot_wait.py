# SPDX-License-Identifier: Apache-2.0
"""Wait for the agents of booting amphorae, all in one thread.

Invariant: a waiting load balancer uses no thread and no lease. An agent that listens is a hint only: the controller
makes the load balancer due, and the next job queries the agent. After a lost hint, the row is due at the end of its
pause anyway.
"""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import msgspec

from amphora_driver.errors import AmphoraDriverError

LOG = logging.getLogger(__name__)
# Shortest and longest pause in seconds between two connection attempts to a booting amphora.
_MIN_PAUSE, _MAX_PAUSE = 0.01, 0.25
# Seconds of pause for each second that the controller has waited for the amphora, up to _MAX_PAUSE.
_PAUSE_PER_SECOND = 0.02
# Seconds of pause for each booting amphora, up to _MAX_PAUSE.
_PAUSE_PER_ENTRY = 0.0005
# Seconds after which an unanswered attempt is repeated. The kernel would repeat its SYN packet only after one, three
# and seven seconds (RFC 6298).
_CONNECT_TIMEOUT = 0.5
# An amphora may accept connections although its agent does not answer. Each accepted connection then doubles the delay
# before the next connection, up to _MAX_REPEAT_DELAY seconds.
_REPEAT_DELAY, _MAX_REPEAT_DELAY = 0.05, 5.0
_MAX_DOUBLINGS = 8
# After this number of seconds, an accepted connection no longer delays the next connection.
_REMEMBER_SECONDS = 60.0
# Pause in seconds after an unexpected error.
_ERROR_BACKOFF = 0.5


class AwaitedAgent(msgspec.Struct, frozen=True):
    """An amphora whose agent is awaited, for at most `seconds`."""

    amphora_id: str
    address: str
    load_balancer_id: str
    seconds: float


class _Entry(msgspec.Struct, eq=False):
    """The state of an awaited amphora; times are of `time.monotonic()`."""

    awaited: AwaitedAgent
    since: float
    until: float
    next_at: float
    socket: socket.socket | None = None


class BootWait:
    """Connects to the agents' ports until they listen.

    The thread of `run` calls `on_listening` with the load balancers whose agents listen.
    """

    def __init__(self, port: int, on_listening: Callable[[Sequence[str]], None]) -> None:
        self._port = port
        self._on_listening = on_listening
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        # For each amphora: the number of connections that it accepted, and the time of the last connection.
        self._connected: dict[str, tuple[int, float]] = {}
        # Removed entries whose sockets are still open. The selector in `run` may still watch these sockets, so only the
        # thread of `run` closes them.
        self._removed: list[_Entry] = []
        self._stopping = False
        self._selector = selectors.DefaultSelector()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        for end in (self._wake_receiver, self._wake_sender):
            end.setblocking(False)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, amphorae: Iterable[AwaitedAgent]) -> None:
        """Begin to wait for the agents of these amphorae; callable from any thread."""
        now = time.monotonic()
        with self._lock:
            for one in amphorae:
                self._remove(one.amphora_id)
                times, _last = self._connected.get(one.amphora_id, (0, 0.0))
                delay = 0.0 if not times else min(_REPEAT_DELAY * 2 ** min(times, _MAX_DOUBLINGS), _MAX_REPEAT_DELAY)
                self._entries[one.amphora_id] = _Entry(one, now, now + one.seconds, now + delay)
        self._wake()

    def remove_load_balancer(self, load_balancer_id: str) -> None:
        """End the wait for the amphorae of a load balancer; callable from any thread."""
        with self._lock:
            gone = [one for one, entry in self._entries.items() if entry.awaited.load_balancer_id == load_balancer_id]
            for amphora_id in gone:
                self._remove(amphora_id)
        if gone:
            self._wake()

    def run(self) -> None:
        try:
            while not self._stopping:
                try:
                    self._run_once()
                except Exception:
                    # An error must not end this thread. Without this thread, a job would continue only after its
                    # planned pause, even if the agent answers earlier.
                    LOG.exception(
                        "the controller failed unexpectedly while it waited for booting amphorae, and continues to wait"
                    )
                    time.sleep(_ERROR_BACKOFF)
        finally:
            with self._lock:
                for amphora_id in list(self._entries):
                    self._remove(amphora_id)
            self._close_removed()
            self._selector.close()
            self._wake_receiver.close()
            self._wake_sender.close()

    def stop(self) -> None:
        self._stopping = True
        self._wake()

    def _run_once(self) -> None:
        ready = self._selector.select(self._start_due())
        listening = []
        with self._lock:
            for key, _events in ready:
                entry = key.data
                if entry is None:
                    with suppress(BlockingIOError):
                        while self._wake_receiver.recv(64):
                            pass
                elif entry.socket is not None and self._is_connected(entry):
                    listening.append(entry.awaited)
            for one in listening:
                self._remove(one.amphora_id)
        self._close_removed()
        if not listening:
            return
        try:
            self._on_listening(sorted({one.load_balancer_id for one in listening}))
        except (AmphoraDriverError, OSError) as error:
            LOG.warning(
                "the controller could not start the jobs of load balancers with booted amphorae; the next "
                "poll of the database starts these jobs: %s",
                error,
            )

    def _start_due(self) -> float | None:
        """Start the connections that are due; return the seconds until the next one, None without any."""
        with self._lock:
            now = time.monotonic()
            for entry in [one for one in self._entries.values() if one.until <= now]:
                self._remove(entry.awaited.amphora_id)
            for entry in self._entries.values():
                if entry.next_at <= now:
                    self._connect(entry, now)
            times = [min(entry.next_at, entry.until) for entry in self._entries.values()]
        self._close_removed()
        return max(min(times) - time.monotonic(), 0.0) if times else None

    def _connect(self, entry: _Entry, now: float) -> None:
        self._close(entry)
        entry.next_at = now + self._pause(entry, now)
        family = socket.AF_INET6 if ":" in entry.awaited.address else socket.AF_INET
        try:
            connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        except OSError as error:
            # All file descriptors of the process may be in use for a moment, so the attempt is repeated.
            LOG.debug(
                "the controller could not open a socket to booting amphora %s and tries again later: %s",
                entry.awaited.amphora_id,
                error,
            )
            return
        try:
            # The connection may succeed at once (code 0). The selector then reports the socket as writable, as after
            # EINPROGRESS.
            code = connection.connect_ex((entry.awaited.address, self._port))
            if code in (0, errno.EINPROGRESS):
                self._selector.register(connection, selectors.EVENT_WRITE, entry)
                entry.socket, entry.next_at = connection, now + _CONNECT_TIMEOUT
        except (OSError, ValueError) as error:
            # An invalid address is only logged here, because the next job of the load balancer reports it as an error.
            LOG.debug(
                "the controller could not connect to booting amphora %s and tries again later: %s",
                entry.awaited.amphora_id,
                error,
            )
        if entry.socket is None:
            connection.close()

    def _is_connected(self, entry: _Entry) -> bool:
        taken = entry.socket is not None and entry.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
        self._close(entry)
        now = time.monotonic()
        entry.next_at = now + self._pause(entry, now)
        if taken:
            times, _last = self._connected.get(entry.awaited.amphora_id, (0, 0.0))
            self._connected[entry.awaited.amphora_id] = (times + 1, now)
        return taken

    def _pause(self, entry: _Entry, now: float) -> float:
        pause = max(_MIN_PAUSE, _PAUSE_PER_SECOND * (now - entry.since), _PAUSE_PER_ENTRY * len(self._entries))
        return min(pause, _MAX_PAUSE)

    def _remove(self, amphora_id: str) -> None:
        entry = self._entries.pop(amphora_id, None)
        if entry is not None:
            self._removed.append(entry)

    def _close_removed(self) -> None:
        """Close the sockets of removed entries, in the thread that selects on them."""
        with self._lock:
            for entry in self._removed:
                self._close(entry)
            self._removed.clear()
            old = time.monotonic() - _REMEMBER_SECONDS
            self._connected = {one: seen for one, seen in self._connected.items() if seen[1] > old}

    def _close(self, entry: _Entry) -> None:
        if entry.socket is not None:
            self._selector.unregister(entry.socket)
            entry.socket.close()
            entry.socket = None

    def _wake(self) -> None:
        # The send fails if the socket is full or `run` has ended. A full socket already contains a message that wakes
        # `run`.
        with suppress(OSError):
            self._wake_sender.send(b"!")
