# SPDX-License-Identifier: Apache-2.0
"""Transports of log lines: syslog over UDP, TCP and TLS, and JSON lines over HTTPS.

The standards are RFC 5426 (UDP), RFC 6587 (TCP) and RFC 5425 (TLS).

Invariant: a TLS target has a certificate of the configured CA with the target's IP address. No transport sends a line,
an authorization or a client certificate before this verification. A call ends within seconds after `stopping` is set,
unless the target sends an answer in slow pieces. The key of a client certificate is in memory only.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from amphora_agent.log_settings import Endpoint, LogTarget, parse_endpoint

if TYPE_CHECKING:
    import http.client
    import ssl

CONNECT_SECONDS = 5.0
# Seconds without an acknowledgement after which the connection to a target is closed (tcp(7)).
SILENCE_SECONDS = 30.0
ANSWER_SECONDS = 15.0
# After a handshake of TLS 1.3, the target may still refuse the client certificate. The log forwarder waits at most this
# number of seconds, because a target without TLS tickets sends nothing if it accepts.
ACCEPT_SECONDS = 1.0
_CHECK_SECONDS = 0.5
_SIOCOUTQ = 0x5411
# Size of the send buffer in bytes. A lost connection leaves the delivery of the lines in this buffer uncertain, so the
# buffer is small.
_SEND_BUFFER = 256 << 10
_MOST_ANSWER = 64 << 10
# HTTP statuses with which a target refuses lines for ever (RFC 9110, 15.5).
_REFUSED = (400, 413, 422)


class LinesRefused(Exception):
    """The target has refused lines for ever."""


class Transport(Protocol):
    """A connection to one target, for one thread."""

    uncertain: int
    """Number of lines that were in the send buffer when a connection ended."""
    lost: int
    """Number of lines that the target's host has reported as undeliverable."""

    @property
    def is_connected(self) -> bool: ...

    def send(self, lines: Sequence[bytes]) -> None:
        """Send lines. Raises OSError if none or only some were sent, LinesRefused, and ValueError."""

    def close(self) -> None: ...


class Datagrams:
    """One datagram for each message. There is no acknowledgement."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._socket: socket.socket | None = None
        self.uncertain = self.lost = 0

    @property
    def is_connected(self) -> bool:
        return self._socket is not None

    def send(self, lines: Sequence[bytes]) -> None:
        try:
            if self._socket is None:
                family = socket.AF_INET6 if ":" in self._endpoint.host else socket.AF_INET
                self._socket = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
                self._socket.settimeout(_CHECK_SECONDS)
                self._socket.connect((self._endpoint.host, self._endpoint.port))
            for line in lines:
                self._send(self._socket, line)
        except OSError:
            # After an error, the log forwarder closes the socket, because a new socket uses the amphora's present
            # address.
            self.close()
            raise

    def _send(self, opened: socket.socket, line: bytes) -> None:
        try:
            opened.send(line)
        except ConnectionRefusedError:
            # The error belongs to an earlier datagram, which the target's host refused. The kernel has not sent this
            # datagram, so it is sent again.
            self.lost += 1
            opened.send(line)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class Stream:
    """A TCP connection, with TLS if there is a context. Octet counting separates the messages."""

    def __init__(self, endpoint: Endpoint, context: ssl.SSLContext | None, stopping: threading.Event) -> None:
        self._endpoint = endpoint
        self._context = context
        self._stopping = stopping
        self._socket: socket.socket | None = None
        self._sent_bytes = 0
        # Batches of lines that the target may not have received. Each entry is the position of the batch's end in the
        # stream, and the number of lines.
        self._unacknowledged: deque[tuple[int, int]] = deque()
        self.uncertain = self.lost = 0

    @property
    def is_connected(self) -> bool:
        return self._socket is not None

    def send(self, lines: Sequence[bytes]) -> None:
        if self._socket is not None and _is_closed(self._socket):
            self.close()
        try:
            if self._socket is None:
                self._socket = self._connect()
            self._send_all(self._socket, b"".join([b"%d %s" % (len(line), line) for line in lines]))
            self._unacknowledged.append((self._sent_bytes, len(lines)))
            self._forget_acknowledged(self._socket)
        except OSError:
            self.close()
            raise

    def _connect(self) -> socket.socket:
        opened = socket.create_connection((self._endpoint.host, self._endpoint.port), timeout=CONNECT_SECONDS)
        try:
            milliseconds = int(SILENCE_SECONDS * 1000)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(SILENCE_SECONDS))
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
            if self._context is not None:
                secured = self._context.wrap_socket(opened, server_hostname=self._endpoint.host)
                opened = secured
                _await_acceptance(secured)
            opened.settimeout(_CHECK_SECONDS)
        except OSError:
            opened.close()
            raise
        self._sent_bytes = 0
        return opened

    def _send_all(self, opened: socket.socket, data: bytes) -> None:
        left = memoryview(data)
        while left:
            if self._stopping.is_set():
                raise InterruptedError("the target was removed")
            try:
                sent = opened.send(left)
            except TimeoutError as error:
                # The kernel's error ETIMEDOUT ends the connection. A time-out of Python's socket has no error number,
                # so the log forwarder continues.
                if error.errno is not None:
                    raise
                continue
            left = left[sent:]
        self._sent_bytes += len(data)

    def _forget_acknowledged(self, opened: socket.socket) -> None:
        # The number of waiting bytes includes the overhead of TLS. So too few lines may count as acknowledged, but
        # never too many.
        waiting = struct.unpack("i", fcntl.ioctl(opened.fileno(), _SIOCOUTQ, b"\0" * 4))[0]
        while self._unacknowledged and self._unacknowledged[0][0] <= self._sent_bytes - waiting:
            self._unacknowledged.popleft()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self.uncertain += sum(lines for _, lines in self._unacknowledged)
        self._unacknowledged.clear()


def _await_acceptance(opened: ssl.SSLSocket) -> None:
    """Wait until the target has accepted the connection; raises OSError if it refuses.

    With TLS 1.3, the handshake of the client ends before the target checks the client certificate. A target that
    refuses sends an alert, and one that accepts usually sends TLS tickets. Without this wait, the forwarder would take
    the first lines of each connection for sent, or would report a closed connection instead of the alert.
    """
    if opened.version() != "TLSv1.3":
        return
    if not select.select([opened], [], [], ACCEPT_SECONDS)[0]:
        return
    opened.setblocking(False)
    try:
        data = opened.recv(4096)
    except OSError as error:
        # SSLWantReadError means that the target has sent only TLS tickets, so the target accepts the connection.
        if type(error).__name__ == "SSLWantReadError":
            return
        raise
    if not data:
        raise ConnectionResetError("the target closed the connection after the TLS handshake")


def _is_closed(opened: socket.socket) -> bool:
    """Return whether the target has closed the connection.

    A target sends nothing else, apart from TLS tickets.
    """
    if not select.select([opened], [], [], 0)[0]:
        return False
    timeout = opened.gettimeout()
    opened.setblocking(False)
    try:
        return not opened.recv(4096)
    except BlockingIOError:
        return False
    except OSError as error:
        # SSLWantReadError means a TLS record without data, so the connection is open. The code compares the name,
        # because an import of the module ssl would need memory.
        return type(error).__name__ != "SSLWantReadError"
    finally:
        opened.settimeout(timeout)


class Requests:
    """POST requests with JSON lines over one HTTPS connection. Each answer confirms its lines."""

    def __init__(self, endpoint: Endpoint, context: ssl.SSLContext, authorization: str) -> None:
        self._endpoint = endpoint
        self._context = context
        self._headers = {"Content-Type": "application/x-ndjson", "User-Agent": "amphora-log-forwarder"}
        if authorization:
            self._headers["Authorization"] = authorization
        self._connection: http.client.HTTPSConnection | None = None
        self.uncertain = self.lost = 0

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    def send(self, lines: Sequence[bytes]) -> None:
        import http.client  # noqa: PLC0415 (saves memory without such a target)

        if self._connection is not None and (self._connection.sock is None or _is_closed(self._connection.sock)):
            # The server may have closed the idle connection, so the log forwarder opens a new one itself. A connection
            # that http.client reopens would not wait for the target's check of the client certificate.
            self.close()
        try:
            if self._connection is None:
                self._connection = http.client.HTTPSConnection(
                    self._endpoint.host, self._endpoint.port, timeout=ANSWER_SECONDS, context=self._context
                )
                self._connection.connect()
                _await_acceptance(self._connection.sock)
                self._connection.sock.settimeout(ANSWER_SECONDS)
            self._connection.request("POST", self._endpoint.path, b"".join(lines), self._headers)
            with self._connection.getresponse() as answer:
                answer.read(_MOST_ANSWER)
                status, rest = answer.status, answer.read(1)
        except http.client.HTTPException as error:
            self.close()
            raise ConnectionError(f"invalid answer: {type(error).__name__}") from error
        except OSError:
            self.close()
            raise
        if rest:
            self.close()
        if status in _REFUSED:
            raise LinesRefused(f"the target answered with the status {status}")
        if not 200 <= status < 300:
            raise ConnectionError(f"the target answered with the status {status}")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def create_transport(target: LogTarget, authorities: str, stopping: threading.Event) -> Datagrams | Stream | Requests:
    """Return the transport of a target; raises ValueError or OSError for unusable certificates."""
    endpoint = parse_endpoint(target.url)
    if endpoint.scheme == "udp":
        return Datagrams(endpoint)
    if endpoint.scheme == "tcp":
        return Stream(endpoint, None, stopping)
    import ssl  # noqa: PLC0415 (saves memory without such a target)

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(cadata=authorities)
    if target.client_certificate:
        _load_client_certificate(context, target.client_certificate)
    if endpoint.scheme == "https":
        return Requests(endpoint, context, target.authorization)
    return Stream(endpoint, context, stopping)


def _load_client_certificate(context: ssl.SSLContext, pem: str) -> None:
    """Load a certificate and its key from a file in memory.

    OpenSSL reads a private key from a file only. This file has no name, and is never on a disk.
    """
    descriptor = os.memfd_create("client-certificate")
    try:
        data = memoryview(pem.encode("ascii"))
        while data:
            data = data[os.write(descriptor, data) :]
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
