# SPDX-License-Identifier: Apache-2.0
"""Listener statistics for Octavia.

Invariant: totals include every amphora that ever served the listener, also deleted ones, so they never decrease.
Active connections include existing amphorae only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import sqlalchemy as sa

from amphora_driver.database.tables import amphora, job, listener_statistics

if TYPE_CHECKING:
    from collections.abc import Sequence


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
        return {
            "id": self.listener_id,
            "active_connections": self.active_connections,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "request_errors": self.request_errors,
            "total_connections": self.total_connections,
        }


def list_due_totals(connection: sa.Connection, limit: int) -> list[ListenerTotals]:
    """Return the totals that Octavia has not received in their newest version."""
    table = listener_statistics
    changed = (
        connection.execute(
            sa.select(table.c.listener_id)
            .join(job, job.c.load_balancer_id == table.c.load_balancer_id)
            .where(table.c.version > table.c.reported, job.c.committed > 0)
            .distinct()
            .limit(limit)
        )
        .scalars()
        .all()
    )
    if not changed:
        return []
    rows = connection.execute(
        sa.select(
            table.c.listener_id,
            sa.func.sum(sa.case((amphora.c.id.is_(None), 0), else_=table.c.active_connections)).label("active"),
            sa.func.sum(table.c.bytes_in).label("bytes_in"),
            sa.func.sum(table.c.bytes_out).label("bytes_out"),
            sa.func.sum(table.c.request_errors).label("errors"),
            sa.func.sum(table.c.total_connections).label("total"),
            sa.func.sum(table.c.version).label("version"),
        )
        .outerjoin(amphora, amphora.c.id == table.c.amphora_id)
        .where(table.c.listener_id.in_(changed))
        .group_by(table.c.listener_id)
    )
    return [
        ListenerTotals(
            listener_id=row.listener_id,
            active_connections=int(row.active),
            bytes_in=int(row.bytes_in),
            bytes_out=int(row.bytes_out),
            request_errors=int(row.errors),
            total_connections=int(row.total),
            version=int(row.version),
        )
        for row in rows
    ]


def mark_totals_reported(connection: sa.Connection, totals: Sequence[ListenerTotals]) -> None:
    """Record that Octavia has received totals. A listener with newer counters stays due."""
    table = listener_statistics
    for one in totals:
        now = connection.execute(
            sa.select(sa.func.sum(table.c.version)).where(table.c.listener_id == one.listener_id)
        ).scalar()
        if now is not None and int(now) == one.version:
            connection.execute(
                table.update().where(table.c.listener_id == one.listener_id).values(reported=table.c.version)
            )
