# SPDX-License-Identifier: Apache-2.0
"""Count and delete flows in the kernel's connection tracking, by their marks.

Invariant: only flows with one of the given marks are deleted, or flows without a mark to one of the given destinations.
Raw nfnetlink (linux/netfilter/nfnetlink_conntrack.h) with the standard library only, because the checker imports it.
Called in the namespace of the flows.

Neither end of a deleted flow is informed. The client's next packet begins a new flow to another member.
"""

from __future__ import annotations

import re
import socket
import struct
import sys
from collections.abc import Collection, Iterator

from amphora_agent.errors import VirtualServersError
from amphora_agent.l4.model import Host

_NETLINK_NETFILTER = 12
_GET, _DELETE = 1 << 8 | 1, 1 << 8 | 2
_REQUEST, _ACK, _DUMP = 1, 4, 0x300
_ERROR, _DONE = 2, 3
_TUPLE_ORIG, _MARK, _MARK_MASK, _ZONE = 1, 8, 21, 18
_TUPLE_IP, _TUPLE_PROTO, _PROTO_NUMBER, _PROTO_DESTINATION = 1, 2, 1, 3
_DESTINATION_OF = {socket.AF_INET: 2, socket.AF_INET6: 4}
_TYPE_MASK = 0x3FFF
_ENOENT = 2
_REMEDY = "Use a kernel with nf_conntrack_netlink."
_TIMEOUT_SECONDS = 30.0
_BUFFER = 1 << 20
_HEAD = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
# Offset of the attributes in a message.
_FIRST = 20
# A mark as an attribute. Attributes are aligned to four bytes, in a message and in a received block.
_MARKED = re.compile(rb"\x08\x00\x08\x00(.{4})" if sys.byteorder == "little" else rb"\x00\x08\x00\x08(.{4})", re.DOTALL)
# The kernel goes through all flows for each mark. For more marks, one dump of all flows is faster.
_MAX_DUMPS = 8
# Requests before their answers are read. The answers are far smaller than the socket's buffer.
_BATCH = 200


def end_flows(marks: Collection[int], masks: Collection[tuple[int, int]] = ()) -> None:
    """Delete every flow with one of these marks.

    Args:
        marks: whole marks.
        masks: pairs of bits and a mask; a flow matches if its masked mark has these bits.

    Raises:
        VirtualServersError: the kernel refused.
    """
    whole = [*masks, *((mark, 0xFFFFFFFF) for mark in marks)]
    if not whole:
        return
    try:
        with _link() as link:
            if len(whole) <= _MAX_DUMPS:
                for mark, mask in whole:
                    _delete(link, [_number(_MARK, mark) + _number(_MARK_MASK, mask)])
            else:
                _delete_marked(link, {*marks}, masks)
    except OSError as error:
        raise VirtualServersError("end flows", str(error), _REMEDY) from error


def end_unmarked_flows(places: Collection[tuple[Host, int, int]]) -> None:
    """Delete every flow without a mark to one of these destinations.

    Such a flow began before the rules contained the destination. The kernel applies the rules to the first packet of a
    flow only. While its client continues to send, the rules would never apply.

    Args:
        places: each an address, a protocol number, and a port.

    Raises:
        VirtualServersError: the kernel refused.
    """
    if not places:
        return
    wanted = {_packed_destination(*place) for place in places}
    try:
        with _link() as link:
            unmarked = _flows(link, _number(_MARK, 0) + _number(_MARK_MASK, 0xFFFFFFFF))
            _delete_messages(
                link, [one for one, mark in unmarked if mark == 0 and _original_destination(one) in wanted]
            )
    except OSError as error:
        raise VirtualServersError("end flows", str(error), _REMEDY) from error


def count_flows(mask: int) -> dict[int, int]:
    """Return the number of flows by the masked mark.

    Raises:
        VirtualServersError: the kernel refused.
    """
    found: dict[int, int] = {}
    try:
        with _link() as link:
            for answer, _ in _dump(link):
                for one in _MARKED.finditer(answer):
                    if one.start() % 4 == 0:
                        bits = int.from_bytes(one[1], "big") & mask
                        found[bits] = found.get(bits, 0) + 1
    except OSError as error:
        raise VirtualServersError("count flows", str(error), _REMEDY) from error
    return found


def _link() -> socket.socket:
    link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_NETFILTER)
    link.settimeout(_TIMEOUT_SECONDS)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
    link.bind((0, 0))
    return link


def _number(kind: int, value: int) -> bytes:
    return _ATTRIBUTE.pack(8, kind) + value.to_bytes(4, "big")


def _message(kind: int, flags: int, family: int, attributes: bytes) -> bytes:
    body = struct.pack("=BBH", family, 0, 0) + attributes
    return _HEAD.pack(_HEAD.size + len(body), kind, _REQUEST | flags, 1, 0) + body


def _dump(link: socket.socket, only: bytes = b"") -> Iterator[tuple[bytes, list[tuple[int, int]]]]:
    """Yield received blocks of a dump, with the start and end of each flow's message.

    ``only`` are attributes by which the kernel selects flows; empty for all flows.
    """
    link.send(_message(_GET, _DUMP, socket.AF_UNSPEC, only))
    unpack = struct.Struct("=IH").unpack_from
    while True:
        answer = link.recv(_BUFFER)
        at, stop, spans, last = 0, len(answer), [], False
        while at < stop and not last:
            size, kind = unpack(answer, at)
            if kind == _ERROR:
                _raise_error(answer, at)
            last = kind == _DONE
            if not last:
                spans.append((at, at + size))
            at += (size + 3) & ~3
        yield answer, spans
        if last:
            return


def _flows(link: socket.socket, only: bytes = b"") -> Iterator[tuple[bytes, int]]:
    """Yield each flow: its message and its mark."""
    for answer, spans in _dump(link, only):
        for at, stop in spans:
            mark = _find(answer, at + _FIRST, stop, _MARK)
            # The kernel may omit a mark of 0.
            yield answer[at:stop], 0 if mark is None else int.from_bytes(answer[mark + 4 : mark + 8], "big")


def _find(message: bytes, at: int, stop: int, wanted: int) -> int | None:
    """Return the offset of an attribute; None if it is missing."""
    unpack = _ATTRIBUTE.unpack_from
    while at + 4 <= stop:
        size, kind = unpack(message, at)
        if kind & _TYPE_MASK == wanted:
            return at
        at += (size + 3) & ~3
    return None


def _nested_value(message: bytes, *kinds: int) -> bytes:
    """Return the value of a nested attribute; empty if it is missing."""
    for number, kind in enumerate(kinds):
        at = _find(message, 0 if number else _FIRST, len(message), kind)
        if at is None:
            return b""
        message = message[at + _ATTRIBUTE.size : at + _ATTRIBUTE.unpack_from(message, at)[0]]
    return message


def _original_destination(message: bytes) -> tuple[bytes, bytes, bytes]:
    """Return the packed destination of a flow's first packet."""
    family = socket.AF_INET6 if message[16] == socket.AF_INET6 else socket.AF_INET
    return (
        _nested_value(message, _TUPLE_ORIG, _TUPLE_IP, _DESTINATION_OF[family]),
        _nested_value(message, _TUPLE_ORIG, _TUPLE_PROTO, _PROTO_NUMBER),
        _nested_value(message, _TUPLE_ORIG, _TUPLE_PROTO, _PROTO_DESTINATION),
    )


def _packed_destination(address: Host, number: int, port: int) -> tuple[bytes, bytes, bytes]:
    """Return a destination in the form of `_original_destination`."""
    return address.packed, bytes((number,)), port.to_bytes(2, "big")


def _delete_marked(link: socket.socket, marks: set[int], masks: Collection[tuple[int, int]]) -> None:
    """Dump all flows, and delete the matching ones."""
    _delete_messages(
        link, [one for one, mark in _flows(link) if mark in marks or any(mark & mask == bits for bits, mask in masks)]
    )


def _delete_messages(link: socket.socket, messages: list[bytes]) -> None:
    """Delete flows, each identified by the tuple of its first packet."""
    for first in range(0, len(messages), _BATCH):
        some = messages[first : first + _BATCH]
        _delete(link, [_identity(one) for one in some], [one[16] for one in some])


def _identity(message: bytes) -> bytes:
    attributes = b""
    for kind in (_TUPLE_ORIG, _ZONE):
        if (at := _find(message, _FIRST, len(message), kind)) is not None:
            size = _ATTRIBUTE.unpack_from(message, at)[0]
            attributes += message[at : at + ((size + 3) & ~3)]
    return attributes


def _delete(link: socket.socket, identities: list[bytes], families: list[int] | None = None) -> None:
    """Delete flows and wait for the answers. A flow that has ended meanwhile is not an error."""
    families = families or [socket.AF_UNSPEC] * len(identities)
    link.send(b"".join(_message(_DELETE, _ACK, *one) for one in zip(families, identities, strict=True)))
    left = len(identities)
    while left:
        answer = link.recv(_BUFFER)
        at = 0
        while at < len(answer):
            size, kind = struct.unpack_from("=IH", answer, at)
            if kind == _ERROR:
                left -= 1
                _raise_error(answer, at)
            at += (size + 3) & ~3


def _raise_error(answer: bytes, at: int) -> None:
    number = -struct.unpack_from("=i", answer, at + 16)[0]
    if number not in (0, _ENOENT):
        raise OSError(number, f"the kernel refused (error {number})")
