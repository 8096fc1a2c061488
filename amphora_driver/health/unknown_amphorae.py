# SPDX-License-Identifier: Apache-2.0
"""Collects senders of heartbeats whose amphora ids are not in the database.

Invariant: memory is bounded, independent of the input. This module keeps at most `MAX_UNKNOWN_AMPHORAE` ids, and
`MAX_UNKNOWN_PER_ADDRESS` of them from one address, so that one sender cannot displace the others. An id that sends
for a short time only gets no row, because a deleted amphora sends for a while.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from amphora_driver.store.orphans import MAX_UNKNOWN_AMPHORAE, MAX_UNKNOWN_PER_ADDRESS, UnknownAmphora

# Seconds without a datagram after which an unknown amphora id is forgotten.
_SILENCE_TTL = 120.0


class UnknownAmphorae:
    """The unknown senders. Thread-safe.

    Args:
        min_duration: seconds for which an id has to send before `find_due` returns the id.
        write_interval: seconds between two results of `find_due`.
    """

    def __init__(
        self, min_duration: float = 15.0, write_interval: float = 10.0, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._min_duration = min_duration
        self._write_interval = write_interval
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        # For each unknown amphora id: the monotonic times of the first and the last datagram, and the sender's address.
        self._senders: dict[str, tuple[float, float, str]] = {}
        self._recorded: dict[str, float] = {}
        self._recorded_at = float("-inf")

    def add(self, amphora_id: str, address: str, now: float) -> None:
        with self._lock:
            known = self._senders.get(amphora_id)
            if known is None:
                from_address = sum(sender == address for _, _, sender in self._senders.values())
                if len(self._senders) >= MAX_UNKNOWN_AMPHORAE or from_address >= MAX_UNKNOWN_PER_ADDRESS:
                    return
            self._senders[amphora_id] = (now if known is None else known[0], now, address)

    def find_due(self, now: float) -> list[UnknownAmphora]:
        """Return the ids to record now: each sent for long enough, and again since the last record."""
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
        self._recorded_at = now
        with self._lock:
            self._recorded = {one: at for one, at in self._recorded.items() if one in self._senders}
            self._recorded.update(dict.fromkeys((one.amphora_id for one in amphorae), now))
