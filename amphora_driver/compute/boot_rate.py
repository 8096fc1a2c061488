# SPDX-License-Identifier: Apache-2.0
"""A rate limit for boots, in which fail-overs precede new load balancers.

Invariant: no call waits. An urgent boot starts at once. It delays the later boots, so the average rate stays the same.
"""

from __future__ import annotations

import threading

# A reservation expires this number of seconds after the planned start of its boot. A boot may never start, for example
# if its load balancer was deleted.
_KEEP_SECONDS = 300.0


class BootRate:
    """Distributes the boots of one controller process over time. Its methods are safe for threads.

    Args:
        rate: boots per second; 0 for no limit.
        burst: number of boots that may start at once after a pause.
    """

    def __init__(self, rate: float, burst: int) -> None:
        self._interval = 1.0 / rate if rate else 0.0
        self._burst = burst
        self._lock = threading.Lock()
        # Time at which the average rate permits the next boot. A burst may start boots earlier.
        self._booked_until = 0.0
        self._reserved: dict[str, float] = {}

    def reserve(self, amphora_id: str, now: float, *, urgent: bool = False) -> float:
        """Return the seconds until the boot of an amphora may start; 0.0 for now.

        A repeated call for the same amphora returns the remaining time of its reservation.

        Args:
            amphora_id: the amphora to boot.
            now: the time of a monotonic clock.
            urgent: the boot is part of a fail-over.
        """
        if not self._interval:
            return 0.0
        with self._lock:
            self._reserved = {one: at for one, at in self._reserved.items() if at > now - _KEEP_SECONDS}
            starts_at = self._reserved.get(amphora_id)
            if starts_at is None:
                starts_at = max(self._booked_until - (self._burst - 1) * self._interval, now)
                self._booked_until = max(self._booked_until, now) + self._interval
            if urgent or starts_at <= now:
                self._reserved.pop(amphora_id, None)
                return 0.0
            self._reserved[amphora_id] = starts_at
            return starts_at - now
