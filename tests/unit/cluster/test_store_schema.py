# SPDX-License-Identifier: Apache-2.0
"""The schema of cluster membership: migrations equal the tables, and the database may be shared with the driver."""

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from amphora_cluster.database.tables import SCHEMA, group_row, metadata
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
