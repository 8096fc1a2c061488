# SPDX-License-Identifier: Apache-2.0
"""The connections of the API: time limits, and bytes that were read in advance.

gunicorn itself waits without a limit for the rest of a request, and for a client that does not read its answer.
"""

from __future__ import annotations

import errno
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any

# Maximum seconds for one read or one write, and for all reads of one request. These limits do not apply while
# the server processes a request and the client waits for the answer.
EXCHANGE_SECONDS, REQUEST_SECONDS = 20.0, 60.0


class Connection(socket.socket):
    """A connection with time limits in blocking mode. gunicorn sets this mode before each request.

    Attributes:
        ahead: bytes that were read before; `recv` returns them first.
        read_end: moment at which all reads of the request must have ended.
        ending: the answer is sent. `recv` returns what has arrived, and never waits.
    """

    ahead: bytes = b""
    read_end: float | None = None
    ending: bool = False

    def setblocking(self, flag: bool, /) -> None:
        self.settimeout(EXCHANGE_SECONDS if flag else 0.0)
        self.read_end = None

    def recv(self, *words: Any, **named: Any) -> bytes:
        receive = super().recv
        return _read(self, words, lambda: receive(*words, **named))

    def shutdown(self, how: int, /) -> None:
        super().shutdown(how)
        self.ending = True


class TlsConnection(Connection, ssl.SSLSocket):
    """A connection with TLS, and with the same limits and attributes."""


def limit_connection(conn: Any) -> None:
    """Replace the socket of gunicorn's connection by one with time limits. Idempotent."""
    if not isinstance(conn.sock, Connection):
        conn.sock = Connection(fileno=conn.sock.detach())


def make_context(_config: Any, default: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    """Return gunicorn's TLS context, whose connections have time limits."""
    context = default()
    context.sslsocket_class = TlsConnection
    return context


def _read(connection: Connection, words: tuple[Any, ...], read: Callable[[], bytes]) -> bytes:
    if connection.ahead:
        size = words[0]
        found, connection.ahead = connection.ahead[:size], connection.ahead[size:]
        return found
    before = connection.gettimeout()
    if connection.ending:
        return _arrived(connection, read)
    if before == 0:
        return read()
    now = time.monotonic()
    if connection.read_end is None:
        connection.read_end = now + REQUEST_SECONDS
    left = connection.read_end - now
    if left <= 0:
        raise _lost()
    # When gunicorn closes a connection, its main thread waits with a shorter time-out. This function must not extend
    # that time-out.
    connection.settimeout(left if before is None else min(before, left))
    try:
        return read()
    except TimeoutError as error:
        raise _lost() from error
    finally:
        connection.settimeout(before)


def _arrived(connection: Connection, read: Callable[[], bytes]) -> bytes:
    """Return what has arrived, or nothing. gunicorn reads the rest of a connection in its main thread."""
    connection.settimeout(0.0)
    try:
        return read()
    except BlockingIOError:
        return b""


def _lost() -> ConnectionResetError:
    """Return the error that gunicorn treats as the end of a client, without a traceback in the log."""
    return ConnectionResetError(errno.ECONNRESET, "the client did not send its request in time")
