# SPDX-License-Identifier: Apache-2.0
"""Cache of the fleet snapshot, shared by all requests.

Invariant: for any number of requests, the database is read at most once per second, over a separate read-only
connection. The reads of a large fleet are rarer, so that they use a small part of a processor. While the database does
not answer, requests get the last snapshot at once, together with the error.
"""

from __future__ import annotations

import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa

from amphora_driver import metrics
from amphora_driver.database.engine import Database
from amphora_driver.errors import AmphoraDriverError
from amphora_driver.telemetry import fleet_queries
from amphora_driver.telemetry.alerts import Notice, find_notices
from amphora_driver.telemetry.fleet_snapshot import FailoverInfo, FleetSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable

# Minimum seconds between two reads of the database for the status page and the metrics.
MAX_AGE = 1.0
# The reads use at most this part of a processor. With 10,000 load balancers, a read takes half a second of processor
# time, and a page that is open in a browser requests a new snapshot every few seconds.
_MAX_SHARE = 0.1
# Seconds to wait for the database.
_DATABASE_TIMEOUT = 3.0


class View(msgspec.Struct, frozen=True, kw_only=True):
    """The last snapshot and its notices.

    Attributes:
        number: number of the read; it identifies results that are derived from this view.
        fleet: the last snapshot; None if no read has succeeded.
        read_error: error of the last read; None after a success.
        cpu: CPU time of the read in this process, in seconds; 0 for the first read and for a failed one.
    """

    number: int
    fleet: FleetSnapshot | None
    notices: tuple[Notice, ...] = ()
    read_error: str | None = None
    cpu: float = 0.0


def open_read_only(url: str) -> Database:
    """Open a database with read-only connections."""
    database = Database(url, durable=False, answer_timeout=_DATABASE_TIMEOUT)
    dialect = database.engine.dialect.name

    def forbid_writes(connection: Any, _record: Any) -> None:
        if dialect == "postgresql":
            # With this attribute, psycopg makes all transactions of the connection read-only.
            connection.read_only = True
            return
        with closing(connection.cursor()) as cursor:
            cursor.execute("PRAGMA query_only=ON" if dialect == "sqlite" else "SET SESSION TRANSACTION READ ONLY")

    for engine in database.engines:
        sa.event.listen(engine, "connect", forbid_writes)
    return database


class SnapshotCache:
    """The shared view of the fleet. Thread-safe.

    Args:
        interval: seconds between two heartbeats of an amphora.
        spares: default number of spares of a pool, for flavors without a number.
        clock: returns monotonic seconds.
        expiry_days: days before the expiry of a user's certificate from which the view contains it.
    """

    def __init__(
        self,
        database: Database,
        interval: float,
        spares: int = 0,
        clock: Callable[[], float] = time.monotonic,
        expiry_days: float = 30,
    ) -> None:
        self._database = database
        self._interval = interval
        self._spares = spares
        self._expiry_days = expiry_days
        self._clock = clock
        self._lock = threading.Lock()
        self._view: View | None = None
        self._read_at = 0.0
        self._counted: set[int] = set()
        self._counted_until = 0.0

    def get_view(self) -> View:
        """Return a view that is at most `MAX_AGE` old.

        A view can be older if its read takes much processor time, or while the database is slow or unreachable.
        """
        known = self._view
        if known is not None and not self._is_outdated(known):
            return known
        if known is None:
            self._lock.acquire()
        elif not self._lock.acquire(blocking=False):
            # Another thread reads the database, so this request gets the previous snapshot.
            return known
        try:
            if self._view is None or self._is_outdated(self._view):
                self._view = self._read_view(self._view)
                self._read_at = self._clock()
            return self._view
        finally:
            self._lock.release()

    def close(self) -> None:
        self._database.dispose()

    def _is_outdated(self, view: View) -> bool:
        return self._clock() - self._read_at >= max(MAX_AGE, view.cpu / _MAX_SHARE)

    def _read_view(self, known: View | None) -> View:
        number = 1 if known is None else known.number + 1
        begun = time.thread_time()
        try:
            fleet = fleet_queries.read_fleet(self._database, self._spares, self._expiry_days)
            self._count_failovers()
        except AmphoraDriverError as error:
            old = known or View(number=0, fleet=None)
            return msgspec.structs.replace(old, number=number, read_error=str(error), cpu=0.0)
        notices = find_notices(fleet, self._interval)
        # The first read also compiles the SQL statements. So its processor time is not used as an estimate for later
        # reads.
        cpu = 0.0 if known is None else time.thread_time() - begun
        return View(number=number, fleet=fleet, notices=notices, cpu=cpu)

    def _count_failovers(self) -> None:
        """Count each fail-over once that ended since the first read of this process."""
        found, now = fleet_queries.list_ended_failovers(self._database, self._counted_until)
        if self._counted_until:
            for one in found:
                if one.id not in self._counted:
                    metrics.count_failover(one.cause, one.outcome or "", failover_duration(one))
        self._counted = {one.id for one in found}
        self._counted_until = now


def failover_duration(failover: FailoverInfo) -> float | None:
    """Return the seconds from the last heartbeat or the request until users were served; None if not yet."""
    if failover.served_at is None:
        return None
    return failover.served_at - (failover.silent_since or failover.begun_at)
