# SPDX-License-Identifier: Apache-2.0
"""The flows that the kernel forwards, by their marks: how many there are, and an end to some of them.

Invariant: only flows with one of the given marks are touched, or those without any to one of the given places. Raw
nfnetlink (linux/netfilter/nfnetlink_conntrack.h) and nothing but the standard library: it is part of the checker.
Called in the namespace whose flows they are.

Nobody is told that a flow was ended. Its client's next packet is the first one of a new flow, for another member.
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
# Where attributes begin in a message.
_FIRST = 20
# A mark as an attribute. Attributes begin at multiples of four, in a message as in a piece.
_MARKED = re.compile(rb"\x08\x00\x08\x00(.{4})" if sys.byteorder == "little" else rb"\x00\x08\x00\x08(.{4})", re.DOTALL)
# The kernel goes through all flows for each mark; beyond so many, going through them here is quicker.
_MOST_WALKS = 8
# Orders sent before their answers are read: what fits into the socket's buffer many times over.
_BATCH = 200


def end(marks: Collection[int], masks: Collection[tuple[int, int]] = ()) -> None:
    """End every flow that has one of these marks.

    Args:
        masks: marks of which only some bits count, each with these bits.

    Raises:
        VirtualServersError: the kernel refused.
    """
    whole = [*masks, *((mark, 0xFFFFFFFF) for mark in marks)]
    if not whole:
        return
    try:
        with _link() as link:
            if len(whole) <= _MOST_WALKS:
                for mark, mask in whole:
                    _order(link, [_number(_MARK, mark) + _number(_MARK_MASK, mask)])
            else:
                _end_each(link, {*marks}, masks)
    except OSError as error:
        raise VirtualServersError("end flows", str(error), _REMEDY) from error


def end_unled(places: Collection[tuple[Host, int, int]]) -> None:
    """End every flow without a mark to one of these places.

    It began when no rule knew the place. The kernel looks for rules at a flow's first packet only: as long as its
    client goes on sending, none would ever be found for it.

    Args:
        places: each an address, a protocol's number, and a port.

    Raises:
        VirtualServersError: the kernel refused.
    """
    if not places:
        return
    wanted = {_destination(*place) for place in places}
    try:
        with _link() as link:
            unmarked = _walk(link, _number(_MARK, 0) + _number(_MARK_MASK, 0xFFFFFFFF))
            _end_these(link, [one for one, mark in unmarked if mark == 0 and _sent_to(one) in wanted])
    except OSError as error:
        raise VirtualServersError("end flows", str(error), _REMEDY) from error


def count(mask: int) -> dict[int, int]:
    """How many flows there are, by these bits of their marks.

    Raises:
        VirtualServersError: the kernel does not tell.
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
    """All flows, or those the kernel finds by some attributes: pieces, and where in each one begins and ends."""
    link.send(_message(_GET, _DUMP, socket.AF_UNSPEC, only))
    unpack = struct.Struct("=IH").unpack_from
    while True:
        answer = link.recv(_BUFFER)
        at, end_, places, last = 0, len(answer), [], False
        while at < end_ and not last:
            size, kind = unpack(answer, at)
            if kind == _ERROR:
                _refused(answer, at)
            last = kind == _DONE
            if not last:
                places.append((at, at + size))
            at += (size + 3) & ~3
        yield answer, places
        if last:
            return


def _walk(link: socket.socket, only: bytes = b"") -> Iterator[tuple[bytes, int]]:
    """Every flow: its message, and its mark."""
    for answer, places in _dump(link, only):
        for at, end_ in places:
            mark = _find(answer, at + _FIRST, end_, _MARK)
            # A kernel may be silent about one that is 0.
            yield answer[at:end_], 0 if mark is None else int.from_bytes(answer[mark + 4 : mark + 8], "big")


def _find(message: bytes, at: int, end_: int, wanted: int) -> int | None:
    """Where an attribute begins."""
    unpack = _ATTRIBUTE.unpack_from
    while at + 4 <= end_:
        size, kind = unpack(message, at)
        if kind & _TYPE_MASK == wanted:
            return at
        at += (size + 3) & ~3
    return None


def _value(message: bytes, *kinds: int) -> bytes:
    """What stands in an attribute in an attribute; empty if it is not there."""
    for number, kind in enumerate(kinds):
        at = _find(message, 0 if number else _FIRST, len(message), kind)
        if at is None:
            return b""
        message = message[at + _ATTRIBUTE.size : at + _ATTRIBUTE.unpack_from(message, at)[0]]
    return message


def _sent_to(message: bytes) -> tuple[bytes, bytes, bytes]:
    """Where a flow's first packet went to."""
    family = socket.AF_INET6 if message[16] == socket.AF_INET6 else socket.AF_INET
    return (
        _value(message, _TUPLE_ORIG, _TUPLE_IP, _DESTINATION_OF[family]),
        _value(message, _TUPLE_ORIG, _TUPLE_PROTO, _PROTO_NUMBER),
        _value(message, _TUPLE_ORIG, _TUPLE_PROTO, _PROTO_DESTINATION),
    )


def _destination(address: Host, number: int, port: int) -> tuple[bytes, bytes, bytes]:
    """The same of a place."""
    return address.packed, bytes((number,)), port.to_bytes(2, "big")


def _end_each(link: socket.socket, marks: set[int], masks: Collection[tuple[int, int]]) -> None:
    """Look at all, and end those."""
    _end_these(
        link,
        [one for one, mark in _walk(link) if mark in marks or any(mark & mask == bits for bits, mask in masks)],
    )


def _end_these(link: socket.socket, messages: list[bytes]) -> None:
    """End flows, each by the addresses and ports its first packet had."""
    for first in range(0, len(messages), _BATCH):
        some = messages[first : first + _BATCH]
        _order(link, [_named(one) for one in some], [one[16] for one in some])


def _named(message: bytes) -> bytes:
    attributes = b""
    for kind in (_TUPLE_ORIG, _ZONE):
        if (at := _find(message, _FIRST, len(message), kind)) is not None:
            size = _ATTRIBUTE.unpack_from(message, at)[0]
            attributes += message[at : at + ((size + 3) & ~3)]
    return attributes


def _order(link: socket.socket, orders: list[bytes], families: list[int] | None = None) -> None:
    """Have flows deleted, and wait until they are. Those that have ended by themselves meanwhile are no matter."""
    families = families or [socket.AF_UNSPEC] * len(orders)
    link.send(b"".join(_message(_DELETE, _ACK, *one) for one in zip(families, orders, strict=True)))
    left = len(orders)
    while left:
        answer = link.recv(_BUFFER)
        at = 0
        while at < len(answer):
            size, kind = struct.unpack_from("=IH", answer, at)
            if kind == _ERROR:
                left -= 1
                _refused(answer, at)
            at += (size + 3) & ~3


def _refused(answer: bytes, at: int) -> None:
    number = -struct.unpack_from("=i", answer, at + 16)[0]
    if number not in (0, _ENOENT):
        raise OSError(number, f"the kernel refused (error {number})")
