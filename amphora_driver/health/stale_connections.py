# SPDX-License-Identifier: Apache-2.0
"""Finds connection counts in the database of amphorae that no longer send heartbeats.

Invariant: a silent amphora contributes no open connections to a sum. A process that wrote the rows itself corrects them
with `statistics.closed_connections`. This module corrects the other rows: a restarted health manager wrote them, or no
amphora of the load balancer sends heartbeats. An amphora counts as silent if this process did not hear it and its
recorded heartbeat order did not change between two scans.
"""

from __future__ import annotations

from collections.abc import Container

import sqlalchemy as sa

from amphora_driver.database.tables import amphora_heartbeat, listener_statistics
from amphora_driver.health.statistics import Row

# Minimum seconds between two searches for silent amphorae whose rows still have open connections.
_SCAN_INTERVAL = 60.0

_Order = tuple[int, int] | None
_ROWS_WITH_CONNECTIONS = (
    sa.select(*(listener_statistics.c[name] for name in Row.__struct_fields__))
    .add_columns(amphora_heartbeat.c.epoch, amphora_heartbeat.c.sequence)
    .outerjoin(amphora_heartbeat, amphora_heartbeat.c.amphora_id == listener_statistics.c.amphora_id)
    .where(listener_statistics.c.active_connections > 0)
)


class StaleConnections:
    """The silent amphorae of the last scan. Reported values expire after `expiry` seconds."""

    def __init__(self, expiry: float) -> None:
        self._expiry = expiry
        self._next_scan: float | None = None
        self._scanned_before = False
        self._silent: dict[str, _Order] = {}

    def is_due(self, now: float) -> bool:
        """Return whether to scan now (time of `time.monotonic()`). The first scan waits one expiry time."""
        if self._next_scan is None:
            self._next_scan = now + self._expiry
        return now >= self._next_scan

    def find_rows(self, connection: sa.Connection, now: float, heard: Container[str]) -> list[Row]:
        """Return corrected rows without connections, of amphorae silent in this scan and the previous one.

        The amphorae in `heard` have unexpired heartbeats here. `now` is in seconds since 1970. Call `record_scan` after
        the write of the rows.
        """
        # The query omits amphorae with a recent heartbeat. A fleet has tens of thousands of such rows, and to read them
        # would stop the writes of heartbeats for seconds. A time of more than `_expiry` in the future is not recent,
        # because it comes from a wrong clock.
        recent = amphora_heartbeat.c.seen_at.between(now - self._expiry / 2, now + self._expiry)
        query = _ROWS_WITH_CONNECTIONS.where(sa.or_(amphora_heartbeat.c.seen_at.is_(None), ~recent))
        rows = [row for row in connection.execute(query) if row.amphora_id not in heard]
        orders: dict[str, _Order] = {
            row.amphora_id: None if row.epoch is None else (row.epoch, row.sequence) for row in rows
        }
        before, self._silent = self._silent, orders
        return [
            Row(**{name: getattr(row, name) for name in Row.__struct_fields__} | {"active_connections": 0})
            for row in rows
            if row.amphora_id in before and before[row.amphora_id] == orders[row.amphora_id]
        ]

    def record_scan(self, now: float) -> None:
        self._next_scan = now + (max(_SCAN_INTERVAL, self._expiry) if self._scanned_before else self._expiry)
        self._scanned_before = True
