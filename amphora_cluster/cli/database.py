# SPDX-License-Identifier: Apache-2.0
"""Commands about the database of cluster membership: its schema, and the encryption of its secrets."""

from __future__ import annotations

import argparse
from typing import Any

from sqlalchemy.exc import DBAPIError

from amphora_cluster.cli.stores import load_conf, opened
from amphora_cluster.database.reencryption import reencrypt
from amphora_cluster.database.tables import SCHEMA
from amphora_driver.cli.command import ShowOne, argument
from amphora_driver.database import migrate, schema_check
from amphora_driver.errors import StoreError


class DatabaseStatus(ShowOne):
    """Show the schema of the database of groups, and whether this version can use it."""

    def values(self, parsed_args: argparse.Namespace) -> dict[str, Any]:
        """Return the schema."""
        with opened(self.app) as stores:
            try:
                with stores.database.engine.connect().execution_options(amphora_read_only=True) as connection:
                    found = schema_check.read_revisions(connection, SCHEMA)
            except DBAPIError as error:
                raise StoreError("read from the database", str(error.orig or error)) from error
        wrong = schema_check.describe_mismatch(found, SCHEMA)
        happened, remedy = wrong or ("", "")
        return {
            "Schema": " ".join(found),
            "Wanted": schema_check.known_revisions(SCHEMA)[-1],
            "Fits": wrong is None,
            "Reason": happened,
            "What to do": remedy,
        }


class UpgradeDatabase(ShowOne):
    """Create the schema of the database of groups, or upgrade it to this version.

    An interrupted upgrade can be repeated. The command is refused while controllers of another version use it.
    """

    arguments = (
        argument(
            "--force",
            action="store_true",
            help="Upgrade even if processes seem to use the database. Use it only if none of them runs.",
        ),
    )

    def values(self, parsed_args: argparse.Namespace) -> dict[str, Any]:
        """Upgrade the schema."""
        url = load_conf(self.app).amp_cluster.connection
        if not parsed_args.force and (names := migrate.active_processes(url, SCHEMA)):
            raise StoreError(
                "upgrade the database",
                f"these processes use it: {', '.join(names)}",
                f"Stop {SCHEMA.users} on every host. The lease of a crashed process expires after some seconds.",
            )
        done = migrate.upgrade(url, SCHEMA)
        return {"Before": done.before, "After": done.after}


class ReencryptSecrets(ShowOne):
    """Encrypt credentials and digests of tokens with the first key of the key file.

    Run it before an old key is removed from the file.
    """

    def values(self, parsed_args: argparse.Namespace) -> dict[str, Any]:
        """Encrypt the secrets again; return their numbers."""
        with opened(self.app) as stores:
            found = reencrypt(stores.database, stores.vault)
        return {"Encrypted again": found.changed, "Already encrypted": found.current, "Unreadable": found.unreadable}
