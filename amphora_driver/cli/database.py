# SPDX-License-Identifier: Apache-2.0
"""Commands about the database's schema.

Invariant: `database status` works with every schema and without one. Only `database upgrade` changes the schema.
"""

from __future__ import annotations

import argparse
from typing import Any

from amphora_driver.cli.command import ShowOne, argument
from amphora_driver.database import migrate, schema_check
from amphora_driver.errors import StoreError


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
