# SPDX-License-Identifier: Apache-2.0
"""HTTP checks: a member answers a request with an expected status.

Invariant: a check connects only to the address of the monitor and follows no redirect. It reads a bounded number of
bytes within the monitor's time-out, however slowly the member sends.
"""

from __future__ import annotations

import re

from amphora_agent.l4.event_loop import EventLoop
from amphora_agent.l4.model import Monitor
from amphora_agent.l4_checks.check import Check, OnResult, Target, error_text
from amphora_agent.l4_checks.tcp import Connection, TcpChecks

MAX_LINE_BYTES = 1024
# A status line may lack the reason phrase and the space before it (RFC 9112, section 4).
_FIRST_LINE = re.compile(rb"HTTP/1\.[0-9] ([1-9][0-9]{2})(?: [^\r\n]*)?\r?\n")


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


def build_request(monitor: Monitor, address: str, port: int) -> bytes:
    """Return the request. HTTP/1.1 requires a host; the default is the member's address."""
    host = monitor.host
    if host is None and monitor.version == "1.1":
        host = (f"[{address}]" if ":" in address else address) + ("" if port == 80 else f":{port}")
    lines = [f"{monitor.method} {monitor.path} HTTP/{monitor.version}"]
    lines += [f"Host: {host}"] if host is not None else []
    lines += ["Content-Length: 0"] if monitor.method in ("POST", "PUT", "PATCH") else []
    lines += ["User-Agent: amphora-checker", "Connection: close"]
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode("ascii")


def parse_status(received: bytes) -> int | None:
    """Return the status of an answer; None if more bytes are needed. Raises ValueError for other text."""
    line = received[:MAX_LINE_BYTES]
    if (found := _FIRST_LINE.match(line)) is not None:
        return int(found[1])
    is_prefix = line.startswith(b"HTTP/1.") or b"HTTP/1.".startswith(line)
    if b"\n" in line or len(received) >= MAX_LINE_BYTES or not is_prefix:
        raise ValueError("not an HTTP/1 answer")
    return None


def matches_codes(status: int, codes: tuple[str, ...]) -> bool:
    """Return whether a status is one of these codes; a code may be a range like 200-204."""
    ranges = (code.partition("-") for code in codes)
    return any(int(least) <= status <= int(most or least) for least, _, most in ranges)
