# SPDX-License-Identifier: Apache-2.0
"""HTTP checks: a member answers a request with an expected status.

Invariant: a check connects only to the address of the monitor and follows no redirect. It reads a bounded number of
bytes within the monitor's time-out, however slowly the member sends.
"""

from __future__ import annotations

from amphora_agent.l4.event_loop import EventLoop
from amphora_agent.l4_checks.check import Check, OnResult, Target, error_text
from amphora_agent.l4_checks.http_response import MAX_LINE_BYTES, build_request, matches_codes, parse_status
from amphora_agent.l4_checks.tcp import Connection, TcpChecks


class HttpChecks(TcpChecks):
    """Checks by an HTTP request."""

    def start(self, target: Target, on_result: OnResult) -> Check:
        return _Request(self._loop, target, on_result)


class _Request(Connection):
    def __init__(self, loop: EventLoop, target: Target, on_result: OnResult) -> None:
        super().__init__(loop, target, on_result)
        self._codes = target.monitor.codes
        self._unsent = build_request(target.monitor, target.address, target.port)
        self._received = b""
        self._is_connected = False

    def _on_connected(self) -> None:
        self._is_connected = True
        try:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except OSError as error:
            self.report(False, error_text(error))
            return
        if not self._unsent:
            self._loop.remove(self._socket)
            self._loop.add_reader(self._socket, self._on_readable)

    def _on_readable(self) -> None:
        try:
            data = self._socket.recv(MAX_LINE_BYTES)
            self._received += data
            status = parse_status(self._received)
        except BlockingIOError:
            return
        except OSError as error:
            self.report(False, error_text(error))
        except ValueError as error:
            self.report(False, str(error))
        else:
            if status is not None:
                self.report(matches_codes(status, self._codes), f"status {status}")
            elif not data:
                self.report(False, "connection closed without an answer")

    def expire(self) -> tuple[bool, str]:
        self.end()
        return False, "no answer within the time" if self._is_connected else "no connection within the time"
