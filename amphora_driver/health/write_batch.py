# SPDX-License-Identifier: Apache-2.0
"""Writes reports of amphorae: in one transaction, or in smaller transactions after a refused value.

Invariant: a value that the database refuses blocks the rows of its own load balancer only. If the database does not
answer, no row is written, and the caller repeats the whole batch.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import sqlalchemy as sa

from amphora_driver import metrics
from amphora_driver.database.engine import Database
from amphora_driver.errors import ContentRefused
from amphora_driver.health import statistics
from amphora_driver.store import amphorae, status_outbox
from amphora_driver.store.amphorae import LastHeartbeat
from amphora_driver.untrusted_text import printable

LOG = logging.getLogger(__name__)
T = TypeVar("T")

# After the database has refused rows of a load balancer or amphora, new rows get a separate transaction for this number
# of seconds.
_ISOLATION_TIME = 300.0
# Minimum seconds between two log messages about refused rows of one load balancer.
_LOG_INTERVAL = 60.0
_MAX_LOGGED = 500
# Maximum number of characters of the reason of a status.
_MAX_REASON = 255
# Database libraries raise ValueError or OverflowError for an invalid value, before they send the statement.
_REFUSALS = (ContentRefused, ValueError, OverflowError)


class Entry(msgspec.Struct, frozen=True):
    """The rows to write for one load balancer: changed statuses and changed statistics."""

    load_balancer_id: str
    observations: Sequence[status_outbox.Observation] = ()
    rows: tuple[statistics.Row, ...] = ()


class Written(msgspec.Struct):
    """The ids of the load balancers with written entries, and the number of statuses for Octavia."""

    entries: set[str] = set()
    unreported: int = 0


def plain(reason: str) -> str:
    """Return a reason, which quotes the amphora, with the characters that every database can store."""
    return printable(reason, _MAX_REASON)


def apply_or_split(
    parts: Sequence[T],
    apply: Callable[[Sequence[T]], None],
    record_refusal: Callable[[T, Exception], None],
    refusals: tuple[type[Exception], ...] = (ContentRefused,),
) -> None:
    """Apply all parts at once. If the database refuses a value, apply each half, down to the refused part."""
    if not parts:
        return
    try:
        apply(parts)
    except refusals as error:
        if len(parts) == 1:
            record_refusal(parts[0], error)
            return
        half = len(parts) // 2
        apply_or_split(parts[:half], apply, record_refusal, refusals)
        apply_or_split(parts[half:], apply, record_refusal, refusals)


class BatchWriter:
    """Writes batches. Not thread-safe."""

    def __init__(self, database: Database) -> None:
        self._database = database
        # Refused writes, by load balancer id for statuses and statistics, and by amphora id for heartbeats.
        self.refused: Counter[str] = Counter()
        # Amphorae, and keys of statistics, that have rows in the tables. The sets are emptied from time to time,
        # because an operator may restore an older database without these rows.
        self._recorded: set[str] = set()
        self._recorded_rows: set[statistics.Key] = set()
        self._refused_at: dict[str, float] = {}
        self._logged_at: dict[str, float] = {}

    def write(self, entries: Sequence[Entry], seen: Sequence[LastHeartbeat]) -> Written:
        """Write all rows that the database accepts. Raise StoreError if the database does not answer.

        The arguments contain at most one entry for each load balancer and one heartbeat for each amphora.
        """
        written = Written()
        parts: list[Entry | LastHeartbeat] = [*entries, *seen]
        isolated = [[one] for one in parts if _owner(one) in self._refused_at]
        for each in ([one for one in parts if _owner(one) not in self._refused_at], *isolated):
            apply_or_split(
                each,
                lambda some: self._write_parts(some, written),
                lambda one, error: self.record_refusal(_owner(one), error),
                _REFUSALS,
            )
        return written

    def record_refusal(self, owner: str, error: Exception) -> None:
        """Count a refusal for a load balancer or an amphora, and log at most one per `_LOG_INTERVAL`."""
        now = time.monotonic()
        self.refused[owner] += 1
        self._refused_at[owner] = now
        metrics.count_refused_rows()
        if now - self._logged_at.get(owner, -_LOG_INTERVAL) >= _LOG_INTERVAL:
            self._logged_at[owner] = now
            reason = printable(str(error), _MAX_LOGGED)
            refused = (
                "the database refused the reports of %s (a load balancer or an amphora), so the health "
                "manager tries again with the next heartbeat (refusal %d): %s"
            )
            LOG.warning(refused, owner, self.refused[owner], reason)

    def forget_old_refusals(self) -> None:
        """Forget old refusals, and which rows the tables have."""
        now = time.monotonic()
        self._recorded.clear()
        self._recorded_rows.clear()
        self._refused_at = {one: at for one, at in self._refused_at.items() if now - at < _ISOLATION_TIME}
        self._logged_at = {one: at for one, at in self._logged_at.items() if one in self._refused_at}
        self.refused = Counter({one: count for one, count in self.refused.items() if one in self._refused_at})

    def _write_parts(self, parts: Sequence[Entry | LastHeartbeat], written: Written) -> None:
        entries = [one for one in parts if isinstance(one, Entry)]
        seen = [one for one in parts if not isinstance(one, Entry)]
        rows = [row for entry in entries for row in entry.rows]
        seen_by_owner = {entry.load_balancer_id: entry.observations for entry in entries if entry.observations}

        def write(connection: sa.Connection) -> int:
            if rows:
                statistics.write_rows(connection, rows, self._recorded_rows)
            if seen:
                amphorae.record_heartbeats(connection, seen, self._recorded)
            return status_outbox.write_all_observations(connection, seen_by_owner)

        written.unreported += self._database.write(write)
        self._recorded.update(one.amphora_id for one in seen)
        self._recorded_rows.update(row.key for row in rows)
        written.entries.update(entry.load_balancer_id for entry in entries)


def _owner(part: Entry | LastHeartbeat) -> str:
    return part.load_balancer_id if isinstance(part, Entry) else part.amphora_id
