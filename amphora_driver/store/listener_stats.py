# SPDX-License-Identifier: Apache-2.0
"""Listener statistics for Octavia.

Invariant: totals include every amphora that ever served the listener, also deleted ones, so they never decrease.
Active connections include existing amphorae only.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import sqlalchemy as sa

from amphora_driver.database.tables import amphora, job, listener_statistics

_COUNTERS = ("active_connections", "bytes_in", "bytes_out", "request_errors", "total_connections")


class ListenerTotals(msgspec.Struct, frozen=True, kw_only=True):
    """A listener's totals; `version`, the sum of its rows' versions, grows with every change."""

    listener_id: str
    active_connections: int
    bytes_in: int
    bytes_out: int
    request_errors: int
    total_connections: int
    version: int

    def to_octavia(self) -> dict[str, int | str]:
        """Return the document for octavia_lib's statistics interface: all six keys, absolute values."""
        return {"id": self.listener_id, **{name: getattr(self, name) for name in _COUNTERS}}


def list_due_totals(connection: sa.Connection, limit: int) -> list[ListenerTotals]:
    """Return the totals that Octavia has not received in their newest version."""
    table = listener_statistics
    changed = (
        sa.select(table.c.listener_id)
        .join(job, job.c.load_balancer_id == table.c.load_balancer_id)
        .where(table.c.version > table.c.reported, job.c.committed > 0)
    )
    listener_ids = connection.execute(changed.distinct().limit(limit)).scalars().all()
    if not listener_ids:
        return []
    counters: dict[str, sa.ColumnElement[int]] = {name: table.c[name] for name in (*_COUNTERS, "version")}
    # The row of a deleted amphora keeps its last number of active connections, which must not count.
    counters["active_connections"] = sa.case((amphora.c.id.is_(None), 0), else_=table.c.active_connections)
    rows = connection.execute(
        sa.select(table.c.listener_id, *(sa.func.sum(column).label(name) for name, column in counters.items()))
        .outerjoin(amphora, amphora.c.id == table.c.amphora_id)
        .where(table.c.listener_id.in_(listener_ids))
        .group_by(table.c.listener_id)
    )
    # MariaDB and PostgreSQL return sums as Decimal, so they are converted.
    return [
        ListenerTotals(listener_id=row.listener_id, **{name: int(getattr(row, name)) for name in counters})
        for row in rows
    ]


def mark_totals_reported(connection: sa.Connection, totals: Sequence[ListenerTotals]) -> None:
    """Record that Octavia has received totals. A listener with newer counters stays due."""
    table = listener_statistics
    for one in totals:
        mine = table.c.listener_id == one.listener_id
        now = connection.execute(sa.select(sa.func.sum(table.c.version)).where(mine)).scalar()
        if now is not None and int(now) == one.version:
            connection.execute(table.update().where(mine).values(reported=table.c.version))
