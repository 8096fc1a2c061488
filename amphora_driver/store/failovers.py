# SPDX-License-Identifier: Apache-2.0
"""Why amphorae were replaced, and what happened when: cause and time line of every fail-over.

Invariant: an amphora that is being replaced has exactly one open row, written in the same transaction that retires it;
what happens to its load balancer is noted in every open row of that, in the transaction of the step that does it. So a
crash neither loses a fail-over nor invents one.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa

from amphora_driver import failpoints
from amphora_driver.database.tables import URGENT, amphora, work
from amphora_driver.database.tables_fleet import failover, failover_event
from amphora_driver.store.amphorae import State

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

_MAX_TEXT = 1000
# How many are forgotten in one transaction: nobody is to wait for that.
_PURGE_BATCH = 500


class Cause(str, Enum):
    """What a fail-over was begun for."""

    SILENT = "silent"
    MUTE = "mute"
    NEVER_SPOKE = "never_spoke"
    ASKED = "asked"
    OPERATOR = "operator"
    ROTATION = "rotation"
    DRIFT = "drift"
    MACHINE = "machine"


class Event(str, Enum):
    """What happens on the way, in about this order."""

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
    """How it ended."""

    DONE = "done"
    GONE = "gone"
    SUPERSEDED = "superseded"
    RECOVERED = "recovered"


class FailoverTrigger(msgspec.Struct, frozen=True, kw_only=True):
    """Cause of a fail-over.

    Attributes:
        reason: in words.
        asked_by: who, where somebody did.
        rotation_id: which rotation, where one did.
        silent_since: when the amphora was heard last (seconds since 1970), where that is the cause.
    """

    cause: Cause
    reason: str
    asked_by: str | None = None
    rotation_id: int | None = None
    silent_since: float | None = None


def open_failovers(
    connection: sa.Connection,
    load_balancer_id: str,
    amphora_ids: Sequence[str] | None,
    why: FailoverTrigger,
    now: float,
) -> int:
    """Retire amphorae of one load balancer, make it due, and write down why.

    Who is being replaced already, or is not of that load balancer, is left alone; so is a load balancer that is being
    deleted, and a pool of spares, which looks after its own.

    Args:
        connection: of a writing transaction.
        load_balancer_id: whose.
        amphora_ids: which of its amphorae; None for all.
        why: the cause.
        now: seconds since 1970, by the database's clock.

    Returns:
        How many are replaced because of this call.
    """
    # The row of `work` first, as every step does: two that lock in different orders wait for each other.
    op = connection.execute(sa.select(work.c.op).where(work.c.load_balancer_id == load_balancer_id).with_for_update())
    if op.scalar() != "apply":
        return 0
    chosen = [amphora.c.load_balancer_id == load_balancer_id, amphora.c.state != State.RETIRING.value]
    if amphora_ids is not None:
        chosen.append(amphora.c.id.in_(list(amphora_ids)))
    found = [row.id for row in connection.execute(sa.select(amphora.c.id).where(*chosen).with_for_update())]
    for amphora_id in found:
        connection.execute(
            amphora.update()
            .where(amphora.c.id == amphora_id)
            .values(state=State.RETIRING.value, reason=why.reason[:_MAX_TEXT])
        )
        _insert_failover(connection, load_balancer_id, amphora_id, why, now)
    if found:
        # What failed before may well have failed because of these.
        due = {"dirty": True, "free_at": URGENT, "attempts": 0}
        connection.execute(work.update().where(work.c.load_balancer_id == load_balancer_id).values(**due))
        failpoints.reach(failpoints.Point.FAILOVER_WRITTEN)
    return len(found)


def _insert_failover(
    connection: sa.Connection, load_balancer_id: str, amphora_id: str, why: FailoverTrigger, now: float
) -> None:
    row = {
        "load_balancer_id": load_balancer_id,
        "amphora_id": amphora_id,
        "cause": why.cause.value,
        "reason": why.reason[:_MAX_TEXT],
        "asked_by": why.asked_by,
        "rotation_id": why.rotation_id,
        "silent_since": why.silent_since,
        "begun_at": now,
    }
    key = connection.execute(failover.insert().values(**row)).inserted_primary_key
    _insert_event(connection, int(key[0]) if key else 0, now, Event.BEGUN, amphora_id, why.reason)


def record_event(
    connection: sa.Connection,
    load_balancer_id: str,
    event: Event,
    now: float,
    amphora_id: str | None = None,
    detail: str | None = None,
) -> None:
    """Write an event into the time line of each open fail-over of a load balancer; nothing where there is none."""
    for failover_id in _open_ids(connection, load_balancer_id):
        _insert_event(connection, failover_id, now, event, amphora_id, detail)


def record_failure(connection: sa.Connection, load_balancer_id: str, now: float, reason: str) -> None:
    """Something went wrong on the way and is tried again; said once where it goes wrong in the same way each time."""
    newest = sa.select(failover_event.c.word, failover_event.c.detail).order_by(failover_event.c.id.desc()).limit(1)
    for failover_id in _open_ids(connection, load_balancer_id):
        last = connection.execute(newest.where(failover_event.c.failover_id == failover_id)).first()
        if last is None or (last.word, last.detail) != (Event.FAILED.value, reason[:_MAX_TEXT]):
            _insert_event(connection, failover_id, now, Event.FAILED, None, reason)


def record_served(connection: sa.Connection, load_balancer_id: str, now: float, but: Collection[str] = ()) -> None:
    """Users are served again by all that is wanted; the first time counts. Who is gone by now is done with.

    Args:
        connection: of a writing transaction.
        load_balancer_id: whose.
        now: seconds since 1970, by the database's clock.
        but: amphorae that were well when it was looked what is wanted: their fail-overs begun since then are not meant.
    """
    for row in connection.execute(_open_with_amphora(load_balancer_id).where(failover.c.served_at.is_(None))).all():
        if row.amphora_id not in but:
            _set_served(connection, row.id, now)
            if row.there is None:
                _finish_failover(connection, row.id, FailoverOutcome.DONE, now, row.amphora_id)


def finish_settled_failovers(connection: sa.Connection, load_balancer_id: str, now: float) -> None:
    """Nothing is left to do for a load balancer: the fail-overs of amphorae that are gone have ended."""
    for row in connection.execute(_open_with_amphora(load_balancer_id).where(amphora.c.id.is_(None))).all():
        if row.served_at is None:
            _set_served(connection, row.id, now)
        _finish_failover(connection, row.id, FailoverOutcome.DONE, now, row.amphora_id)


def _open_with_amphora(load_balancer_id: str) -> sa.Select[Any]:
    """Its fail-overs that go on; `there` is empty where the amphora is gone."""
    columns = (failover.c.id, failover.c.amphora_id, failover.c.served_at, amphora.c.id.label("there"))
    left = sa.select(*columns).outerjoin(amphora, amphora.c.id == failover.c.amphora_id)
    return left.where(failover.c.load_balancer_id == load_balancer_id, failover.c.ended_at.is_(None))


def _set_served(connection: sa.Connection, failover_id: int, now: float) -> None:
    connection.execute(failover.update().where(failover.c.id == failover_id).values(served_at=now))
    _insert_event(connection, failover_id, now, Event.SERVED, None, None)


def record_release(connection: sa.Connection, load_balancer_id: str, amphora_id: str, now: float) -> None:
    """An amphora is gone with all that was made for it. Its fail-over ends with that, once users are served by all."""
    record_event(connection, load_balancer_id, Event.RELEASED, now, amphora_id)
    over = (failover.c.amphora_id == amphora_id, failover.c.ended_at.is_(None), failover.c.served_at.is_not(None))
    for row in connection.execute(sa.select(failover.c.id).where(*over)).all():
        _finish_failover(connection, row.id, FailoverOutcome.DONE, now, amphora_id)


def finish_failovers(
    connection: sa.Connection,
    load_balancer_id: str,
    outcome: FailoverOutcome,
    now: float,
    amphora_id: str | None = None,
) -> None:
    """Nothing is left to do: of one amphora's fail-over, or of all that are open."""
    mine = [failover.c.load_balancer_id == load_balancer_id, failover.c.ended_at.is_(None)]
    if amphora_id is not None:
        mine.append(failover.c.amphora_id == amphora_id)
    for row in connection.execute(sa.select(failover.c.id).where(*mine)).all():
        _finish_failover(connection, row.id, outcome, now, amphora_id)


def _finish_failover(
    connection: sa.Connection, failover_id: int, outcome: FailoverOutcome, now: float, amphora_id: str | None
) -> None:
    ended = {"ended_at": now, "outcome": outcome.value}
    connection.execute(failover.update().where(failover.c.id == failover_id).values(**ended))
    _insert_event(connection, failover_id, now, Event.ENDED, amphora_id, outcome.value)


def purge_old_failovers(connection: sa.Connection, before: float, most: int = _PURGE_BATCH) -> bool:
    """Forget fail-overs that ended long ago, with their time lines; the oldest first.

    Args:
        connection: of a writing transaction.
        before: they have ended before this (seconds since 1970).
        most: how many at once.

    Returns:
        Whether there may be more.
    """
    ended = sa.select(failover.c.id).where(failover.c.ended_at < before).order_by(failover.c.ended_at).limit(most)
    old = list(connection.execute(ended).scalars())
    if old:
        # The events first: without its fail-over nobody would ever find one again.
        connection.execute(failover_event.delete().where(failover_event.c.failover_id.in_(old)))
        connection.execute(failover.delete().where(failover.c.id.in_(old)))
    return len(old) == most


def list_open_failovers_of(connection: sa.Connection, load_balancer_id: str) -> Sequence[sa.Row[Any]]:
    """The fail-overs of one load balancer that go on, the oldest first."""
    mine = (failover.c.load_balancer_id == load_balancer_id, failover.c.ended_at.is_(None))
    return connection.execute(sa.select(failover).where(*mine).order_by(failover.c.id)).all()


def list_open_failovers(connection: sa.Connection) -> Sequence[sa.Row[Any]]:
    """Every fail-over that goes on, the oldest first."""
    return connection.execute(sa.select(failover).where(failover.c.ended_at.is_(None)).order_by(failover.c.id)).all()


def list_failover_events(connection: sa.Connection, failover_id: int) -> Sequence[sa.Row[Any]]:
    """The time line of one fail-over."""
    query = sa.select(failover_event).where(failover_event.c.failover_id == failover_id)
    return connection.execute(query.order_by(failover_event.c.id)).all()


def _open_ids(connection: sa.Connection, load_balancer_id: str) -> list[int]:
    query = sa.select(failover.c.id).where(
        failover.c.load_balancer_id == load_balancer_id, failover.c.ended_at.is_(None)
    )
    return [int(row.id) for row in connection.execute(query)]


def _insert_event(
    connection: sa.Connection, failover_id: int, now: float, event: Event, amphora_id: str | None, detail: str | None
) -> None:
    connection.execute(
        failover_event.insert().values(
            failover_id=failover_id,
            at=now,
            word=event.value,
            amphora_id=amphora_id,
            detail=None if detail is None else detail[:_MAX_TEXT],
        )
    )
