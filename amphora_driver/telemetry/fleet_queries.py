# SPDX-License-Identifier: Apache-2.0
"""Reads the snapshot of the fleet from the database.

Invariant: one read transaction with a fixed number of statements for any size of the fleet. Each statement uses an
index, or reads a table with one row for each load balancer or amphora, and has a limit. So the status page never
becomes the main load of the database.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa

from amphora_driver.database import clock, tables, tables_fleet
from amphora_driver.store import circuit_breaker, spare_pools
from amphora_driver.store.requests import Op
from amphora_driver.store.spare_pools import SparePoolSpec
from amphora_driver.telemetry.fleet_snapshot import (
    SPARE,
    AmphoraInfo,
    AuthorityInfo,
    BreakerInfo,
    DetectorInfo,
    FailoverInfo,
    FleetSnapshot,
    LoadBalancerInfo,
    OutboxInfo,
    ProcessInfo,
    RotationInfo,
    SparePoolInfo,
    UnknownAmphoraInfo,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from amphora_driver.database.engine import Database

MAX_BALANCERS = 20_000
MAX_AMPHORAE = 50_000
MAX_ROWS = 200
MAX_FAILOVERS = 12
MAX_ROTATIONS = 3
# Seconds by which consecutive reads of ended fail-overs overlap: an earlier end may be committed later.
_OVERLAP = 60.0


class _Vip(msgspec.Struct, frozen=True):
    address: str = ""


class _Body(msgspec.Struct, frozen=True):
    """The shown fields of a recorded load balancer."""

    name: str | None = None
    vip: _Vip = _Vip()
    additional_vips: tuple[_Vip, ...] = ()


_decode_body = msgspec.json.Decoder(_Body).decode
_decode_spec = msgspec.json.Decoder(SparePoolSpec).decode

_WORK = tables.job
_STATUS = tables.object_status
_AMPHORA = tables.amphora
_SEEN = tables.amphora_heartbeat
_SILENCE = tables_fleet.silent_amphora
_FAILOVER = tables_fleet.failover
_EVENT = tables_fleet.failover_event

# Statements are built once, because building one takes longer than executing it.
_BALANCERS = (
    sa.select(
        *(_WORK.c.load_balancer_id, _WORK.c.project_id, _WORK.c.topology, _WORK.c.op, _WORK.c.generation),
        *(_WORK.c.applied, _WORK.c.committed, _WORK.c.attempts, _WORK.c.error, _WORK.c.dirty, _WORK.c.due_at),
        *(_WORK.c.owner, _WORK.c.leased_until, _WORK.c.spares, _WORK.c.spare_pool),
        *(_STATUS.c.provisioning, _STATUS.c.operating, _STATUS.c.reason, _STATUS.c.pending),
        tables.desired_object.c.body,
    )
    .outerjoin(_STATUS, _STATUS.c.object_id == _WORK.c.load_balancer_id)
    .outerjoin(tables.desired_object, tables.desired_object.c.id == _WORK.c.load_balancer_id)
    .order_by(_WORK.c.load_balancer_id)
    .limit(MAX_BALANCERS)
)
_AMPHORA_COLUMNS = {
    **{name: _AMPHORA.c[name] for name in ("id", "load_balancer_id", "role", "state", "confirmed", "created_at")},
    **{name: _AMPHORA.c[name] for name in ("certificate_issued_at", "certificate_expires_at")},
    **{name: _AMPHORA.c[name] for name in ("certificate_authority", "image", "drift", "drifts", "reason")},
    "heard_at": _SEEN.c.seen_at,
    "holds_vip": _SEEN.c.holds_vip,
    "agent_version": _SEEN.c.agent_version,
    "silence": _SILENCE.c.kind,
    "silent_since": _SILENCE.c.since,
    "verdict": _SILENCE.c.verdict,
}
_AMPHORAE = (
    sa.select(*_AMPHORA_COLUMNS.values())
    .outerjoin(_SEEN, _SEEN.c.amphora_id == _AMPHORA.c.id)
    .outerjoin(_SILENCE, _SILENCE.c.amphora_id == _AMPHORA.c.id)
    .order_by(_AMPHORA.c.load_balancer_id, _AMPHORA.c.created_at, _AMPHORA.c.id)
    .limit(MAX_AMPHORAE)
)
# Uses the index on load balancer and generation, so that earlier requests are not read.
_ACCEPTED = (
    sa.select(_WORK.c.load_balancer_id, sa.func.min(tables.request.c.accepted_at).label("accepted_at"))
    .join(
        tables.request,
        sa.and_(
            tables.request.c.load_balancer_id == _WORK.c.load_balancer_id,
            tables.request.c.generation > _WORK.c.applied,
            tables.request.c.applied_at.is_(None),
        ),
    )
    .where(_WORK.c.applied < _WORK.c.generation)
    .group_by(_WORK.c.load_balancer_id)
    .limit(MAX_BALANCERS)
)
_OPEN = sa.select(_FAILOVER).where(_FAILOVER.c.ended_at.is_(None)).order_by(_FAILOVER.c.id).limit(MAX_ROWS)
_RECENT = (
    sa.select(_FAILOVER)
    .where(_FAILOVER.c.ended_at.is_not(None))
    .order_by(_FAILOVER.c.ended_at.desc(), _FAILOVER.c.id.desc())
    .limit(MAX_FAILOVERS)
)
_ENDED = (
    sa.select(_FAILOVER)
    .where(_FAILOVER.c.ended_at > sa.bindparam("after", type_=sa.Double))
    .order_by(_FAILOVER.c.ended_at, _FAILOVER.c.id)
    .limit(1000)
)
_LAST_EVENTS = (
    sa.select(_EVENT.c.failover_id, _EVENT.c.word, _EVENT.c.at)
    .where(
        _EVENT.c.id.in_(
            sa.select(sa.func.max(_EVENT.c.id))
            .where(_EVENT.c.failover_id.in_(sa.bindparam("ids", expanding=True)))
            .group_by(_EVENT.c.failover_id)
        )
    )
    .limit(MAX_ROWS)
)
_WAITING = _STATUS.c.version > _STATUS.c.reported
_OUTBOX = sa.select(sa.func.count().label("waiting"), sa.func.min(_STATUS.c.since).label("oldest")).where(_WAITING)
_PROCESSES = sa.select(tables_fleet.process).order_by(tables_fleet.process.c.kind, tables_fleet.process.c.name)
_ITEM = tables_fleet.rotation_item
_ROTATIONS = sa.select(tables_fleet.rotation).order_by(tables_fleet.rotation.c.id.desc()).limit(MAX_ROTATIONS)
_ITEMS = (
    sa.select(_ITEM.c.rotation_id, _ITEM.c.state, sa.func.count().label("number"))
    .where(_ITEM.c.rotation_id.in_(sa.bindparam("ids", expanding=True)))
    .group_by(_ITEM.c.rotation_id, _ITEM.c.state)
)
_ZOMBIES = (
    sa.select(tables_fleet.unknown_amphora).order_by(tables_fleet.unknown_amphora.c.last_at.desc()).limit(MAX_ROWS)
)
_AUTHORITIES = (
    sa.select(
        *(tables_fleet.certificate_authority.c.id, tables_fleet.certificate_authority.c.kind),
        *(tables_fleet.certificate_authority.c.state, tables_fleet.certificate_authority.c.expires_at),
    )
    .where(tables_fleet.certificate_authority.c.state != "gone")
    .order_by(tables_fleet.certificate_authority.c.id)
    .limit(MAX_ROWS)
)


def read_fleet(database: Database, spares_configured: int = 0) -> FleetSnapshot:
    """Return the current snapshot of the fleet.

    Args:
        database: the database to read.
        spares_configured: default number of spares of a pool, for flavors without a number.

    Raises:
        StoreError: the database does not answer.
    """
    begun = time.monotonic()
    found = database.read(lambda connection: _read(connection, spares_configured))
    return msgspec.structs.replace(found, took=time.monotonic() - begun)


def list_ended_failovers(database: Database, after: float) -> tuple[tuple[FailoverInfo, ...], float]:
    """Return the fail-overs that ended since the previous call, and some that an earlier call returned.

    Args:
        database: the database to read.
        after: time of the previous call (seconds since 1970); the result begins `_OVERLAP` seconds earlier.

    Returns:
        The fail-overs, the oldest first, and the time of this call.

    Raises:
        StoreError: the database does not answer.
    """

    def read(connection: sa.Connection) -> tuple[tuple[FailoverInfo, ...], float]:
        now = float(connection.execute(sa.select(clock.now(connection))).scalar_one())
        since = max(0.0, (after or now) - _OVERLAP)
        return tuple(_build_failover(row, {}) for row in connection.execute(_ENDED, {"after": since})), now

    return database.read(read)


def _read(connection: sa.Connection, spares_configured: int) -> FleetSnapshot:
    now = float(connection.execute(sa.select(clock.now(connection))).scalar_one())
    rows = connection.execute(_BALANCERS).all()
    amphora_rows = connection.execute(_AMPHORAE).all()
    accepted = {row.load_balancer_id: row.accepted_at for row in connection.execute(_ACCEPTED)}
    amphorae = _build_amphorae(amphora_rows, {row.load_balancer_id: row for row in rows})
    breaker_rows = circuit_breaker.read_breaker_rows(connection)
    outbox = connection.execute(_OUTBOX).one()
    return FleetSnapshot(
        at=now,
        cut=len(rows) == MAX_BALANCERS or len(amphora_rows) == MAX_AMPHORAE,
        balancers=_build_balancers(rows, accepted, _vip_holders(amphorae), now),
        amphorae=amphorae,
        failovers=_read_failovers(connection),
        breaker=_build_breaker(breaker_rows),
        sight=_build_detector(breaker_rows.get(circuit_breaker.SIGHT)),
        processes=tuple(_build(ProcessInfo, row) for row in connection.execute(_PROCESSES.limit(MAX_ROWS))),
        pools=_build_pools(rows, amphorae, spares_configured),
        rotations=_read_rotations(connection),
        authorities=tuple(_build(AuthorityInfo, row) for row in connection.execute(_AUTHORITIES)),
        unknown_amphorae=tuple(_build(UnknownAmphoraInfo, row) for row in connection.execute(_ZOMBIES)),
        outbox=OutboxInfo(waiting=outbox.waiting, oldest=outbox.oldest),
        orphans=connection.execute(sa.select(sa.func.count()).select_from(tables.orphan)).scalar_one(),
    )


def _build(kind: Any, row: Any) -> Any:
    """Return a struct whose fields have the names of the columns."""
    return kind(**{name: getattr(row, name) for name in kind.__struct_fields__})


def _build_breaker(rows: Mapping[str, circuit_breaker.BreakerRow]) -> BreakerInfo:
    """Combine the rows of the circuit breaker: an operator's setting precedes the automatic state."""
    automatic, operator = rows.get(circuit_breaker.AUTOMATIC), rows.get(circuit_breaker.OPERATOR)
    found = BreakerInfo()
    if automatic is not None:
        found = BreakerInfo(
            state=automatic.state,
            since=automatic.since,
            silent=automatic.silent,
            watched=automatic.watched,
            reason=automatic.reason,
        )
    if operator is None:
        return found
    held = {"state": circuit_breaker.OPEN, "since": operator.since, "reason": operator.reason, "held": True}
    return msgspec.structs.replace(found, **held)


def _build_detector(row: circuit_breaker.BreakerRow | None) -> DetectorInfo:
    return DetectorInfo() if row is None else DetectorInfo(state=row.state, since=row.since, reason=row.reason)


def _build_amphorae(rows: Iterable[Any], work: Mapping[str, Any]) -> tuple[AmphoraInfo, ...]:
    newest = {one: row.generation for one, row in work.items() if row.op != spare_pools.OP}
    pools = {one for one, row in work.items() if row.op == spare_pools.OP}
    found = []
    for row in rows:
        # Reading the columns by position takes a third of the time of reading them by name.
        values = dict(zip(_AMPHORA_COLUMNS, row, strict=True))
        of = values["load_balancer_id"]
        values["drifts"] = bool(values["drifts"])
        if of in pools:
            values["role"] = SPARE
        found.append(AmphoraInfo(wanted=newest.get(of, 0), **values))
    return tuple(found)


def _vip_holders(amphorae: Iterable[AmphoraInfo]) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for one in amphorae:
        if one.holds_vip:
            found.setdefault(one.load_balancer_id, []).append(one.id)
    return {load_balancer_id: tuple(ids) for load_balancer_id, ids in found.items()}


def _build_balancers(
    rows: Iterable[Any], accepted: Mapping[str, float], holders: Mapping[str, tuple[str, ...]], now: float
) -> tuple[LoadBalancerInfo, ...]:
    found = []
    for row in rows:
        if row.op == spare_pools.OP:
            continue
        name, addresses = _read_body(row.body)
        found.append(
            LoadBalancerInfo(
                id=row.load_balancer_id,
                name=name,
                project_id=row.project_id,
                addresses=addresses,
                topology=row.topology,
                state=provisioning_status(row),
                operating=row.operating,
                reason=row.reason,
                generation=row.generation,
                applied=row.applied,
                committed=row.committed,
                attempts=row.attempts,
                error=row.error,
                due=row.dirty,
                due_at=row.due_at,
                owner=row.owner if row.owner is not None and (row.leased_until or 0.0) > now else None,
                accepted_at=accepted.get(row.load_balancer_id),
                holders=holders.get(row.load_balancer_id, ()),
            )
        )
    return tuple(found)


def provisioning_status(row: Any) -> str:
    """Return the provisioning status that a user of Octavia sees, now or after the pending report."""
    if row.op == Op.DELETE:
        return "PENDING_DELETE"
    if row.pending is not None and row.provisioning != "ERROR":
        return "PENDING_UPDATE" if row.applied else "PENDING_CREATE"
    return str(row.provisioning or ("ACTIVE" if row.applied else "PENDING_CREATE"))


def _read_body(body: str | None) -> tuple[str | None, tuple[str, ...]]:
    """Return the name and the VIP addresses of a recorded load balancer."""
    if body is None:
        return None, ()
    try:
        found = _decode_body(body)
    except msgspec.DecodeError:
        # A defective row must not hide all others.
        return None, ()
    return found.name, tuple(vip.address for vip in (found.vip, *found.additional_vips) if vip.address)


def _build_pools(rows: Iterable[Any], amphorae: Iterable[AmphoraInfo], configured: int) -> tuple[SparePoolInfo, ...]:
    kept: dict[str, list[AmphoraInfo]] = {}
    for one in amphorae:
        if one.role == SPARE:
            kept.setdefault(one.load_balancer_id, []).append(one)
    used = {row.spare_pool for row in rows}
    found = []
    for row in rows:
        if row.op != spare_pools.OP:
            continue
        spares = kept.get(row.load_balancer_id, [])
        ready = sum(one.state == "ready" for one in spares)
        # A pool of warm spares that no load balancer uses needs no spares.
        wanted = _desired_number(row.spares, configured) if row.load_balancer_id in used else 0
        found.append(
            SparePoolInfo(id=row.load_balancer_id, wanted=wanted, booted=len(spares), ready=ready, error=row.error)
        )
    return tuple(found)


def _desired_number(spec: str | None, configured: int) -> int:
    try:
        number = _decode_spec(spec or b"{}").number
    except msgspec.DecodeError:
        return 0
    return configured if number is None else number


def _read_failovers(connection: sa.Connection) -> tuple[FailoverInfo, ...]:
    """Return the open fail-overs, the oldest first, then the ended ones, the newest first."""
    open_ones = connection.execute(_OPEN).all()
    ids = [row.id for row in open_ones]
    steps = {row.failover_id: row for row in connection.execute(_LAST_EVENTS, {"ids": ids})} if ids else {}
    return tuple(_build_failover(row, steps) for row in [*open_ones, *connection.execute(_RECENT)])


def _build_failover(row: Any, steps: Mapping[int, Any]) -> FailoverInfo:
    step = steps.get(row.id)
    return FailoverInfo(
        id=row.id,
        load_balancer_id=row.load_balancer_id,
        amphora_id=row.amphora_id,
        cause=row.cause,
        reason=row.reason,
        asked_by=row.asked_by,
        silent_since=row.silent_since,
        begun_at=row.begun_at,
        served_at=row.served_at,
        ended_at=row.ended_at,
        outcome=row.outcome,
        step=None if step is None else step.word,
        step_at=None if step is None else step.at,
    )


def _read_rotations(connection: sa.Connection) -> tuple[RotationInfo, ...]:
    rows = connection.execute(_ROTATIONS).all()
    if not rows:
        return ()
    counted: dict[int, dict[str, int]] = {}
    for item in connection.execute(_ITEMS, {"ids": [row.id for row in rows]}):
        counted.setdefault(item.rotation_id, {})[item.state] = item.number
    states = ("waiting", "running", "done", "failed", "skipped")
    return tuple(
        RotationInfo(
            id=row.id,
            state=row.state,
            max_unavailable=row.max_unavailable,
            asked_by=row.asked_by,
            created_at=row.created_at,
            ended_at=row.ended_at,
            reason=row.reason,
            **{state: counted.get(row.id, {}).get(state, 0) for state in states},
        )
        for row in rows
    )
