# SPDX-License-Identifier: Apache-2.0
"""Leases of groups: one controller at a time works on a group.

Invariant: at most one process holds the lease of a group. The *epoch* of a lease is greater than the epochs of all
earlier leases. A write under a lease checks owner and epoch in the same transaction (`guard_claim`). A process that was
stopped, lost its lease and continues therefore changes nothing in the database. Its calls to Octavia are harmless: the
next pass reads servers and pool again.

The database clock measures leases and due times (amphora_driver/database/clock.py). `clamp_due_times` shortens both
after the clock was set back.

A pass that changes nothing costs a part of two transactions: a controller claims several due groups in one transaction,
and returns several leases in one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from amphora_cluster.database.tables import group_row
from amphora_driver.database import clock
from amphora_driver.database.engine import Database
from amphora_driver.database.rows import chunks
from amphora_driver.errors import LeaseLost

# A lease with more than this number of lease times left shows that the database clock was set back. Hosts may configure
# different lease times.
_LEASES = 4
# A lease that expires within this number of seconds is never regarded as too long.
_LEAST = 60.0
# After a crash of a controller, its groups pause. The pause in seconds is this number, multiplied by the group's failed
# passes since the last success.
_CRASH_BACKOFF = 1.0
# Maximum number of characters of a recorded error.
_MAX_ERROR = 2000


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """The right to work on one group.

    Args:
        attempts: failed passes since the last success. A process that lost its lease counts as one.
        events: number of events of the group at the begin of the pass.
    """

    group_id: str
    owner: str
    epoch: int
    attempts: int
    events: int


class PassEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a pass, which returns its lease.

    Args:
        due_at: time of the next pass on the database clock. An event during the pass makes the group due at once.
        error: None after a success.
        attempts: failed passes since the last success, this one included.
    """

    claim: Claim
    due_at: float
    error: str | None = None
    attempts: int = 0


class Claims:
    """The leases of one process; a lease lasts for `seconds`."""

    def __init__(self, database: Database, owner: str, seconds: float) -> None:
        self._database = database
        self._owner = owner
        self._seconds = seconds

    def claim(self, most: int = 1, *, fresh: bool = False) -> tuple[Claim, ...]:
        """Claim up to `most` due groups, the longest due first. With `fresh`, none whose last pass failed."""

        def write(connection: sa.Connection) -> tuple[Claim, ...]:
            now = clock.now(connection)
            rows = connection.execute(
                sa.select(
                    group_row.c.id, group_row.c.epoch, group_row.c.attempts, group_row.c.events, group_row.c.owner
                )
                .where(*_due(now, fresh=fresh))
                .order_by(group_row.c.due_at)
                .limit(most)
                .with_for_update(skip_locked=True)
            ).all()
            if not rows:
                return ()
            connection.execute(
                group_row.update()
                .where(group_row.c.id.in_([row.id for row in rows]))
                # In an UPDATE, MySQL and MariaDB assign columns from left to right. So `attempts`, which depends on the
                # old `owner`, comes first.
                .ordered_values(
                    (group_row.c.attempts, group_row.c.attempts + sa.case((group_row.c.owner.is_(None), 0), else_=1)),
                    (group_row.c.owner, self._owner),
                    (group_row.c.epoch, group_row.c.epoch + 1),
                    (group_row.c.leased_until, now + self._seconds),
                )
            )
            return tuple(
                Claim(
                    group_id=row.id,
                    owner=self._owner,
                    epoch=row.epoch + 1,
                    # A row that still has an owner shows that the owner crashed or was suspended. So the claim counts
                    # as a failed attempt.
                    attempts=row.attempts + (row.owner is not None),
                    events=row.events,
                )
                for row in rows
            )

        # Most searches find no group. A read costs less than a write, so the search begins with a read.
        due = self._database.read(
            lambda connection: connection.execute(
                sa.select(group_row.c.id).where(*_due(clock.now(connection), fresh=fresh)).limit(1)
            ).first()
        )
        return self._database.write(write) if due else ()

    def renew(self, claims: Collection[Claim]) -> None:
        """Renew leases; those that this process has lost stay lost.

        On a database server, the renewal skips locked rows until the next call, so that one locked row does not delay
        the others.
        """
        ids = [claim.group_id for claim in claims]

        def write(connection: sa.Connection) -> None:
            mine = sa.and_(group_row.c.owner == self._owner, group_row.c.id.in_(ids))
            if connection.dialect.name != "sqlite":
                free = sa.select(group_row.c.id).where(mine).with_for_update(skip_locked=True)
                mine = sa.and_(mine, group_row.c.id.in_(connection.execute(free).scalars().all()))
            connection.execute(
                group_row.update().where(mine).values(leased_until=clock.now(connection) + self._seconds)
            )

        if ids:
            self._database.write(write)

    def end_passes(self, ends: Sequence[PassEnd]) -> None:
        """Return the leases of passes in one transaction. A lease that another process owns stays."""
        if ends:
            self._database.write(lambda connection: end_passes(connection, ends))

    def release_all(self, owner: str | None = None) -> int:
        """Return the leases of this process at its end, or those of a dead process; return their number.

        A group may have crashed the dead process. After a crash it is due after a back-off, which grows with the number
        of crashes.
        """

        def write(connection: sa.Connection) -> int:
            values: list[tuple[Any, Any]] = [(group_row.c.owner, None), (group_row.c.leased_until, None)]
            if owner is not None:
                # In an UPDATE, MySQL and MariaDB assign columns from left to right. So `due_at`, which depends on the
                # old `attempts`, comes first.
                later = clock.now(connection) + _CRASH_BACKOFF * group_row.c.attempts
                values = [(group_row.c.due_at, later), (group_row.c.attempts, group_row.c.attempts + 1), *values]
            mine = group_row.update().where(group_row.c.owner == (owner or self._owner))
            return connection.execute(mine.ordered_values(*values)).rowcount

        return self._database.write(write)

    def clamp_due_times(self, longest: float) -> int:
        """Bring forward implausibly late due times and leases: the clock was set back after they were written.

        A live owner renews such a lease. The lease of a dead owner expires. `longest` is the longest possible pause in
        seconds. Return the number of changed groups.
        """
        lease = max(_LEASES * self._seconds, _LEAST)

        def look(connection: sa.Connection) -> bool:
            late = sa.or_(*_late(connection, longest, lease))
            return connection.execute(sa.select(group_row.c.epoch).where(late).limit(1)).first() is not None

        def write(connection: sa.Connection) -> int:
            paused, leased = _late(connection, longest, lease)
            now = clock.now(connection)
            due = connection.execute(group_row.update().where(paused).values(due_at=now)).rowcount
            soon = now + self._seconds
            return due + connection.execute(group_row.update().where(leased).values(leased_until=soon)).rowcount

        return self._database.write(write) if self._database.read(look) else 0


def _due(now: sa.ColumnElement[float], *, fresh: bool) -> tuple[sa.ColumnElement[bool], ...]:
    """Return the conditions of a due group: no pause, and no live owner."""
    due = [group_row.c.due_at <= now, sa.or_(group_row.c.owner.is_(None), group_row.c.leased_until < now)]
    if fresh:
        due += [group_row.c.attempts == 0, group_row.c.owner.is_(None)]
    return tuple(due)


def _late(
    connection: sa.Connection, longest: float, lease: float
) -> tuple[sa.ColumnElement[bool], sa.ColumnElement[bool]]:
    now = clock.now(connection)
    return group_row.c.due_at > now + longest, group_row.c.leased_until > now + lease


_MINE = (
    group_row.c.id == sa.bindparam("of"),
    group_row.c.owner == sa.bindparam("whose"),
    group_row.c.epoch == sa.bindparam("under"),
)
_GUARD = group_row.update().where(*_MINE).values(writes=group_row.c.writes + 1)
_SEEN = sa.bindparam("seen", type_=sa.BigInteger)
_NOW = sa.bindparam("now", type_=sa.Double)
_END = (
    group_row.update()
    .where(*_MINE)
    .values(
        due_at=sa.case((group_row.c.events != _SEEN, _NOW), else_=sa.bindparam("again", type_=sa.Double)),
        attempts=sa.bindparam("failed", type_=sa.Integer),
        error=sa.bindparam("why", type_=sa.Text),
        passed_at=sa.func.coalesce(sa.bindparam("passed", type_=sa.Double), group_row.c.passed_at),
        writes=group_row.c.writes + 1,
        owner=None,
        leased_until=None,
    )
)


def guard_claim(connection: sa.Connection, claim: Claim) -> None:
    """Lock a valid lease until this transaction ends, or raise `LeaseLost`."""
    if connection.execute(_GUARD, _bound(claim)).rowcount != 1:
        wanted = f"write under lease {claim.epoch} of group {claim.group_id}"
        raise LeaseLost(wanted, "another controller has taken it over, or the group does not exist any more")


def end_passes(connection: sa.Connection, ends: Sequence[PassEnd]) -> None:
    """Return the leases of passes; see `Claims.end_passes`."""
    now = connection.execute(sa.select(clock.now(connection))).scalar_one()
    # All processes update groups in the order of their ids, so that no deadlock occurs.
    for part in chunks(sorted(ends, key=lambda end: end.claim.group_id)):
        connection.execute(
            _END,
            [
                {
                    **_bound(end.claim),
                    "now": now,
                    "seen": end.claim.events,
                    "again": end.due_at,
                    "failed": end.attempts,
                    "why": None if end.error is None else end.error[:_MAX_ERROR],
                    "passed": now if end.error is None else None,
                }
                for end in part
            ],
        )


def _bound(claim: Claim) -> dict[str, Any]:
    return {"of": claim.group_id, "whose": claim.owner, "under": claim.epoch}
