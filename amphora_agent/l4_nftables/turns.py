# SPDX-License-Identifier: Apache-2.0
"""ROUND_ROBIN: the member of each turn, with few different turns after a change.

Invariant: each member has exactly the number of turns of `maglev.turn_counts`. In lists of up to `SMALL` turns, the
turns of a member are evenly spread. A longer list keeps the turns of the list before it: a new turn takes the place of
another one, which moves to the end. So one changed member of thousands changes only as many turns as it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from amphora_agent.l4_nftables import maglev

SMALL = 256


def plan_turns(before: Sequence[str], weights: Mapping[str, int]) -> list[str]:
    """Return the member of each turn, for members with weights. ``before`` is the present list."""
    weighted = list(enumerate(weights.values()))
    counts = dict(zip(weights, maglev.turn_counts([weight for _, weight in weighted]), strict=True))
    total = sum(counts.values())
    if total > SMALL and before:
        present = Counter(before)
        surplus = {one: count - counts.get(one, 0) for one, count in present.items() if count > counts.get(one, 0)}
        missing = {one: count - present[one] for one, count in counts.items() if count > present[one]}
        # A list with many different turns is planned anew, because its turns are then evenly spread again.
        if sum(surplus.values()) + sum(missing.values()) <= total // 4:
            return _change_turns(list(before), surplus, missing)
    names = list(weights)
    return [names[number] for number in maglev.turn_table(weighted)]


def _change_turns(turns: list[str], surplus: dict[str, int], missing: Mapping[str, int]) -> list[str]:
    """Remove surplus turns and add missing turns."""
    free = []
    for slot in range(len(turns) - 1, -1, -1) if surplus else ():
        if surplus.get(turns[slot]):
            surplus[turns[slot]] -= 1
            free.append(slot)
    added = [
        one for _, one in sorted(((2 * n + 1) / count, one) for one, count in missing.items() for n in range(count))
    ]
    holes = sorted(free)
    while holes and added:
        turns[holes.pop(0)] = added.pop()
    # The last turns move into the remaining holes.
    for hole in reversed(holes):
        turns[hole] = turns[-1]
        turns.pop()
    for number, one in enumerate(added):
        slot = (2 * number + 1) * len(turns) // (2 * len(added))
        turns.append(turns[slot])
        turns[slot] = one
    return turns
