# SPDX-License-Identifier: Apache-2.0
"""ICMP errors that the members' kernels send to clients.

A kernel sends "port unreachable" to one address about once a second (net.ipv4.icmp_ratelimit). Checks and packets of
clients have the same source address. So under load a check may get no error, and a failed member would count as up.
Therefore errors for packets of clients count too, and failed neighbour resolution where a whole host has failed.

Invariant: an error for a packet of a client counts only if connection tracking has the client's flow
(`flow_exists`). A filter in the kernel selects the packets to read.
"""

from __future__ import annotations

import ctypes
import errno
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from amphora_agent.l4 import netlink
from amphora_agent.l4.event_loop import EventLoop

OnIcmpError = Callable[[str, int, str], None]
"""Called with the address, the port (0 for all ports) and the error of a member."""
_ETH_P_IP, _ETH_P_IPV6, _PACKET_HOST = 0x0800, 0x86DD, 0
_NEIGHBOR_GROUP, _NEW_NEIGHBOUR, _FAILED, _DESTINATION = 0x4, 28, 0x20, 1
_MAX_BYTES, _MAX_AT_ONCE = 8192, 64
# Instructions of classic BPF (linux/filter.h): load a byte, load a byte after the IP header, load the length of the
# header, compare, return.
_LOAD, _LOAD_BEHIND, _LENGTH, _IS, _RETURN = 0x30, 0x50, 0xB1, 0x15, 0x06
_ONLY_UNREACHABLE = {
    socket.AF_INET: (
        (_LOAD, 0, 0, 9),
        (_IS, 0, 4, socket.IPPROTO_ICMP),
        (_LENGTH, 0, 0, 0),
        (_LOAD_BEHIND, 0, 0, 0),
        (_IS, 0, 1, 3),
        (_RETURN, 0, 0, 576),
        (_RETURN, 0, 0, 0),
    ),
    socket.AF_INET6: (
        (_LOAD, 0, 0, 6),
        (_IS, 0, 3, socket.IPPROTO_ICMPV6),
        (_LOAD, 0, 0, 40),
        (_IS, 0, 1, 1),
        (_RETURN, 0, 0, 1280),
        (_RETURN, 0, 0, 0),
    ),
}
_IPV6_HEADER, _ICMP_HEADER = 40, 8
# Code of the ICMP message "destination unreachable" for a closed port (RFC 792; RFC 4443, section 3.1).
_PORT = {socket.AF_INET: 3, socket.AF_INET6: 4}

# A request to the kernel's connection tracking and its attributes (linux/netfilter/nfnetlink_conntrack.h).
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


class IcmpErrorMonitor:
    """Sockets in the present namespace that receive the errors; ``on_error`` gets each error of a member."""

    def __init__(self, loop: EventLoop, on_error: OnIcmpError) -> None:
        self._loop = loop
        self._on_error = on_error
        self._sockets: list[socket.socket] = []
        try:
            for family in (socket.AF_INET, socket.AF_INET6):
                self._watch(_open_icmp_socket(family), partial(self._read_icmp, family))
            self._watch(netlink.open_socket(netlink.ROUTE, _NEIGHBOR_GROUP), self._read_neighbors)
        except OSError:
            self.close()
            raise

    def _watch(self, one: socket.socket, read: Callable[[socket.socket], None]) -> None:
        self._sockets.append(one)
        one.setblocking(False)
        self._loop.add_reader(one, partial(read, one))

    def _read_icmp(self, family: socket.AddressFamily, one: socket.socket) -> None:
        for _ in range(_MAX_AT_ONCE):
            try:
                packet, sender = one.recvfrom(_MAX_BYTES)
            except OSError:
                return
            flow = parse_port_unreachable(family, packet) if sender[2] == _PACKET_HOST else None
            if flow is not None and flow_exists(flow):
                self._on_error(*flow.member, "port unreachable")

    def _read_neighbors(self, one: socket.socket) -> None:
        for _ in range(_MAX_AT_ONCE):
            try:
                messages = one.recv(_MAX_BYTES)
            except OSError as error:
                if error.errno == errno.ENOBUFS:
                    continue
                return
            for address in parse_failed_neighbors(messages):
                self._on_error(address, 0, "host unreachable")

    def close(self) -> None:
        for one in self._sockets:
            self._loop.remove(one)
            one.close()


def _open_icmp_socket(family: socket.AddressFamily) -> socket.socket:
    """Open a socket that receives a copy of each ICMP "unreachable" packet, on every interface."""
    # Python's socket module binds a packet socket only to a named interface. So this code makes the struct sockaddr_ll
    # for all interfaces (packet(7)).
    link = socket.htons(_ETH_P_IP if family == socket.AF_INET else _ETH_P_IPV6)
    address = struct.pack("=HHiHBB8s", socket.AF_PACKET, link, 0, 0, 0, 0, b"")
    libc = ctypes.CDLL(None, use_errno=True)
    # With protocol 0, the socket receives no packet before bind(2). So the filter is attached before the first packet.
    one = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0)
    netlink.attach_filter(one, _ONLY_UNREACHABLE[family])
    if libc.bind(one.fileno(), address, len(address)) != 0:
        one.close()
        raise OSError(ctypes.get_errno(), "the socket for ICMP errors cannot be bound")
    return one


def parse_port_unreachable(family: socket.AddressFamily, packet: bytes) -> Flow | None:
    """Return the flow of a "port unreachable" packet from the flow's destination; None for other packets."""
    start = 4 * (packet[0] & 0x0F) if family == socket.AF_INET and packet else _IPV6_HEADER
    inner = start + _ICMP_HEADER
    if len(packet) < inner + 1 or packet[start + 1] != _PORT[family]:
        return None
    if family == socket.AF_INET:
        source, about, ports, protocol = packet[12:16], packet[inner:], 4 * (packet[inner] & 0x0F), 9
        local, member = about[12:16], about[16:20]
    else:
        source, about, ports, protocol = packet[8:24], packet[inner:], _IPV6_HEADER, 6
        local, member = about[8:24], about[24:40]
    if source != member or len(about) < ports + 4 or about[protocol] != socket.IPPROTO_UDP:
        return None
    local_port, port = struct.unpack_from("!HH", about, ports)
    return Flow(family, socket.IPPROTO_UDP, (_text(family, member), port), (_text(family, local), local_port))


def _text(family: socket.AddressFamily, packed: bytes) -> str:
    return socket.inet_ntop(family, packed)


def parse_failed_neighbors(messages: bytes) -> list[str]:
    """Return the addresses whose neighbour resolution failed (rtnetlink(7), RTM_NEWNEIGH)."""
    found = []
    while len(messages) >= 28:
        length, kind = struct.unpack_from("=IH", messages)
        family, state = messages[16], struct.unpack_from("=H", messages, 24)[0]
        if kind == _NEW_NEIGHBOUR and state & _FAILED and family in (socket.AF_INET, socket.AF_INET6):
            address = netlink.attributes(messages[28:length]).get(_DESTINATION, b"")
            if len(address) == (4 if family == socket.AF_INET else 16):
                found.append(_text(socket.AddressFamily(family), address))
        if length < 28:
            break
        messages = messages[(length + 3) & ~3 :]
    return found


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
