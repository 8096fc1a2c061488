# SPDX-License-Identifier: Apache-2.0
"""Real databases of cluster membership: SQLite for all tests, and servers for statements that differ there."""

import os
import shutil
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import mariadb
import postgresql
import pytest

from amphora_cluster.credential import ApplicationCredential
from amphora_cluster.database.groups import GroupStore
from amphora_cluster.database.passes import PassStore
from amphora_cluster.database.requests import RequestStore
from amphora_cluster.database.tables import SCHEMA, metadata
from amphora_cluster.database.tokens import TokenStore
from amphora_cluster.model import Group, MemberTemplate, Selector, SelectorKind
from amphora_driver.database import migrate
from amphora_driver.database.engine import Database
from amphora_driver.database.vault import Vault
from amphora_driver.secret import Secret

KEY = b"c2l4dGVlbiBieXRlcy4uLnNpeHRlZW4gYnl0ZXMuLi4="
CREDENTIAL = ApplicationCredential(id="c1", secret=Secret(b"hush-hush"))


@lru_cache
def migrated():
    """The content of an empty SQLite database with the newest schema."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.sqlite"
        migrate.upgrade(f"sqlite:///{file}", SCHEMA)
        return file.read_bytes()


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


class Stores:
    """All stores of one database."""

    def __init__(self, database):
        self.database = database
        self.vault = Vault([KEY])
        self.groups = GroupStore(database, self.vault)
        self.requests = RequestStore(database)
        self.passes = PassStore(database)
        self.tokens = TokenStore(database, self.vault)

    def add(self, name="g1", **more):
        """Record a group whose id is its name; return it."""
        values = {
            "selector": Selector(kind=SelectorKind.METADATA, value="role=web"),
            "load_balancer_id": "lb",
            "pool_id": "pool",
            "member": MemberTemplate(ports=(80,)),
            "project_id": "p1",
        }
        group = Group(id=name, name=name, **{**values, **more})
        self.groups.create(group, CREDENTIAL)
        return group


@pytest.fixture
def make_stores():
    return Stores


@pytest.fixture
def credential():
    return CREDENTIAL
