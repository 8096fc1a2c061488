# SPDX-License-Identifier: Apache-2.0
"""gunicorn's worker with time limits for reading a request and for writing its answer.

Without them, gunicorn waits for the rest of a request for ever. A few clients that died, that send nothing, or that
send very slowly would hold all threads, and the API would answer no other caller. Many such clients can still hold the
threads until these limits end: an API for clients that are not trusted needs a proxy that reads requests completely.
"""

from __future__ import annotations

import errno
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any

from gunicorn.workers.gthread import ThreadWorker

# A single read or write may take EXCHANGE_SECONDS, and all reads of one request together REQUEST_SECONDS.
EXCHANGE_SECONDS, REQUEST_SECONDS = 20.0, 60.0


class PlainConnection(socket.socket):
    """A connection with time limits in blocking mode. gunicorn sets this mode before each request."""

    read_end: float | None = None

    def setblocking(self, flag: bool, /) -> None:
        self.settimeout(EXCHANGE_SECONDS if flag else 0.0)
        self.read_end = None

    def recv(self, *words: Any, **named: Any) -> bytes:
        return _read(self, lambda: socket.socket.recv(self, *words, **named))


class TlsConnection(ssl.SSLSocket):
    """A connection with TLS, and with time limits in blocking mode."""

    read_end: float | None = None

    def setblocking(self, flag: bool, /) -> None:
        self.settimeout(EXCHANGE_SECONDS if flag else 0.0)
        self.read_end = None

    def recv(self, *words: Any, **named: Any) -> bytes:
        return _read(self, lambda: ssl.SSLSocket.recv(self, *words, **named))

    def do_handshake(self, block: bool = False) -> None:
        try:
            super().do_handshake(block)
        except TimeoutError as error:
            raise _lost() from error


class Worker(ThreadWorker):
    """A worker whose connections have time limits."""

    def enqueue_req(self, conn: Any) -> None:
        """Replace the socket of a new connection before gunicorn uses it."""
        limit_connection(conn)
        super().enqueue_req(conn)


def limit_connection(conn: Any) -> None:
    """Replace the socket of gunicorn's connection by one with time limits. Idempotent."""
    if not isinstance(conn.sock, PlainConnection | ssl.SSLSocket):
        conn.sock = PlainConnection(fileno=conn.sock.detach())


def make_context(_config: Any, default: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    """Return gunicorn's TLS context, whose connections have time limits."""
    context = default()
    context.sslsocket_class = TlsConnection
    return context


def _read(connection: PlainConnection | TlsConnection, read: Callable[[], bytes]) -> bytes:
    before = connection.gettimeout()
    if before == 0:
        return read()
    now = time.monotonic()
    if connection.read_end is None:
        connection.read_end = now + REQUEST_SECONDS
    left = connection.read_end - now
    if left <= 0:
        raise _lost()
    # gunicorn sets a shorter time-out for the end of a connection, for which its main thread waits. This time-out must
    # stay.
    connection.settimeout(left if before is None else min(before, left))
    try:
        return read()
    except TimeoutError as error:
        raise _lost() from error
    finally:
        connection.settimeout(before)


def _lost() -> ConnectionResetError:
    """Return the error that gunicorn treats as the end of a client, without a traceback in the log."""
    return ConnectionResetError(errno.ECONNRESET, "the client did not send its request in time")
