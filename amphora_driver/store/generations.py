# SPDX-License-Identifier: Apache-2.0
"""Generations without a user's request, and the rotation of TLS ticket keys.

Invariant: no object waits for such a generation, and Octavia's commit state does not change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import sqlalchemy as sa

from amphora_driver.database.tables import job, secret
from amphora_driver.model.secret_refs import Purpose

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

_ALL_COMMITTED = job.c.committed >= job.c.generation
# The order matters: MySQL and MariaDB assign from left to right and use the new values.
_INCREMENT: list[tuple[Any, Any]] = [
    (job.c.committed, sa.case((_ALL_COMMITTED, job.c.generation + 1), else_=job.c.committed)),
    (job.c.generation, job.c.generation + 1),
]
_SETTLED = (~job.c.dirty, job.c.owner.is_(None), job.c.op == "apply", job.c.applied >= job.c.generation)
# The secret from which TLS ticket keys are derived: see `secret_refs.ticket_secret_name`.
_IS_TICKET_SECRET = (secret.c.purpose == Purpose.TICKETS.value, secret.c.ref == "")


def bump_generation(connection: sa.Connection, load_balancer_id: str, generation: int) -> None:
    """Increment the generation, unless another transaction has done so."""
    connection.execute(
        job.update()
        .where(job.c.load_balancer_id == load_balancer_id, job.c.generation == generation)
        .ordered_values(*_INCREMENT)
    )


def start_ticket_rotation(connection: sa.Connection, load_balancer_id: str, due: float) -> None:
    """Record a load balancer's first TLS ticket keys and the time of their rotation (seconds since 1970)."""
    connection.execute(
        job.update().where(job.c.load_balancer_id == load_balancer_id).values(tickets=1, tickets_due=due)
    )


class DueTickets(msgspec.Struct, frozen=True, kw_only=True):
    """A load balancer with TLS ticket keys due for rotation.

    Attributes:
        number: number of the current keys.
        sealed: the encrypted secret of the keys; None if there is none.
    """

    load_balancer_id: str
    number: int
    sealed: bytes | None


def list_due_tickets(connection: sa.Connection, now: float, limit: int) -> tuple[DueTickets, ...]:
    """Return load balancers with TLS ticket keys due for rotation, the longest wait first.

    A load balancer that is being changed is not included.

    Args:
        connection: of `Database.read`.
        now: seconds since 1970.
        limit: maximum number, because each rotation is a push.
    """
    rows = connection.execute(
        sa.select(job.c.load_balancer_id, job.c.tickets, secret.c.sealed)
        .outerjoin(secret, sa.and_(secret.c.object_id == job.c.load_balancer_id, *_IS_TICKET_SECRET))
        .where(job.c.tickets_due <= now, *_SETTLED)
        .order_by(job.c.tickets_due)
        .limit(limit)
    )
    return tuple(DueTickets(load_balancer_id=row[0], number=row[1], sealed=row[2]) for row in rows)


def rotate_tickets(
    connection: sa.Connection, due: Iterable[tuple[DueTickets, bytes | None]], now: float, period: float
) -> int:
    """Replace the secrets of TLS ticket keys and make the load balancers due. Return their number.

    The same transaction overwrites the old secret, so the table keeps no copy of it.

    Args:
        connection: of `Database.write`.
        due: results of `list_due_tickets`, each with the next encrypted secret; None keeps the secret.
        now: seconds since 1970.
        period: seconds until the next rotation.
    """
    rotation: list[tuple[Any, Any]] = [
        (job.c.tickets, job.c.tickets + 1),
        (job.c.tickets_due, now + period),
        (job.c.dirty, True),
        (job.c.due_at, 0.0),
    ]
    rotated = 0
    for one, following in due:
        unchanged = job.c.load_balancer_id == one.load_balancer_id, job.c.tickets == one.number
        # A change since `list_due_tickets` may have created new keys, which are due later.
        query = job.update().where(*unchanged, job.c.tickets_due <= now, *_SETTLED)
        if connection.execute(query.ordered_values(*_INCREMENT, *rotation)).rowcount:
            rotated += 1
            if following is not None:
                kept = secret.update().where(secret.c.object_id == one.load_balancer_id, *_IS_TICKET_SECRET)
                connection.execute(kept.values(sealed=following))
    return rotated
