# SPDX-License-Identifier: Apache-2.0
"""Differences between reports (docs/reference/heartbeat.md).

Invariant: a difference contains every object that has changed since the last complete report, also if it has its
former state again. So the loss of another difference has no effect, also for health managers that do not know
differences and read one as a report about some objects. A complete report follows after every change of the objects or
of the generation, and at least as every `COMPLETE_EVERY`-th heartbeat.
"""

from __future__ import annotations

from typing import Any

# The health manager forgets a value that no report repeats within five heartbeats. So at least every fourth report is
# complete.
COMPLETE_EVERY = 4
# The agent sends a difference only if the size in bytes of the last complete report is between these limits. A smaller
# report fits into one Ethernet packet anyway. A difference can be twice as long as the complete report, but must fit
# into one datagram.
LEAST_BYTES, MOST_BYTES = 1400, 30_000
# If the complete report has more listeners, pools and members, the health manager ignores the states in a difference.
# Such a report can be smaller than MOST_BYTES after compression, so this limit is separate.
MOST_NAMES = 5_000

Document = dict[str, Any]


class ReportDifferences:
    """The last complete report of one sender, and what has changed since."""

    def __init__(self) -> None:
        self._complete: Document | None = None
        self._sequence = 0
        self._sent = 0
        # The objects that have changed since the last complete report; the members by pool.
        self._listeners: set[str] = set()
        self._members: dict[str, set[str]] = {}

    def forget(self) -> None:
        """Make the next report a complete one."""
        self._complete = None

    def record(self, document: Document, sequence: int, sizes: list[int]) -> None:
        """Record a complete report: the sequence of its first datagram, and the sizes of its datagrams."""
        is_suitable = len(sizes) == 1 and LEAST_BYTES <= sizes[0] <= MOST_BYTES and _count_names(document) <= MOST_NAMES
        self._listeners.clear()
        self._members.clear()
        self._complete, self._sequence, self._sent = document if is_suitable else None, sequence, 1

    def find(self, document: Document) -> Document | None:
        """Return the difference to send instead of a report; None if the report has to be complete."""
        before = self._complete
        if before is None or self._sent >= COMPLETE_EVERY or not _have_equal_objects(before, document):
            return None
        self._sent += 1
        self._listeners |= {name for name, one in document["listeners"].items() if one != before["listeners"][name]}
        for name, pool in document["pools"].items():
            if pool != (known := before["pools"][name]):
                changed = (one for one, word in pool["members"].items() if word != known["members"][one])
                self._members.setdefault(name, set()).update(changed)
        return {
            **document,
            "full": self._sequence,
            "listeners": {name: document["listeners"][name] for name in sorted(self._listeners)},
            "pools": {name: _some(document["pools"][name], members) for name, members in sorted(self._members.items())},
        }


def _count_names(document: Document) -> int:
    members = sum(len(pool["members"]) for pool in document["pools"].values())
    return len(document["listeners"]) + len(document["pools"]) + members


def _have_equal_objects(before: Document, document: Document) -> bool:
    pools = before["pools"]
    return (
        document["generation"] == before["generation"]
        and document["listeners"].keys() == before["listeners"].keys()
        and document["pools"].keys() == pools.keys()
        and all(one["members"].keys() == pools[name]["members"].keys() for name, one in document["pools"].items())
    )


def _some(pool: Document, members: set[str]) -> Document:
    return {"status": pool["status"], "members": {one: pool["members"][one] for one in sorted(members)}}
