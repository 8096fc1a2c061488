# SPDX-License-Identifier: Apache-2.0
"""Load balancers that somebody wants to be read from Octavia, and told to it, as a whole.

Invariant: what was asked for is open until its outcome is written, in the transaction that takes what was read. So a
crash in the middle means only that it is done again.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from amphora_driver.database.tables import status
from amphora_driver.database.tables_fleet import resync

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

# Rows looked at together.
_CHUNK = 500
# Seconds for which it is remembered what came of one.
_KEPT_SECONDS = 30 * 86400.0


class ResyncOutcome(str, Enum):
    """What came of it."""

    DONE = "done"
    """Read, compared, and everything is said again."""
    UNREAD = "unread"
    """Octavia does not hand it over; everything is said again as it is recorded."""
    UNKNOWN = "unknown"
    """It is recorded here, and Octavia does not know it."""
    REMOVED = "removed"
    """Only one side knew it, and it is removed there, as asked."""
    UNRECORDED = "unrecorded"
    """Octavia knows it, and it is not recorded here."""
    NOWHERE = "nowhere"
    """Neither knows it."""
    GOING = "going"
    """It is being deleted: nothing is read, Octavia hears when it is gone."""


def request_resyncs(
    connection: sa.Connection,
    load_balancer_ids: Collection[str],
    now: float,
    asked_by: str | None = None,
    *,
    remove_unknown: bool = False,
) -> None:
    """Have these resynchronised; what came of an earlier time is forgotten.

    Args:
        connection: of a writing transaction.
        load_balancer_ids: which; they need not be recorded.
        now: seconds since 1970.
        asked_by: who.
        remove_unknown: remove those that only one side knows, where they are known.
    """
    connection.execute(resync.delete().where(resync.c.ended_at < now - _KEPT_SECONDS))
    values = {"asked_at": now, "asked_by": asked_by, "remove_unknown": remove_unknown}
    fresh = {"ended_at": None, "outcome": None, "detail": None}
    for one in sorted(load_balancer_ids):
        mine = resync.c.load_balancer_id == one
        if not connection.execute(resync.update().where(mine).values(**values, **fresh)).rowcount:
            connection.execute(resync.insert().values(load_balancer_id=one, **values))


def list_open_resyncs(connection: sa.Connection) -> Sequence[sa.Row[Any]]:
    """Those that are not done, the first asked for first."""
    order = (resync.c.asked_at, resync.c.load_balancer_id)
    return connection.execute(sa.select(resync).where(resync.c.ended_at.is_(None)).order_by(*order)).all()


def list_resyncs(connection: sa.Connection, load_balancer_ids: Collection[str] | None = None) -> list[sa.Row[Any]]:
    """The last time each was asked for, by id; of all that ever were where nobody is named."""
    query = sa.select(resync).order_by(resync.c.load_balancer_id)
    if load_balancer_ids is None:
        return list(connection.execute(query))
    ids = sorted(load_balancer_ids)
    found: list[sa.Row[Any]] = []
    for start in range(0, len(ids), _CHUNK):
        found += connection.execute(query.where(resync.c.load_balancer_id.in_(ids[start : start + _CHUNK]))).all()
    return found


def set_resync_detail(connection: sa.Connection, load_balancer_id: str, detail: str) -> None:
    """Note what it waits for."""
    mine = resync.c.load_balancer_id == load_balancer_id
    connection.execute(resync.update().where(mine, resync.c.ended_at.is_(None)).values(detail=detail))


def finish_resync(
    connection: sa.Connection, asked: sa.Row[Any], outcome: ResyncOutcome, now: float, detail: str | None = None
) -> bool:
    """Note what came of it; False if it is done already, or was asked for anew."""
    mine = (resync.c.load_balancer_id == asked.load_balancer_id, resync.c.asked_at == asked.asked_at)
    values = {"ended_at": now, "outcome": outcome.value, "detail": detail}
    return bool(connection.execute(resync.update().where(*mine, resync.c.ended_at.is_(None)).values(**values)).rowcount)


def report_again(connection: sa.Connection, load_balancer_id: str) -> None:
    """Have Octavia told every status of a load balancer's objects again, whatever it was told before.

    Only of one whose row in Octavia is PENDING, which keeps users from changing it: a provisioning status that is said
    twice could otherwise take back the PENDING of a request that has come meanwhile.
    """
    # In this order: MySQL and MariaDB assign from left to right, and go on with what was assigned.
    again: list[tuple[Any, Any]] = [(status.c.settled, status.c.version + 1), (status.c.version, status.c.version + 1)]
    mine = status.c.load_balancer_id == load_balancer_id
    connection.execute(status.update().where(mine).ordered_values(*again))
