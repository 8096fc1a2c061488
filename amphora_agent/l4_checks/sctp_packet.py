# SPDX-License-Identifier: Apache-2.0
"""The SCTP packets that a check needs (RFC 9260).

Invariant: pure. Built packets have a correct checksum. The parser does not verify the checksum of received packets,
because a sender on the same host leaves it to a network card. Instead, the verification tag must repeat 32 random bits.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

INIT, INIT_ACK, ABORT = 1, 2, 6
# Source port, destination port, verification tag and checksum of an SCTP packet (RFC 9260, section 3).
_HEADER = struct.Struct("!HHII")
# Type, flags and length of a chunk.
_CHUNK = struct.Struct("!BBH")
# Initiate tag, window, two numbers of streams, and first TSN of an INIT chunk.
_START = struct.Struct("!IIHHI")
_CHECKSUM_AT = 8
# The smallest permitted receive window (RFC 9260, section 3.3.2), because a check transfers no data.
_WINDOW = 1500
_CASTAGNOLI = 0x82F63B78


@dataclass(frozen=True)
class Packet:
    """A received packet. ``initiate`` is the tag that its sender expects in answers; None if it has none."""

    source: int
    destination: int
    tag: int
    kind: int
    initiate: int | None


def _table() -> tuple[int, ...]:
    entries = []
    for number in range(256):
        value = number
        for _ in range(8):
            value = value >> 1 ^ _CASTAGNOLI if value & 1 else value >> 1
        entries.append(value)
    return tuple(entries)


_TABLE = _table()


def crc32c(data: bytes | bytearray) -> int:
    """Return the checksum of appendix A."""
    value = 0xFFFFFFFF
    for byte in data:
        value = _TABLE[(value ^ byte) & 0xFF] ^ value >> 8
    return value ^ 0xFFFFFFFF


def init(source: int, destination: int, initiate: int) -> bytes:
    """Build an INIT (section 3.3.2). ``initiate`` is not 0; answers repeat it as their tag."""
    chunk = _CHUNK.pack(INIT, 0, _CHUNK.size + _START.size) + _START.pack(initiate, _WINDOW, 1, 1, initiate)
    return _packed(source, destination, 0, chunk)


def abort(source: int, destination: int, tag: int) -> bytes:
    """Build an ABORT (section 3.3.7)."""
    return _packed(source, destination, tag, _CHUNK.pack(ABORT, 0, _CHUNK.size))


def _packed(source: int, destination: int, tag: int, chunk: bytes) -> bytes:
    packet = bytearray(_HEADER.pack(source, destination, tag, 0) + chunk)
    struct.pack_into("<I", packet, _CHECKSUM_AT, crc32c(packet))
    return bytes(packet)


def parse(data: bytes) -> Packet | None:
    """Parse a packet with its first chunk; None if malformed. The answer to INIT is always first."""
    if len(data) < _HEADER.size + _CHUNK.size:
        return None
    source, destination, tag, _ = _HEADER.unpack_from(data)
    kind, _, length = _CHUNK.unpack_from(data, _HEADER.size)
    initiate = None
    if kind in (INIT, INIT_ACK):
        least = _CHUNK.size + _START.size
        if length < least or len(data) < _HEADER.size + least:
            return None
        initiate = _START.unpack_from(data, _HEADER.size + _CHUNK.size)[0]
    return Packet(source, destination, tag, kind, initiate)


def source_port(data: bytes) -> int | None:
    """Return the source port of a packet in an ICMP error, which may have eight bytes only."""
    return int.from_bytes(data[:2], "big") if len(data) >= 2 else None
