# SPDX-License-Identifier: Apache-2.0
"""Waiting for amphorae that boot, all of them in one thread.

Invariant: who waits here holds nothing, neither a thread nor a lease. What is learned is a hint: the load balancer is
made due, and somebody looks at the amphora itself. All that is forgotten here, or never heard, costs the pause after
which its row is due anyway.
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
# Seconds between two knocks at a port: at first, and of one that has not come for long. A refusal costs some 50 us.
_PAUSE, _LONGEST_PAUSE = 0.01, 0.25
# How much longer that becomes with the time somebody has waited, and with each other one that waits.
_PATIENCE, _CROWD = 0.02, 0.0005
# Seconds after which a connection that is neither taken nor refused is begun anew: the kernel would ask again after
# one, three and seven seconds only (RFC 6298), long after the machine is there.
_ATTEMPT = 0.5
# One that listens and is waited for again does not answer yet: seconds until it is knocked at, twice as many each time.
_SHY, _LONGEST_SHY = 0.05, 5.0
_STEPS = 8
# Seconds for which is remembered that one has listened.
_REMEMBERED = 60.0
# Seconds after something went wrong that nobody thought of.
_TROUBLE = 0.5


class Awaited(msgspec.Struct, frozen=True):
    """An amphora whose agent is waited for, for so many seconds at the most."""

    amphora_id: str
    address: str
    load_balancer_id: str
    seconds: float


class _Guest(msgspec.Struct, eq=False):
    """One that is waited for; times are of `time.monotonic()`."""

    awaited: Awaited
    since: float
    until: float
    next_at: float
    socket: socket.socket | None = None


class WaitingRoom:
    """Knocks at the ports of amphorae until one listens.

    Args:
        port: the agents'.
        came: called with the load balancers of those that listen; from the room's own thread.
    """

    def __init__(self, port: int, came: Callable[[Sequence[str]], None]) -> None:
        self._port = port
        self._came = came
        self._lock = threading.Lock()
        self._guests: dict[str, _Guest] = {}
        # How often each was here and listened, and when it did last.
        self._listened: dict[str, tuple[int, float]] = {}
        # Those to be closed by the thread that waits for them.
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
        """Wait for these from now on; from any thread."""
        now = time.monotonic()
        with self._lock:
            for one in amphorae:
                self._drop(one.amphora_id)
                times, _last = self._listened.get(one.amphora_id, (0, 0.0))
                shy = 0.0 if not times else min(_SHY * 2 ** min(times, _STEPS), _LONGEST_SHY)
                self._guests[one.amphora_id] = _Guest(one, now, now + one.seconds, now + shy)
        self._ring()

    def forget(self, load_balancer_id: str) -> None:
        """Nobody waits for the amphorae of this load balancer any more; from any thread."""
        with self._lock:
            gone = [one for one, guest in self._guests.items() if guest.awaited.load_balancer_id == load_balancer_id]
            for amphora_id in gone:
                self._drop(amphora_id)
        if gone:
            self._ring()

    def run(self) -> None:
        """Wait, until told to stop."""
        try:
            while not self._stopping:
                try:
                    self._round()
                except Exception:
                    # Without this thread nobody would hear of who has booted, and nobody would notice.
                    LOG.exception("waiting for those that boot failed, and goes on")
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
        """Have `run` return."""
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
        """Knock where it is time; returns after how many seconds it is somebody's turn, None if nobody is here."""
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
        """Begin a connection; one from before that was neither taken nor refused ends."""
        self._hang_up(guest)
        guest.next_at = now + self._pause(guest, now)
        family = socket.AF_INET6 if ":" in guest.awaited.address else socket.AF_INET
        try:
            knocking = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        except OSError as error:
            # No descriptor is left, for example: not now.
            LOG.debug("could not knock now at amphora %s: %s", guest.awaited.amphora_id, error)
            return
        try:
            # One that is taken in this very moment is heard of like all others.
            code = knocking.connect_ex((guest.awaited.address, self._port))
            if code in (0, errno.EINPROGRESS):
                self._selector.register(knocking, selectors.EVENT_WRITE, guest)
                guest.socket, guest.next_at = knocking, now + _ATTEMPT
        except (OSError, ValueError) as error:
            # No address, for example. Whoever looks at the amphora itself says so.
            LOG.debug("could not knock at amphora %s: %s", guest.awaited.amphora_id, error)
        if guest.socket is None:
            knocking.close()

    def _answered(self, guest: _Guest) -> bool:
        """Whether the connection was taken."""
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
            LOG.warning("could not hasten those whose amphorae have booted, they are looked at later: %s", error)

    def _drop(self, amphora_id: str) -> None:
        guest = self._guests.pop(amphora_id, None)
        if guest is not None:
            self._left.append(guest)

    def _sweep(self) -> None:
        """Close what belongs to those that left; in the room's own thread, which may be waiting for them."""
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
            # Rung already, or nobody is there any more.
            return

    def _silence(self) -> None:
        try:
            while self._bell.recv(64):
                pass
        except BlockingIOError:
            return
