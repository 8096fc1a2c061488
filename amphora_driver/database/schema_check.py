# SPDX-License-Identifier: Apache-2.0
"""Check that a database has the schema of this version.

Invariant: no statement of this version reaches a database with another schema. `Database` checks the schema before its
first transaction and every few seconds, so a process that runs across an upgrade stops its work. An upgrade is refused
while processes use the database (`migrate.active_processes`). Migrations are linear: one number, which is also part of
the migration's file name, identifies the state of a database.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import sqlalchemy as sa

from amphora_driver.database.tables_fleet import metadata
from amphora_driver.errors import ConfigurationError, SchemaMismatch, StoreError

if TYPE_CHECKING:
    from amphora_driver.database.engine import Database

LOG = logging.getLogger(__name__)

_ATTEMPT = "use the database"


class Activity(msgspec.Struct, frozen=True, kw_only=True):
    """A table whose rows show that a process uses the database. The columns exist in every revision.

    Args:
        name: column with the name of the process; NULL without a process.
        until: column with a time in seconds since 1970.
        grace: the process is active while the time is less than this number of seconds in the past.
    """

    table: str
    name: str
    until: str
    grace: float = 0.0


class Schema(msgspec.Struct, frozen=True, kw_only=True):
    """The schema of a database: its tables and migrations, and the words of its error messages.

    Args:
        migrations: folder of Alembic's environment; each file in `versions` begins with the number of its revision.
        metadata: the tables of the newest revision.
        version_table: table with the revision of the database.
        lock_name, lock_number: MariaDB's name and PostgreSQL's number of the lock that lets one upgrade run.
        activities: where `migrate.active_processes` finds processes.
        option: the option with the URL of the database.
        command: the command that upgrades the schema.
        users: the processes to stop before an upgrade.
    """

    migrations: Path
    metadata: sa.MetaData
    version_table: str
    lock_name: str
    lock_number: int
    activities: tuple[Activity, ...]
    option: str
    command: str
    users: str


# Seconds without a heartbeat after which a process of the control plane counts as dead.
_PROCESS_ALIVE_SECONDS = 7.0
DRIVER = Schema(
    migrations=Path(__file__).parent / "migrations",
    metadata=metadata,
    version_table="alembic_version",
    lock_name="amphora-driver schema",
    lock_number=0x616D_7068,
    activities=(
        Activity(table="job", name="owner", until="leased_until"),
        Activity(table="duty", name="owner", until="leased_until"),
        Activity(table="process", name="name", until="seen_at", grace=_PROCESS_ALIVE_SECONDS),
    ),
    option="[amp_database] connection",
    command="amphoractl database upgrade",
    users="the controllers and health managers",
)


def known_revisions(schema: Schema = DRIVER) -> tuple[str, ...]:
    """Return the revisions this version knows, oldest first. It requires the last one."""
    return _revisions(schema.migrations)


@lru_cache(maxsize=8)
def _revisions(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.name.partition("_")[0] for path in folder.glob("versions/[0-9]*.py")))


def read_revisions(connection: sa.Connection, schema: Schema = DRIVER) -> tuple[str, ...]:
    """Return the revision recorded in the database: one element, or none before the first upgrade."""
    if not sa.inspect(connection).has_table(schema.version_table):
        return ()
    versions = sa.table(schema.version_table, sa.column("version_num"))
    return tuple(sorted(connection.scalars(sa.select(versions.c.version_num))))


def require_known_schema(connection: sa.Connection, schema: Schema = DRIVER) -> None:
    """Raise `SchemaMismatch` unless the database has the schema of this version."""
    reason = describe_mismatch(read_revisions(connection, schema), schema)
    if reason is not None:
        raise SchemaMismatch(_ATTEMPT, *reason)


def require_utf8mb4(connection: sa.Connection, schema: Schema = DRIVER) -> None:
    """Raise `SchemaMismatch` unless the database can store every Unicode character.

    MariaDB refuses a transaction that writes a character beyond the BMP to a table in utf8mb3, its former default. The
    other databases store all characters.
    """
    if connection.dialect.name != "mysql":
        return
    tables = sa.table("tables", *map(sa.column, ("table_schema", "table_name", "table_collation")))
    tables.schema = "information_schema"
    narrow = connection.scalars(
        sa.select(tables.c.table_name)
        .where(tables.c.table_schema == sa.func.database(), tables.c.table_name.in_(sorted(schema.metadata.tables)))
        .where(tables.c.table_collation.not_like("utf8mb4%"))
        .order_by(tables.c.table_name)
    ).all()
    if narrow:
        happened = f"the tables {', '.join(narrow)} are not in utf8mb4"
        remedy = "Run for each of them: ALTER TABLE name CONVERT TO CHARACTER SET utf8mb4."
        raise SchemaMismatch(_ATTEMPT, happened, remedy)


def describe_mismatch(found: tuple[str, ...], schema: Schema = DRIVER) -> tuple[str, str] | None:
    """Return what is wrong with a recorded revision, and what to do; None if this version works with it."""
    required = known_revisions(schema)[-1]
    command = f"Stop {schema.users} and run: {schema.command}."
    if found == (required,):
        return None
    if not found:
        return "the database has no schema", f"Run: {schema.command}."
    newer = [one for one in found if one not in known_revisions(schema)]
    if newer:
        happened = f"the schema is {newer[-1]}, newer than {required}, the newest revision this version knows"
        return happened, "Install the version that upgraded the database on this host too."
    if len(found) > 1:
        return f"an interrupted upgrade left the schema between {' and '.join(found)}", command
    return f"the schema is {found[0]}, this version requires {required}", command


def is_usable(database: Database) -> bool:
    """Return whether a service may start with this database; log a reason against the start.

    An unreachable database does not prevent the start: `Database` checks the schema once it answers.
    """
    try:
        database.read(lambda connection: require_utf8mb4(connection, database.schema))
    except (SchemaMismatch, ConfigurationError) as error:
        LOG.critical("the service does not start, because the service cannot use the database: %s", error)
        return False
    except StoreError as error:
        LOG.warning("the database does not answer, so the service starts without a check of the schema: %s", error)
    finally:
        database.dispose()
    return True
