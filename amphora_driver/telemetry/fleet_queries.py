# SPDX-License-Identifier: Apache-2.0
"""Reads the snapshot of the fleet from the database.

Invariant: a read is one transaction with a fixed number of statements for any size of the fleet. Each statement uses an
index, or reads a table with one row for each load balancer or amphora, and has a limit. So the status page never
becomes the main load of the database.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import sqlalchemy as sa

from amphora_driver.database import clock, tables, tables_fleet
from amphora_driver.database.joined_rows import join_rows, read_rows
from amphora_driver.store import circuit_breaker, desired_objects, sealed_secrets, spare_pools
from amphora_driver.store.generations import Op
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
# Two consecutive searches for ended fail-overs overlap by this number of seconds. So the second search finds a
# fail-over whose transaction committed after the first search.
_OVERLAP = 60.0
_DAY = 86_400.0
T = TypeVar("T", bound=msgspec.Struct)


_WORK = tables.job
_STATUS = tables.object_status
_AMPHORA = tables.amphora
_SEEN = tables.amphora_heartbeat
_SILENCE = tables_fleet.silent_amphora
_FAILOVER = tables_fleet.failover
_EVENT = tables_fleet.failover_event


class _BalancerRow(msgspec.Struct, frozen=True, array_like=True):
    """A load balancer or a pool of spares, in the order of the columns."""

    id: str
    project_id: str | None
    topology: str
    op: str
    generation: int
    applied: int
    committed: int
    attempts: int
    error: str | None
    due: bool | int
    due_at: float
    owner: str | None
    leased_until: float | None
    spares: str | None
    spare_pool: str | None
    provisioning: str | None
    operating: str | None
    reason: str | None
    pending: int | None
    body: str | None


class _AmphoraRow(msgspec.Struct, frozen=True, array_like=True):
    """An amphora, in the order of the columns."""

    id: str
    load_balancer_id: str
    role: str
    state: str
    confirmed: int
    created_at: float
    certificate_issued_at: float | None
    certificate_expires_at: float | None
    certificate_authority: int | None
    image: str | None
    drift: str | None
    drifts: bool | int | None
    reason: str | None
    near_limit: str | None
    heard_at: float | None
    holds_vip: bool | int | None
    agent_version: str | None
    silence: str | None
    silent_since: float | None
    verdict: str | None


_BALANCERS = join_rows(
    _WORK.outerjoin(_STATUS, _STATUS.c.object_id == _WORK.c.load_balancer_id).outerjoin(
        tables.desired_object, tables.desired_object.c.id == _WORK.c.load_balancer_id
    ),
    _WORK.c.load_balancer_id,
    *(_WORK.c.load_balancer_id, _WORK.c.project_id, _WORK.c.topology, _WORK.c.op, _WORK.c.generation, _WORK.c.applied),
    *(_WORK.c.committed, _WORK.c.attempts, _WORK.c.error, _WORK.c.dirty, _WORK.c.due_at, _WORK.c.owner),
    *(_WORK.c.leased_until, _WORK.c.spares, _WORK.c.spare_pool),
    *(_STATUS.c.provisioning, _STATUS.c.operating, _STATUS.c.reason, _STATUS.c.pending),
    tables.desired_object.c.body,
    limit=MAX_BALANCERS,
)
_AMPHORAE = join_rows(
    _AMPHORA.outerjoin(_SEEN, _SEEN.c.amphora_id == _AMPHORA.c.id).outerjoin(
        _SILENCE, _SILENCE.c.amphora_id == _AMPHORA.c.id
    ),
    _AMPHORA.c.id,
    *(_AMPHORA.c[name] for name in ("id", "load_balancer_id", "role", "state", "confirmed", "created_at")),
    *(_AMPHORA.c[name] for name in ("certificate_issued_at", "certificate_expires_at", "certificate_authority")),
    *(_AMPHORA.c[name] for name in ("image", "drift", "drifts", "reason", "near_limit")),
    *(_SEEN.c.seen_at, _SEEN.c.holds_vip, _SEEN.c.agent_version),
    *(_SILENCE.c.kind, _SILENCE.c.since, _SILENCE.c.verdict),
    limit=MAX_AMPHORAE,
)
# With the condition on the generation, the database uses an index and skips old requests.
_ACCEPTED = (
    sa.select(_WORK.c.load_balancer_id, sa.func.min(tables.request.c.accepted_at).label("accepted_at"))
    .join(tables.request, tables.request.c.load_balancer_id == _WORK.c.load_balancer_id)
    .where(tables.request.c.generation > _WORK.c.applied, tables.request.c.applied_at.is_(None))
    .where(_WORK.c.applied < _WORK.c.generation)
    .group_by(_WORK.c.load_balancer_id)
    .limit(MAX_BALANCERS)
)
_ENDED_AT, _BEGUN = _FAILOVER.c.ended_at, sa.select(_FAILOVER)
_OPEN = _BEGUN.where(_ENDED_AT.is_(None)).order_by(_FAILOVER.c.id).limit(MAX_ROWS)
_RECENT = _BEGUN.where(_ENDED_AT.is_not(None)).order_by(_ENDED_AT.desc(), _FAILOVER.c.id.desc()).limit(MAX_FAILOVERS)
_AFTER = sa.bindparam("after", type_=sa.Double)
_ENDED = _BEGUN.where(_ENDED_AT > _AFTER).order_by(_ENDED_AT, _FAILOVER.c.id).limit(1000)
_CHOSEN = _EVENT.c.failover_id.in_(sa.bindparam("ids", expanding=True))
_LAST_IDS = sa.select(sa.func.max(_EVENT.c.id)).where(_CHOSEN).group_by(_EVENT.c.failover_id)
_STEP = sa.select(_EVENT.c.failover_id, _EVENT.c.word, _EVENT.c.at)
_LAST_EVENTS = _STEP.where(_EVENT.c.id.in_(_LAST_IDS)).limit(MAX_ROWS)
_WAITING = _STATUS.c.unreported == sa.true()
_OUTBOX = sa.select(sa.func.count().label("waiting"), sa.func.min(_STATUS.c.since).label("oldest")).where(_WAITING)
_PROCESS = tables_fleet.process
# Rows of killed processes stay for an hour and may exceed the limit. With the newest heartbeats first, the limit keeps
# the running processes.
_PROCESSES = sa.select(_PROCESS).order_by(_PROCESS.c.seen_at.desc(), _PROCESS.c.name).limit(MAX_ROWS)
_ITEM = tables_fleet.rotation_item
_ROTATIONS = sa.select(tables_fleet.rotation).order_by(tables_fleet.rotation.c.id.desc()).limit(MAX_ROTATIONS)
_ITEMS = (
    sa.select(_ITEM.c.rotation_id, _ITEM.c.state, sa.func.count().label("number"))
    .where(_ITEM.c.rotation_id.in_(sa.bindparam("ids", expanding=True)))
    .group_by(_ITEM.c.rotation_id, _ITEM.c.state)
)
_UNKNOWN = tables_fleet.unknown_amphora
_UNKNOWN_AMPHORAE = sa.select(_UNKNOWN).order_by(_UNKNOWN.c.last_at.desc()).limit(MAX_ROWS)
_CA = tables_fleet.certificate_authority.c
_CAS = sa.select(_CA.id, _CA.kind, _CA.state, _CA.expires_at)
_AUTHORITIES = _CAS.where(_CA.state != "gone").order_by(_CA.id).limit(MAX_ROWS)


def read_fleet(database: Database, spares_configured: int = 0, expiry_days: float = 30) -> FleetSnapshot:
    """Return the current snapshot; raises StoreError if the database does not answer.

    A pool of spares whose flavor has no number keeps `spares_configured` spares. The snapshot has the certificates of
    users that expire in less than `expiry_days`.
    """
    begun = time.monotonic()
    found = database.read(lambda connection: _read(connection, spares_configured, expiry_days))
    return msgspec.structs.replace(found, took=time.monotonic() - begun)


def list_ended_failovers(database: Database, after: float) -> tuple[tuple[FailoverInfo, ...], float]:
    """Return the fail-overs that ended since the previous call, and some that an earlier call returned.

    Args:
        after: time of the previous call (seconds since 1970); the result begins `_OVERLAP` seconds earlier.

    Returns:
        The fail-overs, the oldest first, and the time of the database for the next call.
    """

    def read(connection: sa.Connection) -> tuple[tuple[FailoverInfo, ...], float]:
        now = float(connection.execute(sa.select(clock.now(connection))).scalar_one())
        since = max(0.0, (after or now) - _OVERLAP)
        return tuple(_build_failover(row, {}) for row in connection.execute(_ENDED, {"after": since})), now

    return database.read(read)


def _read(connection: sa.Connection, spares_configured: int, expiry_days: float) -> FleetSnapshot:
    now = float(connection.execute(sa.select(clock.now(connection))).scalar_one())
    rows = sorted(read_rows(connection, _BALANCERS, _BalancerRow), key=lambda row: row.id)
    amphora_rows = read_rows(connection, _AMPHORAE, _AmphoraRow)
    amphora_rows.sort(key=lambda row: (row.load_balancer_id, row.created_at, row.id))
    accepted = {row.load_balancer_id: row.accepted_at for row in connection.execute(_ACCEPTED)}
    amphorae = _build_amphorae(amphora_rows, rows)
    breaker_rows = circuit_breaker.read_breaker_rows(connection)
    sight = breaker_rows.get(circuit_breaker.SIGHT)
    return FleetSnapshot(
        at=now,
        cut=len(rows) == MAX_BALANCERS or len(amphora_rows) == MAX_AMPHORAE,
        balancers=_build_balancers(rows, accepted, amphorae, now),
        amphorae=amphorae,
        failovers=_read_failovers(connection),
        breaker=_build_breaker(breaker_rows),
        sight=DetectorInfo() if sight is None else _build(DetectorInfo, sight),
        processes=tuple(_build(ProcessInfo, row) for row in connection.execute(_PROCESSES)),
        pools=_build_pools(rows, amphorae, spares_configured),
        rotations=_read_rotations(connection),
        authorities=tuple(_build(AuthorityInfo, row) for row in connection.execute(_AUTHORITIES)),
        unknown_amphorae=tuple(_build(UnknownAmphoraInfo, row) for row in connection.execute(_UNKNOWN_AMPHORAE)),
        outbox=_build(OutboxInfo, connection.execute(_OUTBOX).one()),
        orphans=connection.execute(sa.select(sa.func.count()).select_from(tables.orphan)).scalar_one(),
        expiring=tuple(sealed_secrets.list_expiring(connection, now, now + expiry_days * _DAY, MAX_ROWS)),
    )


def _build(kind: type[T], row: Any, **computed: Any) -> T:
    """Return a struct with the computed fields; the others have the names of the columns."""
    names = (name for name in kind.__struct_fields__ if name not in computed)
    return kind(**{name: getattr(row, name) for name in names}, **computed)


def _build_breaker(rows: Mapping[str, circuit_breaker.BreakerRow]) -> BreakerInfo:
    """Combine the rows of the circuit breaker: an operator's setting precedes the automatic state."""
    automatic, operator = rows.get(circuit_breaker.AUTOMATIC), rows.get(circuit_breaker.OPERATOR)
    found = BreakerInfo() if automatic is None else _build(BreakerInfo, automatic, held=False)
    if operator is None:
        return found
    held = {"state": circuit_breaker.OPEN, "since": operator.since, "reason": operator.reason, "held": True}
    return msgspec.structs.replace(found, **held)


def _build_amphorae(rows: Iterable[_AmphoraRow], work: Iterable[_BalancerRow]) -> tuple[AmphoraInfo, ...]:
    newest = {row.id: row.generation for row in work if row.op != spare_pools.OP}
    pools = {row.id for row in work if row.op == spare_pools.OP}
    return tuple(
        AmphoraInfo(
            id=row.id,
            load_balancer_id=row.load_balancer_id,
            role=SPARE if row.load_balancer_id in pools else row.role,
            state=row.state,
            wanted=newest.get(row.load_balancer_id, 0),
            confirmed=row.confirmed,
            created_at=row.created_at,
            heard_at=row.heard_at,
            holds_vip=None if row.holds_vip is None else bool(row.holds_vip),
            agent_version=row.agent_version,
            image=row.image,
            certificate_issued_at=row.certificate_issued_at,
            certificate_expires_at=row.certificate_expires_at,
            certificate_authority=row.certificate_authority,
            drift=row.drift,
            reason=row.reason,
            drifts=bool(row.drifts),
            silence=row.silence,
            silent_since=row.silent_since,
            verdict=row.verdict,
            near_limit=tuple(row.near_limit.split(",")) if row.near_limit else (),
        )
        for row in rows
    )


def _build_balancers(
    rows: Iterable[_BalancerRow], accepted: Mapping[str, float], amphorae: Iterable[AmphoraInfo], now: float
) -> tuple[LoadBalancerInfo, ...]:
    holders: dict[str, tuple[str, ...]] = {}
    for one in amphorae:
        if one.holds_vip:
            holders[one.load_balancer_id] = (*holders.get(one.load_balancer_id, ()), one.id)
    found = []
    for row in rows:
        if row.op == spare_pools.OP:
            continue
        name, addresses = desired_objects.read_name_and_addresses(row.body)
        info = _build(
            LoadBalancerInfo,
            row,
            name=name,
            addresses=addresses,
            due=bool(row.due),
            state=provisioning_status(row),
            owner=row.owner if row.owner is not None and (row.leased_until or 0.0) > now else None,
            accepted_at=accepted.get(row.id),
            holders=holders.get(row.id, ()),
        )
        found.append(info)
    return tuple(found)


def provisioning_status(row: Any) -> str:
    """Return the provisioning status that a user of Octavia sees, now or after the pending report."""
    if row.op == Op.DELETE:
        return "PENDING_DELETE"
    if row.pending is not None and row.provisioning != "ERROR":
        return "PENDING_UPDATE" if row.applied else "PENDING_CREATE"
    return str(row.provisioning or ("ACTIVE" if row.applied else "PENDING_CREATE"))


def _build_pools(
    rows: Iterable[_BalancerRow], amphorae: Iterable[AmphoraInfo], configured: int
) -> tuple[SparePoolInfo, ...]:
    kept: dict[str, list[AmphoraInfo]] = {}
    for one in amphorae:
        if one.role == SPARE:
            kept.setdefault(one.load_balancer_id, []).append(one)
    used = {row.spare_pool for row in rows}
    found = []
    for row in rows:
        if row.op != spare_pools.OP:
            continue
        spares = kept.get(row.id, [])
        ready = sum(one.state == "ready" for one in spares)
        # A pool that no load balancer uses needs no spare amphorae.
        wanted = _desired_number(row.spares, configured) if row.id in used else 0
        found.append(_build(SparePoolInfo, row, wanted=wanted, booted=len(spares), ready=ready))
    return tuple(found)


def _desired_number(spec: str | None, configured: int) -> int:
    try:
        number = msgspec.json.decode(spec or b"{}", type=SparePoolSpec).number
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
    return _build(FailoverInfo, row, step=step and step.word, step_at=step and step.at)


def _read_rotations(connection: sa.Connection) -> tuple[RotationInfo, ...]:
    rows = connection.execute(_ROTATIONS).all()
    if not rows:
        return ()
    items = connection.execute(_ITEMS, {"ids": [row.id for row in rows]})
    numbers = {(item.rotation_id, item.state): item.number for item in items}
    states = ("waiting", "running", "done", "failed", "skipped")
    return tuple(_build(RotationInfo, row, **{one: numbers.get((row.id, one), 0) for one in states}) for row in rows)
