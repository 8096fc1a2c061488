# SPDX-License-Identifier: Apache-2.0
"""Connections that are still counted of amphorae nobody hears any more.

Invariant: who is silent has no connections in the sum. While a process knows what it wrote itself, it takes that back
when its load balancer is heard again without that amphora (`statistics.ended`); this is for all that nobody remembers:
what a health manager wrote that was restarted since, or whose load balancer nobody speaks for. Slow to believe: an
amphora has to be silent, for this process and for all others (its place does not move), from one look to the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import sqlalchemy as sa

from amphora_driver.database.tables import amphora_seen, listener_statistics
from amphora_driver.health.statistics import Row

if TYPE_CHECKING:
    from collections.abc import Container

# Seconds between two looks, but for the first ones, which are as far apart as what was said is believed.
_EVERY = 60.0

_Place = tuple[int, int] | None
_OPEN = (
    sa.select(listener_statistics, amphora_seen.c.epoch, amphora_seen.c.sequence)
    .outerjoin(amphora_seen, amphora_seen.c.amphora_id == listener_statistics.c.amphora_id)
    .where(listener_statistics.c.active_connections > 0)
)


class Leftovers:
    """What was found at the last look; for one thread.

    Args:
        expiry: seconds after which what was said and not repeated is no longer believed.
    """

    def __init__(self, expiry: float) -> None:
        self._expiry = expiry
        self._next: float | None = None
        self._second = False
        self._silent: dict[str, _Place] = {}

    def due(self, now: float) -> bool:
        """Whether it is time for a look, on `time.monotonic()`'s clock; not before everybody could be heard."""
        if self._next is None:
            self._next = now + self._expiry
        return now >= self._next

    def among(self, connection: sa.Connection, heard: Container[str]) -> list[Row]:
        """Rows to be written, without connections: of those that were silent at this look and at the one before.

        To be followed by `looked`.

        Args:
            connection: a reading transaction's.
            heard: the amphorae this process hears.
        """
        rows = [row for row in connection.execute(_OPEN) if row.amphora_id not in heard]
        places: dict[str, _Place] = {
            row.amphora_id: None if row.epoch is None else (row.epoch, row.sequence) for row in rows
        }
        before, self._silent = self._silent, places
        return [
            Row(
                listener_id=row.listener_id,
                amphora_id=row.amphora_id,
                load_balancer_id=row.load_balancer_id,
                active_connections=0,
                bytes_in=row.bytes_in,
                bytes_out=row.bytes_out,
                request_errors=row.request_errors,
                total_connections=row.total_connections,
            )
            for row in rows
            if row.amphora_id in before and before[row.amphora_id] == places[row.amphora_id]
        ]

    def looked(self, now: float) -> None:
        """A look has ended, and what it found is written."""
        self._next = now + (max(_EVERY, self._expiry) if self._second else self._expiry)
        self._second = True
