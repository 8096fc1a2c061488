# SPDX-License-Identifier: Apache-2.0
"""The outbox of notifications.

Invariant: the transaction of a request writes the row of its notification. The row is due from the transaction that
records that Octavia has accepted the result, ACTIVE or DELETED. It is deleted after the message bus has accepted the
message, so each notification is sent at least once, also after a crash. Its `message_id` never changes. The due rows of
one load balancer have the order of the requests.

All functions work inside the caller's transaction. While notifications are off, a controller calls the functions that
delete rows only: another host may have the option on.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import msgspec
import sqlalchemy as sa

from amphora_driver.database import clock
from amphora_driver.database.rows import chunks, load_as
from amphora_driver.database.tables import desired_object, job, notification
from amphora_driver.model.loadbalancer import LoadBalancer
from amphora_driver.notifications.payload import build_payload


class Event(Enum):
    """A request that has a notification."""

    CREATE = "create"
    UPDATE = "update"
    DELETE = "delete"


Announce = Callable[[sa.Connection, str, int, Event], None]
"""Records the notification of a request: connection, load balancer, generation, event."""


class Notification(msgspec.Struct, frozen=True, kw_only=True):
    """A notification that is due; `payload` is JSON, `ready_at` is in seconds since 1970."""

    id: int
    message_id: str
    event: Event
    ready_at: float
    payload: str


_IDS: sa.BindParameter[Any] = sa.bindparam("ids", expanding=True)
_ROW = notification.c
_DECODER = msgspec.json.Decoder(LoadBalancer)
_WAITING = (
    sa.select(_ROW.id, _ROW.load_balancer_id, _ROW.generation, _ROW.event)
    .where(_ROW.load_balancer_id.in_(_IDS), _ROW.ready_at.is_(None))
    .order_by(_ROW.id)
)
_BODIES = sa.select(desired_object.c.id, desired_object.c.body).where(desired_object.c.id.in_(_IDS))
_DELETE = notification.delete().where(_ROW.id.in_(_IDS))
# A notification may become due after its id was read. So the DELETE statement checks again that the notification still
# waits.
_DELETE_WAITING = _DELETE.where(_ROW.ready_at.is_(None))
_DUE = sa.select(notification).where(_ROW.ready_at.is_not(None)).order_by(_ROW.id)


def announce_nothing(_connection: sa.Connection, _load_balancer_id: str, _generation: int, _event: Event) -> None:
    """Record nothing, because notifications are off."""


def announce(connection: sa.Connection, load_balancer_id: str, generation: int, event: Event) -> None:
    """Record the notification of a request, which waits for the result; see `Announce`."""
    if event is Event.DELETE:
        # Octavia accepts a deletion only after the previous request has ended. If the provider agent died before it
        # released that request's notification, `announce` releases the notification here.
        applied = connection.execute(sa.select(job.c.applied).where(job.c.load_balancer_id == load_balancer_id))
        release(connection, {load_balancer_id: int(applied.scalar_one())})
        # A user may repeat a failed deletion. Only the newest deletion causes a notification, so older waiting rows are
        # deleted.
        repeated = _ROW.load_balancer_id == load_balancer_id, _ROW.event == event.value, _ROW.ready_at.is_(None)
        connection.execute(notification.delete().where(*repeated))
    row = {"load_balancer_id": load_balancer_id, "generation": generation, "event": event.value}
    connection.execute(notification.insert(), {**row, "message_id": str(uuid.uuid4())})


def release(connection: sa.Connection, served: Mapping[str, int]) -> None:
    """Make the notifications due of creations and updates that Octavia has accepted as ACTIVE.

    Args:
        connection: an open transaction.
        served: by load balancer, the newest generation that its amphorae serve.
    """
    waiting = _list_waiting(connection, served)
    _make_due(connection, [one for one in waiting if one.generation <= served[one.load_balancer_id] and _lives(one)])


def release_deleted(connection: sa.Connection, load_balancer_ids: Collection[str]) -> None:
    """Make the notifications due of accepted deletions, and drop those of requests never served."""
    waiting = _list_waiting(connection, load_balancer_ids)
    _make_due(connection, [one for one in waiting if not _lives(one)])
    delete(connection, [one.id for one in waiting if _lives(one)])


def list_due(connection: sa.Connection, limit: int) -> list[Notification]:
    """Return the oldest due notifications."""
    return load_as(connection, Notification, _DUE.limit(limit))


def delete(connection: sa.Connection, ids: Sequence[int]) -> None:
    """Delete notifications, for example those that the message bus has accepted."""
    for some in chunks(ids):
        connection.execute(_DELETE, {"ids": some})


def delete_old(connection: sa.Connection, max_age: float) -> int:
    """Delete notifications that have been due for longer than `max_age` seconds; return their number."""
    old = notification.delete().where(_ROW.ready_at < clock.now(connection) - max_age)
    return connection.execute(old).rowcount


def delete_ownerless(connection: sa.Connection) -> None:
    """Delete waiting notifications of load balancers that were deleted while notifications were off."""
    known = sa.exists().where(job.c.load_balancer_id == _ROW.load_balancer_id)
    # On MariaDB, a DELETE that reads `job` would lock rows of `job`. So the ids are read first.
    found = connection.execute(sa.select(_ROW.id).where(_ROW.ready_at.is_(None), ~known))
    for some in chunks(list(found.scalars())):
        connection.execute(_DELETE_WAITING, {"ids": some})


def delete_excess(connection: sa.Connection, keep: int, limit: int) -> int:
    """Delete the oldest waiting notifications, but none of the newest `keep`; return their number.

    One call deletes at most `limit`.
    """
    waiting = _ROW.ready_at.is_(None)
    number = connection.execute(sa.select(sa.func.count()).select_from(notification).where(waiting)).scalar_one()
    excess = min(number - keep, limit)
    if excess <= 0:
        return 0
    found = connection.execute(sa.select(_ROW.id).where(waiting).order_by(_ROW.id).limit(excess)).scalars().all()
    return sum(connection.execute(_DELETE_WAITING, {"ids": some}).rowcount for some in chunks(found))


def _lives(row: Any) -> bool:
    return bool(row.event != Event.DELETE.value)


def _list_waiting(connection: sa.Connection, load_balancer_ids: Iterable[str]) -> list[Any]:
    found: list[Any] = []
    for some in chunks(sorted(load_balancer_ids)):
        found += connection.execute(_WAITING, {"ids": some})
    return found


def _make_due(connection: sa.Connection, waiting: Sequence[Any]) -> None:
    payloads: dict[str, str] = {}
    for some in chunks(sorted({one.load_balancer_id for one in waiting})):
        for row in connection.execute(_BODIES, {"ids": some}):
            payloads[row.id] = msgspec.json.encode(build_payload(_DECODER.decode(row.body))).decode()
    # All writers update rows in the order of their ids, so that no deadlock occurs.
    for one in sorted(waiting, key=lambda row: int(row.id)):
        if payload := payloads.get(one.load_balancer_id):
            changed = notification.update().where(_ROW.id == one.id, _ROW.ready_at.is_(None))
            connection.execute(changed.values(ready_at=clock.now(connection), payload=payload))
