# SPDX-License-Identifier: Apache-2.0
"""A request that arrives on a connection: no thread waits for it.

The main loop of a worker reads all of a request without waiting, and then gives the connection to a thread. A client
that sends nothing, or that sends slowly, therefore holds a connection only.

A request needs the length of its body in advance, because the end of a body in chunks is known to gunicorn's parser
only.
"""

from __future__ import annotations

import json
import re
import selectors
import socket
import ssl
from contextlib import suppress
from http import HTTPStatus

from amphora_cluster.api import connections
from amphora_cluster.api.connections import Connection, TlsConnection
from amphora_cluster.api.parameters import MOST_BYTES

_MOST_HEAD = 32 * 1024
_PART = 64 * 1024
_LENGTH = re.compile(rb"(?im)^content-length[ \t]*:[ \t]*([^\r\n]*?)[ \t]*\r?$")
_CHUNKS = re.compile(rb"(?im)^transfer-encoding[ \t]*:")
_EXPECT = re.compile(rb"(?im)^expect[ \t]*:[ \t]*100-continue")
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# Seconds for which a refused connection stays open. A close while the client still sends would reset it and lose the
# answer.
_LINGER_SECONDS = 2.0
_REASONS = {
    411: ("it has no Content-Length", "Send the length of the body."),
    413: (f"its body is larger than {MOST_BYTES} bytes", "Send several requests."),
    431: (f"its header is larger than {_MOST_HEAD} bytes", "Shorten the URL and the headers."),
}


class ConnectionEnded(Exception):
    """The client closed the connection, or failed in the TLS handshake."""


def missing_bytes(received: bytes) -> int:
    """Return the number of bytes that a request still lacks; 1 if its header is not complete.

    A negative result is a status with which the API refuses the request.
    """
    head, end, body = received.partition(b"\r\n\r\n")
    if not end:
        return -431 if len(received) > _MOST_HEAD else 1
    if _CHUNKS.search(head):
        return -411
    lengths = set(_LENGTH.findall(head))
    if len(lengths) != 1 or not (length := lengths.pop()).isdigit():
        # The request has no body, or gunicorn will refuse its header. In both cases, no more bytes are needed.
        return 0
    if len(length) > 9 or int(length) > MOST_BYTES:
        return -413
    return max(int(length) - len(body), 0)


class IncomingRequest:
    """The bytes of one request.

    Args:
        connection: in non-blocking mode.
        source: the network of the client, see `network_of`.
        now: a monotonic clock in seconds.

    Attributes:
        source: as given.
        complete: the connection returns the whole request without waiting.
        expires: moment at which the connection is closed.
        events: what the connection waits for, for a selector.
    """

    def __init__(self, connection: Connection, source: str, now: float) -> None:
        self.source = source
        self._connection = connection
        self._received = bytearray()
        self._shaking_hands = isinstance(connection, TlsConnection)
        self._continued = self._refused = False
        self._last = now + connections.REQUEST_SECONDS
        self.complete = False
        self.events = selectors.EVENT_READ
        self.expires = min(now + connections.EXCHANGE_SECONDS, self._last)

    def advance(self, now: float) -> None:
        """Read what has arrived.

        Raises:
            ConnectionEnded: there is nothing to answer.
        """
        if not self._refused:
            self.expires = min(now + connections.EXCHANGE_SECONDS, self._last)
        try:
            self._advance(now)
        except (BlockingIOError, ssl.SSLWantReadError):
            self.events = selectors.EVENT_READ
        except ssl.SSLWantWriteError:
            self.events = selectors.EVENT_WRITE
        except OSError as error:
            raise ConnectionEnded from error

    def _advance(self, now: float) -> None:
        if isinstance(self._connection, TlsConnection) and self._shaking_hands:
            self._connection.do_handshake()
            self._shaking_hands = False
        while True:
            part = self._connection.recv(_PART)
            if not part:
                raise ConnectionEnded
            if self._refused:
                # The function discards one part of a refused request for each event. So a client that sends endlessly
                # cannot block the main loop.
                return
            self._received += part
            missing = missing_bytes(bytes(self._received))
            if missing < 0:
                self._refuse(-missing, now)
            elif missing == 0:
                self.complete = True
                self._connection.ahead = bytes(self._received)
                return
            elif not self._continued and _EXPECT.search(self._received):
                # With the header "Expect: 100-continue", the client waits for this line before it sends the body.
                self._continued = True
                self._connection.send(_CONTINUE)

    def _refuse(self, status: int, now: float) -> None:
        happened, remedy = _REASONS[status]
        body = json.dumps({"wanted": "read the request", "happened": happened, "remedy": remedy}).encode() + b"\n"
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
            f"Cache-Control: no-store\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self._refused, self.expires = True, now + _LINGER_SECONDS
        self._received.clear()
        self._connection.send(head.encode() + body)
        if isinstance(self._connection, TlsConnection):
            # unwrap() sends the end of TLS to the client. The server does not wait for the reply of the client.
            with suppress(ssl.SSLWantReadError):
                self._connection.unwrap()
        else:
            # Connection.shutdown() would make `recv` return without data at once, and the reader would close the
            # connection before the client has read the answer. So the method of the base class is called.
            socket.socket.shutdown(self._connection, socket.SHUT_WR)
