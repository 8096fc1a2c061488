# SPDX-License-Identifier: Apache-2.0
"""The schema of cluster membership: migrations equal the tables, and the database may be shared with the driver."""

import shutil

import msgspec
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from amphora_cluster.database.processes import ControllerRegistration
from amphora_cluster.database.tables import SCHEMA, group_row, metadata, process_row
from amphora_driver.database import migrate, schema_check
from amphora_driver.database.engine import Database
from amphora_driver.database.schema_check import SchemaState
from amphora_driver.errors import ConfigurationError, SchemaMismatch


@pytest.fixture(params=["sqlite", "mariadb", "postgresql"])
def empty(request, tmp_path):
    """The URL of a database without tables."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/empty.sqlite"
        return
    url = request.getfixturevalue(f"cluster_{request.param}")[1]
    yield url
    engine = sa.create_engine(url)
    found = sa.MetaData()
    found.reflect(engine)
    found.drop_all(engine)
    engine.dispose()


def test_the_migrations_make_the_tables(empty):
    newest = schema_check.known_revisions(SCHEMA)[-1]
    assert migrate.upgrade(empty, SCHEMA) == migrate.Upgrade(before="", after=newest)
    assert migrate.upgrade(empty, SCHEMA) == migrate.Upgrade(before=newest, after=newest)
    engine = sa.create_engine(empty)
    with engine.connect() as connection:
        options = {"compare_type": True, "version_table": SCHEMA.version_table}
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, metadata) == []
    engine.dispose()


def test_one_database_has_the_tables_of_both(empty):
    migrate.upgrade(empty, SCHEMA)
    other = Database(empty)
    with pytest.raises(SchemaMismatch, match="the database has no schema"):
        other.read(lambda _: None)
    other.dispose()
    migrate.upgrade(empty)
    for schema in (SCHEMA, schema_check.DRIVER):
        database = Database(empty, schema=schema)
        assert database.read(lambda connection, s=schema: schema_check.read_state(connection, s).revisions)
        assert schema_check.is_usable(database)
        database.dispose()
    both = set(metadata.tables) & set(schema_check.DRIVER.metadata.tables)
    assert both == set()


def test_errors_name_the_option_and_the_command(tmp_path):
    database = Database(f"sqlite:///{tmp_path}/cluster.sqlite", schema=SCHEMA)
    with pytest.raises(SchemaMismatch, match="Run: amphoractl group database upgrade"):
        database.read(lambda _: None)
    assert not schema_check.is_usable(database)
    with pytest.raises(ConfigurationError, match=r"Check \[amp_cluster\] connection"):
        Database("nonsense", schema=SCHEMA).read(lambda _: None)
    words = schema_check.describe_mismatch(SchemaState(revisions=("0001",)), SCHEMA)[1]
    assert words == "Stop the processes amphora-cluster and amphora-cluster-api and run: " + SCHEMA.command + "."


def test_an_upgrade_finds_controllers_of_another_version(empty):
    migrate.upgrade(empty, SCHEMA)
    database = Database(empty, schema=SCHEMA)
    values = {"name": "g", "project_id": "p", "body": "{}", "created_at": 0.0}

    def fill(connection):
        for name, until in (("live", database.now() + 60), ("dead", database.now() - 60)):
            row = {**values, "id": name, "name": name, "owner": name, "leased_until": until}
            connection.execute(group_row.insert().values(**row))

    database.write(fill)
    assert migrate.blocking_processes(empty, SCHEMA) == (), "these have the current schema"
    database.write(lambda c: c.execute(sa.text(f"UPDATE {SCHEMA.version_table} SET version_num = '0001'")))
    assert migrate.blocking_processes(empty, SCHEMA) == ("live",)
    database.dispose()


@pytest.fixture
def with_contract(tmp_path):
    """Return the schema with one contract migration more than this version."""
    folder, last = tmp_path / "migrations", schema_check.known_revisions(SCHEMA)[-1]
    shutil.copytree(SCHEMA.migrations, folder, ignore=shutil.ignore_patterns("__pycache__"))
    number = f"{int(last) + 1:04}"
    text = f'revision = "{number}"\ndown_revision = "{last}"\n\n\ndef upgrade():\n    pass\n'
    (folder / f"versions/{number}_contract_next.py").write_text(text)
    return msgspec.structs.replace(SCHEMA, migrations=folder)


def test_a_contract_migration_is_refused_while_an_older_controller_runs(empty, with_contract):
    migrate.upgrade(empty, SCHEMA)
    database = Database(empty, schema=SCHEMA)
    names = ("this", "ended", "next")
    controllers = {name: ControllerRegistration(database, name) for name in names}
    for _ in range(2):
        for one in controllers.values():
            one.heartbeat()
    controllers["ended"].deregister()
    is_next = process_row.c.name == "next"
    newest = schema_check.known_revisions(with_contract)[-1]

    def change(connection):
        connection.execute(process_row.update().where(is_next).values(revision=newest))
        row = {"project_id": "p", "body": "{}", "created_at": 0.0, "leased_until": database.now() + 60}
        # A controller of the first versions is in no registry. It and the controller of the next version have a lease.
        for name in ("next", "first"):
            connection.execute(group_row.insert().values(id=name, name=name, owner=name, **row))

    database.write(change)
    assert migrate.blocking_processes(empty, with_contract) == ()
    assert migrate.blocking_processes(empty, with_contract, contract=True) == ("first", "this")
    database.write(lambda c: c.execute(process_row.update().values(seen_at=database.now() - 10)))
    assert migrate.blocking_processes(empty, with_contract, contract=True) == ("first",)
    controllers["next"].purge()
    assert database.read(lambda c: c.execute(sa.select(sa.func.count()).select_from(process_row)).scalar()) == 2
    database.write(lambda c: c.execute(process_row.update().values(seen_at=database.now() - 4000)))
    controllers["next"].purge()
    assert database.read(lambda c: c.execute(sa.select(process_row.c.name)).all()) == []
    database.dispose()
