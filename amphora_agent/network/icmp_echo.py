# SPDX-License-Identifier: Apache-2.0
"""Ask whether an address answers an ICMP echo.

Invariant: an answer counts only if it comes from the address that was asked and repeats the random bytes of a
question that still waits. There is one socket for each family, however many questions wait, and nothing blocks.
"""

from __future__ import annotations

import errno
import os
import socket
import struct

_NONCE_BYTES = 16
_LARGEST = 256
_BUFFER_BYTES = 1 << 20
_HEAD = struct.Struct("!BBH")  # type, code, checksum
_NUMBERS = struct.Struct("!HH")  # identifier and sequence, which come between the head and our own bytes
# From the kernel's headers; the socket module does not name them.
_SO_RCVBUFFORCE = 33
_SOL_RAW, _ICMP_FILTER, _ICMP6_FILTER = 255, 1, 1


class _Protocol:
    """How the two families differ. Questions of the newer one are summed up by the kernel."""

    __slots__ = ("answered", "filter", "number", "question", "summed")

    def __init__(
        self, number: int, question: int, answered: bytes, summed: bool, filter_: tuple[int, int, bytes]
    ) -> None:
        self.number = number
        self.question = question
        self.answered = answered  # type and code
        self.summed = summed
        self.filter = filter_


def _all_but(answer: int, words: int) -> bytes:
    """The kernel's filter of ICMP types: a set bit keeps that type out."""
    bits = [0xFFFFFFFF] * words
    bits[answer // 32] ^= 1 << answer % 32
    return struct.pack(f"={words}I", *bits)


_PROTOCOLS = {
    socket.AF_INET: _Protocol(socket.IPPROTO_ICMP, 8, bytes((0, 0)), True, (_SOL_RAW, _ICMP_FILTER, _all_but(0, 1))),
    socket.AF_INET6: _Protocol(
        socket.IPPROTO_ICMPV6, 128, bytes((129, 0)), False, (socket.IPPROTO_ICMPV6, _ICMP6_FILTER, _all_but(129, 8))
    ),
}


class Pinger:
    """Questions and who waits for their answers. Made in the network namespace it shall speak in.

    Who waits is any object: a class with a parameter would cost the responder half a megabyte (typing).
    """

    def __init__(self) -> None:
        self.sockets: dict[socket.AddressFamily, socket.socket] = {}
        self._identifier = int.from_bytes(os.urandom(2), "big")
        self._sequence = 0
        self._waiting: dict[bytes, tuple[bytes, object]] = {}
        try:
            for family in _PROTOCOLS:
                self._open(family)
        except OSError:
            self.close()
            raise

    def _open(self, family: socket.AddressFamily) -> None:
        """A raw socket; ping sockets, which the kernel has too, are switched off in a new namespace."""
        protocol = _PROTOCOLS[family]
        try:
            opened = socket.socket(family, socket.SOCK_RAW, protocol.number)
        except OSError as error:
            if error.errno == errno.EAFNOSUPPORT:
                return
            raise
        self.sockets[family] = opened
        opened.setblocking(False)
        opened.setsockopt(*protocol.filter)
        try:
            opened.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
        except PermissionError:  # without CAP_NET_ADMIN: up to net.core.rmem_max
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)

    def ask(self, address: str, asker: object) -> bytes:
        """Send a question; what is returned is for `forget`.

        Raises:
            OSError: it cannot be sent: there is no route, for example.
        """
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        opened = self.sockets.get(family)
        if opened is None:
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        packed = socket.inet_pton(family, address)  # first: a socket would ask a name server what it does not know
        self._sequence = (self._sequence + 1) & 0xFFFF
        mark = _NUMBERS.pack(self._identifier, self._sequence) + os.urandom(_NONCE_BYTES)
        opened.sendto(_question(_PROTOCOLS[family], mark), (address, 0))
        self._waiting[mark] = (packed, asker)
        return mark

    def forget(self, mark: bytes) -> None:
        """Nobody waits for this answer any more."""
        self._waiting.pop(mark, None)

    def answered(self, family: socket.AddressFamily) -> object:
        """Read one packet; who has waited for it, if anybody has."""
        try:
            packet, sender = self.sockets[family].recvfrom(_LARGEST)
        except BlockingIOError:
            return None
        start = 4 * (packet[0] & 0x0F) if family == socket.AF_INET else 0
        if packet[start : start + 2] != _PROTOCOLS[family].answered:
            return None
        mark = packet[start + _HEAD.size :]
        address, asker = self._waiting.get(mark, (b"", None))
        if asker is None or socket.inet_pton(family, sender[0].partition("%")[0]) != address:
            return None
        del self._waiting[mark]
        return asker

    def close(self) -> None:
        for one in self.sockets.values():
            one.close()


def _question(protocol: _Protocol, mark: bytes) -> bytes:
    message = _HEAD.pack(protocol.question, 0, 0) + mark
    return _HEAD.pack(protocol.question, 0, _checksum(message)) + mark if protocol.summed else message


def _checksum(message: bytes) -> int:
    """The one of RFC 1071, for a message of an even length."""
    total: int = sum(struct.unpack(f"!{len(message) // 2}H", message))
    total = (total & 0xFFFF) + (total >> 16)
    return ~(total + (total >> 16)) & 0xFFFF
