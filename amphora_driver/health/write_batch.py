# SPDX-License-Identifier: Apache-2.0
"""Writes what amphorae said: one transaction for all of them, smaller ones after a refusal.

Invariant: a value that the database refuses keeps only its own load balancer's rows from being written. A database that
does not answer is not a refusal: then nothing is written, and the caller repeats the whole batch.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from amphora_driver import metrics
from amphora_driver.errors import ContentRefused
from amphora_driver.health import statistics
from amphora_driver.store import amphorae, status_outbox
from amphora_driver.untrusted_text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import sqlalchemy as sa

    from amphora_driver.database.engine import Database
    from amphora_driver.store.amphorae import LastHeartbeat

LOG = logging.getLogger(__name__)

# Seconds for which the rows of a load balancer that were refused once have a transaction of their own.
_APART = 300.0
# Seconds between two lines of the log about one load balancer.
_LOG_INTERVAL = 60.0
_LONGEST_REASON = 500
# What a driver of a database raises for a value before it sends anything.
_REFUSALS = (ContentRefused, ValueError, OverflowError)


class Entry(msgspec.Struct, frozen=True):
    """What is to be written for one load balancer."""

    load_balancer_id: str
    news: Sequence[status_outbox.Observation] = ()
    rows: tuple[statistics.Row, ...] = ()


class Written(msgspec.Struct):
    """What a batch has written. `differing` is the number of statuses that Octavia does not know yet."""

    entries: set[str] = set()
    seen: set[str] = set()
    differing: int = 0


class Batches:
    """For one thread.

    Attributes:
        refused: how often rows were refused, by the id of their load balancer, or of the amphora that was heard.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self.refused: Counter[str] = Counter()
        self._refused_at: dict[str, float] = {}
        self._logged_at: dict[str, float] = {}

    def write(self, entries: Sequence[Entry], seen: Sequence[LastHeartbeat]) -> Written:
        """Write all that the database takes.

        Args:
            entries: at most one for each load balancer.
            seen: the last heartbeats, at most one for each amphora.

        Raises:
            StoreError: the database does not answer. What was refused before is counted.
        """
        written = Written(set(), set())
        parts: list[Entry | LastHeartbeat] = [*entries, *seen]
        apart = [one for one in parts if _owner(one) in self._refused_at]
        self._halve([one for one in parts if _owner(one) not in self._refused_at], written)
        for one in apart:
            self._halve([one], written)
        return written

    def refuse(self, owner: str, error: Exception) -> None:
        """Count what could not be written for a load balancer or an amphora, and log it once in a while."""
        now = time.monotonic()
        self.refused[owner] += 1
        self._refused_at[owner] = now
        metrics.count_refused_rows()
        if now - self._logged_at.get(owner, -_LOG_INTERVAL) >= _LOG_INTERVAL:
            self._logged_at[owner] = now
            words = printable(str(error), _LONGEST_REASON)
            LOG.warning("Could not write what amphorae say of %s (%d times): %s", owner, self.refused[owner], words)

    def tidy(self) -> None:
        """Forget refusals that have not been repeated for some time."""
        now = time.monotonic()
        self._refused_at = {one: at for one, at in self._refused_at.items() if now - at < _APART}
        self._logged_at = {one: at for one, at in self._logged_at.items() if one in self._refused_at}
        self.refused = Counter({one: count for one, count in self.refused.items() if one in self._refused_at})

    def _halve(self, parts: Sequence[Entry | LastHeartbeat], written: Written) -> None:
        """Write these in one transaction. Where the database refuses them, write their halves."""
        if not parts:
            return
        entries = [one for one in parts if isinstance(one, Entry)]
        seen = [one for one in parts if not isinstance(one, Entry)]

        def write(connection: sa.Connection) -> int:
            statistics.store(connection, [row for entry in entries for row in entry.rows])
            if seen:
                amphorae.record_heartbeats(connection, seen)
            return sum(
                status_outbox.write_observations(connection, entry.load_balancer_id, entry.news)
                for entry in entries
                if entry.news
            )

        try:
            written.differing += self._database.write(write)
        except _REFUSALS as error:
            if len(parts) == 1:
                self.refuse(_owner(parts[0]), error)
                return
            half = len(parts) // 2
            self._halve(parts[:half], written)
            self._halve(parts[half:], written)
            return
        written.entries.update(entry.load_balancer_id for entry in entries)
        written.seen.update(one.amphora_id for one in seen)


def _owner(part: Entry | LastHeartbeat) -> str:
    return part.load_balancer_id if isinstance(part, Entry) else part.amphora_id
