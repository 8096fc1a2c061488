# SPDX-License-Identifier: Apache-2.0
"""Divides the listeners among the provider agents of several hosts, which report in parallel.

Invariant: one provider agent at a time reports a listener, except after a call that ended with a time-out. Otherwise,
Octavia might apply an older total after a newer one. A part is the listeners whose ids begin with the same hexadecimal
digit. The right to a part is a duty. Its lease is extended while a call to Octavia lasts.

Each provider agent takes an equal number of parts. A provider agent that cannot report returns its parts. The others
take a part that stays free, and return one part at a time while they have more than their number.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

import msgspec
import sqlalchemy as sa

from amphora_driver.database import clock
from amphora_driver.database.engine import Database
from amphora_driver.database.tables import duty
from amphora_driver.database.tables_fleet import process
from amphora_driver.store.process_registry import ProcessKind

PARTS = "0123456789abcdef"
_NAME = "statistics-"
# Seconds of a lease for a part of the listeners; seconds between two renewals; minimum remaining seconds of the lease
# at the start of a call.
_LEASE, _RENEWAL, _LEAST = 15.0, 5.0, 5.0
# A lease with more remaining seconds means that the database clock was set back.
_LONGEST_LEASE = 10 * _LEASE
# A provider agent whose last heartbeat is older than this number of seconds gets no parts.
_ALIVE = 10.0


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The parts to keep or take, and those to return."""

    kept: frozenset[str]
    returned: frozenset[str]


def decide(
    own: Collection[str], free: Collection[str], idle: Collection[str], number: int, *, first: bool = False
) -> Decision:
    """Choose the parts of one provider agent of `number`. Pure.

    `own` parts and `free` ones have no other owner. The `idle` ones were free at the previous decision too. At its
    `first` decision a provider agent may still have the parts of its predecessor.
    """
    share = -(-len(PARTS) // max(1, number))
    ordered = sorted(own)
    returned = ordered[share:] if first else ordered[share:][:1]
    kept = [one for one in ordered if one not in returned]
    taken = sorted(free)[: max(0, share - len(kept))]
    unwanted = [one for one in idle if one in free]
    return Decision(kept=frozenset([*kept, *taken, *unwanted]), returned=frozenset(returned))


class StatisticsShares:
    """The parts of this provider agent. For one thread, except `extend`."""

    def __init__(self, database: Database, name: str) -> None:
        self._database, self._name = database, name
        self._held: frozenset[str] = frozenset()
        self._free: frozenset[str] = frozenset()
        self._renewed_at: float | None = None

    def parts(self) -> frozenset[str]:
        """Return the parts whose listeners this process may report in one call that starts now."""
        now = time.monotonic()
        if self._renewed_at is None or now - self._renewed_at >= _RENEWAL:
            self._held, self._free = self._database.write(self._renew)
            self._renewed_at = now
        return self._held if self.may_call() else frozenset()

    def may_call(self) -> bool:
        """Return whether the leases last long enough for a call that starts now."""
        return self._renewed_at is not None and time.monotonic() - self._renewed_at < _LEASE - _LEAST

    def extend(self) -> None:
        """Extend the leases during a long call, from another thread. Expired leases stay expired."""

        def write(connection: sa.Connection) -> None:
            now = clock.now(connection)
            mine = duty.c.owner == self._name, duty.c.name.startswith(_NAME), duty.c.leased_until > now
            connection.execute(duty.update().where(*mine).values(leased_until=now + _LEASE))

        self._database.write(write)

    def release(self) -> None:
        """Return all parts, because this process stops or cannot report."""
        self._held, self._free, self._renewed_at = frozenset(), frozenset(), None
        mine = sa.and_(duty.c.owner == self._name, duty.c.name.startswith(_NAME))
        self._database.write(lambda connection: connection.execute(duty.update().where(mine).values(leased_until=0.0)))

    def _renew(self, connection: sa.Connection) -> tuple[frozenset[str], frozenset[str]]:
        """Renew the leases. Return the held parts and the free ones."""
        now = clock.now(connection)
        held = sa.and_(duty.c.leased_until > now, duty.c.leased_until <= now + _LONGEST_LEASE)
        query = sa.select(duty.c.name, duty.c.owner, held.label("held")).where(duty.c.name.in_(map(_duty_of, PARTS)))
        rows = connection.execute(query.order_by(duty.c.name).with_for_update()).all()
        if len(rows) < len(PARTS):
            known = {row.name for row in rows}
            new = [{"name": name, "owner": "", "epoch": 0} for one in PARTS if (name := _duty_of(one)) not in known]
            connection.execute(duty.insert().values(leased_until=0.0), new)
            rows = connection.execute(query.order_by(duty.c.name)).all()
        own = {row.name[-1] for row in rows if row.held and row.owner == self._name}
        free = frozenset(row.name[-1] for row in rows if not row.held)
        first = self._renewed_at is None
        found = decide(own, free, free & self._free, self._count_agents(connection, now), first=first)
        if found.returned:
            connection.execute(_of(found.returned).values(leased_until=0.0))
        if found.kept:
            # In an UPDATE, MySQL and MariaDB assign columns from left to right. So `epoch`, which depends on the old
            # `owner`, comes first.
            epoch = sa.case((duty.c.owner == self._name, duty.c.epoch), else_=duty.c.epoch + 1)
            values: list[tuple[Any, Any]] = [("epoch", epoch), ("owner", self._name), ("leased_until", now + _LEASE)]
            connection.execute(_of(found.kept).ordered_values(*values))
        return found.kept, (free - found.kept) | found.returned

    def _count_agents(self, connection: sa.Connection, now: sa.ColumnElement[float]) -> int:
        """Return the number of living provider agents, including this one."""
        alive = process.c.kind == ProcessKind.PROVIDER_AGENT.value, process.c.seen_at > now - _ALIVE
        return len({self._name, *connection.execute(sa.select(process.c.name).where(*alive)).scalars()})


def _duty_of(part: str) -> str:
    return _NAME + part


def _of(parts: Collection[str]) -> sa.Update:
    return duty.update().where(duty.c.name.in_(sorted(map(_duty_of, parts))))
