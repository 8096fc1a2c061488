# SPDX-License-Identifier: Apache-2.0
"""Detects amphorae that no longer serve their confirmed configuration, for example after a reboot.

A restarted amphora has lost the user keys in its memory and serves an older generation or none.

Invariant: the health manager may process a heartbeat long after a confirmation that follows the heartbeat. So two
heartbeats at least one interval apart have to be behind the same confirmed generation, without a newer one in between.
A heartbeat whose values were not read (overload) proves nothing about the generation.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from amphora_driver.health.amphora_reports import LastReport


class LostConfig(msgspec.Struct, frozen=True):
    """An amphora that serves an older generation than it confirmed; 0 for none."""

    amphora_id: str
    confirmed: int
    serves: int


class LostConfigDetector:
    """Finds amphorae with heartbeats behind their confirmed generation. `interval` is in seconds."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        # Amphorae that seem to have lost their configuration, each with its confirmed generation and the start of the
        # suspicion.
        self._suspected: dict[str, tuple[int, float]] = {}

    def find_lost(
        self, updated: Mapping[str, LastReport], confirmed: Mapping[str, int], now: float
    ) -> list[LostConfig]:
        """Return the amphorae that have lost the configuration that they confirmed.

        Args:
            updated: the last heartbeat of each amphora with new heartbeats.
            confirmed: the newest confirmed generation of each amphora, read after those heartbeats.
            now: time of `time.monotonic()`, after the read of `confirmed`.
        """
        found = []
        for amphora_id, last in updated.items():
            expected = confirmed.get(amphora_id, 0)
            if last.generation >= expected:
                self._suspected.pop(amphora_id, None)
                continue
            confirmed_before, since = self._suspected.get(amphora_id, (None, now))
            if confirmed_before != expected:
                self._suspected[amphora_id] = (expected, now)
            elif last.read_at > since + self._interval:
                found.append(LostConfig(amphora_id, expected, last.generation))
        return found

    def clear(self, lost: list[LostConfig]) -> None:
        """Forget the suspicions of these amphorae, after the database contains their losses."""
        for one in lost:
            self._suspected.pop(one.amphora_id, None)

    def retain(self, amphora_ids: set[str]) -> None:
        self._suspected = {one: suspicion for one, suspicion in self._suspected.items() if one in amphora_ids}
