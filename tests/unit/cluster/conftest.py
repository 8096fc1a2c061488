# SPDX-License-Identifier: Apache-2.0
"""Real databases of cluster membership: SQLite for all tests, and servers for statements that differ there."""

import os
import shutil

import mariadb
import postgresql
import pytest
from cluster_stores import CREDENTIAL, Stores, migrated

from amphora_cluster.database.tables import SCHEMA, metadata
from amphora_driver.database import migrate
from amphora_driver.database.engine import Database


@pytest.fixture(scope="session")
def cluster_mariadb():
    """A MariaDB database with the schema; all tests share one server."""
    if os.geteuid() != 0 or not (shutil.which("mariadbd") or shutil.which("mariadbd", path="/usr/sbin")):
        pytest.skip("needs root and mariadbd")
    with mariadb.server("cluster", "empty") as (url, empty):
        migrate.upgrade(url, SCHEMA)
        yield url, empty


@pytest.fixture(scope="session")
def cluster_postgresql():
    """A PostgreSQL database with the schema; all tests share one server."""
    if postgresql.missing():
        pytest.skip(postgresql.missing())
    with postgresql.server("cluster", "empty") as (url, empty):
        migrate.upgrade(url, SCHEMA)
        yield url, empty


@pytest.fixture
def sqlite_cluster(tmp_path):
    (tmp_path / "cluster.sqlite").write_bytes(migrated())
    database = Database(f"sqlite:///{tmp_path}/cluster.sqlite", schema=SCHEMA, durable=False)
    yield database
    database.dispose()


@pytest.fixture(params=["sqlite", "mariadb", "postgresql"])
def any_cluster(request):
    """Each supported database in turn, empty."""
    if request.param == "sqlite":
        yield request.getfixturevalue("sqlite_cluster")
        return
    database = Database(request.getfixturevalue(f"cluster_{request.param}")[0], schema=SCHEMA)
    yield database
    database.write(lambda c: [c.execute(table.delete()) for table in reversed(metadata.sorted_tables)])
    database.dispose()


@pytest.fixture
def make_stores():
    return Stores


@pytest.fixture
def credential():
    return CREDENTIAL
