# SPDX-License-Identifier: Apache-2.0
"""Amphorae that no longer serve what they confirmed: their machine was restarted, its memory with users' keys is gone.

Invariant: pure memory, and slow to believe. A heartbeat may have been sent before the confirmation and be read long
after it. So an amphora counts as one that lost something only when a heartbeat is received a whole interval after
it was first seen to be behind what was confirmed *then*, and nothing in between said otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from amphora_driver.health.amphora_reports import Seen


class Loss(msgspec.Struct, frozen=True):
    """An amphora that confirmed one generation and serves an older one, or none (0)."""

    amphora_id: str
    confirmed: int
    serves: int


class _Suspicion(msgspec.Struct, frozen=True):
    confirmed: int
    since: float


class Losses:
    """Who is suspected.

    Args:
        interval: seconds between an amphora's heartbeats.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._suspected: dict[str, _Suspicion] = {}

    def among(self, heard: Mapping[str, Seen], confirmed: Mapping[str, int], now: float) -> list[Loss]:
        """Those of the amphorae just heard that have lost what they served.

        Args:
            heard: the last heartbeat of each.
            confirmed: the newest generation each of them confirmed, read after they were heard.
            now: on `time.monotonic()`'s clock, after that reading.
        """
        found = []
        for amphora_id, seen in heard.items():
            expected = confirmed.get(amphora_id, 0)
            if seen.generation >= expected:
                self._suspected.pop(amphora_id, None)
                continue
            suspicion = self._suspected.get(amphora_id)
            if suspicion is None or suspicion.confirmed != expected:
                self._suspected[amphora_id] = _Suspicion(expected, now)
            elif seen.monotonic > suspicion.since + self._interval:
                found.append(Loss(amphora_id, expected, seen.generation))
        return found

    def settled(self, losses: list[Loss]) -> None:
        """These were written down."""
        for one in losses:
            self._suspected.pop(one.amphora_id, None)

    def keep(self, amphora_ids: set[str]) -> None:
        """Forget every amphora but these."""
        self._suspected = {one: suspicion for one, suspicion in self._suspected.items() if one in amphora_ids}
