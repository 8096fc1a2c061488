# SPDX-License-Identifier: Apache-2.0
"""What a socket's error queue says (ip(7), IP_RECVERR): errors of ICMP, and what they are about.

Invariant: reading it empties it, and never raises: a queue that is left as it is wakes its reader for ever.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterator

# From the kernel's headers; the socket module does not name them.
_IP_RECVERR, _IPV6_RECVERR, _MSG_ERRQUEUE = 11, 25, 0x2000
_EXTENDED = struct.Struct("=IBBBBII")  # errno, origin, type, code, padding, info, data
_LEVELS = {(socket.IPPROTO_IP, _IP_RECVERR), (socket.IPPROTO_IPV6, _IPV6_RECVERR)}
_LARGEST = 512
# What says that nobody is there. Others (a packet that was too large, for example) are about the way.
_GONE = {
    errno.ECONNREFUSED: "port unreachable",
    errno.ENOPROTOOPT: "protocol unreachable",
    errno.EHOSTUNREACH: "host unreachable",
    errno.ENETUNREACH: "network unreachable",
    errno.EHOSTDOWN: "host unreachable",
    errno.EACCES: "it may not be reached",
}


def ask_for(one: socket.socket) -> None:
    """Have the kernel fill it. Without it, it says nothing of hosts that cannot be reached."""
    if one.family == socket.AF_INET6:
        one.setsockopt(socket.IPPROTO_IPV6, _IPV6_RECVERR, 1)
    else:
        one.setsockopt(socket.IPPROTO_IP, _IP_RECVERR, 1)


def read(one: socket.socket) -> Iterator[tuple[str, str, bytes]]:
    """What is in it: what happened, whom it is about, and the packet from its own header on."""
    one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)  # the same once more, which the next call would raise
    while True:
        try:
            packet, control, _, about = one.recvmsg(_LARGEST, 256, _MSG_ERRQUEUE)
        except OSError:
            return
        for level, kind, data in control:
            if (level, kind) in _LEVELS and len(data) >= _EXTENDED.size:
                number = _EXTENDED.unpack_from(data)[0]
                if (happened := _GONE.get(number)) is not None:
                    yield happened, about[0].partition("%")[0] if about else "", packet
