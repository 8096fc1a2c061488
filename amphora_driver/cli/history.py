# SPDX-License-Identifier: Apache-2.0
"""What happened to a load balancer, in the order in which it happened.

Invariant: a line says one thing that happened at one moment. A request is two lines, when it was accepted and when it
was applied, so that what went on meanwhile stands between them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa

from amphora_driver.cli.formatting import Moment, Plain, Span, lasting
from amphora_driver.database.tables import request
from amphora_driver.database.tables_fleet import failover, failover_event, resync

if TYPE_CHECKING:
    from collections.abc import Iterator

HEAD = ("At", "What", "Event", "Number", "Object", "Seconds", "Detail")


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened.

    Attributes:
        at: when (seconds since 1970).
        what: request, fail-over or resync.
        event: in a few words.
        number: the generation of a request, the id of a fail-over.
        object_id: which object or amphora.
        seconds: since the request was accepted, or the fail-over begun.
        detail: outcome or reason.
    """

    at: float
    what: str
    event: str
    number: int | None = None
    object_id: str | None = None
    seconds: float | None = None
    detail: str | None = None


def of(connection: sa.Connection, load_balancer_id: str, limit: int) -> list[Line]:
    """The newest lines, the newest first.

    Args:
        connection: of a reading transaction.
        load_balancer_id: whose; it may be gone.
        limit: the most lines.
    """
    requests = sa.select(request).where(request.c.load_balancer_id == load_balancer_id)
    lines = [
        line
        for row in connection.execute(requests.order_by(request.c.id.desc()).limit(limit))
        for line in _of_request(row)
    ]
    events = (
        sa.select(failover_event, failover.c.cause, failover.c.asked_by, failover.c.silent_since, failover.c.begun_at)
        .join(failover, failover.c.id == failover_event.c.failover_id)
        .where(failover.c.load_balancer_id == load_balancer_id)
    )
    rows = connection.execute(events.order_by(failover_event.c.id.desc()).limit(limit))
    lines += [line for row in rows for line in _of_event(row)]
    for row in connection.execute(sa.select(resync).where(resync.c.load_balancer_id == load_balancer_id)):
        lines += _of_resync(row)
    # What was written later comes first where two moments are the same.
    return sorted(lines, key=lambda line: line.at, reverse=True)[:limit]


def shown(line: Line) -> tuple[Any, ...]:
    """A line in the order of `HEAD`."""
    return (
        *(Moment(line.at), line.what, line.event, Plain(line.number), Plain(line.object_id)),
        *(Span(line.seconds), Plain(line.detail)),
    )


def _of_request(row: Any) -> Iterator[Line]:
    common = {"what": "request", "number": row.generation, "object_id": row.object_id}
    if row.applied_at is not None:
        took = row.applied_at - row.accepted_at
        yield Line(at=row.applied_at, event=f"applied: {row.action}", seconds=took, detail=row.outcome, **common)
        yield Line(at=row.accepted_at, event=row.action, **common)
    else:
        yield Line(at=row.accepted_at, event=row.action, detail=row.outcome or "not applied yet", **common)


def _of_event(row: Any) -> Iterator[Line]:
    common = {"what": "fail-over", "number": row.failover_id, "object_id": row.amphora_id}
    words = row.word.replace("_", " ")
    if row.word == "begun":
        asked = f", asked for by {row.asked_by}" if row.asked_by else ""
        since = row.silent_since
        heard = "" if since is None else f", {lasting(max(0.0, row.at - since))} after it was heard last"
        yield Line(at=row.at, event=words, detail=f"{row.cause}{asked}{heard}: {row.detail or ''}", **common)
    else:
        yield Line(at=row.at, event=words, seconds=row.at - row.begun_at, detail=row.detail, **common)


def _of_resync(row: Any) -> Iterator[Line]:
    common: dict[str, Any] = {"what": "resync", "object_id": row.load_balancer_id}
    if row.ended_at is not None:
        took = row.ended_at - row.asked_at
        words = ": ".join(word for word in (row.outcome, row.detail) if word)
        yield Line(at=row.ended_at, event="ended", seconds=took, detail=words, **common)
    asked = f"asked for by {row.asked_by}" if row.asked_by else None
    waits = None if row.ended_at is not None else row.detail or "not begun yet"
    detail = "; ".join(word for word in (asked, waits) if word) or None
    yield Line(at=row.asked_at, event="asked for", detail=detail, **common)
