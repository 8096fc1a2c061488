# SPDX-License-Identifier: Apache-2.0
"""What others were told of members that are not there, overheard.

A member's kernel says "port unreachable" to one address about once a second (net.ipv4.icmp_ratelimit), and clients'
packets bear the same address as ours: under load a check of its own hears nothing, and would call a dead member up. So
what is said to clients counts too; and where a host is gone, that the kernel has not found its link address.

Invariant: nobody but the kernel is believed: what is said to a client counts only if the client's flow is there
(`amphora_agent.l4_checks.conntrack_lookup`). Nothing is read but what the kernel has sorted out.
"""

from __future__ import annotations

import ctypes
import errno
import socket
import struct
from collections.abc import Callable
from functools import partial

from amphora_agent.l4.event_loop import Loop
from amphora_agent.l4_checks.conntrack_lookup import Flow

# By address and port (0: all of them), what happened.
Heard = Callable[[str, int, str], None]
_ETH_P_IP, _ETH_P_IPV6, _SO_ATTACH_FILTER, _PACKET_HOST = 0x0800, 0x86DD, 26, 0
_NETLINK_ROUTE, _NEIGHBOURS, _NEW_NEIGHBOUR, _FAILED, _DESTINATION = 0, 0x4, 28, 0x20, 1
_LARGEST, _MOST_AT_ONCE = 8192, 64
# Classic BPF (linux/filter.h): load a byte, load one behind the header, its length, compare, return.
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
# Codes of a port that is not there (RFC 792; RFC 4443, section 3.1).
_PORT = {socket.AF_INET: 3, socket.AF_INET6: 4}


class Evidence:
    """Listens while it exists. Made in the network namespace it is about.

    Args:
        exists: whether there is such a flow.
    """

    def __init__(self, loop: Loop, heard: Heard, exists: Callable[[Flow], bool]) -> None:
        self._loop = loop
        self._heard = heard
        self._exists = exists
        self._sockets: list[socket.socket] = []
        try:
            for family in (socket.AF_INET, socket.AF_INET6):
                self._watch(_overhearing(family), partial(self._overhear, family))
            self._watch(_neighbours(), self._lost)
        except OSError:
            self.close()
            raise

    def _watch(self, one: socket.socket, read: Callable[[socket.socket], None]) -> None:
        self._sockets.append(one)
        one.setblocking(False)
        self._loop.read(one, partial(read, one))

    def _overhear(self, family: socket.AddressFamily, one: socket.socket) -> None:
        for _ in range(_MOST_AT_ONCE):
            try:
                packet, sender = one.recvfrom(_LARGEST)
            except OSError:
                return
            if sender[2] == _PACKET_HOST and (flow := told(family, packet)) is not None and self._exists(flow):
                self._heard(*flow.member, "port unreachable")

    def _lost(self, one: socket.socket) -> None:
        for _ in range(_MOST_AT_ONCE):
            try:
                messages = one.recv(_LARGEST)
            except OSError as error:
                if error.errno == errno.ENOBUFS:
                    continue
                return
            for address in lost(messages):
                self._heard(address, 0, "host unreachable")

    def close(self) -> None:
        for one in self._sockets:
            self._loop.forget(one)
            one.close()


def _overhearing(family: socket.AddressFamily) -> socket.socket:
    """A copy of each packet that says "unreachable", taken before anything is done with it, on every interface."""
    program = b"".join(struct.pack("=HBBI", *line) for line in _ONLY_UNREACHABLE[family])
    code = ctypes.create_string_buffer(program, len(program))
    # By hand: the socket module wants the name of one interface (packet(7), struct sockaddr_ll).
    link = socket.htons(_ETH_P_IP if family == socket.AF_INET else _ETH_P_IPV6)
    address = struct.pack("=HHiHBB8s", socket.AF_PACKET, link, 0, 0, 0, 0, b"")
    libc = ctypes.CDLL(None, use_errno=True)
    one = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0)  # deaf until it has its filter
    place = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, place)
    if libc.bind(one.fileno(), address, len(address)) != 0:
        one.close()
        raise OSError(ctypes.get_errno(), "ICMP cannot be overheard")
    return one


def _neighbours() -> socket.socket:
    one = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_ROUTE)
    one.bind((0, _NEIGHBOURS))
    return one


def told(family: socket.AddressFamily, packet: bytes) -> Flow | None:
    """The flow that a packet says has no port to go to; None if it says something else.

    Who says so has to be whom the flow went to.
    """
    start = 4 * (packet[0] & 0x0F) if family == socket.AF_INET and packet else _IPV6_HEADER
    inner = start + _ICMP_HEADER
    if len(packet) < inner + 1 or packet[start + 1] != _PORT[family]:
        return None
    if family == socket.AF_INET:
        source, about, ports, protocol = packet[12:16], packet[inner:], 4 * (packet[inner] & 0x0F), 9
        us, member = about[12:16], about[16:20]
    else:
        source, about, ports, protocol = packet[8:24], packet[inner:], _IPV6_HEADER, 6
        us, member = about[8:24], about[24:40]
    if source != member or len(about) < ports + 4 or about[protocol] != socket.IPPROTO_UDP:
        return None
    our_port, port = struct.unpack_from("!HH", about, ports)
    return Flow(family, socket.IPPROTO_UDP, (_text(family, member), port), (_text(family, us), our_port))


def _text(family: socket.AddressFamily, packed: bytes) -> str:
    return socket.inet_ntop(family, packed)


def lost(messages: bytes) -> list[str]:
    """The addresses of which the kernel has not found the link address (rtnetlink(7), RTM_NEWNEIGH)."""
    found = []
    while len(messages) >= 28:
        length, kind = struct.unpack_from("=IH", messages)
        family, state = messages[16], struct.unpack_from("=H", messages, 24)[0]
        if kind == _NEW_NEIGHBOUR and state & _FAILED and family in (socket.AF_INET, socket.AF_INET6):
            found += _destination(socket.AddressFamily(family), messages[28:length])
        if length < 28:
            break
        messages = messages[(length + 3) & ~3 :]
    return found


def _destination(family: socket.AddressFamily, attributes: bytes) -> list[str]:
    while len(attributes) >= 4:
        length, kind = struct.unpack_from("=HH", attributes)
        if kind == _DESTINATION and len(attributes[4:length]) == (4 if family == socket.AF_INET else 16):
            return [_text(family, attributes[4:length])]
        if length < 4:
            break
        attributes = attributes[(length + 3) & ~3 :]
    return []
