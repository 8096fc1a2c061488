# SPDX-License-Identifier: Apache-2.0
"""Upgrade a database to the schema of this version.

Invariant: only migrations change the schema of a deployed database. `Schema.metadata` describes the result of the last
one, and a test compares the two. An upgrade may be interrupted at any point and repeated. Each migration step checks
whether it is done (migrations/repeatable.py), because MariaDB commits in the middle of a migration. A lock lets one
upgrade run at a time. The upgrade does not change a database that a newer version upgraded.

Upgrades are rolling: `upgrade` applies expand migrations while processes of the previous version work. It applies
contract migrations only if the caller requests them. It first records the minimum revision and waits until each older
process has checked the schema again. `blocking_processes` lists the processes that an upgrade would stop.

The lock does not cover two nodes of a Galera cluster. The second upgrade then fails, retries, and finds the work done.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy.exc import DBAPIError

from amphora_driver.database import clock, schema_check
from amphora_driver.database.engine import SCHEMA_VALID_SECONDS, Database, parse_url
from amphora_driver.database.schema_check import DRIVER, Schema, SchemaState
from amphora_driver.errors import SchemaMismatch, StoreError

LOG = logging.getLogger(__name__)

_ATTEMPT = "upgrade the database"
_ATTEMPTS = 5
# Seconds to wait until another upgrade ends, which may take minutes for a large table.
_LOCK_SECONDS = 600
# A migration waits up to five seconds for the open transactions that use a table. A longer transaction, for example of
# a backup, makes the attempt fail.
_TABLE_LOCK_SECONDS = 5
# Older processes notice a new minimum revision of the schema at their next check. Their last transactions take less
# than two seconds.
_NOTICE_SECONDS = SCHEMA_VALID_SECONDS + 2.0


class Upgrade(msgspec.Struct, frozen=True, kw_only=True):
    """Revisions before and after an upgrade; `before` is empty if there was no schema.

    Args:
        pending: the contract migrations that were not requested.
    """

    before: str
    after: str
    pending: tuple[str, ...] = ()


def upgrade(url: str, schema: Schema = DRIVER, *, contract: bool = False) -> Upgrade:
    """Upgrade the database at this URL by the expand migrations of this version. Idempotent.

    Args:
        url: the URL of the database.
        schema: the schema to create or upgrade.
        contract: apply the contract migrations too. A new database always gets them.

    Raises:
        ConfigurationError: the URL is invalid, or its driver is not installed.
        SchemaMismatch: this version does not know the schema, or an expand migration follows a contract migration.
        StoreError: the database refused a step. The next upgrade continues after the completed steps.
    """
    engine = _upgrade_engine(url, schema)
    try:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                with _upgrade_lock(engine, schema):
                    if contract:
                        _announce_contracts(engine, schema)
                    return _run_migrations(engine, schema, contract=contract)
            except (DBAPIError, CommandError) as error:
                text = str(error.orig) if isinstance(error, DBAPIError) and error.orig else str(error)
                if attempt == _ATTEMPTS:
                    raise StoreError(_ATTEMPT, text, "Remove the cause and run the upgrade again.") from error
                LOG.info("attempt %d of the database upgrade failed, so the upgrade starts again: %s", attempt, text)
                # Upgrades on two nodes of a Galera cluster may collide. Pauses of random length make a second collision
                # unlikely.
                time.sleep(random.uniform(0.5, 1.0) * 0.2 * 2**attempt)  # noqa: S311 - jitter, no secret
        raise AssertionError("unreachable")
    finally:
        engine.dispose()


def blocking_processes(url: str, schema: Schema = DRIVER, *, contract: bool = False) -> tuple[str, ...]:
    """Return the processes that use the database and do not work with the schema after the upgrade.

    A crashed process counts until its leases and duties expire.
    """
    engine = _upgrade_engine(url, schema)
    try:
        with engine.connect() as connection:
            state = schema_check.read_state(connection, schema)
            rolling = state.newest >= schema.rolling_since
            contracts = schema_check.pending_contracts(state, schema) if contract else ()
            if not state.revisions or state.newest >= schema_check.known_revisions(schema)[-1]:
                return ()
            if rolling and not contracts:
                return ()
            needed = contracts[-1] if rolling else None
            return tuple(sorted(_active_processes(connection, schema, needed)))
    except DBAPIError as error:
        raise StoreError("list the processes that use the database", str(error.orig or error)) from error
    finally:
        engine.dispose()


def _active_processes(connection: sa.Connection, schema: Schema, needed: str | None) -> set[str]:
    """Return the active processes, except those that are known to know the needed revision."""
    there = set(sa.inspect(connection).get_table_names())
    now = clock.now(connection)
    found: set[str] = set()
    newer: set[str] = set()
    for one in schema.activities:
        if one.table not in there:
            continue
        rows = sa.table(one.table, sa.column(one.name), sa.column(one.until, sa.Double))
        alive = rows.c[one.name].is_not(None), rows.c[one.until] > now - one.grace
        found.update(connection.scalars(sa.select(rows.c[one.name]).where(*alive)))
        if one.revision and needed is not None:
            knows = sa.column(one.revision) >= needed
            newer.update(connection.scalars(sa.select(rows.c[one.name]).where(knows)))
    return found - newer


def alembic_config(connection: sa.Connection, schema: Schema = DRIVER) -> Config:
    """Return the Alembic configuration that runs the migrations on an open connection."""
    config = Config()
    config.set_main_option("script_location", str(schema.migrations))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


def _upgrade_engine(url: str, schema: Schema = DRIVER) -> sa.Engine:
    # Changing a large table may take minutes, so an upgrade has no time-out for answers.
    found = parse_url(url, schema.option)
    return Database(url, schema=schema).engine if found.get_backend_name() == "sqlite" else sa.create_engine(found)


def _announce_contracts(engine: sa.Engine, schema: Schema) -> None:
    """Record the minimum revision, and wait for the checks of older processes."""
    with engine.connect() as connection:
        state = schema_check.read_state(connection, schema)
        contracts = schema_check.pending_contracts(state, schema)
        if not contracts or state.minimum is None:
            return
        _raise_minimum(connection, schema, contracts[-1])
    LOG.info("the upgrade waits until processes that do not know the migration %s have stopped", contracts[-1])
    time.sleep(_NOTICE_SECONDS)


def _run_migrations(engine: sa.Engine, schema: Schema, *, contract: bool) -> Upgrade:
    known = schema_check.known_revisions(schema)
    with engine.connect() as connection:
        state = schema_check.read_state(connection, schema)
        before = state.newest
        if before and (before not in known or (state.minimum or "") > known[-1]):
            reason = schema_check.describe_mismatch(state, schema)
            if reason is not None:
                raise SchemaMismatch(_ATTEMPT, *reason)
            return Upgrade(before=before, after=before)
        target = _target(state, schema, contract=contract)
        if len(state.revisions) > 1:
            # Two rows of the version table mean that two Galera nodes ran upgrades at the same time. Only the row of
            # the later revision is right, so the other row is deleted.
            behind = sa.text(f"DELETE FROM {schema.version_table} WHERE version_num <> :newest")  # noqa: S608 - a constant
            connection.execute(behind, {"newest": before})
        if before != target:
            contracts = [one for one in schema_check.pending_contracts(state, schema) if one <= target]
            _limit_lock_waits(connection)
            command.upgrade(alembic_config(connection, schema), target)
            if contracts:
                _raise_minimum(connection, schema, contracts[-1])
        connection.commit()
    return Upgrade(before=before, after=target, pending=tuple(one for one in known if one > target))


def _target(state: SchemaState, schema: Schema, *, contract: bool) -> str:
    """Return the revision to upgrade to, or raise `SchemaMismatch`."""
    known, required = schema_check.known_revisions(schema), schema_check.required_revision(schema)
    contracts = schema_check.pending_contracts(state, schema)
    if contract or not contracts or state.newest < schema.rolling_since:
        return known[-1]
    if contracts[0] < required:
        happened = f"the contract migration {contracts[0]} of a previous version was not applied"
        remedy = f"Stop all processes older than that version, and run: {schema.command} --contract."
        raise SchemaMismatch(_ATTEMPT, happened, remedy)
    return required


def _raise_minimum(connection: sa.Connection, schema: Schema, revision: str) -> None:
    """Record that processes must know this migration."""
    minima = sa.table(schema.minimum_table, sa.column("revision"))
    is_same = minima.c.revision == revision
    if connection.scalar(sa.select(minima.c.revision).where(is_same)) is None:
        connection.execute(minima.insert().values(revision=revision))
    connection.commit()


def _limit_lock_waits(connection: sa.Connection) -> None:
    """Bound the wait for open transactions: all later statements on the table wait behind the upgrade."""
    name = connection.dialect.name
    if name == "postgresql":
        connection.exec_driver_sql(f"SET lock_timeout = '{_TABLE_LOCK_SECONDS}s'")
    elif name != "sqlite":
        connection.exec_driver_sql(f"SET SESSION lock_wait_timeout = {_TABLE_LOCK_SECONDS}")


@contextmanager
def _upgrade_lock(engine: sa.Engine, schema: Schema) -> Iterator[None]:
    """Hold the lock that lets one upgrade run at a time. SQLite needs none: its writers take a file lock."""
    name = engine.dialect.name
    if name not in ("mysql", "mariadb", "postgresql"):
        yield
        return
    # A separate connection holds the lock, so that commits of the migrations do not release it.
    with engine.connect() as connection:
        if name == "postgresql":
            connection.execute(sa.select(sa.func.pg_advisory_lock(schema.lock_number)))
            connection.commit()
        elif not _take_mariadb_lock(connection, schema.lock_name):
            happened = f"another upgrade has been running for {_LOCK_SECONDS} s"
            raise StoreError(_ATTEMPT, happened, "Check the other upgrade.")
        try:
            yield
        finally:
            # The server releases the lock when the connection closes.
            connection.invalidate()


def _take_mariadb_lock(connection: sa.Connection, name: str) -> bool:
    """Take MariaDB's named lock. Return True also on servers without named locks, as some Galera nodes."""
    try:
        taken = connection.execute(sa.select(sa.func.get_lock(name, _LOCK_SECONDS))).scalar()
        connection.commit()
    except DBAPIError as error:
        LOG.info("the database server has no named locks, so the database upgrade runs without a lock: %s", error.orig)
        return True
    return taken == 1
