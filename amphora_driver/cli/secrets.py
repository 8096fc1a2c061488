# SPDX-License-Identifier: Apache-2.0
"""Commands about secrets at rest.

Invariant: keys are called by their place in the file and a fingerprint; neither a key nor what it seals is shown.
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
    """How many secrets are sealed with which key: only keys that seal nothing any more may go from the file."""

    def take_action(self, parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]:
        """Column names and rows."""
        vault = Vault.load(self.app.conf.store.encryption_key_file)
        counts = reencryption.count_key_usage(self.app.database, vault)
        rows = (
            (one.column, _place(one.key), one.fingerprint, _use(one.key), one.rows, one.unbound, one.misplaced)
            for one in counts
        )
        return ("Column", "Line", "Key", "Use", "Secrets", "Unbound", "Misplaced"), rows


class ResealSecrets(ShowOne):
    """Seal every secret with the first key of the file. May be ended and run again, while everything works."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Options."""
        parser: argparse.ArgumentParser = super().get_parser(prog_name)
        parser.add_argument(
            "--bind",
            action="store_true",
            help="also bind what an older version sealed to the rows it is in (once, after an upgrade)",
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """Names and values."""
        vault = Vault.load(self.app.conf.store.encryption_key_file)
        database = self.app.database
        done = reencryption.reencrypt(database, vault, self._tell, bind=parsed_args.bind)
        counts = reencryption.count_key_usage(database, vault)
        left = sum(one.rows for one in counts if one.key not in (0, None))
        lost = sum(one.rows for one in counts if one.key is None)
        # Some are left where a process that has not read the key file yet sealed one meanwhile: run it again.
        names = ("Key", "Resealed", "Left with other keys", "Fit no key", "Unbound", "Misplaced")
        unbound = sum(one.unbound for one in counts)
        misplaced = sum(one.misplaced for one in counts)
        return names, (vault.fingerprints[0], done, left, lost, unbound, misplaced)

    def _tell(self, rows: int) -> None:
        self.app.stderr.write(f"{rows} done\n")


def _place(key: int | None) -> int | None:
    return None if key is None else key + 1


def _use(key: int | None) -> str:
    if key is None:
        return "not in the file"
    return "opens" if key else "seals and opens"
