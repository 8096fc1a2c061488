# SPDX-License-Identifier: Apache-2.0
"""Reads from Octavia: rereads of incomplete deliveries, and resynchronizations for operators.

A reread follows Octavia's commit of an object that Octavia delivered incompletely. A resynchronization reads a load
balancer completely and reports all its statuses.

Invariant: the controller pushes nothing of the load balancer until its reread succeeds or is cancelled. A request for
a resynchronization stays open until the transaction that stores the data from Octavia also writes the outcome.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum
from typing import Any

import msgspec
import sqlalchemy as sa

from amphora_driver.database.rows import chunks
from amphora_driver.database.tables import DUE_NOW, job, object_status
from amphora_driver.database.tables_fleet import resync
from amphora_driver.model.enums import Kind
from amphora_driver.store.generations import update_job

# Seconds for which operators can read the result of a finished resynchronization.
_KEPT_SECONDS = 30 * 86400.0
_ASKED = sa.select(job.c.read_back, job.c.reread).where(job.c.load_balancer_id == sa.bindparam("of"))


class ResyncOutcome(str, Enum):
    """Result of a resynchronization."""

    # The load balancer was read from Octavia, and all its statuses are reported again.
    DONE = "done"
    # The read from Octavia failed, and the statuses in the driver's database are reported again.
    UNREAD = "unread"
    # The driver's database has the load balancer, and Octavia does not.
    UNKNOWN = "unknown"
    # The load balancer existed only in Octavia or only in the driver's database, and was deleted at the operator's
    # request.
    REMOVED = "removed"
    # Octavia has the load balancer, and the driver's database does not.
    UNRECORDED = "unrecorded"
    # Neither Octavia nor the driver's database has the load balancer.
    NOWHERE = "nowhere"
    # The load balancer is being deleted, and DELETED is reported afterwards.
    GOING = "going"


def request_resyncs(
    connection: sa.Connection,
    load_balancer_ids: Collection[str],
    now: float,
    asked_by: str | None = None,
    *,
    remove_unknown: bool = False,
) -> None:
    """Request resynchronizations, also of unrecorded load balancers, and delete earlier results.

    With `remove_unknown`, a load balancer that only one side knows is removed.
    """
    connection.execute(resync.delete().where(resync.c.ended_at < now - _KEPT_SECONDS))
    values = {"asked_at": now, "asked_by": asked_by, "remove_unknown": remove_unknown}
    fresh = {"ended_at": None, "outcome": None, "detail": None}
    for one in sorted(load_balancer_ids):
        mine = resync.c.load_balancer_id == one
        if not connection.execute(resync.update().where(mine).values(**values, **fresh)).rowcount:
            connection.execute(resync.insert().values(load_balancer_id=one, **values))


def list_open_resyncs(connection: sa.Connection) -> Sequence[sa.Row[Any]]:
    """Return the open resynchronizations, the oldest request first."""
    order = (resync.c.asked_at, resync.c.load_balancer_id)
    return connection.execute(sa.select(resync).where(resync.c.ended_at.is_(None)).order_by(*order)).all()


def list_resyncs(connection: sa.Connection, load_balancer_ids: Collection[str] | None = None) -> list[sa.Row[Any]]:
    """Return the last resynchronization of these load balancers, or of all, ordered by id."""
    query = sa.select(resync).order_by(resync.c.load_balancer_id)
    if load_balancer_ids is None:
        return list(connection.execute(query))
    some = (query.where(resync.c.load_balancer_id.in_(ids)) for ids in chunks(sorted(load_balancer_ids)))
    return [row for one in some for row in connection.execute(one)]


def set_resync_detail(connection: sa.Connection, load_balancer_id: str, detail: str) -> None:
    """Record the reason for which a resynchronization waits."""
    mine = resync.c.load_balancer_id == load_balancer_id
    connection.execute(resync.update().where(mine, resync.c.ended_at.is_(None)).values(detail=detail))


def finish_resync(
    connection: sa.Connection, asked: sa.Row[Any], outcome: ResyncOutcome, now: float, detail: str | None = None
) -> bool:
    """Record the outcome; return False if it is finished already, or was requested again."""
    mine = (resync.c.load_balancer_id == asked.load_balancer_id, resync.c.asked_at == asked.asked_at)
    values = {"ended_at": now, "outcome": outcome.value, "detail": detail}
    return bool(connection.execute(resync.update().where(*mine, resync.c.ended_at.is_(None)).values(**values)).rowcount)


def report_again(connection: sa.Connection, load_balancer_id: str) -> None:
    """Make all statuses of a load balancer's objects due for a new report to Octavia.

    Octavia's row of the load balancer must be PENDING, which blocks requests of users. Otherwise a repeated
    provisioning status could overwrite the PENDING of a newer request.
    """
    # In an UPDATE, MySQL and MariaDB assign columns from left to right. So `settled`, which depends on the old
    # `version`, comes first.
    again: list[tuple[Any, Any]] = [(column, object_status.c.version + 1) for column in ("settled", "version")]
    mine = object_status.c.load_balancer_id == load_balancer_id
    connection.execute(object_status.update().where(mine).ordered_values(*again))


def request_object_reread(connection: sa.Connection, load_balancer_id: str, kind: Kind, object_id: str) -> None:
    """Request a read of one object after Octavia's commit."""
    row = connection.execute(_ASKED, {"of": load_balancer_id}).one()
    if row.read_back and row.reread is None:
        return
    objects = list(decode_objects(row.reread) or ())
    if (kind, object_id) not in objects:
        objects.append((kind, object_id))
    update_job(connection, load_balancer_id, read_back=True, reread=msgspec.json.encode(objects).decode())


def request_tree_reread(connection: sa.Connection, load_balancer_id: str) -> None:
    """Request a read of the complete tree after Octavia's commit."""
    update_job(connection, load_balancer_id, read_back=True, reread=None)


def decode_objects(reread: str | None) -> Sequence[tuple[Kind, str]] | None:
    """Decode the column `job.reread`: the objects to read; None for the complete tree."""
    return None if reread is None else msgspec.json.decode(reread, type=list[tuple[Kind, str]])


def finish_reread(connection: sa.Connection, load_balancer_id: str) -> None:
    """End the reread and make the load balancer due."""
    update_job(connection, load_balancer_id, read_back=False, reread=None, dirty=True, due_at=DUE_NOW)


def cancel_reread(connection: sa.Connection, load_balancer_id: str) -> None:
    """Cancel the reread, because the load balancer is being deleted."""
    update_job(connection, load_balancer_id, read_back=False, reread=None)
