# SPDX-License-Identifier: Apache-2.0
"""Whether a member answers a request of HTTP with a status that is wanted.

Invariant: it goes where the monitor says and nowhere else: no redirect is followed. It reads a bounded number of bytes
within the monitor's time, however the member drips them.
"""

from __future__ import annotations

from amphora_agent.l4.event_loop import Loop
from amphora_agent.l4_checks.check import Check, Done, Target, words
from amphora_agent.l4_checks.http_response import LONGEST, among, request, status_of
from amphora_agent.l4_checks.tcp import Connecting


class HttpChecks:
    """Checks by a request."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def begin(self, asked: Target, done: Done) -> Check:
        return _Asking(self._loop, asked, done)

    def close(self) -> None:
        """There is nothing that all of them share."""


class _Asking(Connecting):
    def __init__(self, loop: Loop, asked: Target, done: Done) -> None:
        super().__init__(loop, asked, done)
        self._codes = asked.monitor.codes
        self._unsent = request(asked.monitor, asked.address, asked.port)
        self._received = b""
        self._is_made = False

    def _made(self) -> None:
        self._is_made = True
        try:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except OSError as error:
            self.say(False, words(error))
            return
        if not self._unsent:
            self._loop.forget(self._socket)
            self._loop.read(self._socket, self._hear)

    def _hear(self) -> None:
        try:
            data = self._socket.recv(LONGEST)
            self._received += data
            status = status_of(self._received)
        except BlockingIOError:
            return
        except OSError as error:
            self.say(False, words(error))
        except ValueError as error:
            self.say(False, str(error))
        else:
            if status is not None:
                self.say(among(status, self._codes), f"status {status}")
            elif not data:
                self.say(False, "it hung up without an answer")

    def expire(self) -> tuple[bool, str]:
        self.end()
        return False, "no answer within the time" if self._is_made else "no connection within the time"
