# SPDX-License-Identifier: Apache-2.0
"""Bringing a database to the schema this version needs.

Invariant: the schema of a running database is only ever made by the migrations, one after the other; the tables in
`tables.py` describe where they end, and a test compares the two. An upgrade may be ended anywhere and run again, and
run twice at once: one at a time works, and each step of a migration looks whether it was done (migrations/
repeatable.py), because MariaDB commits in the middle of it. A database that a newer version upgraded is left alone.

Who works with a database while its schema is changed writes what the next version does not know of, and overlooks what
it has begun (the rotation of an authority, say): so nobody is to work then, and who does anyway is told (`working`).

Where the lock that lets one at a time work does not reach (two nodes of a Galera cluster) the second one fails, looks
again, and finds the work done.
"""

from __future__ import annotations

import logging
import random
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy.exc import DBAPIError

from amphora_driver.database import clock, schema_check
from amphora_driver.database.engine import Database, parsed
from amphora_driver.errors import SchemaMismatch, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator

LOG = logging.getLogger(__name__)

_WANTED = "upgrade the database"
_ATTEMPTS = 5
# Locks by name (MariaDB) and by number (PostgreSQL) that live as long as the connection that took them.
_LOCK_NAME = "amphora-driver schema"
_LOCK_NUMBER = 0x616D_7068
# Seconds to wait for another upgrade: adding a column to a large table takes its time.
_LOCK_SECONDS = 600
# Seconds after its last sign of life for which a process is taken for alive: it gives one every two.
_SILENT = 7.0


class Upgrade(msgspec.Struct, frozen=True, kw_only=True):
    """From where to where a database was brought; `before` is empty where it had no schema."""

    before: str
    after: str


def upgrade(url: str) -> Upgrade:
    """Bring the database at this URL to the newest schema; harmless when it is there already.

    Raises:
        ConfigurationError: the URL is none, or its driver is not installed.
        SchemaMismatch: it is newer than this version.
        StoreError: the database said no. What was done until then is found again the next time.
    """
    engine = _engine(url)
    try:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                with _turn(engine):
                    return _bring(engine)
            except (DBAPIError, CommandError) as error:
                words = str(error.orig) if isinstance(error, DBAPIError) and error.orig else str(error)
                if attempt == _ATTEMPTS:
                    raise StoreError(_WANTED, words, "Mend that and run it again.") from error
                LOG.info("upgrading again, attempt %d: %s", attempt, words)
                # Somebody else may be at it, on another node of a cluster.
                time.sleep(random.uniform(0.5, 1.0) * 0.2 * 2**attempt)  # noqa: S311 - jitter, no secret
        raise AssertionError("unreachable")
    finally:
        engine.dispose()


def working(url: str) -> tuple[str, ...]:
    """The processes, of whatever version, that work with a database whose schema is to be changed by an upgrade.

    Whoever died without a word counts until his leases and duties have run out.

    Raises:
        ConfigurationError: the URL is none, or its driver is not installed.
        StoreError: the database said no.
    """
    engine = _engine(url)
    try:
        with engine.connect() as connection:
            if schema_check.recorded(connection) in {(), (schema_check.revisions()[-1],)}:
                return ()
            there = set(sa.inspect(connection).get_table_names())
            now = clock.now(connection)
            # In every version these have had these columns.
            moments = {"work": ("owner", "leased_until", 0.0), "duty": ("owner", "leased_until", 0.0)}
            moments["process"] = ("name", "seen_at", -_SILENT)
            found: set[str] = set()
            for table, (who, until, lead) in moments.items():
                if table in there:
                    rows = sa.table(table, sa.column(who), sa.column(until, sa.Double))
                    alive = rows.c[who].is_not(None), rows.c[until] > now + lead
                    found.update(connection.scalars(sa.select(rows.c[who]).where(*alive)))
            return tuple(sorted(found))
    except DBAPIError as error:
        raise StoreError("see who works with the database", str(error.orig or error)) from error
    finally:
        engine.dispose()


def configuration(connection: sa.Connection) -> Config:
    """Alembic's view of our migrations on an open connection."""
    config = Config()
    config.set_main_option("script_location", str(schema_check.MIGRATIONS))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


def _engine(url: str) -> sa.Engine:
    # A statement of an upgrade may take minutes; what `Database` asks of a server is that it answers in seconds.
    found = parsed(url)
    return Database(url).engine if found.get_backend_name() == "sqlite" else sa.create_engine(found)


def _bring(engine: sa.Engine) -> Upgrade:
    newest = schema_check.revisions()[-1]
    with engine.connect() as connection:
        found = schema_check.recorded(connection)
        if any(one not in schema_check.revisions() for one in found):
            happened, remedy = schema_check.mismatch(found) or ("", "")
            raise SchemaMismatch(_WANTED, happened, remedy)
        if len(found) > 1:
            # Two upgrades at once on two nodes: every step may be repeated, so the later place is as good.
            behind = sa.text(f"DELETE FROM {schema_check.VERSION_TABLE} WHERE version_num <> :newest")  # noqa: S608 - a constant
            connection.execute(behind, {"newest": found[-1]})
        if found != (newest,):
            command.upgrade(configuration(connection), "head")
        connection.commit()
    return Upgrade(before=found[-1] if found else "", after=newest)


@contextmanager
def _turn(engine: sa.Engine) -> Iterator[None]:
    """Be the only one that upgrades. SQLite's writers queue anyway (engine.py)."""
    name = engine.dialect.name
    if name not in ("mysql", "mariadb", "postgresql"):
        yield
        return
    # On a connection of its own: statements that change a schema would end the transaction.
    with engine.connect() as connection:
        if name == "postgresql":
            connection.execute(sa.select(sa.func.pg_advisory_lock(_LOCK_NUMBER)))
            connection.commit()
        elif not _named_lock(connection):
            raise StoreError(_WANTED, f"another upgrade has been running for {_LOCK_SECONDS} s", "Look at that one.")
        try:
            yield
        finally:
            # The lock goes with the connection, also if nobody is there to give it back.
            connection.invalidate()


def _named_lock(connection: sa.Connection) -> bool:
    """Take MariaDB's lock; True as well where there is none to be had, as on some nodes of Galera."""
    try:
        taken = connection.execute(sa.select(sa.func.get_lock(_LOCK_NAME, _LOCK_SECONDS))).scalar()
        connection.commit()
    except DBAPIError as error:
        LOG.info("this database has no lock for upgrades: %s", error.orig)
        return True
    return taken == 1
