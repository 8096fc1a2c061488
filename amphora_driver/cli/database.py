# SPDX-License-Identifier: Apache-2.0
"""Commands about the database's schema and the encrypted secrets in the database.

Invariant: `database status` works with every schema and without one. Only `database upgrade` changes the schema. No
command shows a key or a secret: the output names a key by its line in the file and its fingerprint.
"""

from __future__ import annotations

import argparse
from typing import Any

from amphora_driver.cli.command import Lister, ShowOne, Table, argument
from amphora_driver.database import migrate, schema_check
from amphora_driver.database.vault import Vault
from amphora_driver.errors import StoreError
from amphora_driver.maintenance import reencryption


class DatabaseStatus(ShowOne):
    """Show the schema of the database, and whether this version can use it."""

    def values(self, parsed_args: argparse.Namespace) -> dict[str, Any]:
        found = self.app.recorded_schema()
        wrong = schema_check.describe_mismatch(found)
        happened, remedy = wrong or ("", "")
        return {
            "Schema": " ".join(found),
            "Wanted": schema_check.known_revisions()[-1],
            "Fits": wrong is None,
            "Reason": happened,
            "What to do": remedy,
        }


class UpgradeDatabase(ShowOne):
    """Create the database schema, or upgrade it to this version.

    An interrupted upgrade can be repeated. The command is refused while processes of another version use the database,
    because they do not know the new schema.
    """

    arguments = (
        argument(
            "--force",
            action="store_true",
            help="Upgrade even if processes seem to use the database. Use it only if none of them runs.",
        ),
    )

    def values(self, parsed_args: argparse.Namespace) -> dict[str, Any]:
        url = self.app.conf.amp_database.connection
        if not parsed_args.force and (names := migrate.active_processes(url)):
            raise StoreError(
                "upgrade the database",
                f"these processes use it: {', '.join(names)}",
                "Stop the controllers, health managers and octavia-driver-agent on every host. A crashed process is "
                "listed for a minute; if none of these runs, use --force.",
            )
        done = migrate.upgrade(url)
        return {"Before": done.before, "After": done.after}


class SecretsStatus(Lister):
    """List the number of secrets per encryption key. A key without secrets can be removed from the file."""

    def take_action(self, parsed_args: argparse.Namespace) -> Table:
        vault = Vault.load(self.app.conf.amp_database.encryption_key_file)
        counts = reencryption.count_key_usage(self.app.database, vault)
        return ("Column", "Line", "Key", "Use", "Secrets", "Misplaced"), (
            (one.column, *_describe_key(one.key, one.fingerprint), one.rows, one.misplaced) for one in counts
        )


class ReencryptSecrets(ShowOne):
    """Encrypt every secret with the first key of the file. Services can run; the command can be repeated."""

    def values(self, parsed_args: argparse.Namespace) -> dict[str, Any]:
        vault = Vault.load(self.app.conf.amp_database.encryption_key_file)
        database = self.app.database
        done = reencryption.reencrypt(database, vault, lambda rows: self.app.stderr.write(f"{rows} done\n"))
        counts = reencryption.count_key_usage(database, vault)
        # A running process may still use an old key file and encrypt a secret with an old key. A second run of this
        # command finds such a secret.
        return {
            "Key": vault.fingerprints[0],
            "Reencrypted": done,
            "Left with other keys": sum(one.rows for one in counts if one.key not in (0, None)),
            "Fit no key": sum(one.rows for one in counts if one.key is None),
            "Misplaced": sum(one.misplaced for one in counts),
        }


def _describe_key(key: int | None, fingerprint: str) -> tuple[int | None, str, str]:
    """Return line, fingerprint and use of a key; the place None means that the file has no such key."""
    if key is None:
        return None, fingerprint, "not in the file"
    return key + 1, fingerprint, "opens" if key else "seals and opens"
