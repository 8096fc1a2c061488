# SPDX-License-Identifier: Apache-2.0
"""Limits repeated warnings about the same error, for example during an outage of the database.

Invariant: the first message of each text is logged at once. While the same message repeats, one line in each interval
has the number of repetitions and their beginning. Two messages are the same only if logger, level, text, log fields and
the place of the error are equal, so no failure hides another one. This module imports no other module of the project.

The limit concerns warnings and errors with an exception as an argument or with a traceback. Other messages, for example
about the begin and the end of a state, are events: each one is logged.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

# Seconds between two lines with the same message.
_INTERVAL = 60.0
# Number of different messages in memory. A message that no longer fits is logged as a new one.
_CAPACITY = 1000
_OMITTED = "amphora_is_omitted"


@dataclass
class _Known:
    """One message: its first, last logged and last occurrence, and the numbers of all and of omitted ones."""

    since: float
    logged_at: float
    seen_at: float
    number: int = 1
    omitted: int = 0


@dataclass(frozen=True)
class Occurrence:
    """An occurrence to log, with the number of occurrences since a time in seconds since 1970."""

    number: int
    since: float


class Repetitions:
    """Decides which occurrences of messages are logged; reads no clock. Thread-safe."""

    def __init__(self, interval: float = _INTERVAL, capacity: int = _CAPACITY) -> None:
        self._interval, self._capacity = interval, capacity
        # The messages, in the order of their last occurrences.
        self._known: OrderedDict[Hashable, _Known] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, message: Hashable, now: float) -> Occurrence | None:
        """Record an occurrence, and return it if it is to be logged."""
        with self._lock:
            known = self._known.pop(message, None)
            if known is None or (not self._is_recent(known.seen_at, now) and not known.omitted):
                known = _Known(since=now, logged_at=now, seen_at=now)
                logged = True
            else:
                known.number, known.seen_at = known.number + 1, now
                logged = not self._is_recent(known.logged_at, now)
                known.omitted = 0 if logged else known.omitted + 1
                known.logged_at = now if logged else known.logged_at
            self._known[message] = known
            while len(self._known) > self._capacity:
                self._known.popitem(last=False)
            return Occurrence(known.number, known.since) if logged else None

    def end(self) -> None:
        """Let the next occurrence of each message be logged at once."""
        with self._lock:
            for known in self._known.values():
                known.logged_at = float("-inf")

    def _is_recent(self, at: float, now: float) -> bool:
        # A clock that was set back must not omit messages until it has reached its former time.
        return 0.0 <= now - at < self._interval


_repetitions = Repetitions()


class RepetitionFilter(logging.Filter):
    """Rejects repeated messages about an error, and adds the number of repetitions to the others."""

    def __init__(self, repetitions: Repetitions = _repetitions) -> None:
        super().__init__()
        self._repetitions = repetitions

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING or not _has_error(record):
            return True
        # Each handler has this filter and gets the same record, which is one occurrence.
        if not hasattr(record, _OMITTED):
            setattr(record, _OMITTED, not self._add(record))
        return not getattr(record, _OMITTED)

    def _add(self, record: logging.LogRecord) -> bool:
        """Record an occurrence, and return whether it is logged."""
        try:
            text, place = record.getMessage(), _place(record)
        except Exception:  # noqa: BLE001 - logging reports a message that cannot be formatted; a filter must not raise
            return True
        message = (record.name, record.levelno, text, getattr(record, "instance", None), place)
        occurrence = self._repetitions.add(message, record.created)
        if occurrence is not None and occurrence.number > 1:
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(occurrence.since))
            record.msg, record.args = f"{text} (occurred {occurrence.number} times since {since})", None
        return occurrence is not None


def _has_error(record: logging.LogRecord) -> bool:
    if record.exc_info and record.exc_info[1] is not None:
        return True
    return isinstance(record.args, tuple) and any(isinstance(one, BaseException) for one in record.args)


def _place(record: logging.LogRecord) -> Hashable:
    """Return the error of a record with a traceback, and the line that raised it."""
    if not record.exc_info or record.exc_info[1] is None:
        return None
    kind, error, trace = record.exc_info
    raised = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(trace)][-1:]
    return (kind, str(error), *raised)


def add_filter(logger: logging.Logger) -> None:
    """Limit repeated messages in every handler of a logger."""
    for handler in logger.handlers:
        if not any(isinstance(one, RepetitionFilter) for one in handler.filters):
            handler.addFilter(RepetitionFilter())


def end_repetitions() -> None:
    """Let the next occurrence of each message be logged at once, because the failures before have ended."""
    _repetitions.end()
