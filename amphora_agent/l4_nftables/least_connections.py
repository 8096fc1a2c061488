# SPDX-License-Identifier: Apache-2.0
"""Who gets the next flows where the member with the fewest gets each: the turns until flows are counted again.

Invariant: pure. As long as no flow ends, each turn goes to whom weighted least connections would give it to: the
member that has the fewest flows for its weight. How many end between two counts is how far it can be off.

The kernel goes through the turns one after the other. It would begin them again when it is through; so there are twice
as many as flows are expected, and where that is too many, each member has its part of those that are expected.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from amphora_agent.l4_nftables import maglev

FEWEST, MOST = 64, 512


@dataclass(frozen=True)
class Loads:
    """What is known when turns are made.

    Args:
        flows: how many each member has, by mark.
        begun: how many have begun in all, by virtual server: they have used up turns of before.
        expected: how many will have begun until the next count, by virtual server.
        number: of these turns; others begin at their first one.
    """

    flows: Mapping[int, int] = field(default_factory=dict)
    begun: Mapping[str, int] = field(default_factory=dict)
    expected: Mapping[str, int] = field(default_factory=dict)
    number: int = 0


UNKNOWN = Loads()


def turns(members: Sequence[tuple[int, int, int]], expected: int) -> list[int]:
    """Whose turn it is, one after the other; empty without members.

    Args:
        members: each with its weight (1 or more), and how many flows it has.
    """
    if not members:
        return []
    if 2 * expected > MOST:
        return _parts(members, expected)
    # Some lengths only: then a change of what is expected is seldom a change of the length.
    length = FEWEST
    while length < 2 * expected:
        length *= 2
    waiting = [((has + 1) / weight, number, weight, has) for number, (_, weight, has) in enumerate(members)]
    heapq.heapify(waiting)
    found = []
    for _ in range(length):
        _, number, weight, has = waiting[0]
        found.append(members[number][0])
        heapq.heapreplace(waiting, ((has + 2) / weight, number, weight, has + 1))
    return found


def _parts(members: Sequence[tuple[int, int, int]], expected: int) -> list[int]:
    """Each has as many turns as it lacks of the level at which all will be."""
    level = _level([(weight, has) for _, weight, has in members], expected)
    lacking = [(member, round((weight * level - has) * MOST / expected)) for member, weight, has in members]
    return maglev.interleaved([(member, count) for member, count in lacking if count > 0])


def _level(members: Sequence[tuple[int, int]], expected: int) -> float:
    """How many flows for each unit of weight there are when the expected ones have gone to those with the fewest."""
    ordered = sorted(members, key=lambda one: one[1] / one[0])
    weights, flows, level = 0, expected, 0.0
    for number, (weight, has) in enumerate(ordered):
        weights += weight
        flows += has
        level = flows / weights
        if number + 1 < len(ordered) and level <= ordered[number + 1][1] / ordered[number + 1][0]:
            break
    return level
