# SPDX-License-Identifier: Apache-2.0
"""Tables that tell a member for each value of a hash, or for each turn.

Invariant: pure, and the same on every machine. Each member has its share of the slots, at least one; where a member
comes or goes, nearly only the slots change that it gets or had (`hashed`).

`hashed` is Maglev's table (Eisenbud et al., "Maglev: A Fast and Reliable Software Network Load Balancer", NSDI 2016,
section 3.4): every member takes slots in an order of its own, one after the other. Here a member of twice the weight
takes them twice as often.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd

Weighted = Sequence[tuple[int, int]]
"""Members as numbers, which stand for the same member everywhere, each with its weight (1 or more)."""

# Primes. So many slots for each member make a share exact to some percent.
_SIZES = (1021, 4093, 16381, 65521)
_SLOTS_EACH = 15
_MOST_TURNS = 4096
_MASK = 2**64 - 1


def size(members: int) -> int:
    """How many slots a table for so many members has; more members seldom need another size."""
    return next((one for one in _SIZES if one >= members * _SLOTS_EACH), _SIZES[-1])


def hashed(members: Weighted) -> list[int]:
    """For each value of a hash (modulo the length) a member; empty without members."""
    if not members:
        return []
    slots = size(len(members))
    free = -1
    table = [free] * slots
    # The order in which one takes slots does not depend on who else is there, nor on how they are listed.
    ordered = sorted(members)
    places = [_mixed(member) % slots for member, _ in ordered]
    skips = [_mixed(member ^ _MASK) % (slots - 1) + 1 for member, _ in ordered]
    left = slots
    for number in _turns([weight for _, weight in ordered]):
        place, skip = places[number], skips[number]
        while table[place] != free:
            place = (place + skip) % slots
        table[place], places[number] = number, place
        left -= 1
        if not left:
            break
    return [ordered[number][0] for number in table]


def _turns(weights: Sequence[int]) -> Iterator[int]:
    """Who takes a slot next: everybody once, then each as often as its weight says."""
    largest = max(weights)
    yield from range(len(weights))
    credit = [0] * len(weights)
    while True:
        for number, weight in enumerate(weights):
            credit[number] += weight
            if credit[number] >= largest:
                credit[number] -= largest
                yield number


def _mixed(value: int) -> int:
    """A hash of a number of any length: the mixing step of SplitMix64 for every 64 bits."""
    mixed = 0
    while True:
        mixed = (mixed + (value & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & _MASK
        mixed ^= mixed >> 31
        value >>= 64
        if not value:
            return mixed


def interleaved(members: Weighted) -> list[int]:
    """Whose turn it is, one after the other and then again: each as often as its weight says, spread out."""
    weights = [weight for _, weight in members]
    if not members:
        return []
    least = gcd(*weights)
    total = sum(weights) // least
    exact = total <= _MOST_TURNS
    turns = [each // least if exact else max(1, round(each / least * _MOST_TURNS / total)) for each in weights]
    places = [
        ((2 * turn + 1) / (2 * count), number, member)
        for number, ((member, _), count) in enumerate(zip(members, turns, strict=True))
        for turn in range(count)
    ]
    return [member for _, _, member in sorted(places)]
