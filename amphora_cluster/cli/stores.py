# SPDX-License-Identifier: Apache-2.0
"""The configuration and the database of cluster membership, for the commands of amphoractl.

Invariant: the commands read the file of the service, not that of the driver, unless `--config-file` names another one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from oslo_config.cfg import ConfigOpts

from amphora_cluster import config
from amphora_cluster.database.groups import GroupStore
from amphora_cluster.database.requests import RequestStore
from amphora_cluster.database.tables import SCHEMA
from amphora_cluster.database.tokens import TokenStore
from amphora_driver.cli.command import argument
from amphora_driver.database.engine import Database, parse_url
from amphora_driver.database.vault import Vault
from amphora_driver.errors import ConfigurationError

GROUP = argument("group", metavar="GROUP", help="Name or id of the group, or a unique beginning of its id.")


class Stores:
    """The stores of the configured database. The vault is loaded at its first use."""

    def __init__(self, conf: ConfigOpts, database: Database) -> None:
        self.conf = conf
        self.database = database
        self.requests = RequestStore(database)

    @property
    def vault(self) -> Vault:
        """The vault; raises ConfigurationError if the key file is not usable."""
        return config.load_vault(self.conf)

    @property
    def groups(self) -> GroupStore:
        """The groups."""
        return GroupStore(self.database, self.vault)

    @property
    def tokens(self) -> TokenStore:
        """The tokens."""
        return TokenStore(self.database, self.vault)


def load_conf(app: Any) -> ConfigOpts:
    """Return the options; raises ConfigurationError if a file does not exist or is not valid."""
    return config.load(app.options.config_file)


@contextmanager
def opened(app: Any) -> Iterator[Stores]:
    """Open the database for a command, or raise ConfigurationError if the SQLite file does not exist."""
    conf = load_conf(app)
    url = conf.amp_cluster.connection
    found = parse_url(url, SCHEMA.option)
    path = found.database if found.get_backend_name() == "sqlite" else None
    if path is not None and not Path(path).exists():
        # SQLite would create the missing database file. A command that only reads must not create a file, so the
        # command ends with an error.
        raise ConfigurationError(
            "open the database",
            f"{path} does not exist",
            f"Check {SCHEMA.option}, or use --config-file. New database: {SCHEMA.command}.",
        )
    database = Database(url, schema=SCHEMA)
    try:
        yield Stores(conf, database)
    finally:
        database.dispose()
