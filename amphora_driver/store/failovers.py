# SPDX-License-Identifier: Apache-2.0
"""Cause and time line of every fail-over.

Invariant: an amphora that is being replaced has exactly one open row, from the transaction that retires the amphora. A
step on a load balancer records an event in every open row of the load balancer, in the transaction of the step. A crash
therefore neither loses nor invents a fail-over.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum
from typing import Any

import msgspec
import sqlalchemy as sa

from amphora_driver import failpoints
from amphora_driver.database.tables import URGENT, amphora, job
from amphora_driver.database.tables_fleet import failover, failover_event
from amphora_driver.model.amphora import AmphoraState
from amphora_driver.store.generations import update_job

_MAX_TEXT = 1000
# Maximum number of old fail-overs that one transaction deletes, so that the transaction does not hold locks for long.
_PURGE_BATCH = 500
_IS_OPEN = failover.c.ended_at.is_(None)


class Cause(str, Enum):
    """Cause of a fail-over."""

    SILENT = "silent"
    MUTE = "mute"
    NEVER_SPOKE = "never_spoke"
    ASKED = "asked"
    OPERATOR = "operator"
    ROTATION = "rotation"
    RESIZE = "resize"


class Event(str, Enum):
    """Events of a fail-over, in about this order."""

    FOUND = "found"
    BEGUN = "begun"
    RECORDED = "recorded"
    ADOPTED = "adopted"
    BOOTED = "booted"
    READY = "ready"
    CONFIRMED = "confirmed"
    HANDED_OVER = "handed_over"
    SERVED = "served"
    RELEASED = "released"
    FAILED = "failed"
    ENDED = "ended"


class FailoverOutcome(str, Enum):
    """Result of a fail-over."""

    DONE = "done"
    GONE = "gone"
    SUPERSEDED = "superseded"
    RECOVERED = "recovered"


class FailoverTrigger(msgspec.Struct, frozen=True, kw_only=True):
    """Cause of a fail-over with its details; `silent_since` is the time of the last heartbeat."""

    cause: Cause
    reason: str
    asked_by: str | None = None
    rotation_id: int | None = None
    silent_since: float | None = None


def open_failovers(
    connection: sa.Connection,
    load_balancer_id: str,
    amphora_ids: Sequence[str] | None,
    trigger: FailoverTrigger,
    now: float,
) -> int:
    """Retire amphorae of one load balancer, make it due, and record the cause.

    Amphorae of other load balancers and amphorae that are being replaced are ignored. Nothing happens to a load
    balancer that is being deleted, or to a pool of spares, which replaces its own amphorae. `amphora_ids` None means
    all. Return the number of fail-overs opened.
    """
    # Every transaction locks `job` before `amphora`, because different orders may deadlock.
    op = connection.execute(sa.select(job.c.op).where(job.c.load_balancer_id == load_balancer_id).with_for_update())
    if op.scalar() != "apply":
        return 0
    chosen = [amphora.c.load_balancer_id == load_balancer_id, amphora.c.state != AmphoraState.RETIRING.value]
    if amphora_ids is not None:
        chosen.append(amphora.c.id.in_(list(amphora_ids)))
    found = [row.id for row in connection.execute(sa.select(amphora.c.id).where(*chosen).with_for_update())]
    for amphora_id in found:
        retired = {"state": AmphoraState.RETIRING.value, "reason": trigger.reason[:_MAX_TEXT]}
        connection.execute(amphora.update().where(amphora.c.id == amphora_id).values(**retired))
        _insert_failover(connection, load_balancer_id, amphora_id, trigger, now)
    if found:
        # The replaced amphorae may have caused the earlier failures of the job. So the next job starts at once, without
        # back-off.
        update_job(connection, load_balancer_id, dirty=True, due_at=URGENT, attempts=0)
        failpoints.reach(failpoints.Point.FAILOVER_WRITTEN)
    return len(found)


def _insert_failover(
    connection: sa.Connection, load_balancer_id: str, amphora_id: str, trigger: FailoverTrigger, now: float
) -> None:
    row = {**msgspec.structs.asdict(trigger), "cause": trigger.cause.value, "reason": trigger.reason[:_MAX_TEXT]}
    row |= {"load_balancer_id": load_balancer_id, "amphora_id": amphora_id, "begun_at": now}
    key = connection.execute(failover.insert().values(**row)).inserted_primary_key
    _insert_event(connection, int(key[0]) if key else 0, now, Event.BEGUN, amphora_id, trigger.reason)


def record_event(
    connection: sa.Connection,
    load_balancer_id: str,
    event: Event,
    now: float,
    amphora_id: str | None = None,
    detail: str | None = None,
) -> None:
    """Record an event in the time line of each open fail-over of a load balancer."""
    for row in list_open_failovers_of(connection, load_balancer_id):
        _insert_event(connection, row.id, now, event, amphora_id, detail)


def record_failure(connection: sa.Connection, load_balancer_id: str, now: float, reason: str) -> None:
    """Record a failure that will be retried; a repeated failure with the same reason is recorded once."""
    newest = sa.select(failover_event.c.word, failover_event.c.detail).order_by(failover_event.c.id.desc()).limit(1)
    for row in list_open_failovers_of(connection, load_balancer_id):
        last = connection.execute(newest.where(failover_event.c.failover_id == row.id)).first()
        if last is None or (last.word, last.detail) != (Event.FAILED.value, reason[:_MAX_TEXT]):
            _insert_event(connection, row.id, now, Event.FAILED, None, reason)


def record_served(connection: sa.Connection, load_balancer_id: str, now: float, but: Collection[str] = ()) -> None:
    """Record that all desired amphorae serve users again; finish fail-overs of amphorae that are deleted.

    `but` are amphorae that were healthy when the plan was made: their fail-overs began later and do not count.
    """
    for row in connection.execute(_open_with_amphora(load_balancer_id).where(failover.c.served_at.is_(None))).all():
        if row.amphora_id not in but:
            _set_served(connection, row.id, now)
            if row.there is None:
                _finish_failover(connection, row.id, FailoverOutcome.DONE, now, row.amphora_id)


def finish_settled_failovers(connection: sa.Connection, load_balancer_id: str, now: float) -> None:
    """Finish the fail-overs of deleted amphorae, after the last step for a load balancer."""
    for row in connection.execute(_open_with_amphora(load_balancer_id).where(amphora.c.id.is_(None))).all():
        if row.served_at is None:
            _set_served(connection, row.id, now)
        _finish_failover(connection, row.id, FailoverOutcome.DONE, now, row.amphora_id)


def _open_with_amphora(load_balancer_id: str) -> sa.Select[Any]:
    """Query the open fail-overs of a load balancer; `there` is NULL if the amphora is deleted."""
    columns = (failover.c.id, failover.c.amphora_id, failover.c.served_at, amphora.c.id.label("there"))
    left = sa.select(*columns).outerjoin(amphora, amphora.c.id == failover.c.amphora_id)
    return left.where(failover.c.load_balancer_id == load_balancer_id, _IS_OPEN)


def _set_served(connection: sa.Connection, failover_id: int, now: float) -> None:
    connection.execute(failover.update().where(failover.c.id == failover_id).values(served_at=now))
    _insert_event(connection, failover_id, now, Event.SERVED, None, None)


def record_release(connection: sa.Connection, load_balancer_id: str, amphora_id: str, now: float) -> None:
    """Record the deletion of an amphora and its resources; finish its fail-over if users are served again."""
    record_event(connection, load_balancer_id, Event.RELEASED, now, amphora_id)
    is_served = sa.select(failover.c.id).where(failover.c.amphora_id == amphora_id, _IS_OPEN)
    for row in connection.execute(is_served.where(failover.c.served_at.is_not(None))).all():
        _finish_failover(connection, row.id, FailoverOutcome.DONE, now, amphora_id)


def finish_failovers(
    connection: sa.Connection,
    load_balancer_id: str,
    outcome: FailoverOutcome,
    now: float,
    amphora_id: str | None = None,
) -> None:
    """Finish the open fail-over of one amphora, or all open ones of a load balancer."""
    for row in list_open_failovers_of(connection, load_balancer_id):
        if amphora_id in (None, row.amphora_id):
            _finish_failover(connection, row.id, outcome, now, amphora_id)


def _finish_failover(
    connection: sa.Connection, failover_id: int, outcome: FailoverOutcome, now: float, amphora_id: str | None
) -> None:
    ended = {"ended_at": now, "outcome": outcome.value}
    connection.execute(failover.update().where(failover.c.id == failover_id).values(**ended))
    _insert_event(connection, failover_id, now, Event.ENDED, amphora_id, outcome.value)


def purge_old_failovers(connection: sa.Connection, before: float, limit: int = _PURGE_BATCH) -> bool:
    """Delete fail-overs that ended before this time; return whether more may remain."""
    ended = sa.select(failover.c.id).where(failover.c.ended_at < before).order_by(failover.c.ended_at).limit(limit)
    old = list(connection.execute(ended).scalars())
    if old:
        # Without the fail-over, no query would find its events, so they are deleted first.
        connection.execute(failover_event.delete().where(failover_event.c.failover_id.in_(old)))
        connection.execute(failover.delete().where(failover.c.id.in_(old)))
    return len(old) == limit


def list_open_failovers_of(connection: sa.Connection, load_balancer_id: str) -> Sequence[sa.Row[Any]]:
    """Return the open fail-overs of one load balancer, the oldest first."""
    mine = sa.select(failover).where(failover.c.load_balancer_id == load_balancer_id, _IS_OPEN)
    return connection.execute(mine.order_by(failover.c.id)).all()


def list_open_failovers(connection: sa.Connection) -> Sequence[sa.Row[Any]]:
    """Return all open fail-overs, the oldest first."""
    return connection.execute(sa.select(failover).where(_IS_OPEN).order_by(failover.c.id)).all()


def list_failover_events(connection: sa.Connection, failover_id: int) -> Sequence[sa.Row[Any]]:
    """Return the time line of one fail-over."""
    query = sa.select(failover_event).where(failover_event.c.failover_id == failover_id)
    return connection.execute(query.order_by(failover_event.c.id)).all()


def _insert_event(
    connection: sa.Connection, failover_id: int, now: float, event: Event, amphora_id: str | None, detail: str | None
) -> None:
    row = {"failover_id": failover_id, "at": now, "word": event.value, "amphora_id": amphora_id}
    text = None if detail is None else detail[:_MAX_TEXT]
    connection.execute(failover_event.insert().values(**row, detail=text))
