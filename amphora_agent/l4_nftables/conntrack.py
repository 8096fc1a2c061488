# SPDX-License-Identifier: Apache-2.0
"""Count and delete flows in the kernel's connection tracking, by their marks.

Invariant: the engine deletes only flows with one of the given marks, or flows without a mark to one of the given
destinations. Source: linux/netfilter/nfnetlink_conntrack.h. All functions run in the namespace of the flows.

The kernel informs neither end of a deleted flow. The client's next packet begins a new flow to another member.
"""

from __future__ import annotations

import errno
import re
import socket
import struct
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from amphora_agent.errors import VirtualServersError
from amphora_agent.l4 import netlink
from amphora_agent.l4.model import Host

_GET, _DELETE = 1 << 8 | 1, 1 << 8 | 2
_TUPLE_ORIG, _MARK, _MARK_MASK, _ZONE = 1, 8, 21, 18
_TUPLE_IP, _TUPLE_PROTO, _PROTO_NUMBER, _PROTO_DESTINATION = 1, 2, 1, 3
_DESTINATION_OF = {socket.AF_INET: 2, socket.AF_INET6: 4}
_TIMEOUT_SECONDS = 30.0
_BUFFER = 1 << 20
# Pattern of the mark attribute in a dump of flows. Attributes begin at multiples of four bytes, so matches at other
# offsets are ignored.
_MARKED = re.compile(rb"\x08\x00\x08\x00(.{4})" if sys.byteorder == "little" else rb"\x00\x08\x00\x08(.{4})", re.DOTALL)
# Maximum number of marks for which the L4 daemon sends one request each. The kernel searches all flows for each
# request, so one dump of all flows is faster for more marks.
_MAX_DUMPS = 8
# The L4 daemon sends this number of requests before it reads the answers. The answers then fit into the receive buffer.
_BATCH = 200


def end_flows(marks: Collection[int], masks: Collection[tuple[int, int]] = ()) -> None:
    """Delete flows with one of these marks, or these bits under a mask; raises VirtualServersError."""
    whole = [*masks, *((mark, 0xFFFFFFFF) for mark in marks)]
    if not whole:
        return
    with _session("end flows") as link:
        if len(whole) <= _MAX_DUMPS:
            for mark, mask in whole:
                _delete(link, [_number(_MARK, mark) + _number(_MARK_MASK, mask)])
            return
        wanted = {*marks}
        flows = _flows(link)
        _delete_messages(
            link, [one for one, mark in flows if mark in wanted or any(mark & mask == bits for bits, mask in masks)]
        )


def end_unmarked_flows(places: Collection[tuple[Host, int, int]]) -> None:
    """Delete every flow without a mark to one of these destinations: address, protocol number, port.

    Such a flow began before the rules contained the destination. The kernel applies the rules to the first packet of a
    flow only. While its client continues to send, the rules would never apply. Raises VirtualServersError if the kernel
    refuses a request.
    """
    if not places:
        return
    wanted = {(address.packed, bytes((number,)), port.to_bytes(2, "big")) for address, number, port in places}
    with _session("end flows") as link:
        unmarked = _flows(link, _number(_MARK, 0) + _number(_MARK_MASK, 0xFFFFFFFF))
        _delete_messages(link, [one for one, mark in unmarked if mark == 0 and _original_destination(one) in wanted])


def count_flows(mask: int) -> dict[int, int]:
    """Return the number of flows by the masked mark; raises VirtualServersError."""
    found: dict[int, int] = {}
    with _session("count flows") as link:
        for answer, _ in _dump(link):
            for one in _MARKED.finditer(answer):
                if one.start() % 4 == 0:
                    bits = int.from_bytes(one[1], "big") & mask
                    found[bits] = found.get(bits, 0) + 1
    return found


@contextmanager
def _session(attempt: str) -> Iterator[socket.socket]:
    """Open a netlink socket, and convert errors within the block to VirtualServersError."""
    try:
        with netlink.open_socket(netlink.NETFILTER, timeout=_TIMEOUT_SECONDS) as link:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
            yield link
    except OSError as error:
        raise VirtualServersError(attempt, str(error), "Use a kernel with nf_conntrack_netlink.") from error


def _number(kind: int, value: int) -> bytes:
    return netlink.attribute(kind, value.to_bytes(4, "big"))


def _dump(link: socket.socket, only: bytes = b"") -> Iterator[tuple[bytes, list[tuple[int, int]]]]:
    """Yield blocks of a dump, with start and end of each message. ``only`` selects flows by attributes."""
    return netlink.dump(link, netlink.netfilter_message(_GET, netlink.DUMP, socket.AF_UNSPEC, only))


def _flows(link: socket.socket, only: bytes = b"") -> Iterator[tuple[bytes, int]]:
    """Yield each flow: its message and its mark."""
    for answer, spans in _dump(link, only):
        for at, stop in spans:
            mark = _find(answer, at + netlink.FIRST_ATTRIBUTE, stop, _MARK)
            # The kernel may omit the mark attribute of a flow with the mark 0. So a missing attribute means 0.
            yield answer[at:stop], 0 if mark is None else int.from_bytes(answer[mark + 4 : mark + 8], "big")


def _find(message: bytes, at: int, stop: int, wanted: int) -> int | None:
    """Return the offset of an attribute; None if it is missing. Copies nothing, because dumps are large."""
    unpack = netlink.ATTRIBUTE.unpack_from
    while at + 4 <= stop:
        size, kind = unpack(message, at)
        if kind & netlink.TYPE_MASK == wanted:
            return at
        at += (size + 3) & ~3
    return None


def _original_destination(message: bytes) -> tuple[bytes, bytes, bytes]:
    """Return address, protocol number and port of the first packet's destination, packed."""
    family = socket.AF_INET6 if message[16] == socket.AF_INET6 else socket.AF_INET
    original = netlink.attributes(netlink.attributes(message, netlink.FIRST_ATTRIBUTE).get(_TUPLE_ORIG, b""))
    address, protocol = (netlink.attributes(original.get(kind, b"")) for kind in (_TUPLE_IP, _TUPLE_PROTO))
    number, port = protocol.get(_PROTO_NUMBER, b""), protocol.get(_PROTO_DESTINATION, b"")
    return address.get(_DESTINATION_OF[family], b""), number, port


def _delete_messages(link: socket.socket, messages: list[bytes]) -> None:
    """Delete flows, each identified by the tuple of its first packet."""
    for first in range(0, len(messages), _BATCH):
        some = messages[first : first + _BATCH]
        _delete(link, [_identity(one) for one in some], [one[16] for one in some])


def _identity(message: bytes) -> bytes:
    found = netlink.attributes(message, netlink.FIRST_ATTRIBUTE)
    identity = netlink.attribute(_TUPLE_ORIG | netlink.NESTED, found.get(_TUPLE_ORIG, b""))
    return identity + (netlink.attribute(_ZONE, found[_ZONE]) if _ZONE in found else b"")


def _delete(link: socket.socket, identities: list[bytes], families: list[int] | None = None) -> None:
    """Delete flows and wait for the answers. A flow that has ended meanwhile is not an error."""
    families = families or [socket.AF_UNSPEC] * len(identities)
    requests = zip(families, identities, strict=True)
    link.send(b"".join(netlink.netfilter_message(_DELETE, netlink.ACK, *one) for one in requests))
    left = len(identities)
    while left:
        answer = link.recv(_BUFFER)
        at = 0
        while at < len(answer):
            size, kind = struct.unpack_from("=IH", answer, at)
            if kind == netlink.ERROR:
                left -= 1
                _raise_error(answer, at)
            at += (size + 3) & ~3


def _raise_error(answer: bytes, at: int) -> None:
    number = -struct.unpack_from("=i", answer, at + 16)[0]
    if number not in (0, errno.ENOENT):
        raise OSError(number, f"the kernel refused (error {number})")
