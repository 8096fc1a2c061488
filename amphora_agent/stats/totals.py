# SPDX-License-Identifier: Apache-2.0
"""Counters that never fall.

Invariant: what `visible` returns for a listener is never less than what it, or a `Totals` restored from
`document`, returned before: workers come, go and start again at zero, and their last readings are kept.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from amphora_agent.stats.collect import Counters


class Totals:
    """Sums over the lives of workers. A worker's identity tells it from any other one that ever was.

    A listener's sum outlives the listener: one that was switched off may come back.
    """

    def __init__(self) -> None:
        self._settled: dict[str, Counters] = {}
        self._living: dict[str, dict[str, Counters]] = {}

    def read(self, identity: str, readings: Mapping[str, Counters]) -> None:
        """Take note of what a living worker has counted so far."""
        known = self._living.setdefault(identity, {})
        for listener, counters in readings.items():
            before = known.get(listener)
            if before is not None and counters.fell_below(before):
                self._settle(listener, before)  # somebody cleared its counters
            known[listener] = counters

    def keep(self, living: Collection[str]) -> None:
        """Settle the readings of every worker that is not among these."""
        for identity in [known for known in self._living if known not in living]:
            for listener, counters in self._living.pop(identity).items():
                self._settle(listener, counters)

    def visible(self, listener: str) -> Counters:
        """The listener's counters since the amphora was born."""
        total = self._settled.get(listener, Counters())
        for readings in self._living.values():
            total += readings.get(listener, Counters())
        return total

    def _settle(self, listener: str, counters: Counters) -> None:
        self._settled[listener] = self._settled.get(listener, Counters()) + counters

    def document(self) -> dict[str, Any]:
        """All of it, for the disk."""
        return {
            "settled": {name: asdict(counters) for name, counters in self._settled.items()},
            "living": {
                identity: {name: asdict(counters) for name, counters in readings.items()}
                for identity, readings in self._living.items()
            },
        }

    @classmethod
    def restored(cls, document: Mapping[str, Any]) -> Totals:
        """What `document` described."""
        totals = cls()
        totals._settled = {name: Counters(**found) for name, found in document["settled"].items()}
        totals._living = {
            identity: {name: Counters(**found) for name, found in readings.items()}
            for identity, readings in document["living"].items()
        }
        return totals
