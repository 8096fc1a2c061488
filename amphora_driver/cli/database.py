# SPDX-License-Identifier: Apache-2.0
"""Commands about the database's schema.

Invariant: `database status` works with every schema and without one. Only `database upgrade` changes the schema.
"""

from __future__ import annotations

import argparse
from typing import Any

from cliff.show import ShowOne

from amphora_driver.database import migrate, schema_check
from amphora_driver.errors import StoreError


class DatabaseStatus(ShowOne):
    """Show the schema of the database, and whether this version can use it."""

    def take_action(self, parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """Return names and values."""
        found = self.app.recorded_schema()
        wrong = schema_check.describe_mismatch(found)
        happened, remedy = wrong or ("", "")
        names = ("Schema", "Wanted", "Fits", "Reason", "What to do")
        return names, (" ".join(found), schema_check.known_revisions()[-1], wrong is None, happened, remedy)


class UpgradeDatabase(ShowOne):
    """Create the database schema, or upgrade it to this version. Can be interrupted and repeated.

    The command is refused while processes of another version use the database: they do not know the new schema.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the arguments."""
        parser: argparse.ArgumentParser = super().get_parser(prog_name)
        parser.add_argument(
            "--force",
            action="store_true",
            help="Upgrade even if processes seem to use the database. Use it only if none of them runs.",
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """Return names and values.

        Raises:
            StoreError: processes use the database, or the database refused a statement.
        """
        if not parsed_args.force:
            _refuse_if_in_use(migrate.active_processes(self.app.conf.amp_database.connection))
        done = migrate.upgrade(self.app.conf.amp_database.connection)
        return ("Before", "After"), (done.before, done.after)


def _refuse_if_in_use(names: tuple[str, ...]) -> None:
    """Raise StoreError if processes use the database."""
    if names:
        raise StoreError(
            "upgrade the database",
            f"these processes use it: {', '.join(names)}",
            "Stop the controllers, health managers and octavia-driver-agent on every host. A crashed process is listed "
            "for a minute; if none of these runs, use --force.",
        )
