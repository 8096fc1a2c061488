# SPDX-License-Identifier: Apache-2.0
"""LEAST_CONNECTIONS: a list of turns that gives the next flows to the members with the fewest flows.

Invariant: while no flow ends, each turn selects the member with the fewest flows for its weight. The kernel begins
again at the end, so there are twice as many turns as expected flows. If that is too many, each member gets its share of
them.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from amphora_agent.l4_nftables import maglev

MIN_TURNS, MAX_TURNS = 64, 512


@dataclass(frozen=True)
class Loads:
    """Flow counts from which turns are planned.

    ``flows`` are present flows by mark. ``begun`` counts flows since the start by virtual server; they have used turns.
    ``expected`` flows by virtual server will begin before the next count. A plan with a new ``number`` begins at its
    first turn.
    """

    flows: Mapping[int, int] = field(default_factory=dict)
    begun: Mapping[str, int] = field(default_factory=dict)
    expected: Mapping[str, int] = field(default_factory=dict)
    number: int = 0


NO_LOADS = Loads()


def plan_turns(members: Sequence[tuple[int, int, int]], expected: int) -> list[int]:
    """Return the member of each turn, for members with a weight and a number of flows."""
    if not members:
        return []
    if 2 * expected > MAX_TURNS:
        return _proportional_turns(members, expected)
    # The list contains the members in the order in which they get new flows. The list's length is MIN_TURNS times a
    # power of two, so that the length rarely changes.
    length = MIN_TURNS
    while length < 2 * expected:
        length *= 2
    waiting = [((flows + 1) / weight, number, weight, flows) for number, (_, weight, flows) in enumerate(members)]
    heapq.heapify(waiting)
    found = []
    for _ in range(length):
        _, number, weight, flows = waiting[0]
        found.append(members[number][0])
        heapq.heapreplace(waiting, ((flows + 2) / weight, number, weight, flows + 1))
    return found


def _proportional_turns(members: Sequence[tuple[int, int, int]], expected: int) -> list[int]:
    """Return turns in proportion to the flows that each member lacks of the common level."""
    level = _level([(weight, flows) for _, weight, flows in members], expected)
    turns = [(member, round((weight * level - flows) * MAX_TURNS / expected)) for member, weight, flows in members]
    return maglev.turn_table([(member, count) for member, count in turns if count > 0])


def _level(members: Sequence[tuple[int, int]], expected: int) -> float:
    """Return the flows for each unit of weight, after the least loaded members got the expected flows."""
    ordered = sorted(members, key=lambda one: one[1] / one[0])
    weights, total, level = 0, expected, 0.0
    for number, (weight, flows) in enumerate(ordered):
        weights += weight
        total += flows
        level = total / weights
        if number + 1 < len(ordered) and level <= ordered[number + 1][1] / ordered[number + 1][0]:
            break
    return level
