# SPDX-License-Identifier: Apache-2.0
"""Samples of the database while a scenario runs: queue, outbox, fail-overs, and waits for row locks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
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

    def take_locks(self, connection: sa.Connection, at: float, node: int = 0) -> None:
        """Add a sample of the waits for locks. Each node of a cluster has locks and threads of its own."""
        for user, wait, seconds in connection.exec_driver_sql(_LOCKS[connection.dialect.name]).fetchall():
            seen = at - self._first.setdefault(f"{node}@{wait}", at)
            self.waits[user] = max(self.waits.get(user, 0.0), float(seconds), seen)

    def take_values(self, connection: sa.Connection, at: float) -> None:
        """Add a sample of the rows."""
        for name, query in _VALUES.items():
            value = connection.exec_driver_sql(query.format(now=_NOW[connection.dialect.name])).scalar_one()
            self.course[name].append((at, int(value)))


@contextmanager
def sampled(*urls: str) -> Iterator[Samples]:
    """Sample the locks of each server and the rows of the first one; a server without an answer has no samples."""
    engines = [sa.create_engine(url, isolation_level="AUTOCOMMIT") for url in urls]
    found = Samples()
    begun = time.monotonic()

    def take() -> None:
        for node, engine in enumerate(engines):
            try:
                with engine.connect() as connection:
                    found.take_locks(connection, time.monotonic() - begun, node)
                    if node == 0:
                        found.take_values(connection, time.monotonic() - begun)
            except sa.exc.SQLAlchemyError:
                found.failed += 1

    try:
        with repeating(take):
            yield found
    finally:
        for engine in engines:
            engine.dispose()


@contextmanager
def repeating(work: Callable[[], None]) -> Iterator[None]:
    """Let a thread do the work four times a second while the block runs."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(_EVERY):
            work()

    thread = threading.Thread(target=run, name="samples", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class LockCounters:
    """The servers' own counters.

    MariaDB counts waits for row locks, and measures the longest one since the start. PostgreSQL counts deadlocks.
    """

    def __init__(self, *urls: str) -> None:
        self._engines = [sa.create_engine(url) for url in urls]

    def read(self) -> dict[str, float]:
        """Return number, total and longest wait in seconds, or the number of deadlocks; nothing of SQLite."""
        if self._engines[0].dialect.name == "postgresql":
            with self._engines[0].connect() as connection:
                query = "SELECT sum(deadlocks) FROM pg_stat_database"
                return {"deadlocks": float(connection.exec_driver_sql(query).scalar_one())}
        if self._engines[0].dialect.name != "mysql":
            return {}
        each = [_read_lock_status(engine) for engine in self._engines]
        return {
            "waits": sum(one["waits"] for one in each),
            "seconds": sum(one["time"] for one in each) / 1000,
            "longest": max(one["time_max"] for one in each) / 1000,
        }

    def dispose(self) -> None:
        for engine in self._engines:
            engine.dispose()


def _read_lock_status(engine: sa.Engine) -> dict[str, float]:
    listed = ", ".join(f"'Innodb_row_lock_{one}'" for one in ("waits", "time", "time_max"))
    with engine.connect() as connection:
        rows = connection.exec_driver_sql(f"SHOW GLOBAL STATUS WHERE Variable_name IN ({listed})").fetchall()
    return {name.lower().removeprefix("innodb_row_lock_"): float(value) for name, value in rows}
