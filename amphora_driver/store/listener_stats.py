# SPDX-License-Identifier: Apache-2.0
"""Listener statistics for Octavia.

Invariant: totals include every amphora that ever served the listener, also deleted ones, so they never decrease.
Active connections include existing amphorae only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from amphora_driver.database.rows import chunks, force_index
from amphora_driver.database.tables import amphora, job, listener_statistics

_COUNTERS = ("active_connections", "bytes_in", "bytes_out", "request_errors", "total_connections")


# The SQL statements are module constants, because SQLAlchemy needs more time to build a statement than to execute it.
_IDS: sa.BindParameter[Any] = sa.bindparam("ids", expanding=True)
_OF_LISTENERS = listener_statistics.c.listener_id.in_(_IDS)
_LOCK_VERSIONS = (
    sa.select(listener_statistics.c.listener_id, listener_statistics.c.version)
    .where(_OF_LISTENERS)
    .order_by(listener_statistics.c.listener_id, listener_statistics.c.amphora_id)
    .with_for_update()
)
# For several hundred ids, MariaDB sometimes expects so many rows that it reads and locks the complete table.
_BY_LISTENER = "FORCE INDEX (PRIMARY)"
_MARK_REPORTED = (
    listener_statistics.update()
    .where(_OF_LISTENERS, listener_statistics.c.version > listener_statistics.c.reported)
    .values(reported=listener_statistics.c.version)
    .with_hint(_BY_LISTENER, dialect_name="mysql")
    .with_hint(_BY_LISTENER, dialect_name="mariadb")
)


_FIRST_DIGIT = sa.func.lower(sa.func.substr(listener_statistics.c.listener_id, 1, 1))
_COMMITTED = sa.select(job.c.committed).where(job.c.load_balancer_id == listener_statistics.c.load_balancer_id)
# A subquery reads `committed`, because with a join the server could begin with all rows of `job`.
_DUE = (
    force_index(sa.select(listener_statistics.c.listener_id), listener_statistics, "unreported")
    .where(listener_statistics.c.unreported == sa.true(), _COMMITTED.scalar_subquery() > 0)
    .group_by(listener_statistics.c.listener_id)
    .order_by(listener_statistics.c.listener_id)
)


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
        return {"id": self.listener_id, **{name: getattr(self, name) for name in _COUNTERS}}


def list_due_totals(
    connection: sa.Connection, limit: int, after: str = "", parts: Collection[str] | None = None
) -> list[ListenerTotals]:
    """Return the totals that Octavia has not received in their newest version, ordered by listener.

    Ids after `after`, the last reported listener, come first. A listener whose counters always change then delays no
    other one. With `parts`, the result has only listeners whose ids begin with one of these digits.
    """
    table = listener_statistics
    listener_ids = _list_due_listeners(connection, limit, after, parts)
    if not listener_ids:
        return []
    counters: dict[str, sa.ColumnElement[int]] = {name: table.c[name] for name in (*_COUNTERS, "version")}
    # The row of a deleted amphora keeps its last number of active connections, which must not count.
    counters["active_connections"] = sa.case((amphora.c.id.is_(None), 0), else_=table.c.active_connections)
    rows = connection.execute(
        sa.select(table.c.listener_id, *(sa.func.sum(column).label(name) for name, column in counters.items()))
        .outerjoin(amphora, amphora.c.id == table.c.amphora_id)
        .where(table.c.listener_id.in_(listener_ids))
        .group_by(table.c.listener_id)
    )
    # MariaDB and PostgreSQL return sums as Decimal, so they are converted.
    found = {row.listener_id: {name: int(getattr(row, name)) for name in counters} for row in rows}
    return [ListenerTotals(listener_id=one, **found[one]) for one in listener_ids if one in found]


def _list_due_listeners(connection: sa.Connection, limit: int, after: str, parts: Collection[str] | None) -> list[str]:
    """Return the first listeners with unreported counters after `after`, then those up to `after`."""
    mine = [] if parts is None else [_FIRST_DIGIT.in_(sorted(parts))]
    # Two statements, because each one reads the index in its order and stops at the limit. One statement for both parts
    # would read and sort all due listeners in each of many calls.
    found: list[str] = []
    for part in (listener_statistics.c.listener_id > after, listener_statistics.c.listener_id <= after):
        if len(found) < limit:
            found += connection.execute(_DUE.where(part, *mine).limit(limit - len(found))).scalars()
    return found


def mark_totals_reported(connection: sa.Connection, totals: Sequence[ListenerTotals]) -> None:
    """Record that Octavia has received totals. A listener with newer counters stays due."""
    sent = {one.listener_id: one.version for one in totals}
    for ids in chunks(sorted(sent)):
        # The lock prevents changes of the counters before the UPDATE. Otherwise, a changed counter would count as
        # reported, although Octavia has not received it.
        now: Counter[str] = Counter()
        for listener_id, version in connection.execute(_LOCK_VERSIONS, {"ids": ids}):
            now[listener_id] += version
        unchanged = [one for one in ids if now[one] == sent[one]]
        if unchanged:
            connection.execute(_MARK_REPORTED, {"ids": unchanged})
