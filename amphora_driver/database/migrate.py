# SPDX-License-Identifier: Apache-2.0
"""Upgrade a database to the schema of this version.

Invariant: only migrations change the schema of a deployed database. `Schema.metadata` describes the result of the last
one, and a test compares the two. An upgrade may be interrupted at any point and repeated. Each migration step checks
whether it is done (migrations/repeatable.py), because MariaDB commits in the middle of a migration. A lock lets one
upgrade run at a time. The upgrade does not change a database that a newer version upgraded.

A process of the old version must not use the database during an upgrade: it writes data the new version does not
expect, and ignores operations the new version has begun (a CA rotation, for example). `active_processes` lists such
processes.

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
from amphora_driver.database.engine import Database, parse_url
from amphora_driver.database.schema_check import DRIVER, Schema
from amphora_driver.errors import SchemaMismatch, StoreError

LOG = logging.getLogger(__name__)

_ATTEMPT = "upgrade the database"
_ATTEMPTS = 5
# Seconds to wait for another upgrade. Adding a column to a large table may take minutes.
_LOCK_SECONDS = 600


class Upgrade(msgspec.Struct, frozen=True, kw_only=True):
    """Revisions before and after an upgrade; `before` is empty if there was no schema."""

    before: str
    after: str


def upgrade(url: str, schema: Schema = DRIVER) -> Upgrade:
    """Upgrade the database at this URL to the newest revision of its schema. Idempotent.

    Raises:
        ConfigurationError: the URL is invalid, or its driver is not installed.
        SchemaMismatch: the schema is newer than this version.
        StoreError: the database refused a step. The next upgrade continues after the completed steps.
    """
    engine = _upgrade_engine(url, schema)
    try:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                with _upgrade_lock(engine, schema):
                    return _run_migrations(engine, schema)
            except (DBAPIError, CommandError) as error:
                text = str(error.orig) if isinstance(error, DBAPIError) and error.orig else str(error)
                if attempt == _ATTEMPTS:
                    raise StoreError(_ATTEMPT, text, "Remove the cause and run the upgrade again.") from error
                LOG.info("attempt %d of the database upgrade failed, so the upgrade starts again: %s", attempt, text)
                # Upgrades on two nodes of a Galera cluster may collide. Random pauses prevent a second collision.
                time.sleep(random.uniform(0.5, 1.0) * 0.2 * 2**attempt)  # noqa: S311 - jitter, no secret
        raise AssertionError("unreachable")
    finally:
        engine.dispose()


def active_processes(url: str, schema: Schema = DRIVER) -> tuple[str, ...]:
    """Return the processes, of any version, that use a database with an outdated schema.

    A crashed process counts until its leases and duties expire.
    """
    engine = _upgrade_engine(url, schema)
    try:
        with engine.connect() as connection:
            if schema_check.read_revisions(connection, schema) in {(), schema_check.known_revisions(schema)[-1:]}:
                return ()
            there = set(sa.inspect(connection).get_table_names())
            now = clock.now(connection)
            found: set[str] = set()
            for one in schema.activities:
                if one.table in there:
                    rows = sa.table(one.table, sa.column(one.name), sa.column(one.until, sa.Double))
                    alive = rows.c[one.name].is_not(None), rows.c[one.until] > now - one.grace
                    found.update(connection.scalars(sa.select(rows.c[one.name]).where(*alive)))
            return tuple(sorted(found))
    except DBAPIError as error:
        raise StoreError("list the processes that use the database", str(error.orig or error)) from error
    finally:
        engine.dispose()


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


def _run_migrations(engine: sa.Engine, schema: Schema) -> Upgrade:
    known = schema_check.known_revisions(schema)
    newest = known[-1]
    with engine.connect() as connection:
        found = schema_check.read_revisions(connection, schema)
        if any(one not in known for one in found):
            happened, remedy = schema_check.describe_mismatch(found, schema) or ("", "")
            raise SchemaMismatch(_ATTEMPT, happened, remedy)
        if len(found) > 1:
            # Two rows of the version table mean that two upgrades ran at the same time on two Galera nodes. The row of
            # the later revision is right.
            behind = sa.text(f"DELETE FROM {schema.version_table} WHERE version_num <> :newest")  # noqa: S608 - a constant
            connection.execute(behind, {"newest": found[-1]})
        if found != (newest,):
            command.upgrade(alembic_config(connection, schema), "head")
        connection.commit()
    return Upgrade(before=found[-1] if found else "", after=newest)


@contextmanager
def _upgrade_lock(engine: sa.Engine, schema: Schema) -> Iterator[None]:
    """Hold the lock that lets one upgrade run at a time. SQLite needs none: its writers take a file lock."""
    name = engine.dialect.name
    if name not in ("mysql", "mariadb", "postgresql"):
        yield
        return
    # The lock is held on a connection of its own, so that commits of migrations do not release it.
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
