# SPDX-License-Identifier: Apache-2.0
"""Looking at the fleet on behalf of everybody who asks.

Invariant: however many look, the database is asked once in a second at most, over a connection of its own that can
write nothing; and while it is away everybody is answered at once with what was seen last, and is told so.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa

from amphora_driver import metrics
from amphora_driver.database.engine import Database
from amphora_driver.errors import AmphoraDriverError
from amphora_driver.telemetry import fleet_queries as reading
from amphora_driver.telemetry.alerts import Notice, notices
from amphora_driver.telemetry.fleet_snapshot import Failover, Fleet

if TYPE_CHECKING:
    from collections.abc import Callable

BELIEVED_SECONDS = 1.0
# Seconds a page waits for the database.
_PATIENCE = 3.0


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What is shown.

    Attributes:
        number: grows with each look, so that what was made of one is known again.
        fleet: as it was seen last; None if never.
        notices: what of it needs attention.
        trouble: why the last look failed; None if it did not.
        cpu: seconds of processor time this look took here.
    """

    number: int
    fleet: Fleet | None
    notices: tuple[Notice, ...] = ()
    trouble: str | None = None
    cpu: float = 0.0


def read_only(url: str) -> Database:
    """A database on which nothing of this process can write."""
    database = Database(url, durable=False, answer_timeout=_PATIENCE)
    engine = database.engine
    sa.event.listen(engine, "connect", _FORBIDDING.get(engine.dialect.name, _forbid_writing))
    return database


def _forbid_writing(connection: Any, _record: Any, statement: str = "SET SESSION TRANSACTION READ ONLY") -> None:
    cursor = connection.cursor()
    cursor.execute(statement)
    cursor.close()


def _forbid_sqlite(connection: Any, record: Any) -> None:
    _forbid_writing(connection, record, "PRAGMA query_only=ON")


def _forbid_postgresql(connection: Any, _record: Any) -> None:
    # What its driver begins transactions with.
    connection.read_only = True


_FORBIDDING = {"sqlite": _forbid_sqlite, "postgresql": _forbid_postgresql}


class Looking:
    """The look everybody shares.

    Args:
        database: where the rows are.
        interval: seconds between two heartbeats of an amphora.
        spares: how many are kept for load balancers whose flavor does not say.
        clock: seconds, monotonic.
    """

    def __init__(
        self, database: Database, interval: float, spares: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._database = database
        self._interval = interval
        self._spares = spares
        self._clock = clock
        self._lock = threading.Lock()
        self._view: View | None = None
        self._seen_at = 0.0
        self._counted: set[int] = set()
        self._counted_until = 0.0

    def view(self) -> View:
        """The fleet, at most a second old; older where the database is away, or slow."""
        known = self._view
        if known is not None and self._clock() - self._seen_at < BELIEVED_SECONDS:
            return known
        if known is None:
            self._lock.acquire()
        elif not self._lock.acquire(blocking=False):
            # Who comes while somebody else looks gets what there is.
            return known
        try:
            if self._view is None or self._clock() - self._seen_at >= BELIEVED_SECONDS:
                self._view = self._look(self._view)
                self._seen_at = self._clock()
            return self._view
        finally:
            self._lock.release()

    def close(self) -> None:
        """Close the connections."""
        self._database.dispose()

    def _look(self, known: View | None) -> View:
        number = 1 if known is None else known.number + 1
        begun = time.thread_time()
        try:
            seen = reading.read(self._database, self._spares)
            self._count()
        except AmphoraDriverError as error:
            old = known or View(number=0, fleet=None)
            return msgspec.structs.replace(old, number=number, trouble=str(error))
        found = notices(seen, self._interval)
        return View(number=number, fleet=seen, notices=found, cpu=time.thread_time() - begun)

    def _count(self) -> None:
        """Count fail-overs that ended since this process began to look, each once."""
        found, now = reading.ended(self._database, self._counted_until)
        if self._counted_until:
            for one in found:
                if one.id not in self._counted:
                    metrics.count_failover(one.cause, one.outcome or "", duration(one))
        self._counted = {one.id for one in found}
        self._counted_until = now


def duration(failover: Failover) -> float | None:
    """Seconds from the last sign of life, or from the request, until users were served again; None if not yet."""
    if failover.served_at is None:
        return None
    return failover.served_at - (failover.silent_since or failover.begun_at)
