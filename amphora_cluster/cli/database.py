# SPDX-License-Identifier: Apache-2.0
"""Commands about the database of cluster membership: its schema, and the encryption of its secrets."""

from __future__ import annotations

import argparse
from typing import Any

from sqlalchemy.exc import DBAPIError

from amphora_cluster.cli.stores import load_conf, opened
from amphora_cluster.database.reencryption import reencrypt
from amphora_cluster.database.tables import SCHEMA
from amphora_driver.cli.command import UPGRADE_ARGUMENTS, ShowOne
from amphora_driver.database import schema_check
from amphora_driver.database.operations import schema_values, upgrade_values
from amphora_driver.errors import StoreError


class DatabaseStatus(ShowOne):
    """Show the schema of the database of groups, and whether this version can use it."""

    def values(self, parsed_args: argparse.Namespace) -> dict[str, Any]:
        """Return the schema."""
        with opened(self.app) as stores:
            try:
                with stores.database.engine.connect().execution_options(amphora_read_only=True) as connection:
                    state = schema_check.read_state(connection, SCHEMA)
            except DBAPIError as error:
                raise StoreError("read from the database", str(error.orig or error)) from error
        return schema_values(state, SCHEMA)


class UpgradeDatabase(ShowOne):
    """Create the schema of the database of groups, or upgrade it to this version.

    Processes of the previous version continue to work. Run `--contract` when all processes have this version. An
    interrupted upgrade can be repeated.
    """

    arguments = UPGRADE_ARGUMENTS

    def values(self, parsed_args: argparse.Namespace) -> dict[str, Any]:
        """Upgrade the schema."""
        url = load_conf(self.app).amp_cluster.connection
        return upgrade_values(url, SCHEMA, contract=parsed_args.contract, force=parsed_args.force)


class ReencryptSecrets(ShowOne):
    """Encrypt credentials and digests of tokens with the first key of the key file.

    Run it before an old key is removed from the file.
    """

    def values(self, parsed_args: argparse.Namespace) -> dict[str, Any]:
        """Encrypt the secrets again; return their numbers."""
        with opened(self.app) as stores:
            found = reencrypt(stores.database, stores.vault)
        return {"Encrypted again": found.changed, "Already encrypted": found.current, "Unreadable": found.unreadable}
