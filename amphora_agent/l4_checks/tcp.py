# SPDX-License-Identifier: Apache-2.0
"""TCP checks: a member accepts a connection. A reset ends it, so that no port is in TIME-WAIT."""

from __future__ import annotations

import errno
import os
import socket

from amphora_agent.l4.event_loop import EventLoop, make_nonblocking
from amphora_agent.l4_checks.check import Check, OnResult, Target

# A struct linger with 0 seconds: close() resets the connection.
_RESET_ON_CLOSE = b"\1\0\0\0\0\0\0\0"


class TcpChecks:
    """Checks by a TCP connection."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop

    def start(self, target: Target, on_result: OnResult) -> Check:
        return Connection(self._loop, target, on_result)

    def close(self) -> None:
        """Do nothing, because the checks share no resources."""


class Connection:
    """A connection to a member; `_on_connected` decides what follows."""

    def __init__(self, loop: EventLoop, target: Target, on_result: OnResult) -> None:
        self._loop = loop
        self._on_result = on_result
        self._socket = _start_connecting(target)
        loop.add_writer(self._socket, self._on_writable)

    def _on_writable(self) -> None:
        number = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            self.report(False, os.strerror(number).lower())
        else:
            self._on_connected()

    def _on_connected(self) -> None:
        self.report(True, "connection accepted")

    def report(self, good: bool, reason: str) -> None:
        self.end()
        self._on_result(good, reason)

    def expire(self) -> tuple[bool, str]:
        self.end()
        return False, "no connection within the time"

    def end(self) -> None:
        self._loop.remove(self._socket)
        self._socket.close()


def _start_connecting(target: Target) -> socket.socket:
    """Return a socket that connects; raises OSError if the connection cannot be started."""
    opened = make_nonblocking(socket.socket(target.family, socket.SOCK_STREAM))
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    try:
        number = opened.connect_ex(target.endpoint)
    except OSError as error:
        number = error.errno or errno.EINVAL
    if number not in (0, errno.EINPROGRESS):
        opened.close()
        raise OSError(number, os.strerror(number))
    return opened
