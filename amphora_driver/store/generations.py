# SPDX-License-Identifier: Apache-2.0
"""Generations that no user asked for.

Invariant: a load balancer takes the next generation without anybody being told: no object waits for it, and what
Octavia has committed counts as committed still.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import sqlalchemy as sa

from amphora_driver.store.tables import work

if TYPE_CHECKING:
    from typing import Any

_ALL_COMMITTED = work.c.committed >= work.c.generation
# In this order: MySQL and MariaDB assign from left to right, and go on with what was assigned.
_NEXT: list[tuple[Any, Any]] = [
    (work.c.committed, sa.case((_ALL_COMMITTED, work.c.generation + 1), else_=work.c.committed)),
    (work.c.generation, work.c.generation + 1),
]


def renew(connection: sa.Connection, load_balancer_id: str, generation: int) -> None:
    """Take the next generation, unless it was taken meanwhile."""
    connection.execute(
        work.update()
        .where(work.c.load_balancer_id == load_balancer_id, work.c.generation == generation)
        .ordered_values(*_NEXT)
    )


def begin_tickets(connection: sa.Connection, load_balancer_id: str, due: float) -> None:
    """Note that a load balancer has TLS ticket keys now, and when the next ones are due (seconds since 1970)."""
    connection.execute(
        work.update().where(work.c.load_balancer_id == load_balancer_id).values(tickets=1, tickets_due=due)
    )


def rotate_tickets(connection: sa.Connection, now: float, period: float, limit: int) -> int:
    """Have load balancers whose time has come take the next TLS ticket keys; returns how many.

    Those that something is being done to come next time.

    Args:
        connection: of `Database.write`.
        now: seconds since 1970.
        period: seconds until they are due again.
        limit: the most at once: each of them is pushed.
    """
    settled = (~work.c.dirty, work.c.owner.is_(None), work.c.op == "apply", work.c.applied >= work.c.generation)
    chosen = (
        connection.execute(
            sa.select(work.c.load_balancer_id)
            .where(work.c.tickets_due <= now, *settled)
            .order_by(work.c.tickets_due)
            .limit(limit)
        )
        .scalars()
        .all()
    )
    more: list[tuple[Any, Any]] = [
        (work.c.tickets, work.c.tickets + 1),
        (work.c.tickets_due, now + period),
        (work.c.dirty, True),
        (work.c.free_at, 0.0),
    ]
    return sum(
        connection.execute(
            work.update().where(work.c.load_balancer_id == one, *settled).ordered_values(*_NEXT, *more)
        ).rowcount
        for one in chosen
    )
