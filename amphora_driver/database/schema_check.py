# SPDX-License-Identifier: Apache-2.0
"""Whether a database has the schema this version works with.

Invariant: no statement of ours reaches a database with another schema: `Database` has a look before its first
transaction, and again every few seconds, so that a process that was not stopped before an upgrade does nothing more;
and an upgrade is refused while somebody works (`migrate.working`). Migrations follow one another in a line, so that
where a database stands is one number; the file of each is called by it.
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
# Alembic's own table: where the database stands.
VERSION_TABLE = "alembic_version"
_VERSIONS = sa.table(VERSION_TABLE, sa.column("version_num"))
_WANTED = "use the database"


@lru_cache(maxsize=1)
def revisions() -> tuple[str, ...]:
    """The revisions this version knows, oldest first. The last one is what it works with."""
    return tuple(sorted(path.name.partition("_")[0] for path in MIGRATIONS.glob("versions/[0-9]*.py")))


def recorded(connection: sa.Connection) -> tuple[str, ...]:
    """Where the database says it stands: one revision, and none before the first upgrade."""
    if not sa.inspect(connection).has_table(VERSION_TABLE):
        return ()
    return tuple(sorted(connection.scalars(sa.select(_VERSIONS.c.version_num))))


def check(connection: sa.Connection) -> None:
    """Return if this version works with the database.

    Raises:
        SchemaMismatch: it does not; the sentence says what to do.
    """
    reason = mismatch(recorded(connection))
    if reason is not None:
        raise SchemaMismatch(_WANTED, *reason)


def check_text(connection: sa.Connection) -> None:
    """Return if the database can hold every character that users and amphorae may send.

    MariaDB refuses a transaction with a character beyond the BMP where a table is in utf8mb3, its default for long. The
    other databases always hold them.

    Raises:
        SchemaMismatch: tables are not in utf8mb4; the sentence says what to do.
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
        happened = f"its tables {', '.join(narrow)} are not in utf8mb4"
        remedy = "Run for each of them: ALTER TABLE name CONVERT TO CHARACTER SET utf8mb4."
        raise SchemaMismatch(_WANTED, happened, remedy)


def mismatch(found: tuple[str, ...]) -> tuple[str, str] | None:
    """What is wrong with a database that stands there, and what to do; None if nothing is.

    Args:
        found: what `recorded` says.
    """
    wanted = revisions()[-1]
    command = "Stop the controllers and health managers and run: amphoractl database upgrade."
    if found == (wanted,):
        return None
    if not found:
        return "it has no schema yet", "Run: amphoractl database upgrade."
    newer = [one for one in found if one not in revisions()]
    if newer:
        happened = f"its schema is {newer[-1]}, newer than {wanted}, the newest this version knows"
        return happened, "Install the version that upgraded it on this host too."
    if len(found) > 1:
        return f"an upgrade left it between {' and '.join(found)}", command
    return f"its schema is {found[0]}, this version works with {wanted}", command


def fits(database: Database) -> bool:
    """Whether a service may start with this database; why not is in the log. Connections are closed again.

    A database that is away is no reason: its schema is looked at when it is back.
    """
    try:
        database.read(check_text)
    except (SchemaMismatch, ConfigurationError) as error:
        LOG.critical("%s", error)
        return False
    except StoreError as error:
        LOG.warning("starting without the database: %s", error)
    finally:
        database.dispose()
    return True
