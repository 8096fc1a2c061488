# SPDX-License-Identifier: Apache-2.0
"""Builds packets in the forms that IP permits: with options or extension headers, and in fragments.

Pure. A form is a list of IP packets in sending order. Offsets and lengths are in bytes.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

TCP, VRRP = 6, 112
HOP_BY_HOP, ROUTING, FRAGMENT, DESTINATION = 0, 43, 44, 60
# Six bytes of padding (RFC 8200, section 4.2); with two bytes of the header, they have the smallest size.
PADDING = b"\x01\x04\x00\x00\x00\x00"
# A receiver ignores a routing header of any type without segments left (RFC 8200, section 4.4).
NO_SEGMENTS = b"\xfd\x00\x00\x00\x00\x00"
MORE = 1


@dataclass(frozen=True)
class Addresses:
    """The source and destination addresses of the packets."""

    source: str
    destination: str

    @property
    def version(self) -> int:
        return 6 if ":" in self.source else 4

    @property
    def packed(self) -> bytes:
        family = socket.AF_INET6 if self.version == 6 else socket.AF_INET
        return socket.inet_pton(family, self.source) + socket.inet_pton(family, self.destination)


def syn(ends: Addresses, source_port: int, port: int) -> bytes:
    """Return a SYN of 40 bytes, enough for three fragments (RFC 9293, section 3.1)."""
    head = struct.pack("!HHIIBBHHH", source_port, port, 1, 0, 0xA0, 2, 65535, 0, 0)
    segment = head + b"\x01" * 20
    return segment[:16] + struct.pack("!H", _checksum(_pseudo(ends, len(segment), TCP) + segment)) + segment[18:]


def _pseudo(ends: Addresses, length: int, protocol: int) -> bytes:
    return ends.packed + struct.pack("!HH", protocol, length)


def _checksum(data: bytes) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


# -- IPv6 --------------------------------------------------------------------------------------------------------------


def packet6(ends: Addresses, first: int, payload: bytes) -> bytes:
    return struct.pack("!IHBB", 6 << 28, len(payload), first, 64) + ends.packed + payload


def chained(headers: list[tuple[int, bytes]], protocol: int, payload: bytes) -> tuple[int, bytes]:
    """Prepend extension headers of eight bytes; return the first header's number, and all bytes."""
    for number, rest in reversed(headers):
        payload = bytes([protocol, 0]) + rest + payload
        protocol = number
    return protocol, payload


def _fragments6(
    ends: Addresses,
    number: int,
    protocol: int,
    payload: bytes,
    cuts: list[tuple[int, int]],
    before: list[tuple[int, bytes]],
) -> list[bytes]:
    """Return fragments (RFC 8200, section 4.5).

    Args:
        number: the identification.
        cuts: first byte of each fragment, and the first byte behind it.
        before: headers in front of the fragment header.
    """
    made = []
    for begin, end in cuts:
        more = MORE if end < len(payload) else 0
        header = struct.pack("!BBHI", protocol, 0, begin | more, number)
        made.append(packet6(ends, *chained(before, FRAGMENT, header + payload[begin:end])))
    return made


_OPTIONS = (DESTINATION, PADDING)
_Made6 = Callable[[Addresses, int, int, bytes], list[bytes]]


def _form6(
    *cuts: tuple[int, int], before: tuple[tuple[int, bytes], ...] = (), inside: tuple[tuple[int, bytes], ...] = ()
) -> _Made6:
    def make(ends: Addresses, number: int, protocol: int, data: bytes) -> list[bytes]:
        first, payload = chained(list(inside), protocol, data)
        if not cuts:
            return [packet6(ends, *chained(list(before), first, payload))]
        ended = [(begin, min(end, len(payload))) for begin, end in cuts]
        return _fragments6(ends, number, first, payload, ended, list(before))

    return make


def _nested(ends: Addresses, number: int, protocol: int, data: bytes) -> list[bytes]:
    """Fragment a packet that contains a fragment header: one reassembly yields a fragment."""
    inner = struct.pack("!BBHI", protocol, 0, 0, number) + data
    return _fragments6(ends, number + 1, FRAGMENT, inner, [(0, 32), (32, len(inner))], [])


_END = 1 << 16
SERVED6: dict[str, _Made6] = {
    "whole": _form6(),
    "hop-by-hop options": _form6(before=((HOP_BY_HOP, PADDING),)),
    "routing header": _form6(before=((ROUTING, NO_SEGMENTS),)),
    "destination options": _form6(before=(_OPTIONS,)),
    "many headers": _form6(before=((HOP_BY_HOP, PADDING), _OPTIONS, (ROUTING, NO_SEGMENTS)), inside=(_OPTIONS,)),
    "atomic": _form6((0, _END)),
    "two": _form6((0, 24), (24, _END)),
    "three": _form6((0, 24), (24, 32), (32, _END)),
    "the last first": _form6((24, _END), (0, 24)),
    "three, out of order": _form6((32, _END), (0, 24), (24, 32)),
    "options inside": _form6((0, 32), (32, _END), inside=(_OPTIONS,)),
    "ends inside the headers": _form6((0, 8), (8, _END), inside=(_OPTIONS, _OPTIONS)),
    "ends inside the headers, out of order": _form6((8, _END), (0, 8), inside=(_OPTIONS, _OPTIONS)),
    "routing inside": _form6((0, 8), (8, _END), inside=((ROUTING, NO_SEGMENTS), _OPTIONS)),
}
"""Forms in which an allowed client is served."""
DROPPED6: dict[str, _Made6] = {
    "overlapping": _form6((0, 24), (16, _END)),
    "overlapping, the last first": _form6((16, _END), (0, 24)),
    "overlapping inside the headers": _form6((0, 16), (8, _END), inside=(_OPTIONS,)),
    # RFC 8200, section 4.5: the first fragment contains all headers. Linux requires the header of the upper layer.
    "tiny": _form6((0, 8), (8, _END)),
    "ends before the segment": _form6((0, 8), (8, _END), inside=(_OPTIONS,)),
    "ends before the segment, out of order": _form6((8, _END), (0, 8), inside=(_OPTIONS,)),
}
"""Forms in which the kernel accepts no segment, with or without rules."""
UNUSUAL6: dict[str, _Made6] = {
    "nested": _nested,
    # Linux (6.18) drops these if it reassembles before the rules. nf_defrag_ipv6 leaves the transport offset behind the
    # headers that precede the fragment header, and the kernel reads the headers from that offset.
    "options before": _form6((0, 24), (24, _END), before=((HOP_BY_HOP, PADDING), _OPTIONS)),
    "routing before": _form6((0, 24), (24, _END), before=((ROUTING, NO_SEGMENTS),)),
    "options before, ends inside the headers": _form6((0, 8), (8, _END), before=(_OPTIONS,), inside=(_OPTIONS,) * 2),
}
"""Forms that the kernel may drop, and that must not bypass the rules."""

# -- IPv4 --------------------------------------------------------------------------------------------------------------

_Made4 = Callable[[Addresses, int, int, bytes], list[bytes]]


def packet4(ends: Addresses, number: int, protocol: int, payload: bytes, flags: int, options: bytes) -> bytes:
    words = 5 + len(options) // 4
    size = words * 4 + len(payload)
    head = struct.pack("!BBHHHBBH", 0x40 | words, 0, size, number, flags, 64, protocol, 0) + ends.packed + options
    return head[:10] + struct.pack("!H", _checksum(head)) + head[12:] + payload


def _form4(*cuts: tuple[int, int], options: bytes = b"") -> _Made4:
    def make(ends: Addresses, number: int, protocol: int, data: bytes) -> list[bytes]:
        made = []
        for begin, end in cuts or ((0, _END),):
            more = 0x2000 if end < len(data) else 0
            made.append(packet4(ends, number, protocol, data[begin:end], begin // 8 | more, options))
        return made

    return make


SERVED4: dict[str, _Made4] = {
    "whole": _form4(),
    "options": _form4(options=b"\x01\x01\x01\x01"),
    "two": _form4((0, 24), (24, _END)),
    "tiny": _form4((0, 8), (8, _END)),
    "three": _form4((0, 8), (8, 24), (24, _END)),
    "the last first": _form4((24, _END), (0, 24)),
    "three, out of order": _form4((24, _END), (0, 8), (8, 24)),
    "options, two": _form4((0, 24), (24, _END), options=b"\x01\x01\x01\x01"),
}
DROPPED4: dict[str, _Made4] = {
    "overlapping": _form4((0, 24), (16, _END)),
    "overlapping, the last first": _form4((16, _END), (0, 24)),
}
