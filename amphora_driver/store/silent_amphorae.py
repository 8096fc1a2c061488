# SPDX-License-Identifier: Apache-2.0
"""Database access of the failure detector: heartbeats, health managers' beats, silent amphorae.

Invariant: one transaction reads a snapshot, so it is consistent. `silent_amphora` rows are findings: only the detector
writes them, only on a change, and their loss has no effect.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from amphora_driver.database import clock
from amphora_driver.database.tables import amphora, amphora_heartbeat, duty, job, object_status
from amphora_driver.database.tables_fleet import failover, failover_event, process, silent_amphora
from amphora_driver.model.amphora import AmphoraState
from amphora_driver.model.enums import Kind, Operating
from amphora_driver.store import status_outbox
from amphora_driver.store.failovers import Cause, Event
from amphora_driver.store.process_registry import ProcessKind
from amphora_driver.store.requests import Op

DUTY = "detection"
# Causes of automatic fail-overs.
AUTOMATIC_CAUSES = (Cause.SILENT, Cause.MUTE, Cause.NEVER_SPOKE)
_AUTOMATIC_VALUES = [cause.value for cause in AUTOMATIC_CAUSES]
_MAX_TEXT = 1000
# Newest fail-overs that are searched for recent ones, and load balancers in one statement.
_RECENT_ROWS, _CHUNK = 20_000, 500
# Operating statuses of a load balancer that serves users.
_SERVED = (Operating.ONLINE.value, Operating.DEGRADED.value, Operating.NO_MONITOR.value, Operating.DRAINING.value)


class AmphoraLiveness(msgspec.Struct, frozen=True, kw_only=True):
    """One amphora's liveness; `heard_at`: last heartbeat, or time of readiness (seconds since 1970)."""

    amphora_id: str
    load_balancer_id: str
    state: AmphoraState
    address: str | None
    order: tuple[int, int] | None
    heard_at: float | None


class UnservedFailover(msgspec.Struct, frozen=True, kw_only=True):
    """An automatic fail-over before the moment at which users are served again."""

    id: int
    load_balancer_id: str


class LivenessSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Consistent input of one detection round.

    Attributes:
        owner: process that holds the duty now; None if no process does.
        epoch: increases with each change of the owner.
        amphorae: all that are not booting, of load balancers that are not being deleted. Pools of spares detect the
            failures of their own amphorae.
        beats: by health manager, the number of its proofs that it receives heartbeats.
        unserved: automatic fail-overs in progress.
        at: time of the snapshot (seconds since 1970, by the database's clock); for display only.
    """

    owner: str | None
    amphorae: tuple[AmphoraLiveness, ...]
    beats: dict[str, int]
    unserved: tuple[UnservedFailover, ...]
    at: float
    epoch: int = 0


class RecentFailovers(msgspec.Struct, frozen=True, kw_only=True):
    """Recent automatic fail-overs of one load balancer.

    Attributes:
        ages: seconds since their start, the newest first; fail-overs with the same start are one.
        present: amphorae that existed before the newest one.
    """

    ages: tuple[float, ...]
    present: frozenset[str]


class SilentAmphora(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `silent_amphora`; `since` is in seconds since 1970."""

    amphora_id: str
    load_balancer_id: str
    kind: str
    since: float
    verdict: str


_HEARD = (
    sa.select(
        amphora.c.id,
        amphora.c.load_balancer_id,
        amphora.c.state,
        amphora.c.management_address,
        amphora.c.ready_at,
        amphora_heartbeat.c.epoch,
        amphora_heartbeat.c.sequence,
        amphora_heartbeat.c.seen_at,
    )
    .join(job, job.c.load_balancer_id == amphora.c.load_balancer_id)
    .outerjoin(amphora_heartbeat, amphora_heartbeat.c.amphora_id == amphora.c.id)
    .where(amphora.c.state != AmphoraState.BOOTING.value, job.c.op == Op.APPLY)
    .order_by(amphora.c.load_balancer_id, amphora.c.created_at, amphora.c.id)
)
_BEATS = sa.select(process.c.name, process.c.beat).where(process.c.kind == ProcessKind.HEALTH_MANAGER.value)
_GOING = sa.select(failover.c.id, failover.c.load_balancer_id).where(
    failover.c.ended_at.is_(None), failover.c.served_at.is_(None), failover.c.cause.in_(_AUTOMATIC_VALUES)
)


def load_liveness_snapshot(connection: sa.Connection) -> LivenessSnapshot:
    """Read the input of one detection round."""
    now = clock.now(connection)
    held = sa.select(duty.c.owner, duty.c.epoch, now.label("at")).where(duty.c.name == DUTY, duty.c.leased_until > now)
    mine = connection.execute(held).first()
    return LivenessSnapshot(
        owner=None if mine is None else mine.owner,
        amphorae=tuple(_to_liveness(row) for row in connection.execute(_HEARD)),
        beats={row.name: row.beat for row in connection.execute(_BEATS)},
        unserved=tuple(
            UnservedFailover(id=row.id, load_balancer_id=row.load_balancer_id) for row in connection.execute(_GOING)
        ),
        at=0.0 if mine is None else float(mine.at),
        epoch=0 if mine is None else mine.epoch,
    )


def _to_liveness(row: Any) -> AmphoraLiveness:
    return AmphoraLiveness(
        amphora_id=row.id,
        load_balancer_id=row.load_balancer_id,
        state=AmphoraState(row.state),
        address=row.management_address,
        order=None if row.epoch is None else (row.epoch, row.sequence),
        heard_at=row.ready_at if row.seen_at is None else row.seen_at,
    )


def load_recent_failovers(connection: sa.Connection, seconds: float) -> dict[str, RecentFailovers]:
    """Return the automatic fail-overs of the last `seconds` by load balancer, of the newest rows only."""
    now = connection.execute(sa.select(clock.now(connection))).scalar_one()
    newest = connection.execute(sa.select(sa.func.max(failover.c.id))).scalar() or 0
    query = (
        sa.select(failover.c.load_balancer_id, failover.c.begun_at)
        .where(
            failover.c.id > newest - _RECENT_ROWS,
            failover.c.cause.in_(_AUTOMATIC_VALUES),
            failover.c.begun_at > now - seconds,
        )
        .distinct()
    )
    moments: dict[str, list[float]] = {}
    for row in connection.execute(query.order_by(failover.c.begun_at.desc())):
        moments.setdefault(row.load_balancer_id, []).append(row.begun_at)
    present = _amphorae_before(connection, {one: known[0] for one, known in moments.items()})
    return {
        one: RecentFailovers(ages=tuple(now - at for at in known), present=frozenset(present.get(one, ())))
        for one, known in moments.items()
    }


def _amphorae_before(connection: sa.Connection, last: Mapping[str, float]) -> dict[str, set[str]]:
    """Return the amphorae that are older than their load balancer's last fail-over, by load balancer.

    A warm spare that the fail-over assigned is older too, but does not count.
    """
    found: dict[str, set[str]] = {}
    ids = sorted(last)
    came = sa.select(failover.c.load_balancer_id, failover.c.begun_at, failover_event.c.amphora_id).join(
        failover_event, failover_event.c.failover_id == failover.c.id
    )
    words = [Event.RECORDED.value, Event.ADOPTED.value]
    for start in range(0, len(ids), _CHUNK):
        chunk = ids[start : start + _CHUNK]
        older = sa.select(amphora.c.id, amphora.c.load_balancer_id, amphora.c.created_at)
        for row in connection.execute(older.where(amphora.c.load_balancer_id.in_(chunk))):
            if row.created_at < last[row.load_balancer_id]:
                found.setdefault(row.load_balancer_id, set()).add(row.id)
        with_it = came.where(failover.c.load_balancer_id.in_(chunk), failover_event.c.word.in_(words))
        for row in connection.execute(with_it):
            if row.begun_at == last[row.load_balancer_id]:
                found.get(row.load_balancer_id, set()).discard(row.amphora_id)
    return found


def lock_still_silent(
    connection: sa.Connection, load_balancer_id: str, orders: Mapping[str, tuple[int, int] | None], owner: str
) -> set[str]:
    """Lock amphorae and return those that are ready and have sent no heartbeat since the snapshot.

    Args:
        connection: of a writing transaction.
        load_balancer_id: their load balancer.
        orders: by amphora id, epoch and sequence of its last known heartbeat.
        owner: the calling process; the result is empty if it has lost the duty.
    """
    now = clock.now(connection)
    held = sa.select(duty.c.name).where(duty.c.name == DUTY, duty.c.owner == owner, duty.c.leased_until > now)
    if connection.execute(held.with_for_update()).first() is None:
        return set()
    ids = sorted(orders)
    # Lock `job` before `amphora`, as every transaction does, otherwise two may deadlock.
    connection.execute(sa.select(job.c.op).where(job.c.load_balancer_id == load_balancer_id).with_for_update()).first()
    ready = sa.select(amphora.c.id).where(amphora.c.id.in_(ids), amphora.c.state == AmphoraState.READY.value)
    there = set(connection.execute(ready.with_for_update()).scalars())
    seen = sa.select(amphora_heartbeat).where(amphora_heartbeat.c.amphora_id.in_(ids)).with_for_update()
    places = {row.amphora_id: (row.epoch, row.sequence) for row in connection.execute(seen)}
    return {one for one in ids if one in there and places.get(one) == orders[one]}


def mark_not_served(connection: sa.Connection, load_balancer_id: str, reason: str) -> bool:
    """Set a load balancer's operating status to ERROR, unless it does not serve users anyway.

    The next heartbeat of one of its amphorae updates the status.

    Returns:
        Whether the status changed.
    """
    known = sa.select(object_status.c.operating).where(object_status.c.object_id == load_balancer_id)
    if connection.execute(known.with_for_update()).scalar() not in _SERVED:
        return False
    observation = status_outbox.Observation(
        object_id=load_balancer_id, kind=Kind.LOAD_BALANCER, operating=Operating.ERROR, reason=reason[:_MAX_TEXT]
    )
    return bool(status_outbox.write_observations(connection, load_balancer_id, [observation]))


def list_silent_amphorae(connection: sa.Connection) -> Sequence[sa.Row[Any]]:
    """Return the silent amphorae, the longest silence first."""
    return connection.execute(
        sa.select(silent_amphora).order_by(silent_amphora.c.since, silent_amphora.c.amphora_id)
    ).all()


def write_silent_amphorae(connection: sa.Connection, changed: Collection[SilentAmphora], gone: Collection[str]) -> None:
    """Replace changed rows and delete obsolete ones; the caller limits the number of rows."""
    old = sorted({*gone, *(one.amphora_id for one in changed)})
    if old:
        connection.execute(silent_amphora.delete().where(silent_amphora.c.amphora_id.in_(old)))
    if changed:
        rows = [{**msgspec.structs.asdict(one), "verdict": one.verdict[:_MAX_TEXT]} for one in changed]
        connection.execute(silent_amphora.insert(), rows)
