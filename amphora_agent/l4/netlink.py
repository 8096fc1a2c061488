# SPDX-License-Identifier: Apache-2.0
"""Netlink messages (netlink(7)) and socket filters, with the standard library only."""

from __future__ import annotations

import ctypes
import errno
import socket
import struct
from collections.abc import Iterable, Iterator

ROUTE, NETFILTER = 0, 12
REQUEST, ACK, REPLACE, DUMP = 1, 4, 0x100, 0x300
ERROR, DONE = 2, 3
NESTED = 0x8000
# Offset of the first attribute, after the structs nlmsghdr (16 bytes) and nfgenmsg (4 bytes).
FIRST_ATTRIBUTE = 20
# Length and type of a netlink attribute.
ATTRIBUTE = struct.Struct("=HH")
TYPE_MASK = 0x3FFF
# Length, type, flags, sequence number and port of a netlink message.
_HEAD = struct.Struct("=IHHII")
_SO_ATTACH_FILTER = 26
# Flag of a message of a dump during which the objects have changed (NLM_F_DUMP_INTR).
_INTERRUPTED = 0x10
# The kernel sends a dump in blocks of at most 32 KiB.
_BUFFER = 1 << 17
# Length, type and flags of a netlink message.
_MESSAGE = struct.Struct("=IHH")


def open_socket(protocol: int, groups: int = 0, timeout: float | None = None) -> socket.socket:
    """Return a netlink socket that receives the announcements of multicast groups."""
    opened = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
    try:
        opened.settimeout(timeout)
        opened.bind((0, groups))
    except OSError:
        opened.close()
        raise
    return opened


def message(kind: int, flags: int, body: bytes, number: int = 1) -> bytes:
    """Return a request with a sequence number."""
    return _HEAD.pack(_HEAD.size + len(body), kind, REQUEST | flags, number, 0) + body


def netfilter_message(kind: int, flags: int, family: int, attributes: bytes) -> bytes:
    """Return a request to netfilter (linux/netfilter/nfnetlink.h)."""
    return message(kind, flags, struct.pack("=BBH", family, 0, 0) + attributes)


def dump(link: socket.socket, request: bytes) -> Iterator[tuple[bytes, list[tuple[int, int]]]]:
    """Yield the blocks of the answer to a dump request, with start and end of each message.

    Raises:
        OSError: the kernel refuses the request, or does not answer in time.
        InterruptedError: the objects have changed during the dump, which may be incomplete.
    """
    link.send(request)
    last = False
    while not last:
        answer = link.recv(_BUFFER)
        at, stop, spans = 0, len(answer), []
        while at < stop and not last:
            size, kind, flags = _MESSAGE.unpack_from(answer, at)
            if kind == ERROR:
                number = -struct.unpack_from("=i", answer, at + 16)[0]
                raise OSError(number, f"the kernel refused (error {number})")
            if flags & _INTERRUPTED:
                raise InterruptedError(errno.EINTR, "the objects have changed during the dump")
            last = kind == DONE
            if not last:
                spans.append((at, at + size))
            at += (size + 3) & ~3
        yield answer, spans


def attribute(kind: int, value: bytes) -> bytes:
    """Return an attribute with its padding."""
    return ATTRIBUTE.pack(4 + len(value), kind) + value + bytes(-len(value) % 4)


def attributes(data: bytes, at: int = 0) -> dict[int, bytes]:
    """Return the attributes from an offset on, by type."""
    found, unpack, end = {}, ATTRIBUTE.unpack_from, len(data)
    while at + 4 <= end:
        size, kind = unpack(data, at)
        if size < 4 or at + size > end:
            break
        found[kind & TYPE_MASK] = data[at + 4 : at + size]
        at += (size + 3) & ~3
    return found


def attach_filter(one: socket.socket, lines: Iterable[tuple[int, int, int, int]]) -> None:
    """Let the kernel select the packets for a socket by a classic BPF program (linux/filter.h)."""
    program = b"".join(struct.pack("=HBBI", *line) for line in lines)
    code = ctypes.create_string_buffer(program, len(program))
    place = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, place)
