# SPDX-License-Identifier: Apache-2.0
"""Look up a flow in the kernel's connection tracking.

Invariant: one request and one answer; nothing is changed. If the kernel does not support the request, there is no flow.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

from amphora_agent.l4 import netlink

# linux/netfilter/nfnetlink_conntrack.h
_GET = 1 << 8 | 1
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
        with netlink.open_socket(netlink.NETFILTER, timeout=_ANSWER_SECONDS) as link:
            link.send(build_request(flow))
            answer = link.recv(8192)
    except OSError:
        return False
    kind: int = struct.unpack_from("=H", answer, 4)[0]
    return kind != netlink.ERROR


def build_request(flow: Flow) -> bytes:
    """Return the request for the flow, by the tuple of its replies from the member."""
    (member, port), (local, local_port), family = flow.member, flow.local, flow.family
    addresses = netlink.attribute(_SOURCE_OF[family], socket.inet_pton(family, member))
    addresses += netlink.attribute(_DESTINATION_OF[family], socket.inet_pton(family, local))
    protocol = netlink.attribute(_PROTO_NUMBER, bytes((flow.protocol,)))
    protocol += netlink.attribute(_PROTO_SOURCE, struct.pack("!H", port))
    protocol += netlink.attribute(_PROTO_DESTINATION, struct.pack("!H", local_port))
    nested = netlink.attribute(_TUPLE_IP | netlink.NESTED, addresses)
    nested += netlink.attribute(_TUPLE_PROTO | netlink.NESTED, protocol)
    return netlink.netfilter_message(_GET, 0, family, netlink.attribute(_TUPLE_REPLY | netlink.NESTED, nested))
