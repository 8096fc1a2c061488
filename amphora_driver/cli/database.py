# SPDX-License-Identifier: Apache-2.0
"""Commands about the database's schema and the encrypted secrets in the database.

Invariant: `database status` works with every schema and without one. Only `database upgrade` changes the schema. No
command shows a key or a secret: the output names a key by its line in the file and its fingerprint.
"""

from __future__ import annotations

import argparse
from typing import Any

from amphora_driver.cli.command import UPGRADE_ARGUMENTS, Lister, ShowOne, Table
from amphora_driver.database.operations import schema_values, upgrade_values
from amphora_driver.database.vault import Vault
from amphora_driver.maintenance import reencryption


class DatabaseStatus(ShowOne):
    """Show the schema of the database, and whether this version can use it."""

    def values(self, parsed_args: argparse.Namespace) -> dict[str, Any]:
        return schema_values(self.app.recorded_schema())


class UpgradeDatabase(ShowOne):
    """Create the database schema, or upgrade it to this version.

    Processes of the previous version continue to work. Run `--contract` when all processes have this version. An
    interrupted upgrade can be repeated.
    """

    arguments = UPGRADE_ARGUMENTS

    def values(self, parsed_args: argparse.Namespace) -> dict[str, Any]:
        url = self.app.conf.amp_database.connection
        return upgrade_values(url, contract=parsed_args.contract, force=parsed_args.force)


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
        # A process that has not read the new key file yet may still encrypt secrets with an old key. The output counts
        # such secrets, and another run re-encrypts them.
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
