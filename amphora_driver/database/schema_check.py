# SPDX-License-Identifier: Apache-2.0
"""Check that this version works with the schema of a database.

Invariant: no statement of this version reaches a database whose schema this version does not work with. `Database`
checks the schema before its first transaction and every few seconds, so a process that runs across an upgrade continues
or stops its work.

Migrations are linear: one number, which is also part of the migration's file name, identifies the state of a database.
The second word of the file name is the phase. An expand migration only adds what older processes ignore. A contract
migration changes what older processes need, so it first records its number as a minimum. A process works with each
schema that has all expand migrations of its version and no minimum above its newest revision.
"""

from __future__ import annotations

import logging
from enum import Enum
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
        revision: column with the newest revision that the process knows; empty without such a column. The column
            exists from `Schema.rolling_since` on.
    """

    table: str
    name: str
    until: str
    grace: float = 0.0
    revision: str = ""


class Schema(msgspec.Struct, frozen=True, kw_only=True):
    """The schema of a database: its tables and migrations, and the words of its error messages.

    Args:
        migrations: folder of Alembic's environment; each file in `versions` begins with the number of its revision.
        metadata: the tables of the newest revision.
        version_table: table with the revision of the database.
        minimum_table: table with the contract migrations that have begun.
        rolling_since: the first revision with `minimum_table`. Processes with an older schema must stop for an upgrade.
        lock_name, lock_number: MariaDB's name and PostgreSQL's number of the lock that lets one upgrade run.
        activities: where `migrate.blocking_processes` finds processes.
        option: the option with the URL of the database.
        command: the command that upgrades the schema.
        users: the processes that use the database.
    """

    migrations: Path
    metadata: sa.MetaData
    version_table: str
    minimum_table: str
    rolling_since: str
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
    minimum_table="schema_minimum",
    rolling_since="0005",
    lock_name="amphora-driver schema",
    lock_number=0x616D_7068,
    activities=(
        Activity(table="job", name="owner", until="leased_until"),
        Activity(table="duty", name="owner", until="leased_until"),
        Activity(
            table="process",
            name="name",
            until="seen_at",
            grace=_PROCESS_ALIVE_SECONDS,
            revision="schema_revision",
        ),
    ),
    option="[amp_database] connection",
    command="amphoractl database upgrade",
    users="the controllers and health managers",
)


class Phase(str, Enum):
    """What a migration does to the schema that older processes use."""

    EXPAND = "expand"
    CONTRACT = "contract"


class SchemaState(msgspec.Struct, frozen=True, kw_only=True):
    """What a database records about its schema.

    Args:
        revisions: one revision; none before the first upgrade, two after an interrupted upgrade.
        minimum: the newest contract migration that has begun; empty without one, None without the table.
    """

    revisions: tuple[str, ...] = ()
    minimum: str | None = None

    @property
    def newest(self) -> str:
        """The newest revision; empty before the first upgrade."""
        return self.revisions[-1] if self.revisions else ""


def known_revisions(schema: Schema = DRIVER) -> tuple[str, ...]:
    """Return the revisions this version knows, oldest first."""
    return tuple(_migrations(schema.migrations))


def required_revision(schema: Schema = DRIVER) -> str:
    """Return the newest expand migration, which this version requires."""
    return [one for one, phase in _migrations(schema.migrations).items() if phase is Phase.EXPAND][-1]


def pending_contracts(state: SchemaState, schema: Schema = DRIVER) -> tuple[str, ...]:
    """Return the contract migrations of this version that the database does not have, oldest first."""
    found = _migrations(schema.migrations).items()
    return tuple(one for one, phase in found if phase is Phase.CONTRACT and one > state.newest)


@lru_cache(maxsize=8)
def _migrations(folder: Path) -> dict[str, Phase]:
    words = (path.name.split("_", 2) for path in sorted(folder.glob("versions/[0-9]*.py")))
    return {number: Phase(phase) for number, phase, _ in words}


def read_state(connection: sa.Connection, schema: Schema = DRIVER) -> SchemaState:
    """Return what the database records about its schema."""
    tables = sa.inspect(connection)
    if not tables.has_table(schema.version_table):
        return SchemaState()
    versions = sa.table(schema.version_table, sa.column("version_num"))
    revisions = tuple(sorted(connection.scalars(sa.select(versions.c.version_num))))
    if not tables.has_table(schema.minimum_table):
        return SchemaState(revisions=revisions)
    minima = sa.table(schema.minimum_table, sa.column("revision"))
    minimum = connection.scalar(sa.select(sa.func.max(minima.c.revision))) or ""
    return SchemaState(revisions=revisions, minimum=minimum)


def require_usable_schema(connection: sa.Connection, schema: Schema = DRIVER) -> SchemaState:
    """Return the state of the schema; raise `SchemaMismatch` if this version does not work with it."""
    state = read_state(connection, schema)
    reason = describe_mismatch(state, schema)
    if reason is not None:
        raise SchemaMismatch(_ATTEMPT, *reason)
    return state


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


def describe_mismatch(state: SchemaState, schema: Schema = DRIVER) -> tuple[str, str] | None:
    """Return why this version does not work with a schema, and what to do; None if it works."""
    known, required, found = known_revisions(schema), required_revision(schema), state.revisions
    if not found:
        return "the database has no schema", f"Run: {schema.command}."
    install = "Install the version that upgraded the database on this host too."
    if (state.minimum or "") > known[-1]:
        happened = f"the contract migration {state.minimum} has changed the schema {state.newest}"
        return f"{happened}, and this version knows migrations up to {known[-1]}", install
    if len(found) > 1:
        return f"an interrupted upgrade left the schema between {' and '.join(found)}", f"Run: {schema.command}."
    if found[0] > known[-1] and state.minimum is not None:
        return None
    if found[0] not in known:
        return f"the schema is {found[0]}, which this version does not know", install
    if found[0] < required:
        stop = f"Stop {schema.users} and run" if found[0] < schema.rolling_since else "Run"
        return f"the schema is {found[0]}, this version requires {required}", f"{stop}: {schema.command}."
    return None


def describe_schema(state: SchemaState, schema: Schema = DRIVER) -> str:
    """Describe a schema that this version works with."""
    newest = known_revisions(schema)[-1]
    if state.newest > newest:
        return f"schema {state.newest}, newer than {newest} of this version by expand migrations only"
    if state.newest < newest:
        return f"schema {state.newest}, without the contract migrations of this version up to {newest}"
    return f"schema {newest}, the one of this version"


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
