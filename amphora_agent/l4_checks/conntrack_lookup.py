# SPDX-License-Identifier: Apache-2.0
"""Ask the kernel's connection tracking whether there is such a flow.

Invariant: one question, one answer, nothing changed. A kernel that does not know the question says no.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

# linux/netfilter/nfnetlink.h, nfnetlink_conntrack.h
_NETLINK_NETFILTER, _REQUEST, _ERROR = 12, 1, 2
_GET = 1 << 8 | 1
_NESTED = 0x8000
_TUPLE_REPLY, _TUPLE_IP, _TUPLE_PROTO = 2, 1, 2
_SOURCE_OF, _DESTINATION_OF = {socket.AF_INET: 1, socket.AF_INET6: 3}, {socket.AF_INET: 2, socket.AF_INET6: 4}
_PROTO_NUMBER, _PROTO_SOURCE, _PROTO_DESTINATION = 1, 2, 3
_ANSWER_SECONDS = 1.0


@dataclass(frozen=True)
class Flow:
    """What goes from ``us`` to ``member``, both as the member sees them."""

    family: socket.AddressFamily
    protocol: int
    member: tuple[str, int]
    us: tuple[str, int]


def exists(flow: Flow) -> bool:
    """Whether packets of this flow have passed."""
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_NETFILTER) as link:
            link.settimeout(_ANSWER_SECONDS)
            link.bind((0, 0))
            link.send(question(flow))
            answer = link.recv(8192)
    except OSError:
        return False
    kind: int = struct.unpack_from("=H", answer, 4)[0]
    return kind != _ERROR


def question(flow: Flow) -> bytes:
    """Ask for the flow whose answers go from the member to us."""
    (member, port), (us, our_port) = flow.member, flow.us
    family = flow.family
    addresses = _attribute(_SOURCE_OF[family], socket.inet_pton(family, member))
    addresses += _attribute(_DESTINATION_OF[family], socket.inet_pton(family, us))
    protocol = _attribute(_PROTO_NUMBER, bytes((flow.protocol,)))
    protocol += _attribute(_PROTO_SOURCE, struct.pack("!H", port))
    protocol += _attribute(_PROTO_DESTINATION, struct.pack("!H", our_port))
    nested = _attribute(_TUPLE_IP | _NESTED, addresses) + _attribute(_TUPLE_PROTO | _NESTED, protocol)
    body = struct.pack("=BBH", family, 0, 0) + _attribute(_TUPLE_REPLY | _NESTED, nested)
    return struct.pack("=IHHII", 16 + len(body), _GET, _REQUEST, 1, 0) + body


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)
