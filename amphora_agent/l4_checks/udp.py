# SPDX-License-Identifier: Apache-2.0
"""UDP-CONNECT checks: a datagram is sent, and no ICMP error reports a closed port.

Invariant: silence is success, as in Octavia, if the datagram was sent. An error that arrived since the previous check
counts, whether it answered a check or a packet of a client (`amphora_agent.l4_checks.icmp_errors`).
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress

from amphora_agent.l4.event_loop import EventLoop, make_nonblocking
from amphora_agent.l4_checks import error_queue
from amphora_agent.l4_checks.check import Check, OnResult, Target
from amphora_agent.l4_checks.icmp_errors import IcmpErrorMonitor
from amphora_agent.l4_checks.neighbor_probe import NeighborProbe

# Each check sends this datagram. Programs that log lines ignore a line feed, but some programs interpret an empty
# datagram as the end of input.
PAYLOAD = b"\n"
_MAX_BYTES = 512
# Maximum number of kept ICMP errors that arrived after the end of their check.
_MAX_LATE_ERRORS = 4096


class UdpChecks:
    """Checks by a datagram."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        # Pending checks by address of the member.
        self._checks: dict[str, set[_Datagram]] = {}
        self._late_errors: dict[tuple[str, int], tuple[float, str]] = {}
        self.neighbors = NeighborProbe()
        try:
            self._icmp_errors = IcmpErrorMonitor(loop, self._on_icmp_error)
        except OSError:
            self.neighbors.close()
            raise

    def start(self, target: Target, on_result: OnResult) -> Check:
        when, error = self._late_errors.pop(target.endpoint, (0.0, ""))
        check = _Datagram(self._loop, target, on_result, self)
        self._checks.setdefault(target.address, set()).add(check)
        # A host that has failed sends no ICMP error. So the kernel also asks for the host's link-layer address (ARP or
        # neighbour discovery).
        self.neighbors.probe(target.address)
        if error and when >= time.monotonic() - target.monitor.interval:
            self._loop.call_at(0.0, lambda: check.report(False, error))
        return check

    def _on_icmp_error(self, address: str, port: int, error: str) -> None:
        for check in list(self._checks.get(address, ())):
            if port == 0 or (check.target.direct and port == check.target.port):
                check.on_error(error)

    def keep_late_error(self, endpoint: tuple[str, int], error: str) -> None:
        """Keep an error for the next check, because no check is pending."""
        if len(self._late_errors) >= _MAX_LATE_ERRORS:
            self._late_errors.clear()
        self._late_errors[endpoint] = time.monotonic(), error

    def forget(self, check: _Datagram) -> None:
        known = self._checks.get(check.target.address, set())
        known.discard(check)
        if not known:
            self._checks.pop(check.target.address, None)

    def close(self) -> None:
        self._icmp_errors.close()
        self.neighbors.close()


class _Datagram:
    """One check. Its socket stays open until the next check, because errors may be late."""

    def __init__(self, loop: EventLoop, target: Target, on_result: OnResult, checks: UdpChecks) -> None:
        self.target = target
        self._loop = loop
        self._on_result: OnResult | None = on_result
        self._checks = checks
        self._socket = make_nonblocking(socket.socket(target.family, socket.SOCK_DGRAM))
        try:
            error_queue.enable(self._socket)
            self._socket.connect(target.endpoint)
            self._socket.send(PAYLOAD)
        except OSError:
            self._socket.close()
            raise
        loop.add_reader(self._socket, self._on_readable)

    def _on_readable(self) -> None:
        errors = [text for text, *_ in error_queue.read_errors(self._socket)]
        with suppress(OSError):
            self._socket.recv(_MAX_BYTES)
            self.report(True, "it answers")
        if errors:
            self.on_error(errors[-1])

    def on_error(self, error: str) -> None:
        """Fail the check, or keep the error for the next one."""
        if self._on_result is None:
            self._checks.keep_late_error(self.target.endpoint, error)
        else:
            self.report(False, error)

    def report(self, good: bool, reason: str) -> None:
        """Report a result, if there was none yet."""
        on_result, self._on_result = self._on_result, None
        if on_result is not None:
            on_result(good, reason)

    def expire(self) -> tuple[bool, str]:
        self._on_result = None
        if self._checks.neighbors.is_unresolved(self.target.address):
            return False, "host unreachable"
        return True, "no error received"

    def end(self) -> None:
        self._on_result = None
        self._checks.forget(self)
        self._loop.remove(self._socket)
        self._socket.close()
