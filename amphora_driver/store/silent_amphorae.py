# SPDX-License-Identifier: Apache-2.0
"""Database access of the failure detector: heartbeats, health managers' beats, silent amphorae.

Invariant: one transaction reads a consistent snapshot. `silent_amphora` rows are findings of the failure detector,
which writes a row only on a change. The loss of a row has no effect.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from amphora_driver.database import clock
from amphora_driver.database.joined_rows import join_rows, read_rows
from amphora_driver.database.rows import chunks, force_index, load_as
from amphora_driver.database.tables import amphora, amphora_heartbeat, duty, job, object_status
from amphora_driver.database.tables_fleet import failover, failover_event, process, silent_amphora
from amphora_driver.errors import StoreError
from amphora_driver.model.amphora import AmphoraState
from amphora_driver.model.enums import Kind, Operating
from amphora_driver.store import status_outbox
from amphora_driver.store.failovers import Cause, Event
from amphora_driver.store.generations import Op, lock_jobs
from amphora_driver.store.process_registry import ProcessKind

DUTY = "detection"
AUTOMATIC_CAUSES = (Cause.SILENT, Cause.MUTE, Cause.NEVER_SPOKE)
_AUTOMATIC_VALUES = [cause.value for cause in AUTOMATIC_CAUSES]
_MAX_TEXT = 1000
# Number of newest rows in which recent fail-overs are searched. A search in all rows would be slow.
_RECENT_ROWS = 20_000
# Operating statuses of load balancers that serve users.
_SERVED = (Operating.ONLINE.value, Operating.DEGRADED.value, Operating.NO_MONITOR.value, Operating.DRAINING.value)


class AmphoraLiveness(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An amphora that should send heartbeats. The fields have the order of the columns that are read."""

    amphora_id: str
    load_balancer_id: str
    state: AmphoraState
    address: str | None


class WatchedAmphorae:
    """All amphorae that should send heartbeats. The detector reads them again only after a change.

    Attributes:
        by_id: all that are not booting, of load balancers that are not being deleted. Pools of spares detect the
            failures of their own amphorae.
        ready: the ids of the ready ones.
        load_balancers: the ids of their load balancers.
    """

    def __init__(self, amphorae: Iterable[AmphoraLiveness], fingerprint: Sequence[object] = ()) -> None:
        self.by_id = {one.amphora_id: one for one in amphorae}
        self.ready = {one.amphora_id for one in self.by_id.values() if one.state is AmphoraState.READY}
        self._of_load_balancer: dict[str, set[str]] = {}
        for one in self.by_id.values():
            self._of_load_balancer.setdefault(one.load_balancer_id, set()).add(one.amphora_id)
        self.load_balancers = self._of_load_balancer.keys()
        self.fingerprint = fingerprint

    def of_load_balancer(self, load_balancer_id: str) -> set[str]:
        """Return the ids of the amphorae of a load balancer."""
        return set(self._of_load_balancer.get(load_balancer_id, ()))


class UnservedFailover(msgspec.Struct, frozen=True, kw_only=True):
    """An automatic fail-over before the moment at which users are served again."""

    id: int
    load_balancer_id: str


class LivenessSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Consistent input of one detection round.

    Attributes:
        owner: process that holds the duty now; None if no process does.
        epoch: increases with each change of the owner.
        orders: epoch and sequence of the last heartbeat by amphora id; None before the first heartbeat.
        beats: by health manager, the number of proofs that it receives heartbeats.
        at: time of the snapshot by the database's clock; for display only.
    """

    owner: str | None
    watched: WatchedAmphorae
    orders: dict[str, tuple[int, int] | None]
    beats: dict[str, int]
    unserved: tuple[UnservedFailover, ...]
    at: float
    epoch: int = 0


class RecentFailovers(msgspec.Struct, frozen=True, kw_only=True):
    """Recent automatic fail-overs of one load balancer.

    `ages` are the seconds since their start, the newest first; fail-overs with the same start are one. `present` are
    the amphorae that existed before the newest one.
    """

    ages: tuple[float, ...]
    present: frozenset[str]


class SilentAmphora(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `silent_amphora`."""

    amphora_id: str
    load_balancer_id: str
    kind: str
    since: float
    verdict: str


_WATCHED = join_rows(
    sa.join(amphora, job, job.c.load_balancer_id == amphora.c.load_balancer_id),
    amphora.c.id,
    *(amphora.c.id, amphora.c.load_balancer_id, amphora.c.state, amphora.c.management_address),
).where(amphora.c.state != AmphoraState.BOOTING.value, job.c.op == Op.APPLY)
# A new, removed or changed amphora changes a number or a time in these results, or the number of heartbeats. The list
# of amphorae is read again only after such a change. The indexes limit a round to the few rows of a fleet that are not
# in normal service. Each new amphora changes the newest time of readiness.
_LAST_READY = sa.select(sa.func.max(amphora.c.ready_at))
_UNREADY = (
    force_index(sa.select(amphora.c.state, sa.func.count()), amphora, "unready")
    .add_columns(sa.func.max(amphora.c.ready_at), sa.func.max(amphora.c.created_at))
    .where(amphora.c.unready == sa.true())
    .group_by(amphora.c.state)
    .order_by(amphora.c.state)
)
_JOBS = (
    force_index(sa.select(job.c.op, sa.func.count()), job, "exceptional")
    .where(job.c.exceptional == sa.true(), job.c.op != Op.APPLY)
    .group_by(job.c.op)
    .order_by(job.c.op)
)
_AMPHORAE_OF_JOBS = _JOBS.join(amphora, amphora.c.load_balancer_id == job.c.load_balancer_id)
_FINGERPRINT = _LAST_READY, _UNREADY, _JOBS, _AMPHORAE_OF_JOBS
# A client reads a long text seven times as fast as tens of thousands of rows. So the database joins the heartbeats of
# all amphorae: 65 bytes each, of at most 16 MiB. For texts of groups, the server would sort all rows.
# Each heartbeat is a member of a JSON object, which a decoder in C reads: "AMPHORA":[EPOCH,SEQUENCE].
_HEARTBEAT: sa.ColumnElement[str] = (
    sa.literal_column("'\"'")
    + amphora_heartbeat.c.amphora_id
    + sa.literal_column("'\":['")
    + sa.cast(amphora_heartbeat.c.epoch, sa.String(20))
    + sa.literal_column("','")
    + sa.cast(amphora_heartbeat.c.sequence, sa.String(20))
    + sa.literal_column("']'")
)
_ORDERS = msgspec.json.Decoder(dict[str, tuple[int, int]])
_HEARTBEATS = sa.select(
    sa.func.count().label("number"), sa.func.aggregate_strings(_HEARTBEAT, ",").label("joined")
).select_from(amphora_heartbeat)
_LAST_HEARD = (
    sa.select(amphora.c.id, sa.func.coalesce(amphora_heartbeat.c.seen_at, amphora.c.ready_at).label("at"))
    .outerjoin(amphora_heartbeat, amphora_heartbeat.c.amphora_id == amphora.c.id)
    .where(amphora.c.id.in_(sa.bindparam("ids", expanding=True)))
)
_BEATS = sa.select(process.c.name, process.c.beat).where(process.c.kind == ProcessKind.HEALTH_MANAGER.value)
_GOING = sa.select(failover.c.id, failover.c.load_balancer_id).where(
    failover.c.ended_at.is_(None), failover.c.served_at.is_(None), failover.c.cause.in_(_AUTOMATIC_VALUES)
)


def load_liveness_snapshot(connection: sa.Connection, known: WatchedAmphorae | None = None) -> LivenessSnapshot:
    """Read the input of one detection round. `known` are the amphorae of an earlier round.

    While no amphora or load balancer comes, goes or changes its state, the snapshot contains `known`.
    """
    now = clock.now(connection)
    held = sa.select(duty.c.owner, duty.c.epoch, now.label("at")).where(duty.c.name == DUTY, duty.c.leased_until > now)
    mine = connection.execute(held).first()
    fingerprint = [tuple(row) for statement in _FINGERPRINT for row in connection.execute(statement)]
    orders = load_heartbeat_orders(connection)
    # The deletion of an amphora also deletes its heartbeat.
    fingerprint.append((len(orders),))
    if known is None or known.fingerprint != fingerprint:
        watched = WatchedAmphorae(read_rows(connection, _WATCHED, AmphoraLiveness), fingerprint)
    else:
        watched = known
    return LivenessSnapshot(
        owner=None if mine is None else mine.owner,
        watched=watched,
        orders=dict(zip(watched.by_id, map(orders.get, watched.by_id), strict=True)),
        beats={row.name: row.beat for row in connection.execute(_BEATS)},
        unserved=tuple(load_as(connection, UnservedFailover, _GOING)),
        at=0.0 if mine is None else float(mine.at),
        epoch=0 if mine is None else mine.epoch,
    )


def load_heartbeat_orders(connection: sa.Connection) -> dict[str, tuple[int, int]]:
    """Return epoch and sequence of the last heartbeat of every amphora.

    Raises:
        StoreError: the server has shortened a text.
    """
    number, joined = connection.execute(_HEARTBEATS).one()
    try:
        found = _ORDERS.decode(f"{{{joined or ''}}}")
    except msgspec.DecodeError as error:
        raise _shortened(str(error)) from error
    if len(found) != number:
        raise _shortened(f"{len(found)} of {number} heartbeats arrived")
    return found


def _shortened(happened: str) -> StoreError:
    remedy = "Raise max_allowed_packet of the database server to at least 16 MiB."
    return StoreError("read the last heartbeats", f"the server has shortened a text ({happened})", remedy)


def read_last_heard(connection: sa.Connection, amphora_ids: Collection[str]) -> dict[str, float | None]:
    """Return the times of the last heartbeats; of readiness, for an amphora without a heartbeat."""
    return {row.id: row.at for row in connection.execute(_LAST_HEARD, {"ids": sorted(amphora_ids)})}


def load_recent_failovers(connection: sa.Connection, seconds: float) -> dict[str, RecentFailovers]:
    """Return the automatic fail-overs of the last `seconds` by load balancer, of the newest rows only."""
    now = connection.execute(sa.select(clock.now(connection))).scalar_one()
    newest = connection.execute(sa.select(sa.func.max(failover.c.id))).scalar() or 0
    recent = failover.c.id > newest - _RECENT_ROWS, failover.c.begun_at > now - seconds
    query = sa.select(failover.c.load_balancer_id, failover.c.begun_at).distinct()
    query = query.where(*recent, failover.c.cause.in_(_AUTOMATIC_VALUES)).order_by(failover.c.begun_at.desc())
    moments: dict[str, list[float]] = {}
    for row in connection.execute(query):
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
    came = sa.select(failover.c.load_balancer_id, failover.c.begun_at, failover_event.c.amphora_id).join(
        failover_event, failover_event.c.failover_id == failover.c.id
    )
    words = [Event.RECORDED.value, Event.ADOPTED.value]
    for chunk in chunks(sorted(last)):
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

    `orders` holds epoch and sequence of the last known heartbeat by amphora id. The result is empty if the calling
    process, the `owner`, has lost the duty.
    """
    now = clock.now(connection)
    held = sa.select(duty.c.name).where(duty.c.name == DUTY, duty.c.owner == owner, duty.c.leased_until > now)
    if connection.execute(held.with_for_update()).first() is None:
        return set()
    ids = sorted(orders)
    lock_jobs(connection, [load_balancer_id])
    ready = sa.select(amphora.c.id).where(amphora.c.id.in_(ids), amphora.c.state == AmphoraState.READY.value)
    there = set(connection.execute(ready.with_for_update()).scalars())
    seen = sa.select(amphora_heartbeat).where(amphora_heartbeat.c.amphora_id.in_(ids)).with_for_update()
    places = {row.amphora_id: (row.epoch, row.sequence) for row in connection.execute(seen)}
    return {one for one in ids if one in there and places.get(one) == orders[one]}


def mark_not_served(connection: sa.Connection, load_balancer_id: str, reason: str) -> bool:
    """Set a load balancer that serves users to operating status ERROR; return whether it changed.

    The next heartbeat of one of its amphorae updates the status.
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
    longest_first = silent_amphora.c.since, silent_amphora.c.amphora_id
    return connection.execute(sa.select(silent_amphora).order_by(*longest_first)).all()


def write_silent_amphorae(connection: sa.Connection, changed: Collection[SilentAmphora], gone: Collection[str]) -> None:
    """Replace changed rows and delete obsolete ones; the caller limits the number of rows."""
    old = sorted({*gone, *(one.amphora_id for one in changed)})
    if old:
        connection.execute(silent_amphora.delete().where(silent_amphora.c.amphora_id.in_(old)))
    if changed:
        rows = [{**msgspec.structs.asdict(one), "verdict": one.verdict[:_MAX_TEXT]} for one in changed]
        connection.execute(silent_amphora.insert(), rows)
