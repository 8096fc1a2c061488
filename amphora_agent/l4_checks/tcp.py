# SPDX-License-Identifier: Apache-2.0
"""Whether a member takes TCP connections.

Invariant: a connection costs a socket for as long as it is being made and nothing afterwards: it is reset, so no port
waits for a minute.
"""

from __future__ import annotations

import errno
import os
import socket

from amphora_agent.l4.event_loop import Loop, roomy
from amphora_agent.l4_checks.check import Check, Done, Target

_RESET_AT_ONCE = b"\1\0\0\0\0\0\0\0"  # struct linger


class TcpChecks:
    """Checks by a connection that is made."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def begin(self, asked: Target, done: Done) -> Check:
        return Connecting(self._loop, asked, done)

    def close(self) -> None:
        """There is nothing that all of them share."""


class Connecting:
    """A connection that is being made; `_made` is what follows."""

    def __init__(self, loop: Loop, asked: Target, done: Done) -> None:
        self._loop = loop
        self._done = done
        self._socket = connecting(asked)
        loop.written(self._socket, self._settled)

    def _settled(self) -> None:
        number = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            self.say(False, os.strerror(number).lower())
        else:
            self._made()

    def _made(self) -> None:
        self.say(True, "it takes connections")

    def say(self, good: bool, seen: str) -> None:
        """Give the verdict."""
        self.end()
        self._done(good, seen)

    def expire(self) -> tuple[bool, str]:
        self.end()
        return False, "no connection within the time"

    def end(self) -> None:
        self._loop.forget(self._socket)
        self._socket.close()


def connecting(asked: Target) -> socket.socket:
    """A TCP connection that is being made.

    Raises:
        OSError: it cannot even be tried.
    """
    opened = roomy(socket.socket(asked.family, socket.SOCK_STREAM))
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_ONCE)
    try:
        number = opened.connect_ex(asked.place)
    except OSError as error:
        number = error.errno or errno.EINVAL
    if number not in (0, errno.EINPROGRESS):
        opened.close()
        raise OSError(number, os.strerror(number))
    return opened
