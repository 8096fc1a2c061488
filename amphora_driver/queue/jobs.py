# SPDX-License-Identifier: Apache-2.0
"""Who works on which load balancer.

Invariant: at most one process holds the lease of a load balancer, and every lease has an *epoch* greater than all
before it. A write made under a lease checks owner and epoch in the same transaction (`guard`), so that a process
which was stopped, lost its lease and woke up again changes nothing. A job is "make load balancer X as recorded": it
carries no arguments, may run any number of times, and runs again as long as a newer generation is wanted, or if it
became urgent (`tables.URGENT`) while it ran: what a job has not seen is never forgotten by its end. Leases and
pauses are measured by the database's clock, the same for all controllers (database/clock.py); what ends later than it
could, because that clock was set back, is cut short (`cut_short`).
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa

from amphora_driver.database import clock
from amphora_driver.database.tables import amphora, duty, request, work
from amphora_driver.errors import LeaseLost

if TYPE_CHECKING:
    from collections.abc import Collection

    from amphora_driver.database.engine import Database

# A lease that has more than so many of its lengths left, and more than these seconds, was taken by another clock. The
# same for a duty; hosts of one deployment need not have the same options at every moment.
_LEASES, _DUTIES, _LEAST = 4, 10, 60.0
# Seconds more for each process in a row that has died of a load balancer, before the next one takes it up.
_CAUTION = 0.5


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """The right to work on one load balancer, and what is to be done.

    Attributes:
        attempts: how many have failed.
        deaths: how many processes have ended, or lost their lease, since one of them has got somewhere.
    """

    load_balancer_id: str
    owner: str
    epoch: int
    attempts: int
    deaths: int = 0


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

    def claim(self, load_balancer_id: str | None = None, *, fresh: bool = False) -> Lease | None:
        """The lease of the load balancer that has waited longest, or None if nothing is due.

        Args:
            load_balancer_id: only this one's, if it is due.
            fresh: only one whose last attempt has not failed.
        """

        def write(connection: sa.Connection) -> Lease | None:
            now = clock.now(connection)
            row = connection.execute(
                sa.select(work.c.load_balancer_id, work.c.epoch, work.c.attempts, work.c.deaths, work.c.owner)
                .where(*_due(now, load_balancer_id, fresh=fresh))
                .order_by(work.c.free_at)
                .limit(1)
                .with_for_update(skip_locked=True)
            ).first()
            if row is None:
                return None
            lease = Lease(
                load_balancer_id=row.load_balancer_id,
                owner=self._owner,
                epoch=row.epoch + 1,
                attempts=row.attempts,
                # Whoever had it has not given it back.
                deaths=row.deaths + (row.owner is not None),
            )
            connection.execute(
                work.update()
                .where(work.c.load_balancer_id == row.load_balancer_id)
                # What becomes urgent from now on is news to this job.
                .values(
                    owner=self._owner,
                    epoch=lease.epoch,
                    leased_until=now + self._seconds,
                    free_at=0.0,
                    deaths=lease.deaths,
                )
            )
            return lease

        # Looking costs less than locking, and most looks find nothing.
        anything = self._database.read(lambda connection: self._anything_due(connection, load_balancer_id, fresh=fresh))
        return self._database.write(write) if anything else None

    def next_due(self) -> float | None:
        """When the next job becomes due (on `Database.now()`'s clock), or None if none waits."""
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

        Only those really being worked on are named: a lease that could not be given back must run out. On a server,
        one whose row somebody has locked is passed over until the next time, and costs the others nothing.
        """

        def write(connection: sa.Connection) -> None:
            mine = sa.and_(work.c.owner == self._owner, work.c.load_balancer_id.in_(list(load_balancer_ids)))
            if connection.dialect.name != "sqlite":
                free = sa.select(work.c.load_balancer_id).where(mine).with_for_update(skip_locked=True)
                mine = sa.and_(mine, work.c.load_balancer_id.in_(connection.execute(free).scalars().all()))
            connection.execute(work.update().where(mine).values(leased_until=clock.now(connection) + self._seconds))

        self._database.write(write)

    def finish(self, lease: Lease, generation: int, again_at: float | None = None) -> None:
        """Give a lease back: the load balancer is as `generation` records it, or waits for somebody else.

        Args:
            lease: whose.
            generation: the newest one that was looked at.
            again_at: when somebody is to look again (on `Database.now()`'s clock), whatever happens until then; None
                if nothing is left to do.
        """
        found: dict[str, Any] = {
            "of": lease.load_balancer_id,
            "whose": lease.owner,
            "under": lease.epoch,
            "seen": generation,
        }
        statement = _FINISH if again_at is None else _FINISH_FOR_NOW
        bound = found if again_at is None else {**found, "again": again_at}

        def write(connection: sa.Connection) -> None:
            if connection.dialect.name == "postgresql":
                # A statement of its own. One that waits for a row looks at that row again, but at all others as they
                # were before: it would not see what `take_back` did to an amphora, and undo that the job is due.
                connection.execute(_HOLD, {"of": lease.load_balancer_id})
            # What `guard` makes sure of, and the change, in one.
            if connection.execute(statement, bound).rowcount != 1:
                raise _lost(lease)

        self._database.write(write)

    def wait(self, lease: Lease, generation: int, pause: float, *, readable: bool = True) -> None:
        """Give a lease back because something outside has to happen first; this counts as no attempt.

        Args:
            lease: whose.
            generation: the newest one that was looked at.
            pause: seconds after which somebody is to look again, if nobody hastens it.
            readable: what was looked at was complete; if not, it is due as soon as it is.
        """

        def write(connection: sa.Connection) -> None:
            guard(connection, lease)
            # Whoever asked for more meanwhile does not wait for it.
            came = sa.or_(work.c.generation > generation, _URGENT)
            if not readable:
                came = sa.or_(came, sa.not_(work.c.read_back))
            again = sa.case((came, 0.0), else_=clock.now(connection) + pause)
            connection.execute(
                work.update()
                .where(work.c.load_balancer_id == lease.load_balancer_id)
                .values(owner=None, leased_until=None, dirty=True, free_at=again)
            )

        self._database.write(write)

    def give_way(self, lease: Lease) -> None:
        """Give a lease back with the load balancer due at once: something goes first. This counts as no attempt."""

        def write(connection: sa.Connection) -> None:
            guard(connection, lease)
            connection.execute(
                work.update()
                .where(work.c.load_balancer_id == lease.load_balancer_id)
                .values(owner=None, leased_until=None, dirty=True, free_at=0.0)
            )

        self._database.write(write)

    def hasten(self, load_balancer_ids: Collection[str]) -> None:
        """What these load balancers wait for has come: they are due at once."""
        self._database.write(
            lambda connection: connection.execute(
                work.update()
                .where(work.c.load_balancer_id.in_(list(load_balancer_ids)), work.c.dirty, work.c.free_at > 0.0)
                .values(free_at=0.0)
            )
        )

    def postpone(
        self, lease: Lease, pause: float, reason: str, generation: int | None = None, *, deaths: int = 0
    ) -> None:
        """Give a lease back after a failure, to be tried again after `pause` seconds.

        Args:
            lease: whose.
            pause: seconds.
            reason: what went wrong.
            generation: the newest one that was looked at. What was asked for after that is due at once.
            deaths: of how many others the next one is to know.
        """
        newer = _URGENT if generation is None else sa.or_(work.c.generation > generation, _URGENT)

        def write(connection: sa.Connection) -> None:
            guard(connection, lease)
            connection.execute(
                work.update()
                .where(work.c.load_balancer_id == lease.load_balancer_id)
                # In this order: MySQL and MariaDB assign from left to right, and go on with what was assigned.
                .ordered_values(
                    (work.c.attempts, sa.case((newer, work.c.attempts), else_=lease.attempts + 1)),
                    (work.c.free_at, sa.case((newer, 0.0), else_=clock.now(connection) + pause)),
                    (work.c.owner, None),
                    (work.c.leased_until, None),
                    (work.c.error, reason),
                    (work.c.dirty, True),
                    (work.c.deaths, deaths),
                )
            )

        self._database.write(write)

    def release_all(self, owner: str | None = None) -> int:
        """Give every lease of this process back, at its end, or those of one that is known to be dead.

        Whoever dies may have been killed by what it worked on: that is due at once, but after all that waits already,
        and if others died of it before, after a pause in which who takes up the rest can get on with it.

        Returns:
            How many there were.
        """

        def write(connection: sa.Connection) -> int:
            given: list[tuple[Any, Any]] = [(work.c.owner, None), (work.c.leased_until, None)]
            if owner is not None:
                # In this order: see `postpone`.
                given.append((work.c.free_at, clock.now(connection) + _CAUTION * work.c.deaths))
                given.append((work.c.deaths, work.c.deaths + 1))
            leases = work.update().where(work.c.owner == (owner or self._owner))
            return connection.execute(leases.ordered_values(*given)).rowcount

        return self._database.write(write)

    def cut_short(self, longest: float) -> int:
        """Bring forward what ends later than it could: the clock was set back since that was written.

        Whoever has such a lease and lives renews it; from the dead others take it when it runs out.

        Args:
            longest: seconds that no pause is longer than.

        Returns:
            How many load balancers that were.
        """
        lease = max(_LEASES * self._seconds, _LEAST)
        pauses, leases = work.c.free_at, work.c.leased_until

        def late(connection: sa.Connection) -> tuple[sa.ColumnElement[bool], sa.ColumnElement[bool]]:
            now = clock.now(connection)
            return sa.and_(work.c.dirty, pauses > now + longest), sa.and_(work.c.dirty, leases > now + lease)

        def look(connection: sa.Connection) -> bool:
            found = sa.select(work.c.epoch).where(sa.or_(*late(connection))).limit(1)
            return connection.execute(found).first() is not None

        def write(connection: sa.Connection) -> int:
            paused, leased = late(connection)
            hastened = connection.execute(work.update().where(paused).values(free_at=0.0)).rowcount
            soon = clock.now(connection) + self._seconds
            return hastened + connection.execute(work.update().where(leased).values(leased_until=soon)).rowcount

        # Looking costs less than locking, and there is nothing to be found.
        return self._database.write(write) if self._database.read(look) else 0

    def _anything_due(self, connection: sa.Connection, load_balancer_id: str | None, *, fresh: bool) -> bool:
        due = _due(clock.now(connection), load_balancer_id, fresh=fresh)
        return connection.execute(sa.select(work.c.load_balancer_id).where(*due).limit(1)).first() is not None


def _behind() -> sa.ColumnElement[bool]:
    """An amphora lost what it had confirmed, perhaps while this job was looking elsewhere."""
    return sa.exists().where(
        amphora.c.load_balancer_id == work.c.load_balancer_id,
        amphora.c.state == "ready",
        amphora.c.confirmed < work.c.generation,
    )


def _leaving() -> sa.ColumnElement[bool]:
    """An amphora is to be replaced, and is there still."""
    return sa.exists().where(amphora.c.load_balancer_id == work.c.load_balancer_id, amphora.c.state == "retiring")


def _due(
    now: sa.ColumnElement[float], load_balancer_id: str | None, *, fresh: bool
) -> tuple[sa.ColumnElement[bool], ...]:
    """What makes a load balancer's job due: there is something to do, its pause is over, and nobody works on it."""
    due = [work.c.dirty, work.c.free_at <= now, sa.or_(work.c.owner.is_(None), work.c.leased_until < now)]
    if fresh:
        due.append(work.c.attempts == 0)
    if load_balancer_id is not None:
        due.append(work.c.load_balancer_id == load_balancer_id)
    return tuple(due)


# Needed in every job, so built once: putting a statement together costs more than running it.
_MINE = (
    work.c.load_balancer_id == sa.bindparam("of"),
    work.c.owner == sa.bindparam("whose"),
    work.c.epoch == sa.bindparam("under"),
)
_SEEN = sa.bindparam("seen", type_=sa.BigInteger)
_URGENT = work.c.free_at < 0.0
# Due again if more is wanted by now, or if what this job waited for has come meanwhile.
_DUE_AGAIN = sa.or_(
    work.c.generation > _SEEN,
    _URGENT,
    sa.and_(sa.or_(work.c.applied < work.c.generation, _behind()), sa.not_(work.c.read_back)),
)
# Nothing is over while one is to go: a net below what is urgent. Whoever looks again by himself comes to that anyway.
_NOT_OVER = sa.or_(_DUE_AGAIN, sa.and_(_leaving(), sa.not_(work.c.read_back)))
_RETURNED: list[tuple[Any, Any]] = [
    ("owner", None),
    ("leased_until", None),
    ("attempts", 0),
    ("deaths", 0),
    ("error", None),
]
_AGAIN = sa.bindparam("again", type_=sa.Double)
# In this order: MySQL and MariaDB assign from left to right, and go on with what was assigned.
_FINISH = work.update().where(*_MINE).ordered_values(("dirty", _NOT_OVER), ("free_at", 0.0), *_RETURNED)
_FINISH_FOR_NOW = (
    work.update()
    .where(*_MINE)
    .ordered_values(("free_at", sa.case((_DUE_AGAIN, 0.0), else_=_AGAIN)), ("dirty", True), *_RETURNED)
)
# A process that writes is alive and has made progress. The count is what Galera certifies: see `tables.work`.
_GUARD = work.update().where(*_MINE).values(writes=work.c.writes + 1, deaths=0)
_GUARD_APPLIED = _GUARD.values(applied=sa.bindparam("new_applied", type_=sa.BigInteger))
_HOLD = sa.select(work.c.epoch).where(work.c.load_balancer_id == sa.bindparam("of")).with_for_update()
_CHECK = sa.select(work.c.owner, work.c.epoch, work.c.generation, work.c.op, work.c.free_at).where(
    work.c.load_balancer_id == sa.bindparam("of")
)
_NOTE_OUTCOME = (
    request.update()
    .where(
        request.c.load_balancer_id == sa.bindparam("of"),
        request.c.generation <= sa.bindparam("upto", type_=sa.BigInteger),
        request.c.applied_at.is_(None),
    )
    .values(applied_at=sa.bindparam("now", type_=sa.Double), outcome=sa.bindparam("what", type_=sa.Text))
)


_OLDEST_UNANSWERED = sa.select(sa.func.min(request.c.accepted_at)).where(
    request.c.load_balancer_id == sa.bindparam("of"),
    request.c.generation <= sa.bindparam("upto", type_=sa.BigInteger),
    request.c.applied_at.is_(None),
)
_UNANSWERED = (
    sa.select(request.c.id)
    .where(
        request.c.load_balancer_id == sa.bindparam("of"),
        request.c.generation <= sa.bindparam("upto", type_=sa.BigInteger),
        request.c.applied_at.is_(None),
    )
    .limit(1)
)


def guard(connection: sa.Connection, lease: Lease, applied: int | None = None) -> None:
    """Make sure the lease still holds, and that nobody takes it before this transaction ends.

    Args:
        connection: of a writing transaction.
        lease: whose.
        applied: the generation that every amphora serves, if that is to be noted with it.

    Raises:
        LeaseLost: somebody else owns the load balancer, or it is gone.
    """
    bound: dict[str, Any] = {"of": lease.load_balancer_id, "whose": lease.owner, "under": lease.epoch}
    if applied is None:
        changed = connection.execute(_GUARD, bound).rowcount
    else:
        changed = connection.execute(_GUARD_APPLIED, {**bound, "new_applied": applied}).rowcount
    if changed != 1:
        raise _lost(lease)


def _lost(lease: Lease) -> LeaseLost:
    return LeaseLost(
        f"write under lease {lease.epoch} of load balancer {lease.load_balancer_id}",
        "another controller has taken it over",
    )


def check(connection: sa.Connection, lease: Lease) -> tuple[int, str, bool]:
    """Make sure that the lease still holds, before an effect outside the database that no transaction can take back.

    Returns:
        The newest generation, what is wanted (`Op`), and whether it has become urgent since it was claimed.

    Raises:
        LeaseLost: somebody else owns the load balancer, or it is gone.
    """
    row = connection.execute(_CHECK, {"of": lease.load_balancer_id}).first()
    if row is None or (row.owner, row.epoch) != (lease.owner, lease.epoch):
        raise LeaseLost(
            f"work on load balancer {lease.load_balancer_id} under lease {lease.epoch}",
            "another controller has taken it over",
        )
    return int(row.generation), str(row.op), row.free_at < 0.0


def unanswered(connection: sa.Connection, load_balancer_id: str, generation: int) -> bool:
    """Whether a request up to a generation waits to hear what became of it."""
    return connection.execute(_UNANSWERED, {"of": load_balancer_id, "upto": generation}).first() is not None


def oldest_unanswered(connection: sa.Connection, load_balancer_id: str, generation: int) -> float | None:
    """When the oldest call up to a generation was accepted of which nobody has said yet what became of it."""
    found = connection.execute(_OLDEST_UNANSWERED, {"of": load_balancer_id, "upto": generation}).scalar()
    return None if found is None else float(found)


def note_outcome(connection: sa.Connection, load_balancer_id: str, generation: int, outcome: str) -> None:
    """Close the history of every request up to a generation."""
    bound = {"of": load_balancer_id, "upto": generation, "now": time.time(), "what": outcome}
    connection.execute(_NOTE_OUTCOME, bound)


def hold_duty(database: Database, name: str, owner: str, seconds: float) -> bool:
    """Take or keep a duty that one process at a time performs; True if it is ours for another `seconds`."""

    def write(connection: sa.Connection) -> bool:
        now = clock.now(connection)
        latest = now + max(_DUTIES * seconds, _LEAST)
        held = sa.and_(duty.c.leased_until > now, duty.c.leased_until <= latest)
        mine = sa.select(duty, held.label("held")).where(duty.c.name == name)
        row = connection.execute(mine.with_for_update()).first()
        if row is None:
            connection.execute(duty.insert().values(name=name, owner=owner, epoch=1, leased_until=now + seconds))
            return True
        if row.owner != owner and row.held:
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
