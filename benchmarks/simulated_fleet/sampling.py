# SPDX-License-Identifier: Apache-2.0
"""Samples of the database while a scenario runs: queue, outbox, fail-overs, and waits for row locks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

_EVERY = 0.25
# Each statement uses an index or counts a small table.
_VALUES = {
    "due": "SELECT count(*) FROM job WHERE dirty AND owner IS NULL AND due_at <= {now}",
    "running": "SELECT count(*) FROM job WHERE owner IS NOT NULL",
    "unreported": "SELECT count(*) FROM object_status WHERE unreported = true",
    "open failovers": "SELECT count(*) FROM failover WHERE ended_at IS NULL",
    "failovers": "SELECT count(*) FROM failover",
    "silent": "SELECT count(*) FROM silent_amphora",
    "rotating": "SELECT count(*) FROM rotation_item WHERE state = 'running'",
    "rotated": "SELECT count(*) FROM rotation_item WHERE state = 'done'",
}
_NOW = {"mysql": "UNIX_TIMESTAMP(NOW(6))", "postgresql": "EXTRACT(EPOCH FROM clock_timestamp())"}
_LOCKS = {
    # `trx_wait_started` has whole seconds, so the sampler measures the time itself.
    "mysql": (
        "SELECT p.USER, CONCAT(t.trx_mysql_thread_id, '@', t.trx_wait_started, '@', t.trx_id), 0 "
        "FROM information_schema.INNODB_TRX t JOIN information_schema.PROCESSLIST p ON p.ID = t.trx_mysql_thread_id "
        "WHERE t.trx_state = 'LOCK WAIT'"
    ),
    "postgresql": (
        "SELECT usename, CONCAT(pid, '@', query_start), EXTRACT(EPOCH FROM clock_timestamp() - query_start) "
        "FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    ),
}


class Samples:
    """The largest values and the course of each value, and the longest wait for a lock by database user."""

    def __init__(self) -> None:
        self.course: dict[str, list[tuple[float, int]]] = {name: [] for name in _VALUES}
        self.waits: dict[str, float] = {}
        self.failed = 0
        self._first: dict[str, float] = {}

    def largest(self, name: str) -> int:
        return max((value for _, value in self.course[name]), default=0)

    def last(self, name: str) -> int:
        return self.course[name][-1][1] if self.course[name] else 0

    def summary(self) -> dict[str, Any]:
        """Return the largest values, and the course once a second."""
        return {
            "largest": {name: self.largest(name) for name in _VALUES},
            "lock_waits": dict(self.waits),
            "course": {name: values[:: round(1 / _EVERY)] for name, values in self.course.items()},
        }

    def take(self, connection: sa.Connection, at: float) -> None:
        """Add one sample."""
        kind = connection.dialect.name
        for user, wait, seconds in connection.exec_driver_sql(_LOCKS[kind]).fetchall():
            seen = at - self._first.setdefault(wait, at)
            self.waits[user] = max(self.waits.get(user, 0.0), float(seconds), seen)
        for name, query in _VALUES.items():
            value = connection.exec_driver_sql(query.format(now=_NOW[kind])).scalar_one()
            self.course[name].append((at, int(value)))


@contextmanager
def sampled(url: str) -> Iterator[Samples]:
    """Sample the database of this URL while the block runs. A database that does not answer has no samples."""
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT")
    found, ended = Samples(), threading.Event()
    begun = time.monotonic()

    def run() -> None:
        while not ended.wait(_EVERY):
            try:
                with engine.connect() as connection:
                    found.take(connection, time.monotonic() - begun)
            except sa.exc.SQLAlchemyError:
                found.failed += 1

    thread = threading.Thread(target=run, name="samples", daemon=True)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()
        engine.dispose()


class LockCounters:
    """The server's own counters of waits for row locks (MariaDB): number, and the longest one since its start."""

    def __init__(self, url: str) -> None:
        self._engine = sa.create_engine(url)

    def read(self) -> dict[str, float]:
        """Return number, total and longest wait in seconds; nothing from other servers."""
        if self._engine.dialect.name != "mysql":
            return {}
        names = ("waits", "time", "time_max")
        listed = ", ".join(f"'Innodb_row_lock_{one}'" for one in names)
        with self._engine.connect() as connection:
            rows = connection.exec_driver_sql(f"SHOW GLOBAL STATUS WHERE Variable_name IN ({listed})").fetchall()
        known = {name.lower().removeprefix("innodb_row_lock_"): float(value) for name, value in rows}
        return {"waits": known["waits"], "seconds": known["time"] / 1000, "longest": known["time_max"] / 1000}

    def dispose(self) -> None:
        self._engine.dispose()
