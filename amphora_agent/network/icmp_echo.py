# SPDX-License-Identifier: Apache-2.0
"""ICMP echo requests and their replies.

Invariant: a reply counts only if it comes from the requested address and repeats the random bytes of a pending request.
No call blocks.
"""

from __future__ import annotations

import errno
import os
import socket
import struct

_NONCE_BYTES = 16
_LARGEST = 256
_BUFFER_BYTES = 1 << 20
# Type, code and checksum of an ICMP message.
_HEAD = struct.Struct("!BBH")
# Identifier and sequence number of an echo request.
_NUMBERS = struct.Struct("!HH")
# Constants of the Linux headers that Python's socket module does not have.
_SO_RCVBUFFORCE = 33
_SOL_RAW, _ICMP_FILTER, _ICMP6_FILTER = 255, 1, 1


def _all_but(answer: int, words: int) -> bytes:
    """Return a filter that lets only one ICMP type through: a set bit drops a type."""
    bits = [0xFFFFFFFF] * words
    bits[answer // 32] ^= 1 << answer % 32
    return struct.pack(f"={words}I", *bits)


_PROTOCOLS = {socket.AF_INET: socket.IPPROTO_ICMP, socket.AF_INET6: socket.IPPROTO_ICMPV6}
_REQUEST_TYPES = {socket.AF_INET: 8, socket.AF_INET6: 128}
# First two bytes of an echo reply in ICMP and ICMPv6: the type and the code.
_REPLIES = {socket.AF_INET: bytes((0, 0)), socket.AF_INET6: bytes((129, 0))}
_FILTERS = {
    socket.AF_INET: (_SOL_RAW, _ICMP_FILTER, _all_but(0, 1)),
    socket.AF_INET6: (socket.IPPROTO_ICMPV6, _ICMP6_FILTER, _all_but(129, 8)),
}


class Pinger:
    """Pending echo requests. The requester is any object: the module typing needs half a megabyte."""

    def __init__(self) -> None:
        self.sockets: dict[socket.AddressFamily, socket.socket] = {}
        self._identifier = int.from_bytes(os.urandom(2), "big")
        self._sequence = 0
        self._pending: dict[bytes, tuple[bytes, object]] = {}
        try:
            for family in _PROTOCOLS:
                self._open(family)
        except OSError:
            self.close()
            raise

    def _open(self, family: socket.AddressFamily) -> None:
        opened = open_raw_socket(family, _PROTOCOLS[family])
        if opened is not None:
            self.sockets[family] = opened
            opened.setsockopt(*_FILTERS[family])

    def send(self, address: str, requester: object) -> bytes:
        """Send a request; returns its key for `cancel`. Raises OSError, for example without a route."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        opened, request = self.sockets.get(family), _REQUEST_TYPES[family]
        if opened is None:
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        # sendto() would look up a host name. So inet_pton(), which accepts only addresses, checks the address first.
        packed = socket.inet_pton(family, address)
        self._sequence = (self._sequence + 1) & 0xFFFF
        key = _NUMBERS.pack(self._identifier, self._sequence) + os.urandom(_NONCE_BYTES)
        # The kernel computes the checksum of an ICMPv6 message, so only IPv4 needs one here.
        checksum = _checksum(_HEAD.pack(request, 0, 0) + key) if family == socket.AF_INET else 0
        opened.sendto(_HEAD.pack(request, 0, checksum) + key, (address, 0))
        self._pending[key] = (packed, requester)
        return key

    def cancel(self, key: bytes) -> None:
        """Ignore the reply to this request."""
        self._pending.pop(key, None)

    def receive(self, family: socket.AddressFamily) -> object:
        """Read one packet; returns the requester of the matching request, or None."""
        try:
            packet, sender = self.sockets[family].recvfrom(_LARGEST)
        except BlockingIOError:
            return None
        start = 4 * (packet[0] & 0x0F) if family == socket.AF_INET else 0
        if packet[start : start + 2] != _REPLIES[family]:
            return None
        key = packet[start + _HEAD.size :]
        address, requester = self._pending.get(key, (b"", None))
        if requester is None or socket.inet_pton(family, sender[0].partition("%")[0]) != address:
            return None
        del self._pending[key]
        return requester

    def close(self) -> None:
        for one in self.sockets.values():
            one.close()


def open_raw_socket(family: socket.AddressFamily, protocol: int) -> socket.socket | None:
    """Return a non-blocking raw socket with a large buffer; None if the kernel lacks the family."""
    try:
        opened = socket.socket(family, socket.SOCK_RAW, protocol)
    except OSError as error:
        if error.errno == errno.EAFNOSUPPORT:
            return None
        raise
    opened.setblocking(False)
    try:
        opened.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
    except PermissionError:
        # Without CAP_NET_ADMIN, only the option SO_RCVBUF is permitted, which the kernel limits to net.core.rmem_max.
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    return opened


def _checksum(message: bytes) -> int:
    """Return the checksum of RFC 1071 for a message of an even length."""
    total: int = sum(struct.unpack(f"!{len(message) // 2}H", message))
    total = (total & 0xFFFF) + (total >> 16)
    return ~(total + (total >> 16)) & 0xFFFF
