# SPDX-License-Identifier: Apache-2.0
"""Jobs of controllers: rows with leases and fencing.

Invariant: at most one process holds the lease of a load balancer. The *epoch* of a lease is greater than the epochs of
all earlier leases. A write under a lease checks owner and epoch in the same transaction (`guard_lease`). A process that
was stopped, lost its lease and continues therefore changes nothing.

A job is "make load balancer X as recorded", has no arguments, and may run any number of times. A job runs again if a
newer generation was recorded, or if the row became urgent (`tables.URGENT`) while the job ran. The database's clock
measures leases and pauses (database/clock.py); `clamp_due_times` shortens both after the clock was set back.
"""

from __future__ import annotations

import itertools
import os
import random
import socket
import time
import uuid
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import sqlalchemy as sa

from amphora_driver.database import clock
from amphora_driver.database.engine import Database
from amphora_driver.database.tables import amphora, duty, job, request
from amphora_driver.errors import LeaseLost

# A lease with more remaining time than this number of lease durations means that the database clock was set back. The
# number exceeds 1, because hosts may configure different durations.
_LEASES = 4
# A duty's lease with more remaining time than this number of its lease durations also means that the database clock was
# set back.
_DUTIES = 10
# A lease with less remaining time than this number of seconds is always plausible.
_LEAST = 60.0
# After a crash of the controller, a job pauses this number of seconds for each earlier crash since the job's last
# progress.
_CRASH_BACKOFF = 0.5
# A claim that has collided with one of another Galera node takes any of this number of the oldest due jobs.
_ALTERNATIVES = 16


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """The right to work on one load balancer.

    `crashes` counts the processes that ended or lost their lease since the last progress.
    """

    load_balancer_id: str
    owner: str
    epoch: int
    attempts: int
    crashes: int = 0


def process_name() -> str:
    """Return a name that is unique among all processes, past ones included."""
    return f"{socket.gethostname()[:60]}:{os.getpid()}:{uuid.uuid4().hex[:12]}"


class Jobs:
    """The jobs of a database, for one process; a lease lasts for `seconds`."""

    def __init__(self, database: Database, owner: str, seconds: float) -> None:
        self._database = database
        self._owner = owner
        self._seconds = seconds

    def claim(self, load_balancer_id: str | None = None, *, fresh: bool = False) -> Lease | None:
        """Claim the lease of this load balancer, or of the one that has waited longest; None if no job is due.

        With `fresh`, claim only a job whose last attempt did not fail.
        """

        def bound(connection: sa.Connection) -> tuple[_Claim, dict[str, Any]]:
            is_sqlite = connection.dialect.name == "sqlite"
            given: dict[str, Any] = {"now": time.time()} if is_sqlite else {}
            if load_balancer_id is not None:
                given["of"] = load_balancer_id
            return _claim_statements(load_balancer_id is not None, fresh, is_sqlite), given

        attempts = itertools.count()

        def write(connection: sa.Connection) -> Lease | None:
            statements, given = bound(connection)
            if next(attempts) and load_balancer_id is None:
                # Galera nodes do not see each other's row locks, so controllers on several nodes claim the same oldest
                # job. One commits, and the others would collide on the next job again.
                oldest = connection.execute(statements.oldest, given).scalars().all()
                row = self._lock_any(connection, oldest, given, fresh=fresh)
            else:
                row = connection.execute(statements.lock, given).first()
            if row is None:
                return None
            lease = Lease(
                load_balancer_id=row.load_balancer_id,
                owner=self._owner,
                epoch=row.epoch + 1,
                attempts=row.attempts,
                # If the row of a due job still has an owner, the owner ended without returning its lease. So this claim
                # counts a crash.
                crashes=row.crashes + (row.owner is not None),
            )
            # This claim sets `due_at` to zero. If `due_at` is URGENT at the end of the job, an urgent event has arrived
            # during the job.
            claimed = {"whose": self._owner, "under": lease.epoch, "crashed": lease.crashes, "seconds": self._seconds}
            connection.execute(statements.claim, {**given, **claimed, "of": row.load_balancer_id})
            return lease

        # Most searches find no job. So a search without locks, which costs less than a write transaction, precedes the
        # claim.
        def read(connection: sa.Connection) -> bool:
            statements, given = bound(connection)
            return connection.execute(statements.search, given).first() is not None

        return self._database.write(write) if self._database.read(read) else None

    def _lock_any(
        self, connection: sa.Connection, load_balancer_ids: Sequence[str], given: dict[str, Any], *, fresh: bool
    ) -> Any:
        """Lock the job of a random one of these load balancers, or return None if it is not due."""
        if not load_balancer_ids:
            return None
        statements = _claim_statements(True, fresh, connection.dialect.name == "sqlite")
        chosen = random.choice(load_balancer_ids)  # noqa: S311 - no secret
        return connection.execute(statements.lock, {**given, "of": chosen}).first()

    def next_due(self) -> float | None:
        """Return when the next job becomes due (on `Database.now()`'s clock); None if no job waits."""
        due = sa.case((job.c.owner.is_(None), job.c.due_at), else_=job.c.leased_until)
        first = sa.select(sa.func.min(due)).where(job.c.dirty)
        return self._database.read(lambda connection: connection.execute(first).scalar())

    def renew_leases(self, load_balancer_ids: Collection[str]) -> None:
        """Renew the leases of these load balancers that this process owns.

        The caller names only running jobs, because a lease that could not be returned must expire. On a database
        server, the renewal skips locked rows until the next call, so that one locked row does not delay the others.
        """

        def write(connection: sa.Connection) -> None:
            mine = sa.and_(job.c.owner == self._owner, job.c.load_balancer_id.in_(list(load_balancer_ids)))
            if connection.dialect.name != "sqlite":
                free = sa.select(job.c.load_balancer_id).where(mine).with_for_update(skip_locked=True)
                mine = sa.and_(mine, job.c.load_balancer_id.in_(connection.execute(free).scalars().all()))
            connection.execute(job.update().where(mine).values(leased_until=clock.now(connection) + self._seconds))

        self._database.write(write)

    def complete(self, lease: Lease, generation: int, again_at: float | None = None) -> None:
        """Return a lease after a successful job.

        Args:
            lease: the lease of the job.
            generation: the newest one that the job has seen.
            again_at: when the next job is due at the latest (on `Database.now()`'s clock); None if no work is left.
        """
        found = {**_bound(lease), "seen": generation}
        statement = _COMPLETE if again_at is None else _COMPLETE_FOR_NOW
        bound = found if again_at is None else {**found, "again": again_at}

        def write(connection: sa.Connection) -> None:
            if connection.dialect.name == "postgresql":
                # The row is locked first on PostgreSQL. Without this lock, the UPDATE could see outdated rows of other
                # tables, and mark the job as done although an amphora has just lost its configuration.
                connection.execute(_LOCK_ROW, {"of": lease.load_balancer_id})
            # The UPDATE also checks the lease of the job. If the UPDATE changes no row, the lease is lost.
            if connection.execute(statement, bound).rowcount != 1:
                raise _lost(lease)

        self._database.write(write)

    def defer(self, lease: Lease, generation: int, pause: float, *, readable: bool = True) -> None:
        """Return a lease because the job waits for an external event; this is not a failed attempt.

        Args:
            lease: the lease of the job.
            generation: the newest one that the job has seen.
            pause: seconds after which the job is due, unless `make_due` is called before.
            readable: the recorded load balancer was complete; if not, the job is due as soon as it is.
        """

        def write(connection: sa.Connection) -> None:
            guard_lease(connection, lease)
            # After a newer request or an urgent event, the job is due at once.
            came = sa.or_(job.c.generation > generation, _URGENT)
            if not readable:
                came = sa.or_(came, sa.not_(job.c.read_back))
            again = sa.case((came, 0.0), else_=clock.now(connection) + pause)
            _update(connection, lease.load_balancer_id, owner=None, leased_until=None, dirty=True, due_at=again)

        self._database.write(write)

    def yield_lease(self, lease: Lease) -> None:
        """Return the lease of a preempted job, due at once; this is not a failed attempt."""

        def write(connection: sa.Connection) -> None:
            guard_lease(connection, lease)
            _update(connection, lease.load_balancer_id, owner=None, leased_until=None, dirty=True, due_at=0.0)

        self._database.write(write)

    def make_due(self, load_balancer_ids: Collection[str]) -> None:
        """Make waiting jobs due at once."""
        waiting = job.c.load_balancer_id.in_(list(load_balancer_ids)), job.c.dirty, job.c.due_at > 0.0
        due = job.update().where(*waiting).values(due_at=0.0)
        self._database.write(lambda connection: connection.execute(due))

    def retry_later(
        self, lease: Lease, pause: float, reason: str, generation: int | None = None, *, crashes: int = 0
    ) -> None:
        """Return a lease after a failure; the job is due again after `pause` seconds.

        A request that is newer than `generation`, the newest one that the job has seen, is due at once. `crashes` is
        the new value of `Lease.crashes`.
        """
        newer = _URGENT if generation is None else sa.or_(job.c.generation > generation, _URGENT)

        def write(connection: sa.Connection) -> None:
            guard_lease(connection, lease)
            connection.execute(
                job.update()
                .where(job.c.load_balancer_id == lease.load_balancer_id)
                # In an UPDATE, MySQL and MariaDB assign columns from left to right. So `attempts`, which depends on the
                # old `due_at`, comes first.
                .ordered_values(
                    (job.c.attempts, sa.case((newer, job.c.attempts), else_=lease.attempts + 1)),
                    (job.c.due_at, sa.case((newer, 0.0), else_=clock.now(connection) + pause)),
                    (job.c.owner, None),
                    (job.c.leased_until, None),
                    (job.c.error, reason),
                    (job.c.dirty, True),
                    (job.c.crashes, crashes),
                )
            )

        self._database.write(write)

    def release_leases(self, owner: str | None = None) -> int:
        """Return all leases of this process at its end, or the leases of a dead process.

        A job may have crashed the dead process. Its load balancer is therefore due after all jobs that wait already,
        and after a back-off if earlier processes crashed on it too. Return the number of leases.
        """

        def write(connection: sa.Connection) -> int:
            given: list[tuple[Any, Any]] = [(job.c.owner, None), (job.c.leased_until, None)]
            if owner is not None:
                # In an UPDATE, MySQL and MariaDB assign columns from left to right. So `due_at`, which depends on the
                # old `crashes`, comes first.
                given.append((job.c.due_at, clock.now(connection) + _CRASH_BACKOFF * job.c.crashes))
                given.append((job.c.crashes, job.c.crashes + 1))
            leases = job.update().where(job.c.owner == (owner or self._owner))
            return connection.execute(leases.ordered_values(*given)).rowcount

        return self._database.write(write)

    def clamp_due_times(self, longest: float) -> int:
        """Bring forward implausibly late due times and leases: the clock was set back after they were written.

        A live owner renews such a lease. The lease of a dead owner expires. `longest` is the longest possible pause in
        seconds. Return the number of changed load balancers.
        """
        lease = max(_LEASES * self._seconds, _LEAST)
        pauses, leases = job.c.due_at, job.c.leased_until

        def late(connection: sa.Connection) -> tuple[sa.ColumnElement[bool], sa.ColumnElement[bool]]:
            now = clock.now(connection)
            return sa.and_(job.c.dirty, pauses > now + longest), sa.and_(job.c.dirty, leases > now + lease)

        def look(connection: sa.Connection) -> bool:
            found = sa.select(job.c.epoch).where(sa.or_(*late(connection))).limit(1)
            return connection.execute(found).first() is not None

        def write(connection: sa.Connection) -> int:
            paused, leased = late(connection)
            due = connection.execute(job.update().where(paused).values(due_at=0.0)).rowcount
            soon = clock.now(connection) + self._seconds
            return due + connection.execute(job.update().where(leased).values(leased_until=soon)).rowcount

        # After the database clock is set back, some rows have times too far in the future. This is rare, so a read
        # without locks first searches for such rows, and a write transaction follows only if the read finds some.
        return self._database.write(write) if self._database.read(look) else 0


def _update(connection: sa.Connection, load_balancer_id: str, **values: Any) -> None:
    connection.execute(job.update().where(job.c.load_balancer_id == load_balancer_id).values(**values))


class _Claim(msgspec.Struct, frozen=True):
    """The statements of `Jobs.claim`: search a due job, list the oldest ones, lock one, claim it."""

    search: sa.Select[Any]
    oldest: sa.Select[Any]
    lock: sa.Select[Any]
    claim: sa.Update


@lru_cache(maxsize=8)
def _claim_statements(is_named: bool, fresh: bool, is_sqlite: bool) -> _Claim:
    """Return the statements for one load balancer or any.

    With `fresh`, they find only jobs whose last attempt did not fail.
    """
    now: sa.ColumnElement[float] = sa.bindparam("now", type_=sa.Double) if is_sqlite else clock.SERVER_TIME
    # A job is due if it has work to do, its pause is over, and no live process has its lease.
    due = [job.c.dirty, job.c.due_at <= now, sa.or_(job.c.owner.is_(None), job.c.leased_until < now)]
    if fresh:
        due.append(job.c.attempts == 0)
    if is_named:
        due.append(job.c.load_balancer_id == _OF)
    row = sa.select(job.c.load_balancer_id, job.c.epoch, job.c.attempts, job.c.crashes, job.c.owner).where(*due)
    values: dict[str, Any] = {
        "owner": sa.bindparam("whose"),
        "epoch": sa.bindparam("under"),
        "crashes": sa.bindparam("crashed"),
        "due_at": 0.0,
        "leased_until": now + sa.bindparam("seconds", type_=sa.Double),
    }
    return _Claim(
        search=sa.select(job.c.epoch).where(*due).limit(1),
        oldest=sa.select(job.c.load_balancer_id).where(*due).order_by(job.c.due_at).limit(_ALTERNATIVES),
        lock=row.order_by(job.c.due_at).limit(1).with_for_update(skip_locked=True),
        claim=job.update().where(job.c.load_balancer_id == _OF).values(**values),
    )


# These statements are built once, because SQLAlchemy needs more time to build a statement than to execute it.
_OF: sa.BindParameter[Any] = sa.bindparam("of")
_MINE = (job.c.load_balancer_id == _OF, job.c.owner == sa.bindparam("whose"), job.c.epoch == sa.bindparam("under"))
_THEIRS = amphora.c.load_balancer_id == job.c.load_balancer_id
# An amphora is behind until its agent has confirmed the newest generation, for example after it lost its configuration.
_IS_BEHIND = sa.exists().where(_THEIRS, amphora.c.state == "ready", amphora.c.confirmed < job.c.generation)
_IS_LEAVING = sa.exists().where(_THEIRS, amphora.c.state == "retiring")
_SEEN = sa.bindparam("seen", type_=sa.BigInteger)
_URGENT = job.c.due_at < 0.0
# A finished job is due again after a newer generation, after an urgent event, or if an amphora is behind.
_DUE_AGAIN = sa.or_(
    job.c.generation > _SEEN,
    _URGENT,
    sa.and_(sa.or_(job.c.applied < job.c.generation, _IS_BEHIND), sa.not_(job.c.read_back)),
)
# `due_at` is URGENT after an amphora begins to retire, but another write may have replaced this value. So the condition
# also checks for retiring amphorae.
_NOT_OVER = sa.or_(_DUE_AGAIN, sa.and_(_IS_LEAVING, sa.not_(job.c.read_back)))
_RETURNED = {"owner": None, "leased_until": None, "attempts": 0, "crashes": 0, "error": None}.items()
_AGAIN = sa.bindparam("again", type_=sa.Double)
# In an UPDATE, MySQL and MariaDB assign columns from left to right. So `dirty`, which depends on the old `due_at`,
# comes first.
_COMPLETE = job.update().where(*_MINE).ordered_values(("dirty", _NOT_OVER), ("due_at", 0.0), *_RETURNED)
_COMPLETE_FOR_NOW = (
    job.update()
    .where(*_MINE)
    .ordered_values(("due_at", sa.case((_DUE_AGAIN, 0.0), else_=_AGAIN)), ("dirty", True), *_RETURNED)
)
# Each write increases `writes`, so that the row changes. If another Galera node grants the lease to another controller,
# Galera then detects the conflict.
_GUARD_INTENT = job.update().where(*_MINE).values(writes=job.c.writes + 1)
_GUARD = _GUARD_INTENT.values(crashes=0)
_GUARD_APPLIED = _GUARD.values(applied=sa.bindparam("new_applied", type_=sa.BigInteger))
_LOCK_ROW = sa.select(job.c.epoch).where(job.c.load_balancer_id == _OF).with_for_update()
_CHECK = sa.select(job.c.owner, job.c.epoch, job.c.generation, job.c.op, job.c.due_at).where(
    job.c.load_balancer_id == _OF
)
_IS_OPEN_REQUEST = (
    request.c.load_balancer_id == _OF,
    request.c.generation <= sa.bindparam("upto", type_=sa.BigInteger),
    request.c.applied_at.is_(None),
)
_RECORD_OUTCOME = (
    request.update()
    .where(*_IS_OPEN_REQUEST)
    .values(applied_at=sa.bindparam("now", type_=sa.Double), outcome=sa.bindparam("what", type_=sa.Text))
)
_OLDEST_OPEN_REQUEST = sa.select(sa.func.min(request.c.accepted_at)).where(*_IS_OPEN_REQUEST)


def guard_lease(
    connection: sa.Connection, lease: Lease, applied: int | None = None, *, is_progress: bool = True
) -> None:
    """Lock a valid lease until this transaction ends, or raise `LeaseLost`.

    Also record `applied`, the generation that every amphora serves, unless it is None. A write that only prepares an
    effect is no progress: the effect may crash each controller.
    """
    if applied is None:
        changed = connection.execute(_GUARD if is_progress else _GUARD_INTENT, _bound(lease)).rowcount
    else:
        changed = connection.execute(_GUARD_APPLIED, {**_bound(lease), "new_applied": applied}).rowcount
    if changed != 1:
        raise _lost(lease)


def _bound(lease: Lease) -> dict[str, Any]:
    return {"of": lease.load_balancer_id, "whose": lease.owner, "under": lease.epoch}


def _lost(lease: Lease) -> LeaseLost:
    wanted = f"write under lease {lease.epoch} of load balancer {lease.load_balancer_id}"
    return LeaseLost(wanted, "another controller has taken it over")


def check_lease(connection: sa.Connection, lease: Lease) -> tuple[int, str, bool]:
    """Raise `LeaseLost` if the lease is not valid, before effects that no transaction can roll back.

    Return the newest generation, the recorded `Op`, and whether the job has become urgent since the claim.
    """
    return require_lease(lease, connection.execute(_CHECK, {"of": lease.load_balancer_id}).first())


def require_lease(lease: Lease, row: Any) -> tuple[int, str, bool]:
    """Check the lease as `check_lease` does, in a row of `job` that was just read; None without a row."""
    if row is None or (row.owner, row.epoch) != (lease.owner, lease.epoch):
        wanted = f"work on load balancer {lease.load_balancer_id} under lease {lease.epoch}"
        raise LeaseLost(wanted, "another controller has taken it over")
    return int(row.generation), str(row.op), row.due_at < 0.0


def has_open_request(connection: sa.Connection, load_balancer_id: str, generation: int) -> bool:
    """Whether a request up to a generation has no recorded outcome."""
    return oldest_open_request(connection, load_balancer_id, generation) is not None


def oldest_open_request(connection: sa.Connection, load_balancer_id: str, generation: int) -> float | None:
    """Return when the oldest request without a recorded outcome, up to a generation, was accepted."""
    found = connection.execute(_OLDEST_OPEN_REQUEST, {"of": load_balancer_id, "upto": generation}).scalar()
    return None if found is None else float(found)


def record_outcome(connection: sa.Connection, load_balancer_id: str, generation: int, outcome: str) -> None:
    """Record the outcome of every open request up to a generation."""
    bound = {"of": load_balancer_id, "upto": generation, "now": time.time(), "what": outcome}
    connection.execute(_RECORD_OUTCOME, bound)


def acquire_duty(database: Database, name: str, owner: str, seconds: float) -> bool:
    """Acquire or renew a duty, a task of one process at a time; True if this process holds it."""

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
        values = {"owner": owner, "epoch": row.epoch + (row.owner != owner), "leased_until": now + seconds}
        connection.execute(duty.update().where(duty.c.name == name).values(**values))
        return True

    return database.write(write)


def release_duty(database: Database, name: str, owner: str) -> None:
    """Release a duty, so that another process can acquire it at once."""
    mine = duty.update().where(duty.c.name == name, duty.c.owner == owner)
    database.write(lambda connection: connection.execute(mine.values(leased_until=0.0)))
