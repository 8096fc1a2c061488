# SPDX-License-Identifier: Apache-2.0
"""TLS handshakes outside the threads of the HTTP server.

gunicorn uses one of few threads for each new connection and for its handshake, without a time-out. A few silent clients
would stop gunicorn. Invariants:
* A connection uses a thread only after its client has authenticated as a controller and has sent data.
* The number of waiting connections and their time are limited. An unauthenticated client displaces no controller.
* Addresses without a known controller have a budget of handshakes each, and one together. Each handshake costs a
  signature in the process that sends heartbeats.
"""

from __future__ import annotations

import logging
import selectors
import socket
import ssl
import struct
import threading
import time
from collections import OrderedDict, deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from amphora_agent import x509
from amphora_agent.errors import AgentError
from amphora_agent.tls_identity import Identity

_log = logging.getLogger(__name__)
HANDSHAKE_SECONDS = 10.0
SILENT_SECONDS = 75.0
# Time-out in seconds of each read and each write within a request.
EXCHANGE_SECONDS = 30.0
# Limit for the connections in a TLS handshake, and separately for the authenticated connections that wait for their
# next request.
MOST = 128
_MOST_REASONS = 64
# TLS handshakes per second, and bursts: of one unknown address, and of all unknown addresses together. Within the
# time-out of 10 s, unknown addresses begin at most 40 + 8 * 10 = 120 handshakes, which is less than MOST.
ADDRESS_RATE, ADDRESS_BURST = 1.0, 10.0
UNKNOWN_RATE, UNKNOWN_BURST = 8.0, 40.0
# After a controller's handshake, its address has no rate limit for this number of seconds.
KNOWN_SECONDS = 3600.0
_MOST_KNOWN, _MOST_UNKNOWN = 256, 1024
# SO_LINGER with 0 s: close() resets the connection, and the kernel keeps no state of it.
_RESET = struct.pack("ii", 1, 0)


class Connection(ssl.SSLSocket):
    """A connection with a time-out in blocking mode. After `shutdown`, no call waits for the client.

    gunicorn's main loop shuts down a connection, and then waits up to two seconds for the end of the client's data.
    Meanwhile it serves no other client, and some unresponsive clients would stop it for longer than
    `amphora_agent.server.HANG_SECONDS`. A client that still sends data after the answer gets a reset.
    """

    _is_shut_down = False

    def setblocking(self, flag: bool, /) -> None:
        self.settimeout(EXCHANGE_SECONDS if flag else 0.0)

    def settimeout(self, value: float | None, /) -> None:
        super().settimeout(0.0 if self._is_shut_down else value)

    def shutdown(self, how: int, /) -> None:
        super().shutdown(how)
        self._is_shut_down = True
        self.settimeout(0.0)


@dataclass
class _Peer:
    connection: Connection
    address: Any
    deadline: float


class Bucket:
    """A token bucket, which limits a rate and a burst."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate, self._burst = rate, burst
        self._tokens, self._at = burst, now

    def has(self, now: float) -> bool:
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now
        return self._tokens >= 1.0

    def take(self) -> None:
        self._tokens -= 1.0


class Budget:
    """The budget of handshakes by address. Times are seconds of a monotonic clock.

    The number of addresses is bounded. A dropped address starts with a full bucket.
    """

    def __init__(self, now: float) -> None:
        self._together = Bucket(UNKNOWN_RATE, UNKNOWN_BURST, now)
        self._unknown: OrderedDict[str, Bucket] = OrderedDict()
        self._known: OrderedDict[str, float] = OrderedDict()

    def take(self, address: str, now: float) -> bool:
        """Take a handshake of this address from the budget; return whether it is allowed."""
        if self._known.get(address, now) > now:
            return True
        bucket = self._unknown.setdefault(address, Bucket(ADDRESS_RATE, ADDRESS_BURST, now))
        self._unknown.move_to_end(address)
        while len(self._unknown) > _MOST_UNKNOWN:
            self._unknown.popitem(last=False)
        if not (bucket.has(now) and self._together.has(now)):
            return False
        bucket.take()
        self._together.take()
        return True

    def add_controller(self, address: str, now: float) -> None:
        self._known[address] = now + KNOWN_SECONDS
        self._known.move_to_end(address)
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)


class TlsGate:
    """A listening socket with a method `accept` that returns authenticated connections with data."""

    def __init__(self, listener: Any, identity: Identity) -> None:
        self._listener = listener
        self._identity = identity
        self._ready: deque[tuple[Connection, Any]] = deque()
        self._wakeup, self._waker = socket.socketpair()
        self._wakeup.setblocking(False)
        # Both dictionaries are sorted by deadline, the earliest first.
        self._handshakes: dict[int, _Peer] = {}
        self._idle: dict[int, _Peer] = {}
        self._budget = Budget(time.monotonic())
        self._closing = False
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="gate", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return a descriptor that is readable when `accept` has a connection."""
        return self._wakeup.fileno()

    def getsockname(self) -> Any:
        return self._listener.getsockname()

    def setblocking(self, _: bool) -> None:
        """Do nothing: the gate never blocks."""

    def accept(self) -> tuple[Connection, Any]:
        """Return a connection and the address of its client. Raises BlockingIOError without one."""
        self._wakeup.recv(1)
        return self._ready.popleft()

    def close(self) -> None:
        """Accept no more connections; accepted connections stay open."""
        self._closing = True
        with suppress(OSError):
            self._waker.send(b".")
        self._listener.close()

    def _run(self) -> None:
        while not self._closing:
            try:
                for key, _ in self._selector.select(self._expire()):
                    self._handle(key.fd)
            except Exception:  # noqa: BLE001 (without this thread the agent is not reachable)
                if not self._closing:
                    _log.exception(
                        "The agent accepts no TLS connections for one second, because of an unexpected error"
                    )
                    time.sleep(1.0)

    def _handle(self, number: int) -> None:
        if number in self._handshakes:
            self._continue_handshake(self._handshakes[number])
        elif number in self._idle:
            peer = self._idle[number]
            self._forget(peer)
            self._hand_over(peer)
        else:
            self._accept()

    def _expire(self) -> float:
        """Close expired connections; return the seconds until the next expiry."""
        now = time.monotonic()
        for peers in (self._handshakes, self._idle):
            while peers and (first := next(iter(peers.values()))).deadline <= now:
                self._close(first, "took too long")
        deadlines = [next(iter(peers.values())).deadline for peers in (self._handshakes, self._idle) if peers]
        return min(1.0, *(deadline - now for deadline in deadlines)) if deadlines else 1.0

    def _accept(self) -> None:
        try:
            plain, address = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        # The agent connects to itself to verify a new certificate, so its own address has no limit.
        if not self._budget.take(address[0], time.monotonic()) and address[0] != _local_address(plain):
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            plain.close()
            self._count("too many handshakes from there")
            return
        try:
            context = self._identity.context()
            context.sslsocket_class = Connection
            plain.setblocking(False)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wrapped = context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
        except (OSError, AgentError) as error:
            plain.close()
            self._count(f"{type(error).__name__}: {error}")
            return
        assert isinstance(wrapped, Connection)  # noqa: S101 (tells the type checker the class)
        peer = _Peer(wrapped, address, time.monotonic() + HANDSHAKE_SECONDS)
        self._keep(self._handshakes, peer, selectors.EVENT_READ)

    def _keep(self, peers: dict[int, _Peer], peer: _Peer, events: int) -> None:
        while len(peers) >= MOST:
            self._close(next(iter(peers.values())), "too many others")
        peers[peer.connection.fileno()] = peer
        self._selector.register(peer.connection, events)

    def _continue_handshake(self, peer: _Peer) -> None:
        try:
            peer.connection.do_handshake()
        except ssl.SSLWantReadError:
            self._selector.modify(peer.connection, selectors.EVENT_READ)
        except ssl.SSLWantWriteError:
            self._selector.modify(peer.connection, selectors.EVENT_WRITE)
        except OSError as error:
            self._close(peer, getattr(error, "reason", None) or type(error).__name__)
        else:
            shown = peer.connection
            if why := x509.client_refusal(shown.getpeercert(binary_form=True) or b"", shown.getpeercert() or {}):
                self._close(peer, why)
                return
            self._forget(peer)
            now = time.monotonic()
            self._budget.add_controller(peer.address[0], now)
            peer.deadline = now + SILENT_SECONDS
            if peer.connection.pending():
                self._hand_over(peer)
            else:
                self._keep(self._idle, peer, selectors.EVENT_READ)

    def _hand_over(self, peer: _Peer) -> None:
        self._ready.append((peer.connection, peer.address))
        self._waker.send(b".")

    def _forget(self, peer: _Peer) -> None:
        self._selector.unregister(peer.connection)
        number = peer.connection.fileno()
        self._handshakes.pop(number, None)
        self._idle.pop(number, None)

    def _close(self, peer: _Peer, why: str) -> None:
        if peer.connection.fileno() in self._handshakes:
            self._count(why)
        self._forget(peer)
        peer.connection.close()

    def _count(self, why: str) -> None:
        refused = self._identity.refused
        if why in refused or len(refused) < _MOST_REASONS:
            refused[why] += 1


def _local_address(connection: socket.socket) -> str | None:
    """Return the local address of a connection; None if the connection is closed."""
    try:
        return str(connection.getsockname()[0])
    except OSError:
        return None
