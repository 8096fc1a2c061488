# SPDX-License-Identifier: Apache-2.0
"""Who works on which load balancer.

Invariant: at most one process holds the lease of a load balancer, and every lease has an *epoch* greater than all
before it. A write made under a lease checks owner and epoch in the same transaction (`guard`), so that a process
which was stopped, lost its lease and woke up again changes nothing. A job is "make load balancer X as recorded": it
carries no arguments, may run any number of times, and runs again as long as a newer generation is wanted.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from typing import TYPE_CHECKING

import msgspec
import sqlalchemy as sa

from amphora_driver.errors import LeaseLost
from amphora_driver.store.tables import amphora, duty, request, work

if TYPE_CHECKING:
    from collections.abc import Collection

    from amphora_driver.store.engine import Database


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """The right to work on one load balancer, and what is to be done."""

    load_balancer_id: str
    owner: str
    epoch: int
    attempts: int


def process_name() -> str:
    """A name no other process has or ever had."""
    return f"{socket.gethostname()[:60]}:{os.getpid()}:{uuid.uuid4().hex[:12]}"


class Jobs:
    """The jobs of a database, as one process sees them.

    Args:
        database: where they are.
        owner: `process_name()` of this process.
        seconds: how long a lease lasts without being renewed.
    """

    def __init__(self, database: Database, owner: str, seconds: float) -> None:
        self._database = database
        self._owner = owner
        self._seconds = seconds

    def claim(self) -> Lease | None:
        """The lease of the load balancer that has waited longest, or None if nothing is due."""

        def write(connection: sa.Connection) -> Lease | None:
            now = time.time()
            row = connection.execute(
                sa.select(work.c.load_balancer_id, work.c.epoch, work.c.attempts)
                .where(*_due(now))
                .order_by(work.c.free_at)
                .limit(1)
                .with_for_update(skip_locked=True)
            ).first()
            if row is None:
                return None
            lease = Lease(
                load_balancer_id=row.load_balancer_id, owner=self._owner, epoch=row.epoch + 1, attempts=row.attempts
            )
            connection.execute(
                work.update()
                .where(work.c.load_balancer_id == row.load_balancer_id)
                .values(owner=self._owner, epoch=lease.epoch, leased_until=now + self._seconds)
            )
            return lease

        # Looking costs less than locking, and most looks find nothing.
        return self._database.write(write) if self._database.read(self._anything_due) else None

    def next_due(self) -> float | None:
        """When the next job becomes due (seconds since 1970), or None if none waits."""
        return self._database.read(
            lambda connection: connection.execute(
                sa.select(
                    sa.func.min(
                        sa.case(
                            (work.c.owner.is_(None), work.c.free_at),
                            else_=work.c.leased_until,
                        )
                    )
                ).where(work.c.dirty)
            ).scalar()
        )

    def renew(self, load_balancer_ids: Collection[str]) -> None:
        """Keep the leases of these load balancers for another while, as far as they are this process's.

        Only those really being worked on are named: a lease that could not be given back must run out.
        """
        self._database.write(
            lambda connection: connection.execute(
                work.update()
                .where(work.c.owner == self._owner, work.c.load_balancer_id.in_(list(load_balancer_ids)))
                .values(leased_until=time.time() + self._seconds)
            )
        )

    def finish(self, lease: Lease, generation: int, again_at: float | None = None) -> None:
        """Give a lease back: the load balancer is as `generation` records it, or waits for somebody else.

        Args:
            lease: whose.
            generation: the newest one that was looked at.
            again_at: when somebody is to look again (seconds since 1970), whatever happens until then; None if
                nothing is left to do.
        """

        def write(connection: sa.Connection) -> None:
            guard(connection, lease)
            # Due again if more is wanted by now, or if what this job waited for has come meanwhile.
            due = sa.or_(
                work.c.generation > generation,
                sa.and_(sa.or_(work.c.applied < work.c.generation, _behind()), sa.not_(work.c.read_back)),
            )
            connection.execute(
                work.update()
                .where(work.c.load_balancer_id == lease.load_balancer_id)
                .values(
                    owner=None,
                    leased_until=None,
                    attempts=0,
                    error=None,
                    free_at=0.0 if again_at is None else sa.case((due, 0.0), else_=again_at),
                    dirty=due if again_at is None else True,
                )
            )

        self._database.write(write)

    def postpone(self, lease: Lease, pause: float, reason: str) -> None:
        """Give a lease back after a failure, to be tried again after `pause` seconds."""

        def write(connection: sa.Connection) -> None:
            guard(connection, lease)
            connection.execute(
                work.update()
                .where(work.c.load_balancer_id == lease.load_balancer_id)
                .values(
                    owner=None,
                    leased_until=None,
                    attempts=lease.attempts + 1,
                    error=reason,
                    dirty=True,
                    free_at=time.time() + pause,
                )
            )

        self._database.write(write)

    def release_all(self) -> None:
        """Give every lease of this process back, at its end."""
        self._database.write(
            lambda connection: connection.execute(
                work.update().where(work.c.owner == self._owner).values(owner=None, leased_until=None)
            )
        )

    def _anything_due(self, connection: sa.Connection) -> bool:
        now = time.time()
        return connection.execute(sa.select(work.c.load_balancer_id).where(*_due(now)).limit(1)).first() is not None


def _behind() -> sa.ColumnElement[bool]:
    """An amphora lost what it had confirmed, perhaps while this job was looking elsewhere."""
    return sa.exists().where(
        amphora.c.load_balancer_id == work.c.load_balancer_id,
        amphora.c.state == "ready",
        amphora.c.confirmed < work.c.generation,
    )


def _due(now: float) -> tuple[sa.ColumnElement[bool], ...]:
    """What makes a load balancer's job due: there is something to do, its pause is over, and nobody works on it."""
    return work.c.dirty, work.c.free_at <= now, sa.or_(work.c.owner.is_(None), work.c.leased_until < now)


def guard(connection: sa.Connection, lease: Lease) -> None:
    """Make sure the lease still holds, and that nobody takes it before this transaction ends.

    Raises:
        LeaseLost: somebody else owns the load balancer, or it is gone.
    """
    changed = connection.execute(
        work.update()
        .where(
            work.c.load_balancer_id == lease.load_balancer_id, work.c.owner == lease.owner, work.c.epoch == lease.epoch
        )
        .values(epoch=lease.epoch)
    ).rowcount
    if changed != 1:
        raise LeaseLost(
            f"write under lease {lease.epoch} of load balancer {lease.load_balancer_id}",
            "another controller has taken it over",
        )


def check(connection: sa.Connection, lease: Lease) -> None:
    """Make sure that the lease still holds, before an effect outside the database that no transaction can take back.

    Raises:
        LeaseLost: somebody else owns the load balancer, or it is gone.
    """
    row = connection.execute(
        sa.select(work.c.owner, work.c.epoch).where(work.c.load_balancer_id == lease.load_balancer_id)
    ).first()
    if row is None or (row.owner, row.epoch) != (lease.owner, lease.epoch):
        raise LeaseLost(
            f"work on load balancer {lease.load_balancer_id} under lease {lease.epoch}",
            "another controller has taken it over",
        )


def note_outcome(connection: sa.Connection, load_balancer_id: str, generation: int, outcome: str) -> None:
    """Close the history of every request up to a generation."""
    connection.execute(
        request.update()
        .where(
            request.c.load_balancer_id == load_balancer_id,
            request.c.generation <= generation,
            request.c.applied_at.is_(None),
        )
        .values(applied_at=time.time(), outcome=outcome)
    )


def hold_duty(database: Database, name: str, owner: str, seconds: float) -> bool:
    """Take or keep a duty that one process at a time performs; True if it is ours for another `seconds`."""

    def write(connection: sa.Connection) -> bool:
        now = time.time()
        row = connection.execute(sa.select(duty).where(duty.c.name == name).with_for_update()).first()
        if row is None:
            connection.execute(duty.insert().values(name=name, owner=owner, epoch=1, leased_until=now + seconds))
            return True
        if row.owner != owner and row.leased_until > now:
            return False
        connection.execute(
            duty.update()
            .where(duty.c.name == name)
            .values(owner=owner, epoch=row.epoch + (row.owner != owner), leased_until=now + seconds)
        )
        return True

    return database.write(write)


def drop_duty(database: Database, name: str, owner: str) -> None:
    """Let the next process take a duty at once."""
    database.write(
        lambda connection: connection.execute(
            duty.update().where(duty.c.name == name, duty.c.owner == owner).values(leased_until=0.0)
        )
    )
