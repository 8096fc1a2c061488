# SPDX-License-Identifier: Apache-2.0
"""Outages of a database: their end in the log, and the memory of failed transactions.

Invariant: a failed transaction leaves no reference cycle. Drivers of databases keep an exception in a local variable of
the frame that raises it. Such a cycle also holds the failed connection with its TLS context, about 0.7 MiB on MariaDB.
Python may find it only after thousands of other objects.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable

from amphora_driver import repeated_messages

LOG = logging.getLogger(__name__)
# Failures that last for less than this number of seconds are no outage. A few connections may fail while others
# succeed, and each success would otherwise log a line.
_SHORTEST = 2.0


class OutageMonitor:
    """Logs the end of an outage of one database. Thread-safe.

    A `kind` of transactions, for example "read", can fail while another kind succeeds. An outage ends when each kind
    that has failed succeeds again.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._failing: set[str] = set()
        self._since = 0.0
        self._failures = 0

    @property
    def lasts(self) -> bool:
        """Whether the last transactions of at least one kind have failed."""
        return bool(self._failing)

    def record_failure(self, kind: str) -> None:
        with self._lock:
            if not self._failing:
                self._since, self._failures = self._monotonic(), 0
            self._failing.add(kind)
            self._failures += 1

    def record_success(self, kind: str) -> None:
        """Record a success, and log the end of the outage if this success ends it."""
        # Almost all transactions succeed without an outage. They need no lock.
        if kind not in self._failing:
            return
        with self._lock:
            self._failing.discard(kind)
            seconds, failures = self._monotonic() - self._since, self._failures
            ended = not self._failing and seconds >= _SHORTEST
        if ended:
            LOG.info("the database answers again after %.0f s, in which %d transactions failed", seconds, failures)
            # Messages of the next outage are not repetitions, although they have the same text.
            repeated_messages.end_repetitions()


def release_frames(error: BaseException) -> None:
    """Clear the local variables of the ended frames of an error, and of the errors that caused it."""
    seen: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and not any(one is other for other in seen):
            seen.append(one)
            traceback.clear_frames(one.__traceback__)
            waiting += [one.__cause__, one.__context__]
