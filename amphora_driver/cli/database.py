# SPDX-License-Identifier: Apache-2.0
"""Commands about the database's schema.

Invariant: `status` works with every schema, or none; only `upgrade` changes one.
"""

from __future__ import annotations

import argparse
from typing import Any

from cliff.show import ShowOne

from amphora_driver.database import migrate, schema_check
from amphora_driver.errors import StoreError

# The first schema whose versions bind sealed values to their rows.
_BOUND_SINCE = "0004"


class DatabaseStatus(ShowOne):
    """Where the database's schema stands, and whether this version works with it."""

    def take_action(self, parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """Names and values."""
        found = self.app.recorded_schema()
        wrong = schema_check.describe_mismatch(found)
        happened, remedy = wrong or ("", "")
        names = ("Schema", "Wanted", "Fits", "Reason", "What to do")
        return names, (" ".join(found), schema_check.known_revisions()[-1], wrong is None, happened, remedy)


class UpgradeDatabase(ShowOne):
    """Bring the database to the schema of this version; makes it where there is none. May be ended and run again.

    Refused while processes work with another schema: they would go on as before, beside what the new one brings.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Options."""
        parser: argparse.ArgumentParser = super().get_parser(prog_name)
        parser.add_argument("--force", action="store_true", help="also while somebody seems to work, who does not")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """Names and values.

        Raises:
            StoreError: somebody works with it, or the database said no.
        """
        if not parsed_args.force:
            _nobody_works(migrate.active_processes(self.app.conf.store.connection))
        done = migrate.upgrade(self.app.conf.store.connection)
        if done.before and done.before < _BOUND_SINCE:
            command = "amphoractl secrets reseal --bind (docs/explanation/secrets.md)"
            self.app.stderr.write(f"Run before the services start: {command}\n")
        return ("Before", "After"), (done.before, done.after)


def _nobody_works(names: tuple[str, ...]) -> None:
    """Refuse to go on while somebody works."""
    if names:
        raise StoreError(
            "upgrade the database",
            f"these processes work with it: {', '.join(names)}",
            "Stop controllers, health managers and octavia-driver-agent, of every version, on every host. One that "
            "died counts for a minute; if you know that none of these lives: --force.",
        )
