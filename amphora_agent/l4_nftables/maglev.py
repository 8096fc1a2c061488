# SPDX-License-Identifier: Apache-2.0
"""Lookup tables of members: by a hash value, or by turn.

Invariant: the result is the same on every machine. Each member gets its share of the slots, and at least one.

`hash_table` is Maglev's table (Eisenbud et al., "Maglev: A Fast and Reliable Software Network Load Balancer", NSDI
2016, section 3.4): a change of one member changes almost only its own slots. Here a member with twice the weight claims
slots twice as often.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd

Weighted = Sequence[tuple[int, int]]
"""Members as numbers, which mean the same member on every machine, each with its weight (1 or more)."""

# Sizes of the hash table: primes, so that steps of a fixed length reach every slot. With 15 slots for each member,
# shares are exact to a few percent.
_SIZES = (1021, 4093, 16381, 65521)
_SLOTS_PER_MEMBER = 15
_MAX_TURNS = 4096
_MASK = 2**64 - 1


def table_size(members: int) -> int:
    """Return the number of slots for a number of members; it rarely changes when members are added."""
    return next((one for one in _SIZES if one >= members * _SLOTS_PER_MEMBER), _SIZES[-1])


def hash_table(members: Weighted) -> list[int]:
    """Return a member for each hash value (modulo the length); empty without members."""
    if not members:
        return []
    slots = table_size(len(members))
    free = -1
    table = [free] * slots
    # The order in which a member claims slots depends on this member only. So a change of another member moves few
    # slots.
    ordered = sorted(members)
    positions = [_mix(member) % slots for member, _ in ordered]
    skips = [_mix(member ^ _MASK) % (slots - 1) + 1 for member, _ in ordered]
    left = slots
    for number in _claims([weight for _, weight in ordered]):
        position, skip = positions[number], skips[number]
        while table[position] != free:
            position = (position + skip) % slots
        table[position], positions[number] = number, position
        left -= 1
        if not left:
            break
    return [ordered[number][0] for number in table]


def _claims(weights: Sequence[int]) -> Iterator[int]:
    """Yield the member that claims the next slot: each member once, then each in proportion to its weight."""
    largest = max(weights)
    yield from range(len(weights))
    credit = [0] * len(weights)
    while True:
        for number, weight in enumerate(weights):
            credit[number] += weight
            if credit[number] >= largest:
                credit[number] -= largest
                yield number


def _mix(value: int) -> int:
    """Return a hash of a number of any length: the mixing step of SplitMix64 for every 64 bits."""
    mixed = 0
    while True:
        mixed = (mixed + (value & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & _MASK
        mixed ^= mixed >> 31
        value >>= 64
        if not value:
            return mixed


def turn_counts(weights: Sequence[int]) -> list[int]:
    """Return the number of turns for each weight; at least one."""
    least = gcd(*weights)
    total = sum(weights) // max(1, least)
    if total <= _MAX_TURNS:
        return [each // least for each in weights]
    return [max(1, round(each / least * _MAX_TURNS / total)) for each in weights]


def turn_table(members: Weighted) -> list[int]:
    """Return the member of each turn: members in proportion to their weights, evenly spread."""
    turns = turn_counts([weight for _, weight in members])
    positions = [
        ((2 * turn + 1) / (2 * count), number, member)
        for number, ((member, _), count) in enumerate(zip(members, turns, strict=True))
        for turn in range(count)
    ]
    return [member for _, _, member in sorted(positions)]
