# SPDX-License-Identifier: Apache-2.0
"""ICMP errors from the error queue of a socket (ip(7), IP_RECVERR)."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterator

# Constants of the Linux headers that Python's socket module does not have.
_IP_RECVERR, _IPV6_RECVERR, _MSG_ERRQUEUE = 11, 25, 0x2000
# The kernel's struct sock_extended_err: errno, origin, type, code, padding, info and data.
_EXTENDED = struct.Struct("=IBBBBII")
_LEVELS = {(socket.IPPROTO_IP, _IP_RECVERR), (socket.IPPROTO_IPV6, _IPV6_RECVERR)}
_LARGEST = 512
# These errors mean that the member is unreachable. Other errors, such as a packet that is too large, concern only the
# path to the member.
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
    # A pending error of the socket would make recvmsg() fail, so getsockopt() reads SO_ERROR first, which clears the
    # pending error.
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
