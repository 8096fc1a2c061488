# SPDX-License-Identifier: Apache-2.0
"""Counters that never fall.

Invariant: what `visible` returns for a row is never less than what it, or a `Totals` restored from
`document`, returned before: workers come, go and start again at zero, and their last readings are kept.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from operator import add, lt
from typing import Any

from amphora_agent.stats.haproxy_stats import NONE, Counts
from amphora_agent.stats.stat_columns import COUNTED

# Rows that no worker has any more are remembered too, in case they come back: so many of them.
MOST_ABSENT = 2000


class Totals:
    """Sums over the lives of workers. A worker's identity tells it from any other one that ever was.

    A row's sum outlives the listener, pool or member: one that was switched off may come back.

    Attributes:
        settlements: grows with each reading that became a part of a sum for good.
    """

    def __init__(self) -> None:
        self.settlements = 0
        self._settled: dict[str, Counts] = {}
        self._living: dict[str, dict[str, Counts]] = {}

    def read(self, identity: str, readings: Mapping[str, Counts]) -> None:
        """Take note of what a living worker has counted so far: all of it."""
        known = self._living.setdefault(identity, {})
        for row in [row for row in known if row not in readings]:
            self._settle(row, known.pop(row))  # a member was removed at run time
        self.read_some(identity, readings)

    def read_some(self, identity: str, readings: Mapping[str, Counts]) -> None:
        """Take note of what a living worker has counted so far in some rows."""
        known = self._living.setdefault(identity, {})
        for row, counts in readings.items():
            before = known.get(row)
            if before is counts:
                continue
            if before is not None and before != counts and any(map(lt, counts, before)):
                self._settle(row, before)  # somebody cleared its counters, or it was removed and came back
            known[row] = counts

    @property
    def living(self) -> Collection[str]:
        """The workers that have been read and were not found dead."""
        return self._living.keys()

    def keep(self, living: Collection[str]) -> None:
        """Settle the readings of every worker that is not among these."""
        for identity in [known for known in self._living if known not in living]:
            for row, counts in self._living.pop(identity).items():
                self._settle(row, counts)
        self._forget_absent()

    def visible(self, row: str, but: str = "") -> Counts:
        """The row's counters since the amphora was born.

        Args:
            but: a worker whose readings are left out.
        """
        total = self._settled.get(row, NONE)
        for identity, readings in self._living.items():
            if identity != but and row in readings:
                total = tuple(map(add, total, readings[row]))
        return total

    def beside(self, identity: str) -> dict[str, Counts]:
        """What was counted by others than this worker; rows in which nothing was are left out."""
        rows = set(self._settled).union(*(rows for other, rows in self._living.items() if other != identity))
        return {row: self.visible(row, but=identity) for row in rows}

    def _settle(self, row: str, counts: Counts) -> None:
        self.settlements += 1
        self._settled[row] = tuple(map(add, self._settled.pop(row, NONE), counts))  # the latest is the last

    def _forget_absent(self) -> None:
        if len(self._settled) <= MOST_ABSENT:
            return
        present = {row for readings in self._living.values() for row in readings}
        absent = [row for row in self._settled if row not in present]
        for row in absent[: max(0, len(absent) - MOST_ABSENT)]:
            del self._settled[row]

    def document(self) -> dict[str, Any]:
        """All of it, for the disk."""
        return {"columns": COUNTED, "settled": self._settled, "living": self._living}

    @classmethod
    def restored(cls, document: Mapping[str, Any]) -> Totals:
        """What `document` described, whatever columns it had.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        totals = cls()
        places = {name: place for place, name in enumerate(document["columns"])}

        def counts(row: list[int]) -> Counts:
            return tuple(int(row[places[name]]) if name in places else 0 for name in COUNTED)

        totals._settled = {row: counts(found) for row, found in document["settled"].items()}
        totals._living = {
            identity: {row: counts(found) for row, found in readings.items()}
            for identity, readings in document["living"].items()
        }
        return totals
