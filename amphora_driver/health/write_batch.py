# SPDX-License-Identifier: Apache-2.0
"""Writes reports of amphorae: one transaction for all, smaller ones after a refused value.

Invariant: a value that the database refuses blocks the rows of its own load balancer only. If the database does not
answer, no row is written, and the caller repeats the whole batch.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence

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

# For this number of seconds after a refusal, the rows of the load balancer have a transaction of their own.
_ISOLATION_TIME = 300.0
# Seconds between two log lines about one load balancer.
_LOG_INTERVAL = 60.0
_MAX_REASON = 500
# A database driver raises some of these errors for an invalid value before it sends a statement.
_REFUSALS = (ContentRefused, ValueError, OverflowError)


class Entry(msgspec.Struct, frozen=True):
    """The rows to write for one load balancer: changed statuses and changed statistics."""

    load_balancer_id: str
    observations: Sequence[status_outbox.Observation] = ()
    rows: tuple[statistics.Row, ...] = ()


class Written(msgspec.Struct):
    """The result of a batch.

    Attributes:
        entries: ids of the load balancers with written entries.
        unreported: number of written statuses that Octavia has not received yet.
    """

    entries: set[str] = set()
    unreported: int = 0


class BatchWriter:
    """Writes batches. Not thread-safe.

    Attributes:
        refused: number of refusals by the id of the load balancer, or of the amphora for a last heartbeat.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self.refused: Counter[str] = Counter()
        self._refused_at: dict[str, float] = {}
        self._logged_at: dict[str, float] = {}

    def write(self, entries: Sequence[Entry], seen: Sequence[LastHeartbeat]) -> Written:
        """Write all rows that the database accepts. Raise StoreError if the database does not answer.

        Args:
            entries: at most one for each load balancer.
            seen: the last heartbeats, at most one for each amphora.
        """
        written = Written()
        parts: list[Entry | LastHeartbeat] = [*entries, *seen]
        isolated = [one for one in parts if _owner(one) in self._refused_at]
        self._write_or_split([one for one in parts if _owner(one) not in self._refused_at], written)
        for one in isolated:
            self._write_or_split([one], written)
        return written

    def record_refusal(self, owner: str, error: Exception) -> None:
        """Count a refusal for a load balancer or an amphora, and log it at most once per `_LOG_INTERVAL`."""
        now = time.monotonic()
        self.refused[owner] += 1
        self._refused_at[owner] = now
        metrics.count_refused_rows()
        if now - self._logged_at.get(owner, -_LOG_INTERVAL) >= _LOG_INTERVAL:
            self._logged_at[owner] = now
            reason = printable(str(error), _MAX_REASON)
            LOG.warning(
                "the database refused the reports of %s, trying again with its next heartbeat (refusal %d): %s",
                owner,
                self.refused[owner],
                reason,
            )

    def forget_old_refusals(self) -> None:
        now = time.monotonic()
        self._refused_at = {one: at for one, at in self._refused_at.items() if now - at < _ISOLATION_TIME}
        self._logged_at = {one: at for one, at in self._logged_at.items() if one in self._refused_at}
        self.refused = Counter({one: count for one, count in self.refused.items() if one in self._refused_at})

    def _write_or_split(self, parts: Sequence[Entry | LastHeartbeat], written: Written) -> None:
        """Write the parts in one transaction. If the database refuses them, split them into halves."""
        if not parts:
            return
        entries = [one for one in parts if isinstance(one, Entry)]
        seen = [one for one in parts if not isinstance(one, Entry)]

        def write(connection: sa.Connection) -> int:
            statistics.write_rows(connection, [row for entry in entries for row in entry.rows])
            if seen:
                amphorae.record_heartbeats(connection, seen)
            return sum(
                status_outbox.write_observations(connection, entry.load_balancer_id, entry.observations)
                for entry in entries
                if entry.observations
            )

        try:
            written.unreported += self._database.write(write)
        except _REFUSALS as error:
            if len(parts) == 1:
                self.record_refusal(_owner(parts[0]), error)
                return
            half = len(parts) // 2
            self._write_or_split(parts[:half], written)
            self._write_or_split(parts[half:], written)
            return
        written.entries.update(entry.load_balancer_id for entry in entries)


def _owner(part: Entry | LastHeartbeat) -> str:
    return part.load_balancer_id if isinstance(part, Entry) else part.amphora_id
