# SPDX-License-Identifier: Apache-2.0
"""TLS handshakes, before a thread of the server is taken.

Invariant: a peer costs the server a thread only after it has proven to be a controller and has begun to ask
something. Before that it costs a socket, for a limited time. The number of these sockets is limited, and an unproven
peer takes no place from a proven one. A handshake is a signature in the process that sends heartbeats. Each address
without a proven controller has a budget of handshakes, and all such addresses together have one.

gunicorn has a thread of few wait for each new connection, and for its handshake without any limit of time: a
handful of silent peers would stop it.
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

from amphora_agent.errors import AgentError
from amphora_agent.tls_identity import Identity
from amphora_agent.x509 import callers

_log = logging.getLogger(__name__)
HANDSHAKE_SECONDS = 10.0
SILENT_SECONDS = 75.0
# For one read or write within a request.
EXCHANGE_SECONDS = 30.0
# Of each kind: in their handshake, and proven but silent.
MOST = 128
_MOST_REASONS = 64
# Handshakes for each second, and at once, of one address, and of all addresses together. In HANDSHAKE_SECONDS
# unproven addresses begin at most 40 + 8 * 10 of them: fewer than MOST, so a controller always has a place.
ADDRESS_RATE, ADDRESS_BURST = 1.0, 10.0
UNPROVEN_RATE, UNPROVEN_BURST = 8.0, 40.0
# For so many seconds after its last handshake a controller's address needs none of that.
KNOWN_SECONDS = 3600.0
_MOST_KNOWN, _MOST_UNPROVEN = 256, 1024
# A connection that is refused leaves nothing in the kernel: it is reset.
_RESET = struct.pack("ii", 1, 0)


class Connection(ssl.SSLSocket):
    """A connection whose peer may be slow, but not for ever."""

    def setblocking(self, flag: bool, /) -> None:
        """Block for some seconds at the most."""
        self.settimeout(EXCHANGE_SECONDS if flag else 0.0)


@dataclass
class _Peer:
    connection: Connection
    address: Any
    deadline: float


class Bucket:
    """Tokens that come back with time."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate, self._burst = rate, burst
        self._tokens, self._at = burst, now

    def has(self, now: float) -> bool:
        """Whether there is a token."""
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now
        return self._tokens >= 1.0

    def take(self) -> None:
        self._tokens -= 1.0


class Budget:
    """Which addresses may begin a handshake. Times are seconds of a monotonic clock.

    Its memory is bounded. A forgotten address begins with a full bucket, within the bucket of all unproven addresses.
    """

    def __init__(self, now: float) -> None:
        self._together = Bucket(UNPROVEN_RATE, UNPROVEN_BURST, now)
        self._unproven: OrderedDict[str, Bucket] = OrderedDict()
        self._known: OrderedDict[str, float] = OrderedDict()

    def admits(self, address: str, now: float) -> bool:
        """Whether this address may begin a handshake; if so, it has."""
        if self._known.get(address, now) > now:
            return True
        bucket = self._unproven.setdefault(address, Bucket(ADDRESS_RATE, ADDRESS_BURST, now))
        self._unproven.move_to_end(address)
        while len(self._unproven) > _MOST_UNPROVEN:
            self._unproven.popitem(last=False)
        if not (bucket.has(now) and self._together.has(now)):
            return False
        bucket.take()
        self._together.take()
        return True

    def proven(self, address: str, now: float) -> None:
        """A controller has proven itself from there."""
        self._known[address] = now + KNOWN_SECONDS
        self._known.move_to_end(address)
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)


class Gate:
    """In the place of a listening socket: what is accepted here is ready to be asked for its request."""

    def __init__(self, listener: Any, identity: Identity) -> None:
        self._listener = listener
        self._identity = identity
        self._ready: deque[tuple[Connection, Any]] = deque()
        self._told, self._tell = socket.socketpair()
        self._told.setblocking(False)
        # Both in the order of their deadlines.
        self._shaking: dict[int, _Peer] = {}
        self._silent: dict[int, _Peer] = {}
        self._budget = Budget(time.monotonic())
        self._closing = False
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="gate", daemon=True)
        self._thread.start()

    # -- what a server asks of a listening socket -----------------------------------------------------------

    def fileno(self) -> int:
        """Readable when somebody can be accepted."""
        return self._told.fileno()

    def getsockname(self) -> Any:
        return self._listener.getsockname()

    def setblocking(self, _: bool) -> None:
        """It never blocks."""

    def accept(self) -> tuple[Connection, Any]:
        """A connection and its peer's address.

        Raises:
            BlockingIOError: there is none.
        """
        self._told.recv(1)
        return self._ready.popleft()

    def close(self) -> None:
        """Accept nobody any more; connections that were accepted go on."""
        self._closing = True
        with suppress(OSError):
            self._tell.send(b".")
        self._listener.close()

    # -- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            try:
                for key, _ in self._selector.select(self._expire()):
                    self._see_to(key.fd)
            except Exception:  # noqa: BLE001 (the agent cannot be reached without this thread)
                if not self._closing:
                    _log.exception("The gate")
                    time.sleep(1.0)

    def _see_to(self, number: int) -> None:
        if number in self._shaking:
            self._shake(self._shaking[number])
        elif number in self._silent:
            self._admit(self._silent[number])
        else:
            self._accept()

    def _expire(self) -> float:
        """Close who took too long; seconds until somebody else will have."""
        now = time.monotonic()
        for peers in (self._shaking, self._silent):
            while peers and (first := next(iter(peers.values()))).deadline <= now:
                self._close(first, "took too long")
        deadlines = [next(iter(peers.values())).deadline for peers in (self._shaking, self._silent) if peers]
        return min(1.0, *(deadline - now for deadline in deadlines)) if deadlines else 1.0

    def _accept(self) -> None:
        try:
            plain, address = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        # The agent checks a new certificate of its own from its own address, which no other machine has.
        if not self._budget.admits(address[0], time.monotonic()) and address[0] != _own(plain):
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
        assert isinstance(wrapped, Connection)  # noqa: S101 (the context's class, for the type checker)
        self._keep(self._shaking, _Peer(wrapped, address, time.monotonic() + HANDSHAKE_SECONDS), selectors.EVENT_READ)

    def _keep(self, peers: dict[int, _Peer], peer: _Peer, events: int) -> None:
        while len(peers) >= MOST:
            self._close(next(iter(peers.values())), "too many others")
        peers[peer.connection.fileno()] = peer
        self._selector.register(peer.connection, events)

    def _shake(self, peer: _Peer) -> None:
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
            if why := callers.refusal(shown.getpeercert(binary_form=True) or b"", shown.getpeercert() or {}):
                self._close(peer, why)
                return
            self._forget(peer)
            now = time.monotonic()
            self._budget.proven(peer.address[0], now)
            peer.deadline = now + SILENT_SECONDS
            if peer.connection.pending():
                self._pass_on(peer)
            else:
                self._keep(self._silent, peer, selectors.EVENT_READ)

    def _admit(self, peer: _Peer) -> None:
        self._forget(peer)
        self._pass_on(peer)

    def _pass_on(self, peer: _Peer) -> None:
        self._ready.append((peer.connection, peer.address))
        self._tell.send(b".")

    def _forget(self, peer: _Peer) -> None:
        self._selector.unregister(peer.connection)
        number = peer.connection.fileno()
        self._shaking.pop(number, None)
        self._silent.pop(number, None)

    def _close(self, peer: _Peer, why: str) -> None:
        if peer.connection.fileno() in self._shaking:
            self._count(why)
        self._forget(peer)
        peer.connection.close()

    def _count(self, why: str) -> None:
        refused = self._identity.refused
        if why in refused or len(refused) < _MOST_REASONS:
            refused[why] += 1


def _own(connection: socket.socket) -> str | None:
    """Our address of a connection; None if it has ended."""
    try:
        return str(connection.getsockname()[0])
    except OSError:
        return None
