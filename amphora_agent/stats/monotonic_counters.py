# SPDX-License-Identifier: Apache-2.0
"""Counters of HAProxy's workers, which never decrease although each worker counts from zero."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from itertools import islice
from operator import add, lt
from pathlib import Path
from typing import Any

from amphora_agent.change_priority import GiveWay, never_wait
from amphora_agent.stats.former_workers import COUNTED
from amphora_agent.stats.haproxy_stats import NONE, Counts

_log = logging.getLogger(__name__)
# Maximum number of removed objects whose counters are kept, because such an object may return.
MOST_ABSENT = 2000
_ENCODED_AT_ONCE = 500


class MonotonicCounters:
    """Sums over all workers. The identity of a worker is unique for all time.

    The sum of a row outlives its listener, pool or member, because an object may be enabled again. ``settlements``
    counts the readings that were added to a sum permanently.
    """

    def __init__(self) -> None:
        self.settlements = 0
        self._settled: dict[str, Counts] = {}
        self._running: dict[str, dict[str, Counts]] = {}

    def read(self, identity: str, readings: Mapping[str, Counts]) -> None:
        known = self._running.setdefault(identity, {})
        for row in [row for row in known if row not in readings]:
            # HAProxy has removed the member at run time, so its last counters become permanent.
            self._settle(row, known.pop(row))
        self.read_some(identity, readings)

    def read_some(self, identity: str, readings: Mapping[str, Counts]) -> None:
        """Record the counters of some rows of a running worker."""
        known = self._running.setdefault(identity, {})
        for row, counts in readings.items():
            before = known.get(row)
            if before is counts:
                continue
            if before is not None and before != counts and any(map(lt, counts, before)):
                self._settle(row, before)
                # HAProxy has cleared or recreated the row, so its former counters become permanent.
            known[row] = counts

    def settle(self, identity: str, row: str) -> None:
        """Add the last reading of a deleted row of a running worker to the sum permanently."""
        known = self._running.get(identity, {})
        if row in known:
            self._settle(row, known.pop(row))

    @property
    def running(self) -> Collection[str]:
        return self._running.keys()

    def settle_others(self, running: Collection[str]) -> None:
        """Add the readings of all other workers to the sums permanently."""
        for identity in [known for known in self._running if known not in running]:
            for row, counts in self._running.pop(identity).items():
                self._settle(row, counts)
        if len(self._settled) > MOST_ABSENT:
            present = {row for readings in self._running.values() for row in readings}
            for row in [row for row in self._settled if row not in present][:-MOST_ABSENT]:
                del self._settled[row]

    def total(self, row: str, without: str = "") -> Counts:
        """Return the counters of a row since the first boot, ``without`` the readings of one worker."""
        total = self._settled.get(row, NONE)
        for identity, readings in self._running.items():
            if identity != without and row in readings:
                total = tuple(map(add, total, readings[row]))
        return total

    def totals_without(self, identity: str) -> dict[str, Counts]:
        """Return the counters of all other workers, for the rows that have any."""
        rows = set(self._settled).union(*(rows for other, rows in self._running.items() if other != identity))
        return {row: self.total(row, without=identity) for row in rows}

    def _settle(self, row: str, counts: Counts) -> None:
        self.settlements += 1
        # `pop` moves a changed row to the end. So the first row is the row that has not changed for the longest time.
        self._settled[row] = tuple(map(add, self._settled.pop(row, NONE), counts))

    def document(self) -> dict[str, Any]:
        return {"columns": COUNTED, "settled": self._settled, "living": self._running}

    def text(self, give_way: GiveWay = never_wait) -> str:
        """Return the `document` as JSON.

        One call of the encoder for 10,000 rows would delay the other threads of the agent, which may change members. So
        `give_way` is called after some rows.
        """
        encoded = ((json.dumps(identity), _encode(rows, give_way)) for identity, rows in self._running.items())
        running = ",".join(f"{identity}:{rows}" for identity, rows in encoded)
        columns = json.dumps(COUNTED, separators=(",", ":"))
        return f'{{"columns":{columns},"settled":{_encode(self._settled, give_way)},"living":{{{running}}}}}'

    @classmethod
    def restored(cls, document: Mapping[str, Any]) -> MonotonicCounters:
        """Return the counters of a `document`; raises KeyError, TypeError or ValueError."""
        totals = cls()
        places = {name: place for place, name in enumerate(document["columns"])}

        def counts(row: list[int]) -> Counts:
            return tuple(int(row[places[name]]) if name in places else 0 for name in COUNTED)

        totals._settled = {row: counts(found) for row, found in document["settled"].items()}
        totals._running = {
            identity: {row: counts(found) for row, found in readings.items()}
            for identity, readings in document["living"].items()
        }
        return totals

    @classmethod
    def load(cls, file: Path) -> MonotonicCounters:
        """Return the counters of a file with a `document`; zeros without a readable file."""
        try:
            return cls.restored(json.loads(file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            _log.warning(
                "The agent cannot read the stored traffic counters in %s, so counting starts at zero: %s", file, error
            )
            return cls()


def _encode(rows: Mapping[str, Counts], give_way: GiveWay) -> str:
    items, parts = iter(rows.items()), []
    while some := dict(islice(items, _ENCODED_AT_ONCE)):
        give_way()
        parts.append(json.dumps(some, separators=(",", ":"))[1:-1])
    return f"{{{','.join(parts)}}}"
