# SPDX-License-Identifier: Apache-2.0
"""The stores of one database, and an empty SQLite database with the newest schema."""

from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

from amphora_cluster.credential import ApplicationCredential
from amphora_cluster.database.groups import GroupStore
from amphora_cluster.database.passes import PassStore
from amphora_cluster.database.requests import RequestStore
from amphora_cluster.database.tables import SCHEMA
from amphora_cluster.database.tokens import TokenStore
from amphora_cluster.model import Group, MemberTemplate, Selector, SelectorKind
from amphora_driver.database import migrate
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


class Stores:
    """All stores of one database."""

    def __init__(self, database, key=KEY):
        self.database = database
        self.vault = Vault([key])
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
