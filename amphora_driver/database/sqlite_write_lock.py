# SPDX-License-Identifier: Apache-2.0
"""A write lock for one SQLite file.

SQLite's own locking starves writers: a reader cannot become a writer, and the busy handler is not fair. Therefore a
file lock beside the database queues the writers of all processes. The lock holder starts its transaction with BEGIN
IMMEDIATE.

Invariant: a writer never waits without a limit. The lock holder may be stopped (debugger, frozen host, SIGSTOP). The
waiting writer then fails with an error that names the holder.
"""

from __future__ import annotations

import fcntl
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event

from amphora_driver.errors import StoreError

_LOCK_KEY = "amphora_write_lock"
_ATTEMPT = "write to the database"


class SqliteWriteLock:
    """Serializes the writers of one SQLite file; a `durable` commit survives a power failure."""

    def __init__(self, path: str, *, durable: bool, timeout: float) -> None:
        self._lock_file = LockFile(f"{path}.lock")
        self._durable = durable
        self._timeout = timeout
        Path(path).parent.mkdir(parents=True, exist_ok=True)

    def attach(self, engine: sa.Engine) -> None:
        """Make every writing transaction of an engine take the lock."""
        event.listen(engine, "connect", self._connect)
        event.listen(engine, "begin", self._begin)
        # `_checkin` releases the write lock. The pool raises the event `checkin` right after COMMIT or ROLLBACK, when
        # SQLAlchemy returns the connection.
        event.listen(engine, "checkin", self._checkin)

    def _connect(self, dbapi_connection: Any, _record: Any) -> None:
        # With the isolation level None, Python's SQLite module begins no transactions itself. `_begin` takes the write
        # lock and then begins the transaction.
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
        if _LOCK_KEY not in connection.info:
            # A connection keeps the lock until its return to the pool, so only its first transaction takes the lock.
            connection.info[_LOCK_KEY] = self._lock_file.acquire(self._timeout)
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    def _checkin(self, _dbapi_connection: Any, record: Any) -> None:
        descriptor = record.info.pop(_LOCK_KEY, None)
        if descriptor is not None:
            os.close(descriptor)


class LockFile:
    """An exclusive file lock with a time-out. Closing the descriptor releases the lock."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._mutex = threading.Lock()
        # Threads that still wait in flock() after their callers have reached the time-out, because flock() cannot be
        # cancelled. A later caller takes over one of these threads.
        self._abandoned: list[_Waiter] = []

    def acquire(self, timeout: float) -> int:
        """Wait for the lock at most `timeout` seconds and return its descriptor, or raise `StoreError`."""
        try:
            return self._acquire(timeout)
        except OSError as error:
            raise StoreError(_ATTEMPT, f"{self._path}: {error.strerror}") from error

    def _acquire(self, timeout: float) -> int:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return self._wait(descriptor, timeout)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _wait(self, descriptor: int, timeout: float) -> int:
        """Wait with a limit: flock() has no limit, so a thread calls it."""
        with self._mutex:
            waiter = self._abandoned.pop() if self._abandoned else None
        if waiter is None:
            waiter = _Waiter(descriptor)
            try:
                threading.Thread(target=self._block, args=(waiter,), name="database write lock", daemon=True).start()
            except BaseException:
                os.close(descriptor)
                raise
        else:
            os.close(descriptor)
        try:
            acquired = waiter.done.wait(timeout)
        except BaseException:
            if not self._abandon(waiter):
                os.close(waiter.descriptor)
            raise
        if not acquired and self._abandon(waiter):
            raise StoreError(_ATTEMPT, self._timeout_text(timeout))
        if waiter.error is not None:
            os.close(waiter.descriptor)
            raise waiter.error
        return waiter.descriptor

    def _abandon(self, waiter: _Waiter) -> bool:
        """Stop waiting. Return False if the waiter got the lock in the meantime."""
        with self._mutex:
            if waiter.done.is_set():
                return False
            self._abandoned.append(waiter)
            return True

    def _block(self, waiter: _Waiter) -> None:
        """Block until the lock is free; release it at once if the waiter was abandoned."""
        try:
            fcntl.flock(waiter.descriptor, fcntl.LOCK_EX)
        except OSError as error:
            waiter.error = error
        with self._mutex:
            if waiter in self._abandoned:
                self._abandoned.remove(waiter)
                os.close(waiter.descriptor)
            else:
                waiter.done.set()

    def _timeout_text(self, timeout: float) -> str:
        holder = _lock_holder(self._path)
        name = "another process" if holder is None else f"process {holder}"
        return f"the write lock was not free within {timeout:.0f} s: {name} holds it and may be stopped"


class _Waiter:
    """A descriptor on which a thread waits for the lock."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.done = threading.Event()
        self.error: OSError | None = None


def _lock_holder(path: str) -> str | None:
    """Return the process that holds a file's lock as "number (name)"; None if unknown (proc_locks(5))."""
    with suppress(OSError):
        inode = str(Path(path).stat().st_ino)
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            # Example of a line of /proc/locks: "1: FLOCK  ADVISORY  WRITE 1234 00:1f:5678 0 EOF". A line of a waiting
            # process has "->" as its second field.
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == inode:
                name = Path("/proc", fields[4], "comm").read_text(encoding="utf-8", errors="replace").strip()
                return f"{fields[4]} ({name})"
    return None
