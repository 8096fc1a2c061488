# SPDX-License-Identifier: Apache-2.0
"""Log lines about statuses that Octavia refuses.

Invariant: the first refusals of each reason name their objects. While Octavia refuses many statuses for one reason, for
example during an outage of its database, one line in each minute has their number (`repeated_messages`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

LOG = logging.getLogger(__name__)
# Number of lines with an object in each interval for one reason, and the interval in seconds.
_NAMED, _INTERVAL = 3, 60.0
# Maximum number of reasons in memory. The texts of errors may be different for each object.
_CAPACITY = 100
_MAX_LENGTH = 300


class OctaviaFailure(Exception):
    """The reason of a failed call, as an argument of a message: `RepetitionFilter` requires an exception."""


class RefusalLog:
    """Logs refused statuses; not thread-safe."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        # By reason: the start of the present interval, and the number of refusals since.
        self._intervals: dict[str, tuple[float, int]] = {}

    def log_call(self, what: str, fault: str | None) -> None:
        """Log that Octavia refused a call with several objects, which the provider agent sends one by one."""
        refused = "Octavia refused a call with several %s; the provider agent sends the %s one by one: %s"
        LOG.warning(refused, what, what, OctaviaFailure(reason_of(fault)))

    def log_object(self, what: str, kind: str, object_id: str, pause: float, fault: str | None) -> None:
        """Log that Octavia refused a call with one object.

        Args:
            what: the content of the call, for example "status".
            kind: the kind of the object.
            object_id: the id of the object.
            pause: seconds until the next attempt.
            fault: the error text from Octavia.
        """
        reason = reason_of(fault, object_id)
        now = self._monotonic()
        since, number = self._intervals.pop(reason, (now, 0))
        if now - since >= _INTERVAL:
            since, number = now, 0
        self._intervals[reason] = since, number + 1
        while len(self._intervals) > _CAPACITY:
            del self._intervals[next(iter(self._intervals))]
        if number < _NAMED:
            refused = "Octavia refused the %s of %s %s; the provider agent tries again in %.0f s: %s"
            LOG.warning(refused, what, kind, object_id, pause, reason)
        else:
            # The text names no object, so that the log has one line for many.
            several = "Octavia refused the %s of further objects; the provider agent tries again: %s"
            LOG.warning(several, what, OctaviaFailure(reason))


def failure_of(error: Exception) -> Exception:
    """Return the error, without an SQL statement in its text.

    The statement of Octavia is different in each call, so messages with it would not count as repeated.
    """
    text = str(error)
    return OctaviaFailure(reason_of(text)) if "\n" in text else error


def reason_of(fault: str | None, object_id: str = "") -> str:
    """Return Octavia's error text without the SQL statement, its parameters, and the id of the object."""
    # SQLAlchemy appends lines with the statement and its parameters to the message of the database.
    lines = (fault or "").strip().splitlines() or ["no reason given"]
    first = lines[0][:_MAX_LENGTH]
    return first.replace(object_id, "(object)") if object_id else first
