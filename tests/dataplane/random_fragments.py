# SPDX-License-Identifier: Apache-2.0
"""Random IP packets with random fragmentation, and a model that predicts the result.

Pure. A packet is a TCP segment behind any chain of extension headers or options, whole or in fragments that may be out
of order, repeated, missing or overlapping. The model knows reassembly: all parts make a packet, a repeated one is
ignored, an overlap drops all (RFC 5722 and its erratum 3089). It knows two limits of Linux (`fragments.py`):

* the first fragment has to contain the header of the upper layer, unless it ends inside the chain in front of it;
* a packet with headers in front of a fragment header may be lost.
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
    Ends,
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


class Fate(Enum):
    """What becomes of a packet on its way to the rules: the rules see its segment, do not see it, or may."""

    WHOLE = "whole"
    LOST = "lost"
    EITHER = "either"


@dataclass(frozen=True)
class Piece:
    """A part of what is fragmented, in bytes. An odd one is no part of the partition: it overlaps others.

    A destroyed one has other content than the rest of the packet.
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
    """A packet: the sender's and the receiver's ports, the headers around its fragment header, and its pieces.

    The pieces are in the order of their sending. Without any it is sent as it is. `cuts` are the ends of its parts.
    """

    number: int
    allowed: bool
    port: int
    options: bytes = b""
    before: _Headers = ()
    inside: _Headers = ()
    cuts: tuple[int, ...] = ()
    pieces: tuple[Piece, ...] = ()

    def payload(self, ends: Ends) -> tuple[int, bytes]:
        """What is cut into pieces, with the number of its first header."""
        return chained(list(self.inside), TCP, syn(ends, self.number, self.port))

    def packets(self, ends: Ends) -> list[bytes]:
        """The packets of IP, in the order in which they are sent."""
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

    def fate(self, version: int) -> Fate:
        """What the kernel makes of it."""
        served = Fate.EITHER if self.before and self.pieces else Fate.WHOLE
        if not self.pieces or (version == 4 and len(self.cuts) == 1):
            # Linux keeps an atomic fragment of IPv6 together with others, unlike RFC 6946.
            return served
        short = [one for one in self.pieces if version == 6 and self._is_cut_short(one)]
        odd = next((one for one in self.pieces if one.odd), None)
        if odd is not None:
            return Fate.EITHER if short else self._overlapped(odd)
        parts = {one.end for one in self.pieces if one not in short}
        return served if parts == set(self.cuts) else Fate.LOST

    def _overlapped(self, odd: Piece) -> Fate:
        """What becomes of a packet with a piece that overlaps others.

        Linux (net/ipv4/inet_fragment.c, inet_frag_queue_insert) takes a piece that is inside of what it has for a
        repeated one. So all is dropped if the first of two that overlap in part is there when the second one comes.
        """
        if odd.destroyed and odd.begin == 0:
            # It may name another header than its packet, and be taken for cut short.
            return Fate.EITHER
        at = self.pieces.index(odd)
        met = [one for one in self.pieces if one is not odd and one.overlaps(odd)]
        in_part = any(not odd.contains(one) for one in met)
        later = any(self.pieces.index(one) > at for one in met)
        return Fate.LOST if in_part and later else Fate.EITHER

    def _is_cut_short(self, piece: Piece) -> bool:
        """Whether it is a first fragment that has all extension headers, but not the header of TCP."""
        headers = _HEADER * len(self.inside)
        return piece.begin == 0 and piece.end < self.cuts[-1] and headers <= piece.end < headers + _TCP_HEADER


def sample(chance: random.Random, version: int, number: int, ports: tuple[int, ...]) -> Sample:
    """A random packet.

    Args:
        number: the port that it is sent from, and its identification; no other packet has it.
        ports: the ports that it may be sent to.
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
    return replace(bare, cuts=cuts, pieces=tuple(_mischief(chance, pieces, size)))


def _headers(chance: random.Random) -> _Headers:
    more = ((DESTINATION, PADDING), (ROUTING, NO_SEGMENTS))
    return tuple(chance.choice(more) for _ in range(chance.choice((0, 0, 1, 2, 3))))


def _mischief(chance: random.Random, pieces: list[Piece], size: int) -> list[Piece]:
    """The pieces, with one repeated, missing or overlapped now and then."""
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
    """The elements of all sequences, each in its order, in a random order of the sequences."""
    order = [number for number, one in enumerate(sequences) for _ in one]
    chance.shuffle(order)
    rest = [iter(one) for one in sequences]
    return [next(rest[number]) for number in order]
