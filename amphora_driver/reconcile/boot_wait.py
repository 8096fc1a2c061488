# SPDX-License-Identifier: Apache-2.0
"""Wait for the agents of booting amphorae, all in one thread.

Invariant: a load balancer that waits here uses no thread and no lease. An agent that listens is a hint only: its load
balancer becomes due, and the next job queries the agent. A lost hint costs the rest of the pause after which the row is
due anyway.
"""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from amphora_driver.errors import AmphoraDriverError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

LOG = logging.getLogger(__name__)
# Seconds between two connection attempts to a port: at first, and at most. A refused connection takes about 50 us.
_PAUSE, _LONGEST_PAUSE = 0.01, 0.25
# Growth of this pause with the time of waiting, and with the number of awaited amphorae.
_PATIENCE, _CROWD = 0.02, 0.0005
# Seconds until an unanswered connection is started again. The kernel repeats its SYN only after one, three and seven
# seconds (RFC 6298), long after the machine is ready.
_ATTEMPT = 0.5
# A port that listened and is awaited again belongs to an agent that does not answer yet. Seconds until the next
# attempt: doubled each time, up to a limit.
_SHY, _LONGEST_SHY = 0.05, 5.0
_STEPS = 8
# Seconds for which a port that listened is remembered.
_REMEMBERED = 60.0
# Seconds of back-off after an unexpected error.
_TROUBLE = 0.5


class Awaited(msgspec.Struct, frozen=True):
    """An amphora whose agent is awaited, for at most `seconds`."""

    amphora_id: str
    address: str
    load_balancer_id: str
    seconds: float


class _Guest(msgspec.Struct, eq=False):
    """The state of an awaited amphora; times are of `time.monotonic()`."""

    awaited: Awaited
    since: float
    until: float
    next_at: float
    socket: socket.socket | None = None


class WaitingRoom:
    """Connects to the agents' ports until they listen.

    Args:
        port: of the agents.
        came: called in the thread of `run` with the load balancers whose agents listen.
    """

    def __init__(self, port: int, came: Callable[[Sequence[str]], None]) -> None:
        self._port = port
        self._came = came
        self._lock = threading.Lock()
        self._guests: dict[str, _Guest] = {}
        # By amphora: number of successful connections, and time of the last one.
        self._listened: dict[str, tuple[int, float]] = {}
        # Entries whose sockets the thread of `run` must close.
        self._left: list[_Guest] = []
        self._stopping = False
        self._selector = selectors.DefaultSelector()
        self._bell, self._button = socket.socketpair()
        for end in (self._bell, self._button):
            end.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)

    def __len__(self) -> int:
        return len(self._guests)

    def wait_for(self, amphorae: Iterable[Awaited]) -> None:
        """Begin to wait for these amphorae; callable from any thread."""
        now = time.monotonic()
        with self._lock:
            for one in amphorae:
                self._drop(one.amphora_id)
                times, _last = self._listened.get(one.amphora_id, (0, 0.0))
                shy = 0.0 if not times else min(_SHY * 2 ** min(times, _STEPS), _LONGEST_SHY)
                self._guests[one.amphora_id] = _Guest(one, now, now + one.seconds, now + shy)
        self._ring()

    def forget(self, load_balancer_id: str) -> None:
        """End the wait for the amphorae of a load balancer; callable from any thread."""
        with self._lock:
            gone = [one for one, guest in self._guests.items() if guest.awaited.load_balancer_id == load_balancer_id]
            for amphora_id in gone:
                self._drop(amphora_id)
        if gone:
            self._ring()

    def run(self) -> None:
        """Connect to awaited agents until `stop`."""
        try:
            while not self._stopping:
                try:
                    self._round()
                except Exception:
                    # If this thread ended, every boot would take the full pause, without any visible error.
                    LOG.exception("error while waiting for booting amphorae, continuing")
                    time.sleep(_TROUBLE)
        finally:
            with self._lock:
                for amphora_id in list(self._guests):
                    self._drop(amphora_id)
            self._sweep()
            self._selector.close()
            self._bell.close()
            self._button.close()

    def stop(self) -> None:
        """Make `run` return."""
        self._stopping = True
        self._ring()

    def _round(self) -> None:
        ready = self._selector.select(self._begin())
        came = []
        with self._lock:
            for key, _events in ready:
                guest = key.data
                if guest is None:
                    self._silence()
                elif guest.socket is not None and self._answered(guest):
                    came.append(guest.awaited)
            for one in came:
                self._drop(one.amphora_id)
        self._sweep()
        if came:
            self._tell(came)

    def _begin(self) -> float | None:
        """Start the connections that are due; return the seconds until the next one, None without any."""
        with self._lock:
            now = time.monotonic()
            for guest in [one for one in self._guests.values() if one.until <= now]:
                self._drop(guest.awaited.amphora_id)
            for guest in self._guests.values():
                if guest.next_at <= now:
                    self._knock(guest, now)
            times = [min(guest.next_at, guest.until) for guest in self._guests.values()]
        self._sweep()
        return max(min(times) - time.monotonic(), 0.0) if times else None

    def _knock(self, guest: _Guest, now: float) -> None:
        """Start a connection; close an earlier one without an answer."""
        self._hang_up(guest)
        guest.next_at = now + self._pause(guest, now)
        family = socket.AF_INET6 if ":" in guest.awaited.address else socket.AF_INET
        try:
            knocking = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        except OSError as error:
            # The process may have no free file descriptor: retry later.
            LOG.debug("could not open a socket for amphora %s, retrying: %s", guest.awaited.amphora_id, error)
            return
        try:
            # The selector also reports a connection that is established at once.
            code = knocking.connect_ex((guest.awaited.address, self._port))
            if code in (0, errno.EINPROGRESS):
                self._selector.register(knocking, selectors.EVENT_WRITE, guest)
                guest.socket, guest.next_at = knocking, now + _ATTEMPT
        except (OSError, ValueError) as error:
            # The address may be invalid: the next job reports it.
            LOG.debug("could not connect to amphora %s: %s", guest.awaited.amphora_id, error)
        if guest.socket is None:
            knocking.close()

    def _answered(self, guest: _Guest) -> bool:
        """Close the socket; return whether the connection was established."""
        taken = guest.socket is not None and guest.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
        self._hang_up(guest)
        now = time.monotonic()
        guest.next_at = now + self._pause(guest, now)
        if taken:
            times, _last = self._listened.get(guest.awaited.amphora_id, (0, 0.0))
            self._listened[guest.awaited.amphora_id] = (times + 1, now)
        return taken

    def _pause(self, guest: _Guest, now: float) -> float:
        pause = max(_PAUSE, _PATIENCE * (now - guest.since), _CROWD * len(self._guests))
        return min(pause, _LONGEST_PAUSE)

    def _tell(self, came: list[Awaited]) -> None:
        try:
            self._came(sorted({one.load_balancer_id for one in came}))
        except (AmphoraDriverError, OSError) as error:
            LOG.warning("could not make load balancers with booted amphorae due, their jobs start later: %s", error)

    def _drop(self, amphora_id: str) -> None:
        guest = self._guests.pop(amphora_id, None)
        if guest is not None:
            self._left.append(guest)

    def _sweep(self) -> None:
        """Close the sockets of removed entries, in the thread that selects on them."""
        with self._lock:
            for guest in self._left:
                self._hang_up(guest)
            self._left.clear()
            old = time.monotonic() - _REMEMBERED
            self._listened = {one: seen for one, seen in self._listened.items() if seen[1] > old}

    def _hang_up(self, guest: _Guest) -> None:
        if guest.socket is not None:
            self._selector.unregister(guest.socket)
            guest.socket.close()
            guest.socket = None

    def _ring(self) -> None:
        try:
            self._button.send(b"!")
        except OSError:
            # The buffer is full, so a wake-up is pending; or `run` has ended.
            return

    def _silence(self) -> None:
        try:
            while self._bell.recv(64):
                pass
        except BlockingIOError:
            return
