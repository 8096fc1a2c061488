# SPDX-License-Identifier: Apache-2.0
"""Writes reports of amphorae: in one transaction, or in smaller transactions after a refused value.

Invariant: a value that the database refuses blocks the rows of its own load balancer only. If the database does not
answer, no row is written, and the caller repeats the whole batch. The times of heartbeats do not wait for a long flush
of statuses (`HeartbeatTimes`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import msgspec
import sqlalchemy as sa

from amphora_driver import metrics
from amphora_driver.database.engine import Database
from amphora_driver.database.rows import chunks
from amphora_driver.errors import ContentRefused
from amphora_driver.health import statistics
from amphora_driver.health.amphora_reports import AmphoraReports, LastReport
from amphora_driver.store import amphorae, status_outbox
from amphora_driver.store.amphorae import LastHeartbeat
from amphora_driver.untrusted_text import printable

LOG = logging.getLogger(__name__)
T = TypeVar("T")

# Minimum seconds between two writes of heartbeat times. The limit reduces the load of the database, because an idle
# system writes only heartbeat times.
_HEARTBEAT_WRITE_INTERVAL = amphorae.LIVENESS_WRITE_INTERVAL
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
    rows: Sequence[statistics.Row] = ()


class Written(msgspec.Struct):
    """The ids of the load balancers with written entries, and the number of statuses for Octavia."""

    entries: set[str] = set()
    unreported: int = 0


def split_entries(entries: Sequence[Entry], most: int) -> list[list[Entry]]:
    """Return the entries in parts with at most `most` rows each. A larger entry becomes several entries.

    Each row is written on its own, so several transactions have the same result as one.
    """
    parts: list[list[Entry]] = []
    room = 0
    for entry in entries:
        for piece in _split_entry(entry, most):
            number = len(piece.observations) + len(piece.rows)
            if number > room:
                parts.append([])
                room = most
            parts[-1].append(piece)
            room -= number
    return parts


def _split_entry(entry: Entry, most: int) -> list[Entry]:
    if len(entry.observations) + len(entry.rows) <= most:
        return [entry]
    one = entry.load_balancer_id
    observed = [Entry(one, observations=some) for some in chunks(entry.observations, most)]
    return [*observed, *(Entry(one, rows=some) for some in chunks(entry.rows, most))]


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

        The arguments contain at most one entry with statuses for each load balancer, and one heartbeat for each
        amphora.
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


class HeartbeatTimes:
    """The last heartbeats of amphorae until their times are written. Thread-safe.

    A flush writes the times together with statuses, in one transaction. While a flush takes longer, another thread
    writes them. Each write contains the newest heartbeats, also if they arrived during the flush. `on_written` is
    called after each write.
    """

    def __init__(self, database: Database, reports: AmphoraReports, on_written: Callable[[], None]) -> None:
        self._reports = reports
        self._on_written = on_written
        self._batches = BatchWriter(database)
        # One thread at a time writes, so that no older heartbeats are written after newer ones.
        self._lock = threading.Lock()
        # The last heartbeat of each amphora, until its write to the database.
        self._unwritten: dict[str, LastReport] = {}
        # Heartbeats since the last `take_updated`.
        self._updated: dict[str, LastReport] = {}
        self._written_at = 0.0

    def take_updated(self) -> dict[str, LastReport]:
        """Return the amphorae with a heartbeat since the previous call."""
        with self._lock:
            self._collect()
            updated, self._updated = self._updated, {}
        return updated

    @contextmanager
    def due(self, *, last: bool) -> Iterator[list[LastHeartbeat]]:
        """Yield the heartbeats that the block writes; none before the interval has passed.

        The last flush does not wait for the interval. After an error in the block, the heartbeats stay unwritten.
        """
        with self._lock:
            heartbeats = self._list_due(0.0 if last else _HEARTBEAT_WRITE_INTERVAL)
            yield heartbeats
            if heartbeats:
                self._unwritten.clear()
                self._written_at = time.monotonic()
                self._on_written()

    def write_due(self) -> None:
        """Write the heartbeats that are due in a transaction of their own, or raise StoreError."""
        with self.due(last=False) as heartbeats:
            if heartbeats:
                self._batches.write([], heartbeats)

    def forget(self, amphora_ids: Iterable[str]) -> None:
        with self._lock:
            for amphora_id in amphora_ids:
                self._unwritten.pop(amphora_id, None)
                self._updated.pop(amphora_id, None)

    def retain(self, amphora_ids: Container[str]) -> None:
        """Drop the heartbeats of all other amphorae."""
        with self._lock:
            self._unwritten = {one: last for one, last in self._unwritten.items() if one in amphora_ids}
            self._updated = {one: last for one, last in self._updated.items() if one in amphora_ids}
            self._batches.forget_old_refusals()

    def _list_due(self, age: float) -> list[LastHeartbeat]:
        """Return the unwritten heartbeats if the last write is older than a number of seconds."""
        if time.monotonic() - self._written_at < age:
            return []
        self._collect()
        return [_last_heartbeat(*one) for one in self._unwritten.items()]

    def _collect(self) -> None:
        updated = self._reports.take_updated()
        self._unwritten.update(updated)
        self._updated.update(updated)


def _owner(part: Entry | LastHeartbeat) -> str:
    return part.load_balancer_id if isinstance(part, Entry) else part.amphora_id


def _last_heartbeat(amphora_id: str, last: LastReport) -> LastHeartbeat:
    epoch, sequence = last.order
    return LastHeartbeat(
        amphora_id=amphora_id,
        seen_at=last.wall,
        generation=last.generation,
        epoch=epoch,
        sequence=sequence,
        # During overload, only the time of a heartbeat is recorded. The value `holds_vip` of an older heartbeat must
        # not be recorded with this time.
        holds_vip=last.holds_vip if last.read_at == last.monotonic else None,
        agent_version=last.agent_version,
    )
