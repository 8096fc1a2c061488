# SPDX-License-Identifier: Apache-2.0
"""Heartbeats with ids that are not recorded, until they are written down.

Invariant: bounded, whatever is sent. At most `MOST` ids are remembered, `MOST_OF_ADDRESS` of them from one address, so
that one sender cannot hide the others. Rows are written seldom. An id that is heard only for a moment gets no row: an
amphora that was just removed sends for a while.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

from amphora_driver.store.unknown_amphorae import MAX_ROWS, MAX_ROWS_PER_ADDRESS, UnknownAmphora

if TYPE_CHECKING:
    from collections.abc import Callable

# Seconds for which somebody has to be heard before it is written, between two writes, and after which one that is not
# heard any more makes room.
_AT_LEAST = 15.0
_WRITTEN_EVERY = 10.0
_FORGOTTEN_AFTER = 120.0


class Strays:
    """Usable from any thread.

    Args:
        at_least: seconds for which one is heard before it is told.
        every: seconds between two times any is told.
        wall_clock: the current time in seconds since 1970.
    """

    def __init__(
        self, at_least: float = _AT_LEAST, every: float = _WRITTEN_EVERY, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._at_least = at_least
        self._every = every
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        # First and last heard, on `time.monotonic()`'s clock, and from where.
        self._heard: dict[str, tuple[float, float, str]] = {}
        self._told: dict[str, float] = {}
        self._told_at = float("-inf")

    def hear(self, amphora_id: str, address: str, now: float) -> None:
        """Note that an id was heard at a moment of `time.monotonic()`'s clock, if there is room for it."""
        with self._lock:
            known = self._heard.get(amphora_id)
            if known is None and (len(self._heard) >= MAX_ROWS or self._many_of(address)):
                return
            self._heard[amphora_id] = (now if known is None else known[0], now, address)

    def _many_of(self, address: str) -> bool:
        return Counter(sender for _, _, sender in self._heard.values())[address] >= MAX_ROWS_PER_ADDRESS

    def due(self, now: float) -> list[UnknownAmphora]:
        """Those to be written down now: heard for long enough, and again since they were told; mostly none."""
        if now - self._told_at < self._every:
            return []
        ahead = self._wall_clock() - now
        with self._lock:
            self._heard = {one: each for one, each in self._heard.items() if now - each[1] < _FORGOTTEN_AFTER}
            return [
                UnknownAmphora(amphora_id=one, address=address, first_at=first + ahead, last_at=last + ahead)
                for one, (first, last, address) in self._heard.items()
                if last - first >= self._at_least and last > self._told.get(one, float("-inf"))
            ]

    def told(self, strays: list[UnknownAmphora], now: float) -> None:
        """These were written down."""
        self._told_at = now
        with self._lock:
            self._told = {one: at for one, at in self._told.items() if one in self._heard}
            self._told.update(dict.fromkeys((one.amphora_id for one in strays), now))
