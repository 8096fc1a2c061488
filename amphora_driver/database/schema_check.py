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

import sqlalchemy as sa

from amphora_driver.database.tables_fleet import metadata
from amphora_driver.errors import ConfigurationError, SchemaMismatch, StoreError

if TYPE_CHECKING:
    from amphora_driver.database.engine import Database

LOG = logging.getLogger(__name__)

MIGRATIONS = Path(__file__).parent / "migrations"
VERSION_TABLE = "alembic_version"
_VERSIONS = sa.table(VERSION_TABLE, sa.column("version_num"))
_ATTEMPT = "use the database"


@lru_cache(maxsize=1)
def known_revisions() -> tuple[str, ...]:
    """Return the revisions this version knows, oldest first. It requires the last one."""
    return tuple(sorted(path.name.partition("_")[0] for path in MIGRATIONS.glob("versions/[0-9]*.py")))


def read_revisions(connection: sa.Connection) -> tuple[str, ...]:
    """Return the revision recorded in the database: one element, or none before the first upgrade."""
    if not sa.inspect(connection).has_table(VERSION_TABLE):
        return ()
    return tuple(sorted(connection.scalars(sa.select(_VERSIONS.c.version_num))))


def require_known_schema(connection: sa.Connection) -> None:
    """Raise `SchemaMismatch` unless the database has the schema of this version."""
    reason = describe_mismatch(read_revisions(connection))
    if reason is not None:
        raise SchemaMismatch(_ATTEMPT, *reason)


def require_utf8mb4(connection: sa.Connection) -> None:
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
        .where(tables.c.table_schema == sa.func.database(), tables.c.table_name.in_(sorted(metadata.tables)))
        .where(tables.c.table_collation.not_like("utf8mb4%"))
        .order_by(tables.c.table_name)
    ).all()
    if narrow:
        happened = f"the tables {', '.join(narrow)} are not in utf8mb4"
        remedy = "Run for each of them: ALTER TABLE name CONVERT TO CHARACTER SET utf8mb4."
        raise SchemaMismatch(_ATTEMPT, happened, remedy)


def describe_mismatch(found: tuple[str, ...]) -> tuple[str, str] | None:
    """Return what is wrong with a schema, and what to do; None if this version works with it."""
    required = known_revisions()[-1]
    command = "Stop the controllers and health managers and run: amphoractl database upgrade."
    if found == (required,):
        return None
    if not found:
        return "the database has no schema", "Run: amphoractl database upgrade."
    newer = [one for one in found if one not in known_revisions()]
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
        database.read(require_utf8mb4)
    except (SchemaMismatch, ConfigurationError) as error:
        LOG.critical("the service does not start, because the service cannot use the database: %s", error)
        return False
    except StoreError as error:
        LOG.warning("the database does not answer, so the service starts without a check of the schema: %s", error)
    finally:
        database.dispose()
    return True
