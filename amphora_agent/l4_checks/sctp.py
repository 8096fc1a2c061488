# SPDX-License-Identifier: Apache-2.0
"""Whether a member takes SCTP associations: it is asked for one, and told to forget it when it says yes.

Invariant: the member keeps nothing of a check. There is one raw socket for each family, however many members are
asked: the kernel need not know SCTP.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from amphora_agent.l4.event_loop import Loop
from amphora_agent.l4_checks import error_queue, sctp_packet
from amphora_agent.l4_checks.check import Check, Done, Target

_LARGEST = 2048
_BUFFER_BYTES = 1 << 20
_SO_RCVBUFFORCE = 33
_FIRST_PORT, _PORTS = 32768, 28232  # where ports of clients usually are


class SctpChecks:
    """Checks by INIT."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._sockets: dict[socket.AddressFamily, socket.socket] = {}
        self._waiting: dict[int, _Init] = {}  # by our port
        self._next = int.from_bytes(os.urandom(2), "big") % _PORTS
        try:
            for family in (socket.AF_INET, socket.AF_INET6):
                self._open(family)
        except OSError:
            self.close()
            raise

    def _open(self, family: socket.AddressFamily) -> None:
        try:
            opened = socket.socket(family, socket.SOCK_RAW, socket.IPPROTO_SCTP)
        except OSError as error:
            if error.errno == errno.EAFNOSUPPORT:
                return
            raise
        self._sockets[family] = opened
        opened.setblocking(False)
        error_queue.ask_for(opened)
        opened.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
        self._loop.read(opened, partial(self._hear, opened))

    def begin(self, asked: Target, done: Done) -> Check:
        opened = self._sockets.get(asked.family)
        if opened is None:
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        for _ in range(_PORTS):
            self._next = (self._next + 1) % _PORTS
            if _FIRST_PORT + self._next not in self._waiting:
                break
        else:
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
        check = _Init(_FIRST_PORT + self._next, asked, done, self._forget)
        self._hear(opened)  # an error that waits, which is about somebody else, would be raised
        opened.sendto(sctp_packet.init(check.port, asked.port, check.tag), (asked.address, 0))
        self._waiting[check.port] = check
        return check

    def _forget(self, check: _Init) -> None:
        if self._waiting.get(check.port) is check:
            del self._waiting[check.port]

    def _hear(self, opened: socket.socket) -> None:
        """Read all that is there."""
        for happened, about, question in error_queue.read(opened):
            check = self._waiting.get(sctp_packet.source_of(question) or 0)
            if check is not None and check.asked.address == about:
                check.say(False, happened)
        while True:
            try:
                data, sender = opened.recvfrom(_LARGEST)
            except BlockingIOError:
                return
            except OSError:
                continue  # it was in the queue too
            start = 4 * (data[0] & 0x0F) if opened.family == socket.AF_INET and data else 0
            packet = sctp_packet.read(data[start:])
            if packet is not None:
                self._answered(opened, packet, sender[0].partition("%")[0])

    def _answered(self, opened: socket.socket, packet: sctp_packet.Packet, sender: str) -> None:
        check = self._waiting.get(packet.destination)
        if check is None or check.tag != packet.tag or (sender, packet.source) != check.asked.place:
            return
        if packet.kind == sctp_packet.INIT_ACK and packet.initiate is not None:
            with suppress(OSError):
                opened.sendto(sctp_packet.abort(check.port, packet.source, packet.initiate), (sender, 0))
            check.say(True, "it takes associations")
        elif packet.kind == sctp_packet.ABORT:
            check.say(False, "it refuses associations")

    def close(self) -> None:
        for one in self._sockets.values():
            self._loop.forget(one)
            one.close()
        self._sockets.clear()


class _Init:
    def __init__(self, port: int, asked: Target, done: Done, forget: Callable[[_Init], None]) -> None:
        self.port = port
        self.asked = asked
        self.tag = int.from_bytes(os.urandom(4), "big") or 1
        self._done = done
        self._forget = forget

    def say(self, good: bool, seen: str) -> None:
        """Give the verdict."""
        self.end()
        self._done(good, seen)

    def expire(self) -> tuple[bool, str]:
        self.end()
        return False, "no answer within the time"

    def end(self) -> None:
        self._forget(self)
