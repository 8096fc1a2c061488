# SPDX-License-Identifier: Apache-2.0
"""The migrations end where tables.py says."""

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from amphora_driver.store import migrate
from amphora_driver.store.fleet_tables import metadata


def test_migrations_make_exactly_the_tables(database):
    with database.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []


def test_upgrading_again_changes_nothing(database):
    migrate.upgrade(database.url)
