# SPDX-License-Identifier: Apache-2.0
"""SCTP checks: INIT, INIT ACK and ABORT. The member keeps no state of a check."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import suppress
from functools import partial

from amphora_agent.l4.event_loop import EventLoop
from amphora_agent.l4_checks import error_queue, sctp_packet
from amphora_agent.l4_checks.check import Check, OnResult, Target
from amphora_agent.network.icmp_echo import open_raw_socket

_MAX_BYTES = 2048
# Source ports of SCTP checks: Linux's default range of client ports, 32768 to 60999.
_FIRST_PORT, _PORTS = 32768, 28232


class SctpChecks:
    """Checks by INIT."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._sockets: dict[socket.AddressFamily, socket.socket] = {}
        # Pending checks by local port.
        self._pending: dict[int, _Init] = {}
        self._next = int.from_bytes(os.urandom(2), "big") % _PORTS
        try:
            for family in (socket.AF_INET, socket.AF_INET6):
                self._open(family)
        except OSError:
            self.close()
            raise

    def _open(self, family: socket.AddressFamily) -> None:
        opened = open_raw_socket(family, socket.IPPROTO_SCTP)
        if opened is not None:
            self._sockets[family] = opened
            error_queue.enable(opened)
            self._loop.add_reader(opened, partial(self._read_packets, opened))

    def start(self, target: Target, on_result: OnResult) -> Check:
        opened = self._sockets.get(target.family)
        if opened is None:
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        for _ in range(_PORTS):
            self._next = (self._next + 1) % _PORTS
            if _FIRST_PORT + self._next not in self._pending:
                break
        else:
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
        check = _Init(_FIRST_PORT + self._next, target, on_result, self)
        # All SCTP checks share one socket, so sendto() could raise an error that belongs to another member. The read
        # before sendto() clears such an error.
        self._read_packets(opened)
        opened.sendto(sctp_packet.init(check.port, target.port, check.tag), (target.address, 0))
        self._pending[check.port] = check
        return check

    def forget(self, check: _Init) -> None:
        if self._pending.get(check.port) is check:
            del self._pending[check.port]

    def _read_packets(self, opened: socket.socket) -> None:
        for error, address, packet_start in error_queue.read_errors(opened):
            check = self._pending.get(sctp_packet.source_port(packet_start) or 0)
            if check is not None and check.target.address == address:
                check.report(False, error)
        while True:
            try:
                data, sender = opened.recvfrom(_MAX_BYTES)
            except BlockingIOError:
                return
            except OSError:
                continue
                # An error of recvfrom() is ignored, because the socket's error queue reports this error together with
                # the member's address.
            start = 4 * (data[0] & 0x0F) if opened.family == socket.AF_INET and data else 0
            packet = sctp_packet.parse(data[start:])
            if packet is not None:
                self._on_answer(opened, packet, sender[0].partition("%")[0])

    def _on_answer(self, opened: socket.socket, packet: sctp_packet.Packet, sender: str) -> None:
        check = self._pending.get(packet.destination)
        if check is None or check.tag != packet.tag or (sender, packet.source) != check.target.endpoint:
            return
        if packet.kind == sctp_packet.INIT_ACK and packet.initiate is not None:
            with suppress(OSError):
                opened.sendto(sctp_packet.abort(check.port, packet.source, packet.initiate), (sender, 0))
            check.report(True, "association accepted")
        elif packet.kind == sctp_packet.ABORT:
            check.report(False, "association refused")

    def close(self) -> None:
        for one in self._sockets.values():
            self._loop.remove(one)
            one.close()
        self._sockets.clear()


class _Init:
    def __init__(self, port: int, target: Target, on_result: OnResult, checks: SctpChecks) -> None:
        self.port = port
        self.target = target
        self.tag = int.from_bytes(os.urandom(4), "big") or 1
        self._on_result = on_result
        self._checks = checks

    def report(self, good: bool, reason: str) -> None:
        self.end()
        self._on_result(good, reason)

    def expire(self) -> tuple[bool, str]:
        self.end()
        return False, "no answer within the time"

    def end(self) -> None:
        self._checks.forget(self)
