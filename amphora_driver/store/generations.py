# SPDX-License-Identifier: Apache-2.0
"""Changes of `job` rows without a user's request: due times, generations, TLS ticket keys.

Invariant: no object waits for such a generation, and Octavia's commit state does not change.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import msgspec
import sqlalchemy as sa

from amphora_driver.database.rows import load_as
from amphora_driver.database.tables import job, secret
from amphora_driver.model.secret_refs import Purpose


class Op:
    """Operation of a job. DELETE is final: later requests do not replace it. SPARES: see `spare_pools`."""

    APPLY = "apply"
    DELETE = "delete"
    SPARES = "spares"


# Conditions for a load balancer on which no controller works and whose amphorae serve the newest generation.
SETTLED: tuple[Any, ...] = (
    ~job.c.dirty,
    job.c.owner.is_(None),
    job.c.op == Op.APPLY,
    job.c.applied >= job.c.generation,
)
# The row of the table `secret` with the secret for TLS ticket keys.
_IS_TICKET_SECRET = (secret.c.purpose == Purpose.TICKETS.value, secret.c.ref == "")


def update_job(connection: sa.Connection, load_balancer_id: str, *conditions: Any, **values: Any) -> bool:
    """Update columns of a load balancer's `job` row; return False if a condition does not hold."""
    changed = job.update().where(job.c.load_balancer_id == load_balancer_id, *conditions).values(**values)
    return bool(connection.execute(changed).rowcount)


def lock_jobs(connection: sa.Connection, load_balancer_ids: Collection[str]) -> None:
    """Lock `job` rows until the end of the transaction, in a fixed order.

    Every transaction locks `job` before `amphora`, otherwise two transactions may deadlock.
    """
    for one in sorted(load_balancer_ids):
        connection.execute(sa.select(job.c.epoch).where(job.c.load_balancer_id == one).with_for_update())


def advance_to(following: Any) -> list[tuple[Any, Any]]:
    """Return the assignments of a new generation that is committed if all earlier ones are."""
    # In an UPDATE, MySQL and MariaDB assign columns from left to right. So `committed`, which depends on the old
    # `generation`, comes first.
    committed = sa.case((job.c.committed >= job.c.generation, following), else_=job.c.committed)
    return [(job.c.committed, committed), (job.c.generation, following)]


def bump_generation(connection: sa.Connection, load_balancer_id: str, generation: int) -> None:
    """Increment the generation, unless another transaction has done so."""
    mine = job.update().where(job.c.load_balancer_id == load_balancer_id, job.c.generation == generation)
    connection.execute(mine.ordered_values(*advance_to(job.c.generation + 1)))


def commit_last_generation(connection: sa.Connection, load_balancer_id: str) -> None:
    """Record that the newest generation, is committed if all earlier ones are."""
    update_job(connection, load_balancer_id, job.c.committed >= job.c.generation - 1, committed=job.c.generation)


def start_ticket_rotation(connection: sa.Connection, load_balancer_id: str, due: float) -> None:
    """Record a load balancer's first TLS ticket keys and the time of their rotation (seconds since 1970)."""
    update_job(connection, load_balancer_id, tickets=1, tickets_due=due)


class DueTickets(msgspec.Struct, frozen=True, kw_only=True):
    """A load balancer with TLS ticket keys due for rotation; `sealed` is their encrypted secret."""

    load_balancer_id: str
    number: int
    sealed: bytes | None


def list_due_tickets(connection: sa.Connection, now: float, limit: int) -> tuple[DueTickets, ...]:
    """Return idle load balancers with TLS ticket keys due for rotation, the longest wait first.

    The caller limits the number, because each rotation is a push.
    """
    query = (
        sa.select(job.c.load_balancer_id, job.c.tickets.label("number"), secret.c.sealed)
        .outerjoin(secret, sa.and_(secret.c.object_id == job.c.load_balancer_id, *_IS_TICKET_SECRET))
        .where(job.c.tickets_due <= now, *SETTLED)
        .order_by(job.c.tickets_due)
    )
    return tuple(load_as(connection, DueTickets, query.limit(limit)))


def rotate_tickets(
    connection: sa.Connection, due: Iterable[tuple[DueTickets, bytes | None]], now: float, period: float
) -> int:
    """Replace the secrets of TLS ticket keys and make the load balancers due. Return their number.

    The same transaction overwrites the old secret, so the table keeps no copy of it.

    Args:
        due: results of `list_due_tickets`, each with the next encrypted secret; None keeps the secret.
        period: seconds until the next rotation.
    """
    rotation = {job.c.tickets: job.c.tickets + 1, job.c.tickets_due: now + period, job.c.dirty: True, job.c.due_at: 0.0}
    rotated = 0
    for one, following in due:
        unchanged = job.c.load_balancer_id == one.load_balancer_id, job.c.tickets == one.number
        # A change of the load balancer may have created new keys since the search for due keys. So the UPDATE checks
        # again whether the keys are due.
        query = job.update().where(*unchanged, job.c.tickets_due <= now, *SETTLED)
        if connection.execute(query.ordered_values(*advance_to(job.c.generation + 1), *rotation.items())).rowcount:
            rotated += 1
            if following is not None:
                kept = secret.update().where(secret.c.object_id == one.load_balancer_id, *_IS_TICKET_SECRET)
                connection.execute(kept.values(sealed=following))
    return rotated
