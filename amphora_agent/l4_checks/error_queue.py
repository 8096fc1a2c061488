# SPDX-License-Identifier: Apache-2.0
"""ICMP errors from the error queue of a socket (ip(7), IP_RECVERR)."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterator

# The socket module does not name these constants of the kernel's headers.
_IP_RECVERR, _IPV6_RECVERR, _MSG_ERRQUEUE = 11, 25, 0x2000
_EXTENDED = struct.Struct("=IBBBBII")  # The fields are errno, origin, type, code, padding, info and data.
_LEVELS = {(socket.IPPROTO_IP, _IP_RECVERR), (socket.IPPROTO_IPV6, _IPV6_RECVERR)}
_LARGEST = 512
# These errors mean an unreachable member. Other errors are about the path, for example a packet that is too large.
_UNREACHABLE = {
    errno.ECONNREFUSED: "port unreachable",
    errno.ENOPROTOOPT: "protocol unreachable",
    errno.EHOSTUNREACH: "host unreachable",
    errno.ENETUNREACH: "network unreachable",
    errno.EHOSTDOWN: "host unreachable",
    errno.EACCES: "access is prohibited",
}


def enable(one: socket.socket) -> None:
    """Enable the queue, without which the kernel does not report unreachable hosts."""
    is_ipv6 = one.family == socket.AF_INET6
    option = (socket.IPPROTO_IPV6, _IPV6_RECVERR) if is_ipv6 else (socket.IPPROTO_IP, _IP_RECVERR)
    one.setsockopt(*option, 1)


def read_errors(one: socket.socket) -> Iterator[tuple[str, str, bytes]]:
    """Yield each error: its text, the address it is about, and the packet without the IP header."""
    # Reading SO_ERROR clears the error, which the next call would raise.
    one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    while True:
        try:
            packet, control, _, destination = one.recvmsg(_LARGEST, 256, _MSG_ERRQUEUE)
        except OSError:
            return
        for level, kind, data in control:
            if (level, kind) in _LEVELS and len(data) >= _EXTENDED.size:
                number = _EXTENDED.unpack_from(data)[0]
                if (text := _UNREACHABLE.get(number)) is not None:
                    yield text, destination[0].partition("%")[0] if destination else "", packet
