# SPDX-License-Identifier: Apache-2.0
"""A database and its transactions.

Invariant: `Database.write()` is one transaction that either happened whole or not at all; whatever the database makes
retryable (deadlocks, Galera certification failures, a locked file, a connection lost before the commit was asked for)
is retried here and nowhere else. So the function handed to it may run more than once and must have no other effect than
its SQL. It never happens twice: where the connection is lost during the commit nobody knows whether it happened, and it
is repeated only if it said how it can be recognised (`recognise_by`) and is not found.

Servers run READ COMMITTED: who writes what it has read before locks it (`with_for_update`) or writes on a condition.

On SQLite writers take turns, see `sqlite`.

No answer is waited for without limit, and the database forgets a transaction whose owner is not heard any more: the
rows it holds are somebody else's to work on. Galera: nothing here relies on locks being seen on other nodes, GET_LOCK()
is not used; two nodes' writes collide when they are committed, which is an error 1213 like any other.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import threading
import time
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from amphora_driver import metrics
from amphora_driver.database import clock, schema_check, sqlite_write_lock
from amphora_driver.errors import ConfigurationError, ContentRefused, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.pool import PoolResetState

LOG = logging.getLogger(__name__)
T = TypeVar("T")

# MySQL/MariaDB: deadlock (or a collision of two Galera nodes), lock wait timeout; PostgreSQL: serialization failure,
# deadlock, lock not available.
_RETRY_CODES = {1213, 1205, "40001", "40P01", "55P03"}
# What else says that nobody is there to ask. MariaDB: Galera's node is not part of the cluster (1047, or 1180 during a
# commit), the server ends (1053), it has ended the connection (1927); PostgreSQL: it ends, it starts, it has ended it.
_AWAY_CODES = {1047, 1180, 1053, 1927, "57P01", "57P02", "57P03", "25P03"}
# Seconds in which a transaction is repeated after collisions: longer than an idle transaction holds its locks, and than
# four hosts that write the same rows by way of two Galera nodes need.
_REPEAT_SECONDS = 20.0
# How often in a row nobody may be there: the first time it may be the pool's connections that are stale.
_AWAY_ATTEMPTS = 2
# Seconds for which it is asked again and again whether a transaction has happened whose commit was not answered.
_DOUBT_SECONDS = 6.0
_CONNECT_SECONDS = 3
# Seconds the server lets a transaction wait for a lock, and an idle one hold its locks.
_LOCK_SECONDS = 5
_IDLE_SECONDS = 10
# Seconds for an answer: longer than for a lock, so that the server says first what is wrong.
_ANSWER_SECONDS = 8.0
# Seconds for a turn to write into a file: many may be before us, each for milliseconds.
_TURN_SECONDS = 15.0
# Connections to a server, for each process: as many as it has threads that could write at once.
_CONNECTIONS = {"pool_size": 5, "max_overflow": 43, "pool_timeout": 5}
# Seconds for which a schema that was ours is believed to be it still.
_FITS_SECONDS = 10.0
_WRITE = "write to the database"
_MARK = "amphora_recognised_by"
# What MariaDB says with every answer, if it is so (SERVER_STATUS_IN_TRANS).
_IN_TRANSACTION = 1


def recognise_by(connection: sa.Connection, statement: sa.Select[Any], parameters: dict[str, Any]) -> None:
    """Say how the transaction of `Database.write` that runs now can be recognised.

    Args:
        connection: the one the transaction was handed.
        statement: finds a row if and only if this very transaction, and no other one, was committed.
        parameters: of the statement.
    """
    connection.info[_MARK] = (statement, parameters)


class _Doubt(msgspec.Struct, Generic[T], frozen=True):
    """A transaction whose commit was asked for and never answered."""

    mark: tuple[Any, dict[str, Any]]
    result: T


class _Happened(Exception):
    """A doubted transaction has happened after all."""


class Database:
    """One database, usable from any thread and from processes forked later.

    Args:
        url: SQLAlchemy URL. What it says of timeouts (`connect_timeout`, `read_timeout`, `write_timeout` with MariaDB)
            comes before what is chosen here.
        durable: whether a commit must survive a power cut (what users were promised), or may be redone (what only
            speeds up recovery). Only SQLite knows the difference.
        patience: seconds to wait for an answer to one statement of a server's.
    """

    def __init__(self, url: str, *, durable: bool = True, patience: float = _ANSWER_SECONDS) -> None:
        self._url = url
        self._durable = durable
        self._patience = patience
        self._engine: sa.Engine | None = None
        # When it was seen to have our schema, by `time.monotonic()`.
        self._fits_at: float | None = None
        self._pid = 0
        self._making = threading.Lock()
        # What the server's clock is ahead of time.monotonic(), and when that was looked at.
        self._ahead: tuple[float, float] | None = None
        self._pace = clock.Pace()

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

    def now(self) -> float:
        """Seconds since 1970 by the clock all processes with this database share, without asking it every time."""
        if self._is_file():
            begun, now, ended = time.monotonic(), time.time(), time.monotonic()
            self._pace.note(now - (begun + ended) / 2, (ended - begun) / 2)
            return now
        known = self._ahead
        if known is None or time.monotonic() - known[1] > clock.BELIEVED_SECONDS:
            begun = time.monotonic()
            try:
                told = self.read(lambda connection: connection.execute(sa.select(clock.now(connection))).scalar_one())
            except StoreError:
                # It is away: what is known of its clock is better than ours, and nothing depends on it meanwhile.
                return time.time() if known is None else time.monotonic() + known[0]
            ended = time.monotonic()
            known = self._ahead = (float(told) - (begun + ended) / 2, ended)
            self._pace.note(known[0], (ended - begun) / 2)
        return time.monotonic() + known[0]

    def even_for(self) -> float:
        """Seconds for which `now` has gone evenly, as far as this process has seen: nothing is older for sure."""
        self.now()
        return self._pace.even_for()

    def write(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` in one writing transaction; again, from its beginning, if the database asks for that.

        Raises:
            StoreError: it did not happen; or the connection was lost during the commit and nobody knows.
        """
        with metrics.transaction("write"):
            return self._write(work)

    def _write(self, work: Callable[[sa.Connection], T]) -> T:
        doubts: list[_Doubt[T]] = []
        away = 0
        begun = time.monotonic()
        for attempt in itertools.count(1):
            try:
                return self._once(work, doubts)
            except _Happened as happened:
                return happened.args[0]  # type: ignore[no-any-return]
            except DBAPIError as error:
                if _is_away(error):
                    away += 1
                # A process that has waited in vain for an answer once does not wait again.
                passed = time.monotonic() - begun
                there = away < _AWAY_ATTEMPTS and passed < self._patience
                if not (there if _is_away(error) else _retryable(error) and passed < _REPEAT_SECONDS):
                    refused = isinstance(error, (sa.exc.DataError, sa.exc.IntegrityError))
                    raise (ContentRefused if refused else StoreError)(_WRITE, _words(error)) from error
                LOG.info("the database asks to repeat a transaction (%s), attempt %d", _words(error), attempt)
            except PoolTimeoutError as error:
                raise StoreError(_WRITE, "every connection is in use") from error
            time.sleep(random.uniform(0.2, 1.0) * min(0.005 * 2 ** min(attempt, 7), 0.5))  # noqa: S311 - jitter, no secret
        raise AssertionError("unreachable")

    def read(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` in one reading transaction: a consistent view that waits for no writer.

        Raises:
            StoreError: the database is away.
        """
        with metrics.transaction("read"):
            return self._read(work)

    def _read(self, work: Callable[[sa.Connection], T]) -> T:
        begun = time.monotonic()
        for attempt in range(1, _AWAY_ATTEMPTS + 1):
            try:
                with self.engine.connect().execution_options(amphora_read_only=True) as connection, connection.begin():
                    self._check(connection)
                    return work(connection)
            except DBAPIError as error:
                late = time.monotonic() - begun > self._patience
                if attempt == _AWAY_ATTEMPTS or late or not _is_away(error):
                    raise StoreError("read from the database", _words(error)) from error
            except PoolTimeoutError as error:
                raise StoreError("read from the database", "every connection is in use") from error
        raise AssertionError("unreachable")

    def dispose(self) -> None:
        """Close every connection of this process."""
        if self._engine is not None and self._pid == os.getpid():
            self._engine.dispose()
            self._engine = None

    def _once(self, work: Callable[[sa.Connection], T], doubts: list[_Doubt[T]]) -> T:
        """One transaction, that ends with `_Happened` and without effect if one of those in doubt has happened."""
        with self.engine.connect() as connection:
            connection.info.pop(_MARK, None)
            transaction = connection.begin()
            try:
                self._check(connection)
                result = work(connection)
                # Only now: what `work` has locked or written lets no earlier one come behind this look.
                _raise_if_happened(connection, doubts)
            except BaseException as error:
                transaction.rollback()
                if doubts and isinstance(error, DBAPIError) and not _is_away(error):
                    # It may be in its own way: what it wants to insert is there already.
                    self._raise_if_any_happened(doubts)
                raise
            # An invalid connection does not tell.
            mark = connection.info.get(_MARK)
            try:
                transaction.commit()
            except DBAPIError as error:
                if _is_away(error) and not self._is_file():
                    self._doubt(mark, result, doubts, error)
                raise
            return result

    def _doubt(self, mark: Any, result: T, doubts: list[_Doubt[T]], error: DBAPIError) -> None:
        """Find out what became of a commit that was not answered; returns if it may be repeated."""
        if mark is None:
            raise StoreError(
                "learn whether a transaction was committed", f"{_words(error)} while it was", "Look again."
            ) from error
        doubts.append(_Doubt(mark, result))
        until = time.monotonic() + _DOUBT_SECONDS
        while True:
            try:
                self._raise_if_any_happened(doubts)
            except DBAPIError as trouble:
                if not _is_away(trouble) or time.monotonic() > until:
                    raise
                time.sleep(0.2)
            else:
                return

    def _raise_if_any_happened(self, doubts: list[_Doubt[T]]) -> None:
        with self.engine.connect() as connection, connection.begin():
            _raise_if_happened(connection, doubts)

    def _is_file(self) -> bool:
        return self._url.startswith("sqlite")

    def _check(self, connection: sa.Connection) -> None:
        """Before anything else, and again now and then: whether the schema is the one our statements are written for.

        Somebody may upgrade it under a process that he has forgotten to stop.
        """
        now = time.monotonic()
        if self._fits_at is None or now - self._fits_at > _FITS_SECONDS:
            self._fits_at = None
            schema_check.check(connection)
            self._fits_at = now

    def _make(self) -> sa.Engine:
        url = parsed(self._url)
        if url.get_backend_name() != "sqlite":
            options: dict[str, Any] = {"isolation_level": "READ COMMITTED", "pool_pre_ping": True, "pool_recycle": 3600}
            limits, postgresql = _arguments(url, self._patience), url.get_backend_name() == "postgresql"
            # Its driver knows without asking whether there is anything to undo; of MariaDB's we ask ourselves.
            options["pool_reset_on_return"] = "rollback" if postgresql else None
            engine = sa.create_engine(url, **options, **_CONNECTIONS, connect_args=limits)
            if postgresql:
                event.listen(engine, "do_connect", self._connect_postgresql)
            else:
                event.listen(engine, "connect", _begin_mariadb)
                event.listen(engine, "reset", _reset_mariadb)
            return engine
        engine = sa.create_engine(url, pool_size=16, max_overflow=32)
        sqlite_write_lock.Queue(str(url.database), durable=self._durable, patience=_TURN_SECONDS).listen(engine)
        return engine

    def _connect_postgresql(self, _dialect: Any, _record: Any, arguments: Any, options: Any) -> Any:
        # Its driver is there only where it is used.
        from amphora_driver.database import postgresql  # noqa: PLC0415

        return postgresql.connect(self._patience, tuple(arguments), dict(options))


def parsed(text: str) -> sa.URL:
    """The URL, if there is a driver for it. What is wrong is said without quoting it: there may be a password in it.

    Raises:
        ConfigurationError: it is none, or its driver is not installed.
    """
    wanted, remedy = "use the database", "Check [store] connection."
    try:
        url = sa.make_url(text)
        url.get_dialect().import_dbapi()
    except (ArgumentError, ValueError):
        raise ConfigurationError(wanted, "its URL is not one that SQLAlchemy understands", remedy) from None
    except ImportError as error:
        raise ConfigurationError(wanted, f"its driver is not installed ({error})", remedy) from error
    if "@" in (url.host or ""):
        # The end of a password would be taken for a host's name, which errors show.
        raise ConfigurationError(wanted, "there is more than one @ in its URL", f"{remedy} Write %40 in a password.")
    return url


def _arguments(url: sa.URL, patience: float) -> dict[str, Any]:
    """Limits of a connection to a server, as its driver calls them, but for those the URL names."""
    if url.get_backend_name() == "postgresql":
        limits: dict[str, Any] = {
            "connect_timeout": _CONNECT_SECONDS,
            "keepalives_idle": 5,
            "keepalives_interval": 2,
            "keepalives_count": 3,
            "tcp_user_timeout": int(patience * 1000),
            "options": f"-c lock_timeout={_LOCK_SECONDS}s -c statement_timeout={patience:.0f}s"
            f" -c idle_in_transaction_session_timeout={max(_IDLE_SECONDS, int(patience))}s",
        }
    else:
        limits = {"connect_timeout": _CONNECT_SECONDS, "read_timeout": patience, "write_timeout": patience}
    return {name: value for name, value in limits.items() if name not in url.query}


def _begin_mariadb(dbapi_connection: Any, _record: Any) -> None:
    cursor = dbapi_connection.cursor()
    settings = f"SET SESSION time_zone='+00:00', innodb_lock_wait_timeout={_LOCK_SECONDS}"
    if "mariadb" in str(dbapi_connection.get_server_info()).lower():
        settings += f", idle_transaction_timeout={_IDLE_SECONDS}"
    cursor.execute(settings)
    cursor.close()


def _reset_mariadb(dbapi_connection: Any, _record: Any, reset_state: PoolResetState) -> None:
    """Undo what was left open when a connection is given back; what was ended is not ended once more, on the wire."""
    open_still = getattr(dbapi_connection, "server_status", _IN_TRANSACTION) & _IN_TRANSACTION
    if open_still and not reset_state.terminate_only:
        dbapi_connection.rollback()


def _raise_if_happened(connection: sa.Connection, doubts: list[_Doubt[T]]) -> None:
    for doubt in doubts:
        if connection.execute(*doubt.mark).first() is not None:
            raise _Happened(doubt.result)


def _words(error: DBAPIError) -> str:
    return str(error.orig or error)


def _code(error: DBAPIError) -> Any:
    original: Any = error.orig
    return getattr(original, "sqlstate", None) or (original.args[0] if getattr(original, "args", None) else None)


def _is_away(error: DBAPIError) -> bool:
    """Nobody answered, or somebody who could not be asked."""
    code = _code(error)
    if error.connection_invalidated or code in _AWAY_CODES:
        return True
    original: Any = error.orig
    if hasattr(original, "sqlstate"):
        # PostgreSQL's driver: without a server nobody gives one.
        return isinstance(error, sa.exc.OperationalError) and original.sqlstate is None
    # What the clients of MySQL and MariaDB say themselves.
    return isinstance(code, int) and 2000 <= code < 2100


def _retryable(error: DBAPIError) -> bool:
    return _code(error) in _RETRY_CODES or "database is locked" in str(error.orig)
