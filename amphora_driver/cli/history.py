# SPDX-License-Identifier: Apache-2.0
"""The events of a load balancer: requests, fail-overs and resyncs in order of time.

Invariant: one line is one event at one time. A request has two lines, one for its acceptance and one for its
application, so events in between are listed between them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa

from amphora_driver.cli.formatting import Duration, Timestamp, Value, format_duration
from amphora_driver.database.tables import request
from amphora_driver.database.tables_fleet import failover, failover_event, resync

if TYPE_CHECKING:
    from collections.abc import Iterator

HEAD = ("At", "What", "Event", "Number", "Object", "Seconds", "Detail")


class HistoryEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event; `what` is "request", "fail-over" or "resync".

    Attributes:
        number: generation of a request, or id of a fail-over.
        object_id: id of the object or amphora.
        seconds: time since the acceptance of the request, or since the start of the fail-over.
    """

    at: float
    what: str
    event: str
    number: int | None = None
    object_id: str | None = None
    seconds: float | None = None
    detail: str | None = None


def list_events(connection: sa.Connection, load_balancer_id: str, limit: int) -> list[HistoryEvent]:
    """Return the newest events of a load balancer, which may be deleted; newest first."""
    requests = sa.select(request).where(request.c.load_balancer_id == load_balancer_id)
    found: list[HistoryEvent] = []
    for row in connection.execute(requests.order_by(request.c.id.desc()).limit(limit)):
        found += _request_events(row)
    events = (
        sa.select(failover_event, failover.c.cause, failover.c.asked_by, failover.c.silent_since, failover.c.begun_at)
        .join(failover, failover.c.id == failover_event.c.failover_id)
        .where(failover.c.load_balancer_id == load_balancer_id)
    )
    found += map(_failover_event, connection.execute(events.order_by(failover_event.c.id.desc()).limit(limit)))
    for row in connection.execute(sa.select(resync).where(resync.c.load_balancer_id == load_balancer_id)):
        found += _resync_events(row)
    # `sorted` is stable, so events with equal times keep the order of the queries (newest first).
    return sorted(found, key=lambda event: event.at, reverse=True)[:limit]


def to_row(event: HistoryEvent) -> tuple[Any, ...]:
    """Return the values in the order of `HEAD`."""
    return (
        *(Timestamp(event.at), event.what, event.event, Value(event.number), Value(event.object_id)),
        *(Duration(event.seconds), Value(event.detail)),
    )


def _request_events(row: Any) -> Iterator[HistoryEvent]:
    common = {"what": "request", "number": row.generation, "object_id": row.object_id}
    detail = None
    if row.applied_at is None:
        detail = row.outcome or "not applied yet"
    else:
        took = row.applied_at - row.accepted_at
        applied = f"applied: {row.action}"
        yield HistoryEvent(at=row.applied_at, event=applied, seconds=took, detail=row.outcome, **common)
    yield HistoryEvent(at=row.accepted_at, event=row.action, detail=detail, **common)


def _failover_event(row: Any) -> HistoryEvent:
    seconds, detail = row.at - row.begun_at, row.detail
    if row.word == "begun":
        requested = f", requested by {row.asked_by}" if row.asked_by else ""
        since = row.silent_since
        heard = "" if since is None else f", {format_duration(max(0.0, row.at - since))} after its last heartbeat"
        seconds, detail = None, f"{row.cause}{requested}{heard}: {row.detail or ''}"
    return HistoryEvent(
        at=row.at,
        what="fail-over",
        event=row.word.replace("_", " "),
        number=row.failover_id,
        object_id=row.amphora_id,
        seconds=seconds,
        detail=detail,
    )


def _resync_events(row: Any) -> Iterator[HistoryEvent]:
    common: dict[str, Any] = {"what": "resync", "object_id": row.load_balancer_id}
    if row.ended_at is not None:
        took = row.ended_at - row.asked_at
        words = ": ".join(word for word in (row.outcome, row.detail) if word)
        yield HistoryEvent(at=row.ended_at, event="ended", seconds=took, detail=words, **common)
    requested = f"requested by {row.asked_by}" if row.asked_by else None
    waits = None if row.ended_at is not None else row.detail or "not begun yet"
    detail = "; ".join(word for word in (requested, waits) if word) or None
    yield HistoryEvent(at=row.asked_at, event="asked for", detail=detail, **common)
