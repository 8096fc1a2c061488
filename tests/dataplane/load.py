# SPDX-License-Identifier: Apache-2.0
"""A program (see `program`) with continuous clients that a change of a load balancer can disturb.

Invariant: a client behaves correctly and tolerates no more. It retries a request only on a reused connection that was
closed, not reset, before the first byte of an answer (RFC 9112, 9.3.1). The tally counts retries. Every other
incomplete answer is a failure with a reason.

    start kind=... count=4 port=80 pause=0.05      starts clients of a kind; for TLS: trust=PEM of an authority
    report                                         the results so far, by name
    stop names=[...]                               the same, after these clients have ended

Kinds: `kept` reuses a connection as long as possible, `fresh` opens one for each request, `resumed` does so with the
previous TLS session, `websocket` exchanges frames, `download` reads one body that the member ends.
"""

from __future__ import annotations

import base64
import hashlib
import os
import select
import socket
import ssl
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from program import obey

VIP, HOST = "198.51.100.5", "www.example.com"
TIME_LIMIT = 20.0
MOST_REASONS = 20
# A member writes the digest in hexadecimal digits.
_DIGEST_LENGTH = 2 * hashlib.sha256().digest_size


class Unanswered(Exception):
    """A connection was closed before the first byte of an answer."""


class Cut(Exception):
    """A connection was closed in the middle of an answer."""


@dataclass
class Counts:
    """The results of one kind of client.

    Attributes:
        failures: failed requests, connections and transfers, including resets; `reasons` has their causes.
        retried: requests that a client has retried.
        idle_closes: connections that were closed between two requests without notice.
        farewells: connections that were closed after an answer with "Connection: close".
        alive: open long-lived connections.
        finished: long-lived connections with a regular end.
    """

    requests: int = 0
    failures: int = 0
    resets: int = 0
    cuts: int = 0
    retried: int = 0
    idle_closes: int = 0
    farewells: int = 0
    full_handshakes: int = 0
    resumed_handshakes: int = 0
    alive: int = 0
    finished: int = 0
    bytes: int = 0
    reasons: Counter = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, **more: int) -> None:
        with self.lock:
            for name, value in more.items():
                setattr(self, name, getattr(self, name) + value)

    def answered(self, seconds: float) -> None:
        with self.lock:
            self.requests += 1
            self.seconds.append(seconds)

    def failed(self, what: str, error: Exception) -> None:
        with self.lock:
            self.failures += 1
            self.resets += isinstance(error, (ConnectionResetError, BrokenPipeError))
            self.cuts += isinstance(error, Cut)
            reason = f"{what}: {type(error).__name__}: {error}"
            if reason in self.reasons or len(self.reasons) < MOST_REASONS:
                self.reasons[reason] += 1

    def document(self) -> dict:
        with self.lock:
            numbers = {name: value for name, value in vars(self).items() if isinstance(value, int)}
            ordered = sorted(self.seconds)
            place = {"p50": 0.5, "p99": 0.99, "worst": 1.0}
            last = len(ordered) - 1
            times = {name: round(ordered[int(last * share)], 4) for name, share in place.items()} if ordered else {}
            return {**numbers, "reasons": dict(self.reasons), "seconds": times}


@dataclass
class Group:
    """Clients of one kind with the same settings."""

    kind: str
    port: int
    pause: float
    tls: ssl.SSLContext | None
    counts: Counts = field(default_factory=Counts)
    ending: threading.Event = field(default_factory=threading.Event)
    threads: list[threading.Thread] = field(default_factory=list)

    def connect(self, session: ssl.SSLSession | None = None) -> socket.socket:
        plain = socket.create_connection((VIP, self.port), TIME_LIMIT)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.tls is None:
            return plain
        try:
            wrapped = self.tls.wrap_socket(plain, server_hostname=HOST, session=session)
        except BaseException:
            plain.close()
            raise
        if wrapped.session_reused:
            self.counts.add(resumed_handshakes=1)
        else:
            self.counts.add(full_handshakes=1)
        return wrapped

    def rest(self) -> None:
        self.ending.wait(self.pause)


# -- HTTP ---------------------------------------------------------------------------------------------------------


def ask(connection: socket.socket, path: str = "/", more: str = "") -> tuple[bytes, bytearray]:
    """Send a request.

    Returns:
        The head of the answer in lower case, and the bytes behind it.

    Raises:
        Unanswered: the connection was closed before the first byte.
        Cut: the connection was closed inside the head.
    """
    request = f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\nX-Sent: {time.monotonic():.6f}\r\n{more}\r\n"
    try:
        connection.sendall(request.encode())
    except BrokenPipeError:
        raise Unanswered("the connection was closed before the request was sent") from None
    data = bytearray()
    while (end := data.find(b"\r\n\r\n")) < 0:
        part = connection.recv(65536)
        if not part:
            raise Cut(f"after {len(data)} bytes of the head") if data else Unanswered("no answer")
        data += part
    return bytes(data[:end]).lower(), data[end + 4 :]


def exchange(connection: socket.socket, path: str = "/", more: str = "") -> bool:
    """Send a request with a short answer; return whether the connection can be reused."""
    head, body = ask(connection, path, more)
    status = head.split(b" ", 2)[1]
    length = int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0] or 0)
    while len(body) < length:
        part = connection.recv(65536)
        if not part:
            raise Cut(f"after {len(body)} of {length} bytes")
        body += part
    if status != b"200":
        raise ValueError(f"status {status.decode()}")
    return b"\r\nconnection: close" not in head


def was_closed(connection: socket.socket) -> bool:
    """Return whether the peer has closed the idle connection.

    Raises:
        ConnectionResetError: the peer has reset the connection.
    """
    connection.settimeout(0)
    try:
        return not connection.recv(1)
    except (BlockingIOError, ssl.SSLWantReadError):
        return False
    finally:
        connection.settimeout(TIME_LIMIT)


def kept(group: Group) -> None:
    """Send requests with pauses on one connection as long as possible."""
    counts, connection = group.counts, None
    while not group.ending.is_set():
        begun, used = time.monotonic(), connection is not None
        try:
            if used and was_closed(connection):
                counts.add(idle_closes=1)
                connection, used = _closed(connection), False
            if connection is None:
                connection = group.connect()
            if not exchange(connection):
                counts.add(farewells=1)
                connection = _closed(connection)
            counts.answered(time.monotonic() - begun)
        except Unanswered as error:
            if used:
                counts.add(retried=1)
            else:
                counts.failed("request", error)
            connection = _closed(connection)
            continue
        except (OSError, ValueError, Cut) as error:
            counts.failed("request", error)
            connection = _closed(connection)
        group.rest()
    _closed(connection)


def _closed(connection: socket.socket | None) -> None:
    if connection is not None:
        connection.close()


def fresh(group: Group, *, resume: bool = False) -> None:
    """Open a connection for each request."""
    session = None
    while not group.ending.is_set():
        begun, connection = time.monotonic(), None
        try:
            connection = group.connect(session)
            exchange(connection, more="Connection: close\r\n")
            group.counts.answered(time.monotonic() - begun)
            if resume:
                session = connection.session
        except (OSError, ValueError, Cut, Unanswered) as error:
            group.counts.failed("connection", error)
        _closed(connection)
        group.rest()


def resumed(group: Group) -> None:
    """Open a connection for each request, with the previous TLS session."""
    fresh(group, resume=True)


# -- long-lived connections ---------------------------------------------------------------------------------------


def websocket(group: Group) -> None:
    """Exchange frames: send a frame after the echo of the previous frame."""
    try:
        with group.connect() as connection:
            _upgrade(connection)
            group.counts.add(alive=1)
            try:
                _frames(group, connection)
            finally:
                group.counts.add(alive=-1)
    except (OSError, ValueError, Cut, Unanswered) as error:
        group.counts.failed("websocket", error)


def _upgrade(connection: socket.socket) -> None:
    key = base64.b64encode(os.urandom(16)).decode()
    more = f"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n"
    head, rest = ask(connection, "/websocket", more)
    accept = base64.b64encode(hashlib.sha1(f"{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11".encode()).digest())
    if not head.startswith(b"http/1.1 101") or accept.lower() not in head or rest:
        raise ValueError(f"no upgrade: {head[:60]!r}")


def _frames(group: Group, connection: socket.socket) -> None:
    number = 0
    while not group.ending.is_set():
        number += 1
        said, begun = b"frame %d" % number, time.monotonic()
        if (heard := _echo(connection, 0x1, said)) != said:
            raise ValueError(f"the echo of {said!r} is {heard!r}")
        group.counts.answered(time.monotonic() - begun)
        group.rest()
    _echo(connection, 0x8, b"\x03\xe8")
    group.counts.add(finished=1)


def _echo(connection: socket.socket, kind: int, said: bytes) -> bytes:
    """Send one frame, masked with zeros, and return the payload of the next frame."""
    connection.sendall(bytes((0x80 | kind, 0x80 | len(said))) + bytes(4) + said)
    data = b""
    while len(data) < 2 or len(data) < 2 + data[1]:
        part = connection.recv(4096)
        if not part:
            raise Cut("in the middle of a WebSocket")
        data += part
    return data[2:]


def download(group: Group) -> None:
    """Download one body; its last 64 bytes are the digest of the preceding bytes."""
    try:
        with group.connect() as connection:
            data = _begun(connection)
            group.counts.add(alive=1)
            try:
                _body(group, connection, data)
            finally:
                group.counts.add(alive=-1)
    except (OSError, ValueError, Cut, Unanswered) as error:
        group.counts.failed("download", error)


def _begun(connection: socket.socket) -> bytearray:
    head, data = ask(connection, "/download")
    if b" 200 " not in head or b"chunked" not in head:
        raise ValueError(f"no download: {head[:60]!r}")
    return data


def _body(group: Group, connection: socket.socket, data: bytearray) -> None:
    # HAProxy may merge chunks, so `end` holds as many bytes as the digest has.
    digest, end = hashlib.sha256(), b""
    while True:
        while (chunk := _chunk(data)) is None:
            part = connection.recv(65536)
            if not part:
                raise Cut(f"after {group.counts.bytes} bytes of all downloads")
            data += part
        if not chunk:
            break
        end += chunk
        digest.update(end[:-_DIGEST_LENGTH])
        end = end[-_DIGEST_LENGTH:]
        group.counts.add(bytes=len(chunk))
    if digest.hexdigest().encode() != end:
        raise ValueError("the digest of the download differs from the member's digest")
    group.counts.add(finished=1)


def _chunk(data: bytearray) -> bytes | None:
    """Remove and return the next chunk; None if it is incomplete (RFC 9112, 7.1)."""
    if (line := data.find(b"\r\n")) < 0:
        return None
    begin, size = line + 2, int(data[:line], 16)
    if len(data) < begin + size + 2:
        return None
    chunk = bytes(data[begin : begin + size])
    del data[: begin + size + 2]
    return chunk


# -- orders -------------------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[Group], None]] = {
    each.__name__: each for each in (kept, fresh, resumed, websocket, download)
}


class ClientGroups:
    """All groups, by name."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}
        self.orders = {"start": self._start, "report": self._report, "stop": self._stop}

    def _start(self, name: str, kind: str, count: int, port: int, pause: float, trust: str | None = None) -> None:
        tls = None
        if trust is not None:
            tls = ssl.create_default_context(cadata=trust)
        group = self._groups.get(name) or Group(kind, port, pause, tls)
        self._groups[name] = group
        for _ in range(count):
            thread = threading.Thread(target=KINDS[kind], args=(group,), daemon=True)
            group.threads.append(thread)
            thread.start()

    def _report(self) -> dict:
        return {name: group.counts.document() for name, group in self._groups.items()}

    def _stop(self, names: list[str]) -> dict:
        stopped = [self._groups[name] for name in names]
        for group in stopped:
            group.ending.set()
        for group in stopped:
            for thread in group.threads:
                thread.join(2 * TIME_LIMIT)
                assert not thread.is_alive(), f"a client of kind {group.kind} has not ended"
        return self._report()


def main() -> None:
    threading.stack_size(256 * 1024)
    http_clients = ClientGroups()
    while select.select([sys.stdin], [], [])[0] and (line := sys.stdin.readline()):
        obey(line, http_clients.orders)
    os._exit(0)  # connections in progress are abandoned


if __name__ == "__main__":
    main()
