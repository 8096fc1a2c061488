# SPDX-License-Identifier: Apache-2.0
"""Reading the fleet from the rows.

Invariant: one reading transaction of a fixed number of statements, whatever there is of everything: each goes by a key
or reads a table of which there is one row for each load balancer or amphora, and none brings back more than a limit. So
looking never becomes what the database is busy with.
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
    Authority,
    Balancer,
    Breaker,
    Failover,
    Fleet,
    Machine,
    Outbox,
    Pool,
    Process,
    Rotation,
    Sight,
    Zombie,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from amphora_driver.database.engine import Database

MOST_BALANCERS = 20_000
MOST_AMPHORAE = 50_000
MOST_FINDINGS = 200
MOST_FAILOVERS = 12
MOST_ROTATIONS = 3
# Seconds: what ended before the last look may have been committed after it.
_LATE = 60.0


class _Vip(msgspec.Struct, frozen=True):
    address: str = ""


class _Body(msgspec.Struct, frozen=True):
    """What is shown of a recorded load balancer."""

    name: str | None = None
    vip: _Vip = _Vip()
    additional_vips: tuple[_Vip, ...] = ()


_body = msgspec.json.Decoder(_Body).decode
_spec = msgspec.json.Decoder(SparePoolSpec).decode

_WORK = tables.work
_STATUS = tables.status
_AMPHORA = tables.amphora
_SEEN = tables.amphora_seen
_SILENCE = tables_fleet.silence
_FAILOVER = tables_fleet.failover
_EVENT = tables_fleet.failover_event

# Putting a statement together costs more than running it.
_BALANCERS = (
    sa.select(
        *(_WORK.c.load_balancer_id, _WORK.c.project_id, _WORK.c.topology, _WORK.c.op, _WORK.c.generation),
        *(_WORK.c.applied, _WORK.c.committed, _WORK.c.attempts, _WORK.c.error, _WORK.c.dirty, _WORK.c.free_at),
        *(_WORK.c.owner, _WORK.c.leased_until, _WORK.c.spares, _WORK.c.spare_pool),
        *(_STATUS.c.provisioning, _STATUS.c.operating, _STATUS.c.reason, _STATUS.c.pending),
        tables.wanted_object.c.body,
    )
    .outerjoin(_STATUS, _STATUS.c.object_id == _WORK.c.load_balancer_id)
    .outerjoin(tables.wanted_object, tables.wanted_object.c.id == _WORK.c.load_balancer_id)
    .order_by(_WORK.c.load_balancer_id)
    .limit(MOST_BALANCERS)
)
_MACHINE = {
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
    sa.select(*_MACHINE.values())
    .outerjoin(_SEEN, _SEEN.c.amphora_id == _AMPHORA.c.id)
    .outerjoin(_SILENCE, _SILENCE.c.amphora_id == _AMPHORA.c.id)
    .order_by(_AMPHORA.c.load_balancer_id, _AMPHORA.c.created_at, _AMPHORA.c.id)
    .limit(MOST_AMPHORAE)
)
# By the index on load balancer and generation: history before what is applied is not looked at.
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
    .limit(MOST_BALANCERS)
)
_OPEN = sa.select(_FAILOVER).where(_FAILOVER.c.ended_at.is_(None)).order_by(_FAILOVER.c.id).limit(MOST_FINDINGS)
_RECENT = (
    sa.select(_FAILOVER)
    .where(_FAILOVER.c.ended_at.is_not(None))
    .order_by(_FAILOVER.c.ended_at.desc(), _FAILOVER.c.id.desc())
    .limit(MOST_FAILOVERS)
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
    .limit(MOST_FINDINGS)
)
_WAITING = _STATUS.c.version > _STATUS.c.reported
_OUTBOX = sa.select(sa.func.count().label("waiting"), sa.func.min(_STATUS.c.since).label("oldest")).where(_WAITING)
_PROCESSES = sa.select(tables_fleet.process).order_by(tables_fleet.process.c.kind, tables_fleet.process.c.name)
_ITEM = tables_fleet.rotation_item
_ROTATIONS = sa.select(tables_fleet.rotation).order_by(tables_fleet.rotation.c.id.desc()).limit(MOST_ROTATIONS)
_ITEMS = (
    sa.select(_ITEM.c.rotation_id, _ITEM.c.state, sa.func.count().label("number"))
    .where(_ITEM.c.rotation_id.in_(sa.bindparam("ids", expanding=True)))
    .group_by(_ITEM.c.rotation_id, _ITEM.c.state)
)
_ZOMBIES = sa.select(tables_fleet.zombie).order_by(tables_fleet.zombie.c.last_at.desc()).limit(MOST_FINDINGS)
_AUTHORITIES = (
    sa.select(
        *(tables_fleet.authority.c.id, tables_fleet.authority.c.kind),
        *(tables_fleet.authority.c.state, tables_fleet.authority.c.expires_at),
    )
    .where(tables_fleet.authority.c.state != "gone")
    .order_by(tables_fleet.authority.c.id)
    .limit(MOST_FINDINGS)
)


def read(database: Database, spares_configured: int = 0) -> Fleet:
    """The fleet now.

    Args:
        database: where the rows are.
        spares_configured: how many spares are kept for load balancers whose flavor does not say.

    Raises:
        StoreError: the database is away.
    """
    begun = time.monotonic()
    found = database.read(lambda connection: _read(connection, spares_configured))
    return msgspec.structs.replace(found, took=time.monotonic() - begun)


def ended(database: Database, after: float) -> tuple[tuple[Failover, ...], float]:
    """Fail-overs that ended, also those that were seen before.

    Args:
        database: where they are.
        after: since when (seconds since 1970); a while before that is looked at too.

    Returns:
        They, the oldest first, and the time of this look.

    Raises:
        StoreError: the database is away.
    """

    def look(connection: sa.Connection) -> tuple[tuple[Failover, ...], float]:
        now = float(connection.execute(sa.select(clock.now(connection))).scalar_one())
        since = max(0.0, (after or now) - _LATE)
        return tuple(_failover(row, {}) for row in connection.execute(_ENDED, {"after": since})), now

    return database.read(look)


def _read(connection: sa.Connection, spares_configured: int) -> Fleet:
    now = float(connection.execute(sa.select(clock.now(connection))).scalar_one())
    rows = connection.execute(_BALANCERS).all()
    machines = connection.execute(_AMPHORAE).all()
    accepted = {row.load_balancer_id: row.accepted_at for row in connection.execute(_ACCEPTED)}
    amphorae = _machines(machines, {row.load_balancer_id: row for row in rows})
    rows_of_breaker = circuit_breaker.read_breaker_rows(connection)
    outbox = connection.execute(_OUTBOX).one()
    return Fleet(
        at=now,
        cut=len(rows) == MOST_BALANCERS or len(machines) == MOST_AMPHORAE,
        balancers=_balancers(rows, accepted, _holders(amphorae), now),
        amphorae=amphorae,
        failovers=_failovers(connection),
        breaker=_breaker(rows_of_breaker),
        sight=_sight(rows_of_breaker.get(circuit_breaker.SIGHT)),
        processes=tuple(_of(Process, row) for row in connection.execute(_PROCESSES.limit(MOST_FINDINGS))),
        pools=_pools(rows, amphorae, spares_configured),
        rotations=_rotations(connection),
        authorities=tuple(_of(Authority, row) for row in connection.execute(_AUTHORITIES)),
        zombies=tuple(_of(Zombie, row) for row in connection.execute(_ZOMBIES)),
        outbox=Outbox(waiting=outbox.waiting, oldest=outbox.oldest),
        orphans=connection.execute(sa.select(sa.func.count()).select_from(tables.orphan)).scalar_one(),
    )


def _of(kind: Any, row: Any) -> Any:
    """A fact whose attributes are called as the columns are."""
    return kind(**{name: getattr(row, name) for name in kind.__struct_fields__})


def _breaker(rows: Mapping[str, circuit_breaker.BreakerRow]) -> Breaker:
    """What is so of all its rows: an operator goes before the automatic."""
    automatic, operator = rows.get(circuit_breaker.AUTOMATIC), rows.get(circuit_breaker.OPERATOR)
    found = Breaker()
    if automatic is not None:
        found = Breaker(
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


def _sight(row: circuit_breaker.BreakerRow | None) -> Sight:
    return Sight() if row is None else Sight(state=row.state, since=row.since, reason=row.reason)


def _machines(rows: Iterable[Any], work: Mapping[str, Any]) -> tuple[Machine, ...]:
    newest = {one: row.generation for one, row in work.items() if row.op != spare_pools.OP}
    pools = {one for one, row in work.items() if row.op == spare_pools.OP}
    found = []
    for row in rows:
        # By place: by name it takes three times as long, and there are many.
        said = dict(zip(_MACHINE, row, strict=True))
        of = said["load_balancer_id"]
        said["drifts"] = bool(said["drifts"])
        if of in pools:
            said["role"] = SPARE
        found.append(Machine(wanted=newest.get(of, 0), **said))
    return tuple(found)


def _holders(amphorae: Iterable[Machine]) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for one in amphorae:
        if one.holds_vip:
            found.setdefault(one.load_balancer_id, []).append(one.id)
    return {load_balancer_id: tuple(ids) for load_balancer_id, ids in found.items()}


def _balancers(
    rows: Iterable[Any], accepted: Mapping[str, float], holders: Mapping[str, tuple[str, ...]], now: float
) -> tuple[Balancer, ...]:
    found = []
    for row in rows:
        if row.op == spare_pools.OP:
            continue
        name, addresses = _shown(row.body)
        found.append(
            Balancer(
                id=row.load_balancer_id,
                name=name,
                project_id=row.project_id,
                addresses=addresses,
                topology=row.topology,
                state=state(row),
                operating=row.operating,
                reason=row.reason,
                generation=row.generation,
                applied=row.applied,
                committed=row.committed,
                attempts=row.attempts,
                error=row.error,
                due=row.dirty,
                due_at=row.free_at,
                owner=row.owner if row.owner is not None and (row.leased_until or 0.0) > now else None,
                accepted_at=accepted.get(row.load_balancer_id),
                holders=holders.get(row.load_balancer_id, ()),
            )
        )
    return tuple(found)


def state(row: Any) -> str:
    """The provisioning status as a user of Octavia sees it, or is about to."""
    if row.op == Op.DELETE:
        return "PENDING_DELETE"
    if row.pending is not None and row.provisioning != "ERROR":
        return "PENDING_UPDATE" if row.applied else "PENDING_CREATE"
    return str(row.provisioning or ("ACTIVE" if row.applied else "PENDING_CREATE"))


def _shown(body: str | None) -> tuple[str | None, tuple[str, ...]]:
    """Name and addresses, of one that is recorded."""
    if body is None:
        return None, ()
    try:
        found = _body(body)
    except msgspec.DecodeError:
        # One strange row must not hide all others.
        return None, ()
    return found.name, tuple(vip.address for vip in (found.vip, *found.additional_vips) if vip.address)


def _pools(rows: Iterable[Any], amphorae: Iterable[Machine], configured: int) -> tuple[Pool, ...]:
    kept: dict[str, list[Machine]] = {}
    for one in amphorae:
        if one.role == SPARE:
            kept.setdefault(one.load_balancer_id, []).append(one)
    used = {row.spare_pool for row in rows}
    found = []
    for row in rows:
        if row.op != spare_pools.OP:
            continue
        mine = kept.get(row.load_balancer_id, [])
        ready = sum(one.state == "ready" for one in mine)
        # Nobody takes any: none is wanted any more.
        wanted = _number(row.spares, configured) if row.load_balancer_id in used else 0
        found.append(Pool(id=row.load_balancer_id, wanted=wanted, booted=len(mine), ready=ready, error=row.error))
    return tuple(found)


def _number(spec: str | None, configured: int) -> int:
    try:
        said = _spec(spec or b"{}").number
    except msgspec.DecodeError:
        return 0
    return configured if said is None else said


def _failovers(connection: sa.Connection) -> tuple[Failover, ...]:
    """Those that go on, the oldest first, then those that ended, the newest first."""
    going = connection.execute(_OPEN).all()
    ids = [row.id for row in going]
    steps = {row.failover_id: row for row in connection.execute(_LAST_EVENTS, {"ids": ids})} if ids else {}
    return tuple(_failover(row, steps) for row in [*going, *connection.execute(_RECENT)])


def _failover(row: Any, steps: Mapping[int, Any]) -> Failover:
    step = steps.get(row.id)
    return Failover(
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


def _rotations(connection: sa.Connection) -> tuple[Rotation, ...]:
    rows = connection.execute(_ROTATIONS).all()
    if not rows:
        return ()
    counted: dict[int, dict[str, int]] = {}
    for item in connection.execute(_ITEMS, {"ids": [row.id for row in rows]}):
        counted.setdefault(item.rotation_id, {})[item.state] = item.number
    words = ("waiting", "running", "done", "failed", "skipped")
    return tuple(
        Rotation(
            id=row.id,
            state=row.state,
            max_unavailable=row.max_unavailable,
            asked_by=row.asked_by,
            created_at=row.created_at,
            ended_at=row.ended_at,
            reason=row.reason,
            **{word: counted.get(row.id, {}).get(word, 0) for word in words},
        )
        for row in rows
    )
