# SPDX-License-Identifier: Apache-2.0
"""The migrations produce the schema of tables.py."""

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from amphora_driver.database import migrate, schema_check
from amphora_driver.database.engine import Database
from amphora_driver.database.tables_fleet import metadata


def test_the_migrations_produce_exactly_the_tables(any_database):
    with any_database.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []


def test_a_mariadb_without_full_unicode_is_refused_at_the_start(mariadb_url, caplog):
    database = Database(mariadb_url)
    assert schema_check.is_usable(database)
    with database.engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE orphan CONVERT TO CHARACTER SET utf8mb3")
    try:
        assert not schema_check.is_usable(database)
        assert "the tables orphan are not in utf8mb4. Run for each of them: ALTER TABLE" in caplog.text
    finally:
        with database.engine.begin() as connection:
            connection.exec_driver_sql("ALTER TABLE orphan CONVERT TO CHARACTER SET utf8mb4")
    assert schema_check.is_usable(database)
    database.dispose()


def test_the_other_databases_support_full_unicode(database, postgresql_url):
    assert schema_check.is_usable(database)
    assert schema_check.is_usable(Database(postgresql_url))


def test_a_second_upgrade_changes_nothing(database):
    migrate.upgrade(database.url)
