# SPDX-License-Identifier: Apache-2.0
"""A database and its transactions.

Invariant: `Database.write()` is one atomic transaction. This module alone retries retryable errors: deadlocks, Galera
certification failures, a locked file, a connection lost before COMMIT. The function given to `write` may run more than
once, so SQL must be its only effect. A transaction never commits twice. If the connection is lost during COMMIT, the
result is unknown, and `write` retries only if a commit marker (`set_commit_marker`) shows that nothing was committed.

Servers use READ COMMITTED. A transaction locks rows that it reads and then writes (`with_for_update`), or adds a
condition to the write. SQLite writers queue for a file lock, see `sqlite_write_lock`. On MySQL and MariaDB, reads have
connections of their own in autocommit mode, which saves a COMMIT after each read. With READ COMMITTED, each statement
has a snapshot of its own in both modes.

Every answer has a time-out. MariaDB and PostgreSQL abort the idle transaction of a stopped client, which releases the
row locks; MySQL has no such time-out. No code relies on locks that are visible on other Galera nodes. Colliding writes
of two nodes fail at COMMIT with error 1213, and `write` retries.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.pool import PoolResetState

from amphora_driver import metrics
from amphora_driver.database import clock, idle_ping, schema_check, sqlite_write_lock
from amphora_driver.database.outage import OutageMonitor, release_frames
from amphora_driver.errors import ConfigurationError, ContentRefused, StoreError

LOG = logging.getLogger(__name__)
T = TypeVar("T")

# Error codes of deadlocks, serialization conflicts and lock time-outs, after which a transaction is repeated: two of
# MariaDB, then three of PostgreSQL.
_RETRY_CODES = {1213, 1205, "40001", "40P01", "55P03"}
# Error codes of an unavailable server. MariaDB: node outside the Galera cluster (1047, 1180), shutdown (1053), killed
# connection (1927). PostgreSQL: shutdown (57P01), crash (57P02), start (57P03), idle transaction (25P03).
_UNAVAILABLE_CODES = {1047, 1180, 1053, 1927, "57P01", "57P02", "57P03", "25P03"}
# Seconds for which `Database.write` repeats a transaction after collisions. Within this time, the server ends idle
# transactions of other processes and so releases their locks.
_RETRY_SECONDS = 20.0
# Maximum number of attempts while the server seems unavailable. The first attempt may fail only because the server has
# restarted since the connection was opened.
_UNAVAILABLE_ATTEMPTS = 2
# Seconds for which `Database.write` tries to find out whether an unanswered COMMIT succeeded.
_UNCONFIRMED_SECONDS = 6.0
_CONNECT_SECONDS = 3
# The server ends a wait for a lock after _LOCK_SECONDS, and an idle transaction after _IDLE_SECONDS (MySQL has no limit
# for idle transactions). So a stopped process does not hold locks for long.
_LOCK_SECONDS = 5
_IDLE_SECONDS = 10
# Seconds that a client waits for an answer. This time exceeds the server's lock time-out (_LOCK_SECONDS), so the client
# receives the server's error first.
_ANSWER_SECONDS = 8.0
# Seconds that a writer waits for SQLite's write lock. Many other writers may get the lock first.
_WRITE_LOCK_SECONDS = 15.0
# A process opens up to 48 connections, one for each thread that may write. On MySQL and MariaDB it opens as many for
# reads.
_POOL_OPTIONS = {"pool_size": 5, "max_overflow": 43, "pool_timeout": 5}
# Seconds after which `Database` checks the schema again.
SCHEMA_VALID_SECONDS = 10.0
# Maximum size of a text that MySQL or MariaDB joins from several rows. The default of MySQL is 1,024 bytes.
_JOINED_TEXT_BYTES = 16 * 2**20
_WRITE, _READ = "write to the database", "read from the database"
_POOL_EXHAUSTED = "every connection of the pool is in use"
_COMMIT_MARKER = "amphora_commit_marker"
# MariaDB's flag SERVER_STATUS_IN_TRANS: a transaction is open.
_IN_TRANSACTION = 1


def set_commit_marker(connection: sa.Connection, statement: sa.Select[Any], parameters: dict[str, Any]) -> None:
    """Set the query that returns a row if and only if the transaction of `write` was committed."""
    connection.info[_COMMIT_MARKER] = (statement, parameters)


class _UnconfirmedCommit(msgspec.Struct, Generic[T], frozen=True):
    """A transaction with a COMMIT that was sent but not answered."""

    marker: tuple[Any, dict[str, Any]]
    result: T


class _AlreadyCommitted(Exception):
    """An unconfirmed commit has succeeded."""


class _Engines(msgspec.Struct, frozen=True):
    """The engines for writes and for reads, which may be the same."""

    writing: sa.Engine
    reading: sa.Engine


class Database:
    """One database, usable from any thread and from processes forked later.

    Args:
        url: SQLAlchemy URL. Its time-outs (`connect_timeout`, `read_timeout`, `write_timeout` with MariaDB) override
            the defaults of this class.
        durable: whether a commit must survive a power failure. Needed for accepted requests, not for data that can be
            computed again. Affects SQLite only.
        answer_timeout: seconds to wait for a server's answer to one statement.
        schema: the schema that the database must have.
    """

    def __init__(
        self,
        url: str,
        *,
        durable: bool = True,
        answer_timeout: float = _ANSWER_SECONDS,
        schema: schema_check.Schema = schema_check.DRIVER,
    ) -> None:
        self.schema = schema
        self._url = url
        self._durable = durable
        self._answer_timeout = answer_timeout
        self._engines: _Engines | None = None
        # Time of the last successful check of the schema, on the clock of `time.monotonic()`.
        self._schema_checked_at: float | None = None
        self._schema_logged = ""
        self._pid = 0
        self._engine_lock = threading.Lock()
        # The offset of the database clock from `time.monotonic()`, and the time of its measurement.
        self._clock_offset: tuple[float, float] | None = None
        self._jump_monitor = clock.ClockJumpMonitor()
        self._outage = OutageMonitor()

    @property
    def url(self) -> str:
        """The SQLAlchemy URL."""
        return self._url

    @property
    def engine(self) -> sa.Engine:
        """The engine of this process. A forked child creates a new one: processes must not share connections."""
        return self._load_engines().writing

    @property
    def engines(self) -> tuple[sa.Engine, ...]:
        """The different engines of this process, the one for reads last."""
        made = self._load_engines()
        return (made.writing,) if made.reading is made.writing else (made.writing, made.reading)

    def _load_engines(self) -> _Engines:
        if self._engines is None or self._pid != os.getpid():
            with self._engine_lock:
                if self._engines is None or self._pid != os.getpid():
                    self._engines = self._create_engines()
                    self._pid = os.getpid()
        return self._engines

    def now(self) -> float:
        """Return the database clock (seconds since 1970), from an offset that is measured every few seconds."""
        if self._is_sqlite():
            begun, now, ended = time.monotonic(), time.time(), time.monotonic()
            self._jump_monitor.record_offset(now - (begun + ended) / 2, (ended - begun) / 2)
            return now
        known = self._clock_offset
        if known is None or time.monotonic() - known[1] > clock.OFFSET_VALID_SECONDS:
            try:
                begun, now, ended = self.read(_read_clock)
            except StoreError:
                # While the server is unavailable, the last measured offset gives a more exact time than the local wall
                # clock.
                return time.time() if known is None else time.monotonic() + known[0]
            known = self._clock_offset = (now - (begun + ended) / 2, ended)
            self._jump_monitor.record_offset(known[0], (ended - begun) / 2)
        return time.monotonic() + known[0]

    def seconds_since_clock_jump(self) -> float:
        """Seconds since this process last saw the database clock jump; older ages are unreliable."""
        self.now()
        return self._jump_monitor.seconds_since_clock_jump()

    @metrics.transaction("write")
    def write(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` in one writing transaction and return its result; retry it after retryable errors.

        Raises:
            StoreError: the transaction was not committed, or its result is unknown after a connection loss in COMMIT.
        """
        unconfirmed: list[_UnconfirmedCommit[T]] = []
        unavailable = 0
        begun = time.monotonic()
        for attempt in itertools.count(1):
            try:
                result = self._run_once(work, unconfirmed)
            except _AlreadyCommitted as committed:
                return committed.args[0]  # type: ignore[no-any-return]
            except DBAPIError as error:
                release_frames(error)
                passed, repeated = time.monotonic() - begun, False
                if _is_unavailable(error):
                    unavailable, repeated = unavailable + 1, self._outage.lasts
                    # An answer time-out is not retried, because a retry would double the caller's waiting time.
                    retry = unavailable < _UNAVAILABLE_ATTEMPTS and passed < self._answer_timeout
                else:
                    retry = _is_retryable(error) and passed < _RETRY_SECONDS
                if not retry:
                    if _is_unavailable(error):
                        self._outage.record_failure(_WRITE)
                    refused = isinstance(error, (sa.exc.DataError, sa.exc.IntegrityError))
                    raise (ContentRefused if refused else StoreError)(_WRITE, _error_text(error)) from error
                # During an outage, this line would accompany each error of the caller.
                if not repeated:
                    LOG.info(
                        "a database transaction failed in attempt %d, so this process retries the transaction: %s",
                        attempt,
                        _error_text(error),
                    )
            except PoolTimeoutError as error:
                raise StoreError(_WRITE, _POOL_EXHAUSTED) from error
            else:
                self._outage.record_success(_WRITE)
                return result
            time.sleep(random.uniform(0.2, 1.0) * min(0.005 * 2 ** min(attempt, 7), 0.5))  # noqa: S311 - jitter, no secret
        raise AssertionError("unreachable")

    @metrics.transaction("read")
    def read(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work`, which only reads and waits for no writer; or raise `StoreError`."""
        begun = time.monotonic()
        for attempt in range(1, _UNAVAILABLE_ATTEMPTS + 1):
            try:
                reading = self._load_engines().reading.connect()
                with reading.execution_options(amphora_read_only=True) as connection, connection.begin():
                    self._check_schema(connection)
                    result = work(connection)
            except DBAPIError as error:
                release_frames(error)
                late, unavailable = time.monotonic() - begun > self._answer_timeout, _is_unavailable(error)
                if attempt == _UNAVAILABLE_ATTEMPTS or late or not unavailable:
                    if unavailable:
                        self._outage.record_failure(_READ)
                    raise StoreError(_READ, _error_text(error)) from error
            except PoolTimeoutError as error:
                raise StoreError(_READ, _POOL_EXHAUSTED) from error
            else:
                self._outage.record_success(_READ)
                return result
        raise AssertionError("unreachable")

    def dispose(self) -> None:
        """Close every connection of this process."""
        if self._engines is not None and self._pid == os.getpid():
            for engine in self.engines:
                engine.dispose()
            self._engines = None

    def _run_once(self, work: Callable[[sa.Connection], T], unconfirmed: list[_UnconfirmedCommit[T]]) -> T:
        """Run one transaction, or roll it back and raise `_AlreadyCommitted` for an earlier attempt."""
        with self.engine.connect() as connection:
            connection.info.pop(_COMMIT_MARKER, None)
            transaction = connection.begin()
            try:
                self._check_schema(connection)
                result = work(connection)
                # An earlier attempt may have been committed without an answer of the server. `work` has locked the
                # rows, so no earlier attempt can be committed after this check.
                _raise_if_committed(connection, unconfirmed)
            except BaseException as error:
                transaction.rollback()
                if unconfirmed and isinstance(error, DBAPIError) and not _is_unavailable(error):
                    # An earlier attempt may have been committed, so that this attempt fails, for example with a
                    # duplicate key. In that case the transaction has succeeded.
                    self._raise_if_any_committed(unconfirmed)
                raise
            # The marker is a query that shows, after a connection loss, whether the COMMIT succeeded. At that time,
            # SQLAlchemy no longer provides `connection.info`, so the marker is read before the COMMIT.
            marker = connection.info.get(_COMMIT_MARKER)
            try:
                transaction.commit()
            except DBAPIError as error:
                if _is_unavailable(error) and not self._is_sqlite():
                    self._resolve_commit(marker, result, unconfirmed, error)
                raise
            return result

    def _resolve_commit(
        self, marker: Any, result: T, unconfirmed: list[_UnconfirmedCommit[T]], error: DBAPIError
    ) -> None:
        """Find out whether an unanswered COMMIT succeeded; return if the transaction may be retried."""
        if marker is None:
            attempt = "determine whether a transaction was committed"
            raise StoreError(attempt, f"{_error_text(error)} during COMMIT", "Read the current state again.") from error
        unconfirmed.append(_UnconfirmedCommit(marker, result))
        deadline = time.monotonic() + _UNCONFIRMED_SECONDS
        while True:
            try:
                return self._raise_if_any_committed(unconfirmed)
            except DBAPIError as failure:
                release_frames(failure)
                if not _is_unavailable(failure) or time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def _raise_if_any_committed(self, unconfirmed: list[_UnconfirmedCommit[T]]) -> None:
        with self.engine.connect() as connection, connection.begin():
            _raise_if_committed(connection, unconfirmed)

    def _is_sqlite(self) -> bool:
        return self._url.startswith("sqlite")

    def _check_schema(self, connection: sa.Connection) -> None:
        """Check the schema every few seconds, because an operator may upgrade it at any time."""
        now = time.monotonic()
        if self._schema_checked_at is None or now - self._schema_checked_at > SCHEMA_VALID_SECONDS:
            self._schema_checked_at = None
            state = schema_check.require_usable_schema(connection, self.schema)
            self._schema_checked_at = now
            if state.newest not in {self._schema_logged, schema_check.known_revisions(self.schema)[-1]}:
                LOG.info("this process works with the %s", schema_check.describe_schema(state, self.schema))
            self._schema_logged = state.newest

    def _create_engines(self) -> _Engines:
        url = parse_url(self._url, self.schema.option)
        backend = url.get_backend_name()
        if backend == "sqlite":
            path = str(url.database)
            engine = sa.create_engine(url, pool_size=16, max_overflow=32)
            sqlite_write_lock.SqliteWriteLock(path, durable=self._durable, timeout=_WRITE_LOCK_SECONDS).attach(engine)
            return _Engines(writing=engine, reading=engine)
        limits = _connect_arguments(url, self._answer_timeout)
        if backend == "postgresql":
            engine = _create_server_engine(url, limits, isolation_level="READ COMMITTED")
            event.listen(engine, "do_connect", self._connect_postgresql)
            return _Engines(writing=engine, reading=engine)
        return _Engines(
            writing=_create_mariadb_engine(url, limits, isolation_level="READ COMMITTED"),
            reading=_create_mariadb_engine(url, limits, isolation_level="AUTOCOMMIT"),
        )

    def _connect_postgresql(self, _dialect: Any, _record: Any, arguments: Any, options: Any) -> Any:
        # The import is inside the function, because only hosts with a PostgreSQL database have psycopg.
        from amphora_driver.database import postgresql  # noqa: PLC0415

        return postgresql.connect_with_timeout(self._answer_timeout, tuple(arguments), dict(options))


def parse_url(text: str, option: str = schema_check.DRIVER.option) -> sa.URL:
    """Parse the URL of an option, or raise a `ConfigurationError` that does not quote the password."""
    attempt, remedy = "use the database", f"Check {option}."
    try:
        url = sa.make_url(text)
        url.get_dialect().import_dbapi()
    except (ArgumentError, ValueError):
        raise ConfigurationError(attempt, "SQLAlchemy does not understand its URL", remedy) from None
    except ImportError as error:
        raise ConfigurationError(
            attempt, f"the Python package of its database is not installed ({error})", remedy
        ) from error
    if "@" in (url.host or ""):
        # If a password contains @, SQLAlchemy reads the text after the first @ as the host name. Error messages would
        # then show that part of the password.
        raise ConfigurationError(attempt, "its URL has more than one @", f"{remedy} Write %40 in a password.")
    return url


def _connect_arguments(url: sa.URL, answer_timeout: float) -> dict[str, Any]:
    """Return a connection's limits by the names of its driver, without those the URL sets."""
    if url.get_backend_name() == "postgresql":
        limits: dict[str, Any] = {
            "connect_timeout": _CONNECT_SECONDS,
            "keepalives_idle": 5,
            "keepalives_interval": 2,
            "keepalives_count": 3,
            "tcp_user_timeout": int(answer_timeout * 1000),
            # PostgreSQL compiles a statement with a high estimated cost (JIT), which takes longer than any statement of
            # the driver. The estimates are high for large fleets, and before the first ANALYZE of new rows.
            "options": f"-c jit=off -c lock_timeout={_LOCK_SECONDS}s -c statement_timeout={answer_timeout:.0f}s"
            f" -c idle_in_transaction_session_timeout={max(_IDLE_SECONDS, int(answer_timeout))}s",
        }
    else:
        limits = {"connect_timeout": _CONNECT_SECONDS, "read_timeout": answer_timeout}
        limits["write_timeout"] = answer_timeout
    return {name: value for name, value in limits.items() if name not in url.query}


def _read_clock(connection: sa.Connection) -> tuple[float, float, float]:
    """Return the database clock, between the times of `time.monotonic()` before and after the statement.

    The time to open a connection is not part of the interval, because it would make the clock inexact.
    """
    begun = time.monotonic()
    now = connection.execute(sa.select(clock.now(connection))).scalar_one()
    return begun, float(now), time.monotonic()


def _create_server_engine(url: sa.URL, limits: dict[str, Any], **options: Any) -> sa.Engine:
    engine = sa.create_engine(url, **options, **_POOL_OPTIONS, pool_recycle=3600, connect_args=limits)
    idle_ping.attach(engine)
    return engine


def _create_mariadb_engine(url: sa.URL, limits: dict[str, Any], **options: Any) -> sa.Engine:
    # By default, the pool sends a ROLLBACK for each returned connection, even if no transaction is open.
    engine = _create_server_engine(url, limits, **options, pool_reset_on_return=None)
    event.listen(engine, "connect", _begin_mariadb)
    event.listen(engine, "reset", _reset_mariadb)
    if options["isolation_level"] == "AUTOCOMMIT":
        event.listen(engine, "connect", _wait_for_other_nodes)
        # In this mode too, SQLAlchemy ends each use of a connection with COMMIT or ROLLBACK, and PyMySQL sends both.
        engine.dialect.do_commit = engine.dialect.do_rollback = _roll_back_mariadb  # type: ignore[method-assign]
    return engine


def _begin_mariadb(dbapi_connection: Any, _record: Any) -> None:
    cursor = dbapi_connection.cursor()
    settings = f"SET SESSION time_zone='+00:00', innodb_lock_wait_timeout={_LOCK_SECONDS}"
    settings += f", group_concat_max_len={_JOINED_TEXT_BYTES}"
    if "mariadb" in str(dbapi_connection.get_server_info()).lower():
        settings += f", idle_transaction_timeout={_IDLE_SECONDS}"
    cursor.execute(settings)
    cursor.close()


def _wait_for_other_nodes(dbapi_connection: Any, _record: Any) -> None:
    """Let the reads of a connection to a Galera node wait for all earlier writes of the cluster.

    Behind a balancer, a read can use another node than the write before it. (MariaDB, wsrep_sync_wait)
    """
    cursor = dbapi_connection.cursor()
    # Servers without Galera do not have this variable, or its value is OFF.
    cursor.execute("SHOW SESSION VARIABLES LIKE 'wsrep_on'")
    if any(value == "ON" for _, value in cursor.fetchall()):
        cursor.execute("SET SESSION wsrep_sync_wait = 1")
    cursor.close()


def _reset_mariadb(dbapi_connection: Any, _record: Any, reset_state: PoolResetState) -> None:
    """Roll back an open transaction when a connection returns to the pool."""
    if not reset_state.terminate_only:
        _roll_back_mariadb(dbapi_connection)


def _roll_back_mariadb(dbapi_connection: Any) -> None:
    """Roll back an open transaction; send nothing if there is none."""
    if getattr(dbapi_connection, "server_status", _IN_TRANSACTION) & _IN_TRANSACTION:
        dbapi_connection.rollback()


def _raise_if_committed(connection: sa.Connection, unconfirmed: list[_UnconfirmedCommit[T]]) -> None:
    for one in unconfirmed:
        if connection.execute(*one.marker).first() is not None:
            raise _AlreadyCommitted(one.result)


def _error_text(error: DBAPIError) -> str:
    return str(error.orig or error)


def _code(error: DBAPIError) -> Any:
    original: Any = error.orig
    return getattr(original, "sqlstate", None) or (original.args[0] if getattr(original, "args", None) else None)


def _is_unavailable(error: DBAPIError) -> bool:
    """Return whether the server did not answer, or cannot answer queries now."""
    code = _code(error)
    if error.connection_invalidated or code in _UNAVAILABLE_CODES:
        return True
    original: Any = error.orig
    if hasattr(original, "sqlstate"):
        # psycopg sets a SQLSTATE only in errors from the server. An error without SQLSTATE means that the server did
        # not answer.
        return isinstance(error, sa.exc.OperationalError) and original.sqlstate is None
    # The client library of MySQL and MariaDB has the error codes 2000 to 2099. They mean that the server did not
    # answer.
    return isinstance(code, int) and 2000 <= code < 2100


def _is_retryable(error: DBAPIError) -> bool:
    return _code(error) in _RETRY_CODES or "database is locked" in str(error.orig)
