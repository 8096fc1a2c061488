# SPDX-License-Identifier: Apache-2.0
"""Real databases with the real schema: SQLite for all tests, and servers for statements that differ there."""

import itertools
import os
import shutil

import mariadb
import migrated
import postgresql
import pytest
import sqlalchemy as sa

from amphora_driver.database import migrate
from amphora_driver.database.engine import Database
from amphora_driver.database.tables_fleet import metadata

_numbers = itertools.count()


@pytest.fixture(scope="session")
def mariadb_url():
    """A MariaDB database with the schema; all tests share one server."""
    if os.geteuid() != 0 or not (shutil.which("mariadbd") or shutil.which("mariadbd", path="/usr/sbin")):
        pytest.skip("needs root and mariadbd")
    with mariadb.server("store") as (url,):
        migrate.upgrade(url)
        yield url


@pytest.fixture(scope="session")
def postgresql_url():
    """A PostgreSQL database with the schema; all tests share one server."""
    if postgresql.missing():
        pytest.skip(postgresql.missing())
    with postgresql.server("store") as (url,):
        migrate.upgrade(url)
        yield url


@pytest.fixture
def sqlite_database(tmp_path):
    url = f"sqlite:///{tmp_path}/driver.sqlite"
    migrated.write(url)
    database = Database(url)
    yield database
    database.dispose()


@pytest.fixture
def database(sqlite_database):
    return sqlite_database


@pytest.fixture(params=["sqlite", "mariadb", "postgresql"])
def any_database(request):
    """Each supported database in turn, empty."""
    if request.param == "sqlite":
        yield request.getfixturevalue("sqlite_database")
        return
    database = Database(request.getfixturevalue(f"{request.param}_url"))
    yield database
    database.write(
        lambda connection: [connection.execute(table.delete()) for table in reversed(metadata.sorted_tables)]
    )
    database.dispose()


@pytest.fixture
def empty(kind, request, tmp_path):
    """The URL of an empty database; on servers it is separate from that of the other tests."""
    if kind == "sqlite":
        yield f"sqlite:///{tmp_path}/driver.sqlite"
        return
    url = sa.make_url(request.getfixturevalue(f"{kind}_url"))
    name = f"upgrade{next(_numbers)}"
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with engine.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    yield url.set(database=name).render_as_string(hide_password=False)
    with engine.connect() as connection:
        connection.exec_driver_sql(f"DROP DATABASE {name}")
