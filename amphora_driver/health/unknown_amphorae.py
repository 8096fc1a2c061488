# SPDX-License-Identifier: Apache-2.0
"""Collects senders of heartbeats whose amphora ids are not in the database.

Invariant: memory is bounded, independent of the input. At most `MAX_ROWS` ids are remembered, `MAX_ROWS_PER_ADDRESS` of
them from one address, so that one sender cannot displace the others. Rows are written rarely. An id that sends for a
short time only gets no row, because a deleted amphora sends for a while.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

from amphora_driver.store.unknown_amphorae import MAX_ROWS, MAX_ROWS_PER_ADDRESS, UnknownAmphora

if TYPE_CHECKING:
    from collections.abc import Callable

# Seconds for which an id has to send before it is recorded.
_MIN_DURATION = 15.0
# Seconds between two writes.
_WRITE_INTERVAL = 10.0
# Seconds after which a silent id is forgotten.
_SILENCE_TTL = 120.0


class UnknownAmphorae:
    """The unknown senders. Thread-safe.

    Args:
        min_duration: seconds for which an id has to send before it is returned.
        write_interval: seconds between two results of `find_due`.
        wall_clock: returns the current time in seconds since 1970.
    """

    def __init__(
        self,
        min_duration: float = _MIN_DURATION,
        write_interval: float = _WRITE_INTERVAL,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._min_duration = min_duration
        self._write_interval = write_interval
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        # Times of the first and the last datagram (`time.monotonic()`), and the source address, by amphora id.
        self._senders: dict[str, tuple[float, float, str]] = {}
        self._recorded: dict[str, float] = {}
        self._recorded_at = float("-inf")

    def add(self, amphora_id: str, address: str, now: float) -> None:
        """Count a datagram of an unknown id, if the limits permit (`now` of `time.monotonic()`)."""
        with self._lock:
            known = self._senders.get(amphora_id)
            if known is None and (len(self._senders) >= MAX_ROWS or self._is_address_full(address)):
                return
            self._senders[amphora_id] = (now if known is None else known[0], now, address)

    def _is_address_full(self, address: str) -> bool:
        return Counter(sender for _, _, sender in self._senders.values())[address] >= MAX_ROWS_PER_ADDRESS

    def find_due(self, now: float) -> list[UnknownAmphora]:
        """Return the ids to record now: they sent for long enough, and again since they were last recorded."""
        if now - self._recorded_at < self._write_interval:
            return []
        offset = self._wall_clock() - now
        with self._lock:
            self._senders = {one: each for one, each in self._senders.items() if now - each[1] < _SILENCE_TTL}
            return [
                UnknownAmphora(amphora_id=one, address=address, first_at=first + offset, last_at=last + offset)
                for one, (first, last, address) in self._senders.items()
                if last - first >= self._min_duration and last > self._recorded.get(one, float("-inf"))
            ]

    def mark_recorded(self, amphorae: list[UnknownAmphora], now: float) -> None:
        """Remember that these are written to the database."""
        self._recorded_at = now
        with self._lock:
            self._recorded = {one: at for one, at in self._recorded.items() if one in self._senders}
            self._recorded.update(dict.fromkeys((one.amphora_id for one in amphorae), now))
