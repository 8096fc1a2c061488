# SPDX-License-Identifier: Apache-2.0
"""Random IP packets with random fragmentation, and a model that predicts the result.

Pure. A packet is a TCP segment behind any chain of extension headers or options, whole or in fragments that may be out
of order, repeated, missing or overlapping. The model describes reassembly: all parts form a packet, a repeated part is
ignored, an overlap drops the packet (RFC 5722 and its erratum 3089). It includes two limits of Linux (`fragments.py`):

* the first fragment must contain the header of the upper layer, unless it ends inside the chain before that header;
* a packet with headers before its fragment header may be lost.
"""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass, replace
from enum import Enum

from fragments import (
    DESTINATION,
    FRAGMENT,
    HOP_BY_HOP,
    MORE,
    NO_SEGMENTS,
    PADDING,
    ROUTING,
    TCP,
    Addresses,
    chained,
    packet4,
    packet6,
    syn,
)

_TCP_HEADER = 20
_HEADER = 8
_SEGMENT = 40
_MORE4 = 0x2000
_DESTROYED = 0x5A
_Headers = tuple[tuple[int, bytes], ...]


class Prediction(Enum):
    """The predicted result of a packet: the rules see its segment, do not see it, or may see it."""

    WHOLE = "whole"
    LOST = "lost"
    EITHER = "either"


@dataclass(frozen=True)
class Piece:
    """A range of bytes in one fragment. An odd piece overlaps other pieces.

    A destroyed piece has wrong content.
    """

    begin: int
    end: int
    odd: bool = False
    destroyed: bool = False

    def overlaps(self, other: Piece) -> bool:
        return self.begin < other.end and other.begin < self.end

    def contains(self, other: Piece) -> bool:
        return self.begin <= other.begin and other.end <= self.end


@dataclass(frozen=True)
class Sample:
    """A packet: its ports, the headers around its fragment header, and its pieces.

    The pieces are in sending order. A packet without pieces is sent whole. `cuts` are the ends of its parts.
    """

    number: int
    allowed: bool
    port: int
    options: bytes = b""
    before: _Headers = ()
    inside: _Headers = ()
    cuts: tuple[int, ...] = ()
    pieces: tuple[Piece, ...] = ()

    def payload(self, ends: Addresses) -> tuple[int, bytes]:
        """Return the number of the first header, and the part that is fragmented."""
        return chained(list(self.inside), TCP, syn(ends, self.number, self.port))

    def packets(self, ends: Addresses) -> list[bytes]:
        """Return the IP packets in sending order."""
        first, whole = self.payload(ends)
        made = []
        for one in self.pieces or (Piece(0, len(whole)),):
            data = whole[one.begin : one.end]
            if one.destroyed:
                data = bytes(byte ^ _DESTROYED for byte in data)
            more = one.end < len(whole)
            if ends.version == 4:
                place = one.begin // 8 | (_MORE4 if more else 0)
                made.append(packet4(ends, self.number, TCP, data, place, self.options))
                continue
            protocol = first
            if self.pieces:
                data = struct.pack("!BBHI", first, 0, one.begin | (MORE if more else 0), self.number) + data
                protocol = FRAGMENT
            made.append(packet6(ends, *chained(list(self.before), protocol, data)))
        return made

    def prediction(self, version: int) -> Prediction:
        """Predict the kernel's result."""
        served = Prediction.EITHER if self.before and self.pieces else Prediction.WHOLE
        if not self.pieces or (version == 4 and len(self.cuts) == 1):
            # Linux queues an atomic IPv6 fragment together with other fragments, unlike RFC 6946.
            return served
        short = [one for one in self.pieces if version == 6 and self._is_cut_short(one)]
        odd = next((one for one in self.pieces if one.odd), None)
        if odd is not None:
            return Prediction.EITHER if short else self._overlapped(odd)
        parts = {one.end for one in self.pieces if one not in short}
        return served if parts == set(self.cuts) else Prediction.LOST

    def _overlapped(self, odd: Piece) -> Prediction:
        """Predict the result of a packet with a piece that overlaps other pieces.

        Linux (net/ipv4/inet_fragment.c, inet_frag_queue_insert) treats a piece inside the received range as repeated.
        It drops the packet if a piece arrives after another piece that it overlaps in part.
        """
        if odd.destroyed and odd.begin == 0:
            # The piece may contain another header number, so that Linux regards it as cut short.
            return Prediction.EITHER
        at = self.pieces.index(odd)
        met = [one for one in self.pieces if one is not odd and one.overlaps(odd)]
        in_part = any(not odd.contains(one) for one in met)
        later = any(self.pieces.index(one) > at for one in met)
        return Prediction.LOST if in_part and later else Prediction.EITHER

    def _is_cut_short(self, piece: Piece) -> bool:
        """Return whether a first fragment has all extension headers, but not the whole TCP header."""
        headers = _HEADER * len(self.inside)
        return piece.begin == 0 and piece.end < self.cuts[-1] and headers <= piece.end < headers + _TCP_HEADER


def sample(chance: random.Random, version: int, number: int, ports: tuple[int, ...]) -> Sample:
    """Return a random packet.

    Args:
        number: the source port and the identification, unique for each packet.
        ports: the possible destination ports.
    """
    bare = Sample(number, chance.random() < 0.5, chance.choice(ports))
    if version == 4:
        bare = replace(bare, options=b"\x01" * (4 * chance.choice((0, 0, 0, 1, 2, 10))))
    else:
        bare = replace(bare, inside=_headers(chance))
        if chance.random() < 0.3:
            first = ((HOP_BY_HOP, PADDING),) if chance.random() < 0.5 else ()
            bare = replace(bare, before=(*first, *_headers(chance)))
    if chance.random() < 0.1:
        return bare
    size = _SEGMENT + _HEADER * len(bare.inside)
    steps = range(8, size, 8)
    cuts = (*sorted(chance.sample(steps, chance.choice((0, 1, 1, 2, 3, len(steps))[: 2 + len(steps)]))), size)
    pieces = [Piece(begin, end) for begin, end in zip((0, *cuts), cuts, strict=False)]
    if chance.random() < 0.5:
        chance.shuffle(pieces)
    return replace(bare, cuts=cuts, pieces=tuple(_malformations(chance, pieces, size)))


def _headers(chance: random.Random) -> _Headers:
    more = ((DESTINATION, PADDING), (ROUTING, NO_SEGMENTS))
    return tuple(chance.choice(more) for _ in range(chance.choice((0, 0, 1, 2, 3))))


def _malformations(chance: random.Random, pieces: list[Piece], size: int) -> list[Piece]:
    """Return the pieces, sometimes with a repeated, missing or overlapping piece."""
    kind = chance.random()
    at = chance.randrange(len(pieces) + 1)
    if kind < 0.1:
        return [*pieces[:at], chance.choice(pieces), *pieces[at:]]
    if kind < 0.2 and len(pieces) > 1:
        pieces.remove(chance.choice(pieces))
    elif kind < 0.4:
        begin = chance.randrange(0, size, 8)
        end = min(begin + 8 * chance.randrange(1, 5), size)
        return [*pieces[:at], Piece(begin, end, odd=True, destroyed=chance.random() < 0.5), *pieces[at:]]
    return pieces


def mixed(chance: random.Random, sequences: list[list[bytes]]) -> list[bytes]:
    """Interleave the sequences at random; each sequence keeps its order."""
    order = [number for number, one in enumerate(sequences) for _ in one]
    chance.shuffle(order)
    rest = [iter(one) for one in sequences]
    return [next(rest[number]) for number in order]
