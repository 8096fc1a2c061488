# SPDX-License-Identifier: Apache-2.0
"""Commands about the database's schema.

Invariant: `status` works with every schema, or none; only `upgrade` changes one.
"""

from __future__ import annotations

import argparse
from typing import Any

from cliff.show import ShowOne

from amphora_driver.store import migrate, schema


class DatabaseStatus(ShowOne):
    """Where the database's schema stands, and whether this version works with it."""

    def take_action(self, parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """Names and values."""
        found = self.app.recorded_schema()
        wrong = schema.mismatch(found)
        happened, remedy = wrong or ("", "")
        names = ("Schema", "Wanted", "Fits", "Reason", "What to do")
        return names, (" ".join(found), schema.revisions()[-1], wrong is None, happened, remedy)


class UpgradeDatabase(ShowOne):
    """Bring the database to the schema of this version; makes it where there is none. May be ended and run again."""

    def take_action(self, parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """Names and values."""
        done = migrate.upgrade(self.app.conf.store.connection)
        return ("Before", "After"), (done.before, done.after)
