# SPDX-License-Identifier: Apache-2.0
"""Registry of controllers: each controller updates its own row.

Invariant: a row is a heartbeat, never a lease. `migrate.blocking_processes` reads the rows: a contract migration is
refused while a controller runs that does not know it.
"""

from __future__ import annotations

import sqlalchemy as sa

from amphora_cluster.database.tables import SCHEMA, process_row
from amphora_driver.database import clock, schema_check
from amphora_driver.database.engine import Database

# Each controller writes a heartbeat every HEARTBEAT_INTERVAL seconds. The row of a controller is deleted after
# _PURGED_AFTER seconds without a heartbeat.
HEARTBEAT_INTERVAL = 2.0
_PURGED_AFTER = 3600.0


class ControllerRegistration:
    """The registry row of this controller; `name` is its `process_name()`."""

    def __init__(self, database: Database, name: str) -> None:
        self._database = database
        self._is_own = process_row.c.name == name
        self._row = {"name": name, "revision": schema_check.known_revisions(SCHEMA)[-1]}

    def heartbeat(self) -> None:
        """Update the row of this controller, or insert it."""

        def write(connection: sa.Connection) -> None:
            now = clock.now(connection)
            if not connection.execute(process_row.update().where(self._is_own).values(seen_at=now)).rowcount:
                connection.execute(process_row.insert().values(**self._row, seen_at=now))

        self._database.write(write)

    def deregister(self) -> None:
        """Delete the row, because the controller ends."""
        self._database.write(lambda connection: connection.execute(process_row.delete().where(self._is_own)))

    def purge(self) -> None:
        """Delete the rows of controllers without a recent heartbeat."""

        def write(connection: sa.Connection) -> None:
            old = process_row.c.seen_at < clock.now(connection) - _PURGED_AFTER
            connection.execute(process_row.delete().where(old))

        self._database.write(write)
