# SPDX-License-Identifier: Apache-2.0
"""Look up a flow in the kernel's connection tracking.

Invariant: one request and one answer; nothing is changed. If the kernel does not support the request, there is no flow.
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
    """A flow from ``local`` to ``member``, both as the member sees them."""

    family: socket.AddressFamily
    protocol: int
    member: tuple[str, int]
    local: tuple[str, int]


def flow_exists(flow: Flow) -> bool:
    """Return whether connection tracking has this flow."""
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_NETFILTER) as link:
            link.settimeout(_ANSWER_SECONDS)
            link.bind((0, 0))
            link.send(build_request(flow))
            answer = link.recv(8192)
    except OSError:
        return False
    kind: int = struct.unpack_from("=H", answer, 4)[0]
    return kind != _ERROR


def build_request(flow: Flow) -> bytes:
    """Return the request for the flow, by the tuple of its replies from the member."""
    (member, port), (local, local_port) = flow.member, flow.local
    family = flow.family
    addresses = _attribute(_SOURCE_OF[family], socket.inet_pton(family, member))
    addresses += _attribute(_DESTINATION_OF[family], socket.inet_pton(family, local))
    protocol = _attribute(_PROTO_NUMBER, bytes((flow.protocol,)))
    protocol += _attribute(_PROTO_SOURCE, struct.pack("!H", port))
    protocol += _attribute(_PROTO_DESTINATION, struct.pack("!H", local_port))
    nested = _attribute(_TUPLE_IP | _NESTED, addresses) + _attribute(_TUPLE_PROTO | _NESTED, protocol)
    body = struct.pack("=BBH", family, 0, 0) + _attribute(_TUPLE_REPLY | _NESTED, nested)
    return struct.pack("=IHHII", 16 + len(body), _GET, _REQUEST, 1, 0) + body


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)
