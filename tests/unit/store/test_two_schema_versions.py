# SPDX-License-Identifier: Apache-2.0
"""Rolling upgrades: processes of two versions on one database, on every database.

The database has one expand migration and one contract migration more than this version.
"""

import shutil
from types import SimpleNamespace

import msgspec
import pytest
import sqlalchemy as sa
from alembic import command

from amphora_driver.database import migrate, schema_check
from amphora_driver.database.engine import Database
from amphora_driver.database.tables import job
from amphora_driver.database.tables_fleet import process, schema_minimum
from amphora_driver.errors import SchemaMismatch, StoreError
from amphora_driver.queue.jobs import Jobs, acquire_duty
from amphora_driver.store import process_registry

DATABASES = ("sqlite", "mariadb", "postgresql")
LAST = schema_check.known_revisions()[-1]
EXPAND, CONTRACT, LATER = (f"{int(LAST) + number:04}" for number in (1, 2, 3))
COLUMN = 'sa.Column("next", sa.Integer, nullable=True)'
MIGRATIONS = {
    "expand_next": (EXPAND, LAST, f'add_column("job", {COLUMN})'),
    "contract_next": (CONTRACT, EXPAND, 'drop_column("job", "next")'),
}


def write_migration(folder, name, revision, after, statement):
    text = (
        "import sqlalchemy as sa\n\n"
        "from amphora_driver.database.migrations.repeatable import add_column, drop_column\n\n"
        f'revision = "{revision}"\ndown_revision = "{after}"\n\n\ndef upgrade():\n    {statement}\n'
    )
    (folder / f"versions/{revision}_{name}.py").write_text(text)


@pytest.fixture(autouse=True)
def migrations(request, tmp_path):
    """Add an expand migration and a contract migration to this version."""
    kind = request.node.callspec.params.get("kind")
    if kind in ("mariadb", "postgresql"):
        request.getfixturevalue(f"{kind}_url")  # the database of the other tests has the real revisions
    present, folder = schema_check.DRIVER.migrations, tmp_path / "migrations"
    shutil.copytree(present, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name, values in MIGRATIONS.items():
        write_migration(folder, name, *values)
    msgspec.structs.force_setattr(schema_check.DRIVER, "migrations", folder)
    yield folder
    msgspec.structs.force_setattr(schema_check.DRIVER, "migrations", present)


def record(engine, revision, minimum=None):
    """Record a revision, and a contract migration that has begun."""
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = :to"), {"to": revision})
        if minimum is not None:
            connection.execute(schema_minimum.insert().values(revision=minimum))


@pytest.mark.parametrize("kind", DATABASES)
def test_a_process_continues_after_expand_migrations_and_stops_before_a_contract_migration(empty, monkeypatch, caplog):
    migrate.upgrade(empty)
    database = Database(empty)
    database.read(lambda connection: None)
    monkeypatch.setattr("amphora_driver.database.engine.SCHEMA_VALID_SECONDS", 0.0)
    engine = migrate._upgrade_engine(empty)
    record(engine, "9998")
    with caplog.at_level("INFO"):
        assert database.read(lambda connection: 1) == database.write(lambda connection: 1) == 1
    said = f"this process works with the schema 9998, newer than {CONTRACT} of this version by expand migrations only"
    assert caplog.messages.count(said) == 1
    assert migrate.upgrade(empty) == migrate.Upgrade(before="9998", after="9998")
    # The contract migration has begun, and its statements have not run.
    record(engine, "9998", minimum="9999")
    for attempt in (database.write, database.read, database.write):
        with pytest.raises(SchemaMismatch, match="the contract migration 9999 has changed the schema"):
            attempt(lambda connection: pytest.fail("a statement of ours was let through"))
    engine.dispose()
    database.dispose()


def columns_of(url, table):
    engine = migrate._upgrade_engine(url)
    found = {one["name"] for one in sa.inspect(engine).get_columns(table)}
    engine.dispose()
    return found


@pytest.mark.parametrize("kind", DATABASES)
def test_a_contract_migration_waits_for_its_option_and_for_older_processes(empty, monkeypatch):
    start_at(empty, LAST)
    older = Database(empty, schema=older_version(LAST))
    assert acquire_duty(older, "housekeeping", "older", 60.0)
    register(older, "older", LAST)
    assert migrate.blocking_processes(empty) == ()
    assert migrate.upgrade(empty) == migrate.Upgrade(before=LAST, after=EXPAND, pending=(CONTRACT,))
    assert migrate.upgrade(empty).pending == (CONTRACT,)
    assert "next" in columns_of(empty, "job")
    assert older.write(lambda connection: "an older process works") == "an older process works"
    newer = Database(empty)
    register(newer, "newer", CONTRACT)
    assert migrate.blocking_processes(empty, contract=True) == ("older",)
    older.write(lambda c: process_registry.remove_dead_process(c, "older"))
    assert migrate.blocking_processes(empty, contract=True) == ()

    monkeypatch.setattr("amphora_driver.database.engine.SCHEMA_VALID_SECONDS", 0.0)
    noticed = []

    def wait(seconds):
        """Stand for the time in which each older process checks the schema again."""
        assert seconds > 10.0
        assert "next" in columns_of(empty, "job")
        with pytest.raises(SchemaMismatch, match=f"the contract migration {CONTRACT} has changed"):
            older.write(lambda connection: pytest.fail("an older process still works"))
        noticed.append(newer.write(lambda connection: "a newer process works"))

    monkeypatch.setattr(migrate, "time", SimpleNamespace(sleep=wait))
    assert migrate.upgrade(empty, contract=True) == migrate.Upgrade(before=EXPAND, after=CONTRACT)
    assert noticed == ["a newer process works"]
    assert "next" not in columns_of(empty, "job")
    assert newer.write(lambda connection: 1) == 1
    older.dispose()
    newer.dispose()


def start_at(url, revision):
    """Create a database of this revision."""
    engine = migrate._upgrade_engine(url)
    with engine.connect() as connection:
        command.upgrade(migrate.alembic_config(connection), revision)
        connection.commit()
    engine.dispose()


def older_version(revision):
    """Return the schema as a version knows it whose newest migration is this one."""
    folder = schema_check.DRIVER.migrations.with_name(f"until-{revision}")
    shutil.copytree(schema_check.DRIVER.migrations, folder)
    for file in folder.glob("versions/[0-9]*.py"):
        if file.name > f"{revision}~":
            file.unlink()
    return msgspec.structs.replace(schema_check.DRIVER, migrations=folder)


def register(database, name, revision):
    row = {"kind": "controller", "host": "here", "version": "1", "started_at": 1.0, "beat": 1, "jobs": 0}
    values = {"name": name, "seen_at": database.now() + 60, "draining": False, "schema_revision": revision, **row}
    database.write(lambda c: c.execute(process.insert().values(**values)))


@pytest.mark.parametrize("kind", ["sqlite"])
def test_an_expand_migration_after_an_omitted_contract_migration_is_refused(empty, migrations, monkeypatch):
    monkeypatch.setattr(migrate, "_NOTICE_SECONDS", 0.0)
    start_at(empty, EXPAND)
    write_migration(migrations, "expand_later", LATER, CONTRACT, "pass")
    schema_check._migrations.cache_clear()
    with pytest.raises(SchemaMismatch, match=f"the contract migration {CONTRACT} .* was not applied.*--contract"):
        migrate.upgrade(empty)
    assert migrate.upgrade(empty, contract=True).after == LATER


@pytest.mark.parametrize("kind", ["sqlite"])
def test_a_new_database_has_all_migrations_and_its_minimum(empty):
    assert migrate.upgrade(empty) == migrate.Upgrade(before="", after=CONTRACT)
    database = Database(empty)
    state = database.read(schema_check.read_state)
    assert (state.newest, state.minimum) == (CONTRACT, CONTRACT)
    database.dispose()


@pytest.mark.parametrize("kind", ["mariadb", "postgresql"])
def test_an_upgrade_does_not_wait_behind_a_long_transaction(empty, monkeypatch):
    """A backup holds the lock of a table: all later statements on it would wait behind the upgrade."""
    start_at(empty, LAST)
    monkeypatch.setattr(migrate, "_TABLE_LOCK_SECONDS", 1)
    monkeypatch.setattr(migrate, "_ATTEMPTS", 1)
    engine = migrate._upgrade_engine(empty)
    with engine.connect() as backup:
        backup.execute(sa.select(job)).all()
        with pytest.raises(StoreError, match=r"(?i)lock"):
            migrate.upgrade(empty)
        backup.rollback()
    engine.dispose()
    assert migrate.upgrade(empty).after == EXPAND


@pytest.mark.parametrize("kind", DATABASES)
@pytest.mark.parametrize("revision", ["0001", "head"])
def test_active_processes_are_found_in_every_schema(empty, revision):
    start_at(empty, revision if revision == "0001" else EXPAND)
    engine = migrate._upgrade_engine(empty)
    assert migrate.blocking_processes(empty) == ()
    if revision == "0001":
        held = sa.text("INSERT INTO duty (name, owner, epoch, leased_until) VALUES ('housekeeping', 'one', 1, 4e9)")
        with engine.begin() as connection:
            connection.execute(held)
        assert migrate.blocking_processes(empty) == ("one",), "processes of this schema do not know rolling upgrades"
    else:
        database = Database(empty, schema=older_version(EXPAND))
        database.write(lambda c: c.execute(job.insert().values(load_balancer_id="lb", op="apply", generation=1)))
        assert Jobs(database, "one", 60.0).claim() is not None
        assert acquire_duty(database, "housekeeping", "two", 60.0)
        register(database, "three", EXPAND)
        database.dispose()
        assert migrate.blocking_processes(empty, contract=True) == ("one", "three", "two")
        migrate.upgrade(empty)
    assert migrate.blocking_processes(empty) == (("one",) if revision == "0001" else ())
    engine.dispose()
