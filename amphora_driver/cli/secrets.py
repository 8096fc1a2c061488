# SPDX-License-Identifier: Apache-2.0
"""Commands about the encrypted secrets in the database.

Invariant: the output names a key by its line in the file and its fingerprint. No command shows a key or a secret.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from cliff.lister import Lister
from cliff.show import ShowOne

from amphora_driver.database.vault import Vault
from amphora_driver.maintenance import reencryption


class SecretsStatus(Lister):
    """List the number of secrets per encryption key. A key without secrets can be removed from the file."""

    def take_action(self, parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]:
        """Return column names and rows."""
        vault = Vault.load(self.app.conf.amp_database.encryption_key_file)
        counts = reencryption.count_key_usage(self.app.database, vault)
        rows = (
            (
                one.column,
                _line_number(one.key),
                one.fingerprint,
                _describe_use(one.key),
                one.rows,
                one.misplaced,
            )
            for one in counts
        )
        return ("Column", "Line", "Key", "Use", "Secrets", "Misplaced"), rows


class ReencryptSecrets(ShowOne):
    """Encrypt every secret with the first key of the file. Safe while services run; can be repeated."""

    def take_action(self, parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """Return names and values."""
        vault = Vault.load(self.app.conf.amp_database.encryption_key_file)
        database = self.app.database
        done = reencryption.reencrypt(database, vault, self._print_progress)
        counts = reencryption.count_key_usage(database, vault)
        left = sum(one.rows for one in counts if one.key not in (0, None))
        lost = sum(one.rows for one in counts if one.key is None)
        # A process with an old copy of the key file can encrypt a secret meanwhile; another run finds it.
        names = ("Key", "Reencrypted", "Left with other keys", "Fit no key", "Misplaced")
        misplaced = sum(one.misplaced for one in counts)
        return names, (vault.fingerprints[0], done, left, lost, misplaced)

    def _print_progress(self, rows: int) -> None:
        self.app.stderr.write(f"{rows} done\n")


def _line_number(key: int | None) -> int | None:
    return None if key is None else key + 1


def _describe_use(key: int | None) -> str:
    if key is None:
        return "not in the file"
    return "opens" if key else "seals and opens"
