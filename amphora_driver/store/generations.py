# SPDX-License-Identifier: Apache-2.0
"""Generations that no user asked for.

Invariant: a load balancer takes the next generation without anybody being told: no object waits for it, and what
Octavia has committed counts as committed still.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import sqlalchemy as sa

from amphora_driver.database.tables import secret, work
from amphora_driver.model.secret_refs import Purpose

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

_ALL_COMMITTED = work.c.committed >= work.c.generation
# In this order: MySQL and MariaDB assign from left to right, and go on with what was assigned.
_INCREMENT: list[tuple[Any, Any]] = [
    (work.c.committed, sa.case((_ALL_COMMITTED, work.c.generation + 1), else_=work.c.committed)),
    (work.c.generation, work.c.generation + 1),
]
_SETTLED = (~work.c.dirty, work.c.owner.is_(None), work.c.op == "apply", work.c.applied >= work.c.generation)
# Which secret of a load balancer its TLS ticket keys are made from: see `model.secrets.tickets`.
_IS_TICKET_SECRET = (secret.c.purpose == Purpose.TICKETS.value, secret.c.ref == "")


def bump_generation(connection: sa.Connection, load_balancer_id: str, generation: int) -> None:
    """Take the next generation, unless it was taken meanwhile."""
    connection.execute(
        work.update()
        .where(work.c.load_balancer_id == load_balancer_id, work.c.generation == generation)
        .ordered_values(*_INCREMENT)
    )


def start_ticket_rotation(connection: sa.Connection, load_balancer_id: str, due: float) -> None:
    """Note that a load balancer has TLS ticket keys now, and when the next ones are due (seconds since 1970)."""
    connection.execute(
        work.update().where(work.c.load_balancer_id == load_balancer_id).values(tickets=1, tickets_due=due)
    )


class DueTickets(msgspec.Struct, frozen=True, kw_only=True):
    """A load balancer whose TLS ticket keys are to be rotated.

    Attributes:
        load_balancer_id: which one.
        number: how often they were made or rotated.
        sealed: what they are made from, as it is stored; None if nothing is.
    """

    load_balancer_id: str
    number: int
    sealed: bytes | None


def list_due_tickets(connection: sa.Connection, now: float, limit: int) -> tuple[DueTickets, ...]:
    """Load balancers whose TLS ticket keys are due, those that wait longest first.

    A load balancer that is being changed is left out until that has ended.

    Args:
        connection: of `Database.read`.
        now: seconds since 1970.
        limit: the most at once: each of them is pushed.
    """
    rows = connection.execute(
        sa.select(work.c.load_balancer_id, work.c.tickets, secret.c.sealed)
        .outerjoin(secret, sa.and_(secret.c.object_id == work.c.load_balancer_id, *_IS_TICKET_SECRET))
        .where(work.c.tickets_due <= now, *_SETTLED)
        .order_by(work.c.tickets_due)
        .limit(limit)
    )
    return tuple(DueTickets(load_balancer_id=row[0], number=row[1], sealed=row[2]) for row in rows)


def rotate_tickets(
    connection: sa.Connection, due: Iterable[tuple[DueTickets, bytes | None]], now: float, period: float
) -> int:
    """Replace what TLS ticket keys are made from, and have the load balancers pushed; returns how many.

    The transaction that counts the new keys overwrites the old state: no other copy of it is left in the table.

    Args:
        connection: of `Database.write`.
        due: what `list_due_tickets` returned, each with the sealed state that follows; None leaves the state as it is.
        now: seconds since 1970.
        period: seconds until they are due again.
    """
    more: list[tuple[Any, Any]] = [
        (work.c.tickets, work.c.tickets + 1),
        (work.c.tickets_due, now + period),
        (work.c.dirty, True),
        (work.c.free_at, 0.0),
    ]
    rotated = 0
    for one, following in due:
        unchanged = work.c.load_balancer_id == one.load_balancer_id, work.c.tickets == one.number
        # A change between reading and writing may have made new keys, which are due later.
        query = work.update().where(*unchanged, work.c.tickets_due <= now, *_SETTLED)
        if connection.execute(query.ordered_values(*_INCREMENT, *more)).rowcount:
            rotated += 1
            if following is not None:
                kept = secret.update().where(secret.c.object_id == one.load_balancer_id, *_IS_TICKET_SECRET)
                connection.execute(kept.values(sealed=following))
    return rotated
