# SPDX-License-Identifier: Apache-2.0
"""A database and its transactions.

Invariant: `Database.write()` is one transaction that either happened whole or not at all, and that saw no row change
under its hands; whatever the database makes retryable (deadlocks, Galera certification failures, a locked file) is
retried here and nowhere else. So the function handed to it may run more than once and must have no other effect than
its SQL.

On SQLite two writers would fight (a reader cannot become a writer, the busy handler starves): a file lock beside
the database lets them queue fairly, then BEGIN IMMEDIATE. Measured in the notes on SQLite with several processes.
"""

from __future__ import annotations

import fcntl
import logging
import os
import random
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError

from amphora_driver.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

LOG = logging.getLogger(__name__)
T = TypeVar("T")

# MySQL/MariaDB: deadlock, lock wait timeout; PostgreSQL: serialization failure, deadlock.
_RETRY_CODES = {1213, 1205, "40001", "40P01"}
_ATTEMPTS = 12


class Database:
    """One database, usable from any thread and from processes forked later.

    Args:
        url: SQLAlchemy URL.
        durable: whether a commit must survive a power cut (what users were promised), or may be redone (what only
            speeds up recovery). Only SQLite knows the difference.
    """

    def __init__(self, url: str, *, durable: bool = True) -> None:
        self._url = url
        self._durable = durable
        self._engine: sa.Engine | None = None
        self._pid = 0
        self._making = threading.Lock()

    @property
    def url(self) -> str:
        """The SQLAlchemy URL."""
        return self._url

    @property
    def engine(self) -> sa.Engine:
        """The engine of this process; a forked child gets one of its own, connections are not shared."""
        if self._engine is None or self._pid != os.getpid():
            with self._making:
                if self._engine is None or self._pid != os.getpid():
                    self._engine = self._make()
                    self._pid = os.getpid()
        return self._engine

    def write(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` in one writing transaction; again, from its beginning, if the database asks for that."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                with self.engine.begin() as connection:
                    return work(connection)
            except DBAPIError as error:
                if attempt == _ATTEMPTS or not _retryable(error):
                    raise StoreError("write to the database", str(error.orig or error)) from error
                LOG.info("the database asks to repeat a transaction (%s), attempt %d", error.orig, attempt)
                time.sleep(random.uniform(0.2, 1.0) * min(0.005 * 2**attempt, 0.5))  # noqa: S311 - jitter, no secret
        raise AssertionError("unreachable")

    def read(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` in one reading transaction: a consistent view that waits for no writer."""
        try:
            with self.engine.connect().execution_options(amphora_read_only=True) as connection, connection.begin():
                return work(connection)
        except DBAPIError as error:
            raise StoreError("read from the database", str(error.orig or error)) from error

    def dispose(self) -> None:
        """Close every connection of this process."""
        if self._engine is not None and self._pid == os.getpid():
            self._engine.dispose()
            self._engine = None

    def _make(self) -> sa.Engine:
        url = sa.make_url(self._url)
        if url.get_backend_name() != "sqlite":
            return sa.create_engine(url, isolation_level="READ COMMITTED", pool_pre_ping=True, pool_recycle=3600)
        engine = sa.create_engine(url, pool_size=16, max_overflow=32)
        _SqliteQueue(str(url.database), durable=self._durable).listen(engine)
        return engine


def _retryable(error: DBAPIError) -> bool:
    if error.connection_invalidated:
        return True
    original: Any = error.orig
    code = getattr(original, "sqlstate", None) or (original.args[0] if getattr(original, "args", None) else None)
    return code in _RETRY_CODES or "database is locked" in str(original)


class _SqliteQueue:
    """Lets the writers of one SQLite file go one after the other, in the order they came."""

    def __init__(self, path: str, *, durable: bool) -> None:
        self._lock_path = f"{path}.lock"
        self._durable = durable
        Path(path).parent.mkdir(parents=True, exist_ok=True)

    def listen(self, engine: sa.Engine) -> None:
        event.listen(engine, "connect", self._connect)
        event.listen(engine, "begin", self._begin)
        # A connection goes back to the pool right after its COMMIT or ROLLBACK: the turn of the next writer.
        event.listen(engine, "checkin", self._checkin)

    def _connect(self, dbapi_connection: Any, _record: Any) -> None:
        # The driver must not begin transactions of its own: _begin does.
        dbapi_connection.isolation_level = None
        cursor = dbapi_connection.cursor()
        cursor.execute("PRAGMA busy_timeout=30000")
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute(f"PRAGMA synchronous={'FULL' if self._durable else 'NORMAL'}")
        cursor.execute("PRAGMA foreign_keys=ON")
        cursor.close()

    def _begin(self, connection: sa.Connection) -> None:
        if connection.get_execution_options().get("amphora_read_only"):
            connection.exec_driver_sql("BEGIN DEFERRED")
            return
        if "amphora_write_lock" not in connection.info:
            # Several transactions of one connection, one after the other (a migration each), are one turn.
            descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            connection.info["amphora_write_lock"] = descriptor
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    def _checkin(self, _dbapi_connection: Any, record: Any) -> None:
        descriptor = record.info.pop("amphora_write_lock", None)
        if descriptor is not None:
            os.close(descriptor)
