# SPDX-License-Identifier: Apache-2.0
"""Rows of amphorae and their last heartbeats.

Invariant: the controller inserts an amphora's row before it creates a resource, and deletes the row after the last
resource. Every resource in a backend therefore has a row.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Container, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from amphora_driver.database.bulk_update import BulkUpdate
from amphora_driver.database.joined_rows import JsonRow, join_rows, read_rows
from amphora_driver.database.rows import chunks
from amphora_driver.database.tables import DUE_NOW, amphora, amphora_heartbeat, job, object_status
from amphora_driver.database.tables_fleet import adoption, failover
from amphora_driver.database.vault import SecretLocation, Vault
from amphora_driver.errors import StoreError
from amphora_driver.model.amphora import Amphora, AmphoraState, AttachedPort, Partner
from amphora_driver.secret import Secret
from amphora_driver.store.generations import lock_jobs, update_job

# Seconds between two writes of the last heartbeats to the database. The failure detector allows for this delay.
LIVENESS_WRITE_INTERVAL = 1.0


class ServingState(msgspec.Struct, kw_only=True):
    """A load balancer's state, with its amphorae and confirmed generations, the oldest first.

    `near_limit` has the resources near their limits, by amphora id.
    """

    generation: int
    operating: str | None = None
    amphorae: dict[str, AmphoraState] = {}
    confirmed: dict[str, int] = {}
    drifting: set[str] = set()
    near_limit: dict[str, str] = {}


class LastHeartbeat(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """The last heartbeat of an amphora; a field that the heartbeat does not contain is None."""

    amphora_id: str
    seen_at: float
    generation: int
    epoch: int
    sequence: int
    holds_vip: bool | None = None
    agent_version: str | None = None


class ReachableAmphora(msgspec.Struct, frozen=True, kw_only=True):
    """An amphora whose agent can be called.

    A warm spare has the id of its pool instead of a load balancer's. The epoch of the heartbeats changes with each
    start of the agent, and is 0 before the first heartbeat.
    """

    id: str
    management_address: str
    load_balancer_id: str = ""
    epoch: int = 0


class RecordedJob(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Columns of a load balancer's `job` row, with the state of its fail-overs and its adoption.

    Attributes:
        replacing: a fail-over is open.
        vips_held: an adoption keeps the VIPs away from the amphorae.
        takes_vips: the amphorae take the VIPs in an adoption.
    """

    load_balancer_id: str
    topology: str
    compute: str | None
    network: str | None
    op: str
    generation: int
    applied: int
    read_back: bool
    vip_applied: str | None
    omitted: str | None
    spare_pool: str | None
    spares: str | None
    tickets: int | None
    owner: str | None
    epoch: int
    due_at: float
    replacing: bool
    vips_held: bool
    takes_vips: bool


# The columns of an amphora in the order of the fields of `Amphora`. `plugged` and `partners` contain JSON.
_AmphoraRow: Any = msgspec.defstruct(
    "_AmphoraRow",
    [
        (field.name, str | None if field.name in {"plugged", "partners"} else field.type)
        for field in msgspec.structs.fields(Amphora)
    ],
    array_like=True,
)
_DECODE_JOB = msgspec.json.Decoder(RecordedJob, strict=False).decode
_DECODE_AMPHORA = msgspec.json.Decoder(_AmphoraRow, strict=False).decode
_DECODE_PLUGGED = msgspec.json.Decoder(tuple[AttachedPort, ...]).decode
_DECODE_PARTNERS = msgspec.json.Decoder(tuple[Partner, ...]).decode
_JSON_COLUMNS = ("plugged", "partners")
_IDS: sa.BindParameter[Any] = sa.bindparam("ids", expanding=True)
_LOAD_BALANCER_IDS = sa.select(amphora.c.id, amphora.c.load_balancer_id)
_BY_AGE = _LOAD_BALANCER_IDS.order_by(amphora.c.created_at, amphora.c.id)
# An amphora is dead if it has an open fail-over with one of these causes.
_DEATH_CAUSES = ("silent", "never_spoke")
_IS_OPEN = failover.c.ended_at.is_(None)
_OF_AN_AMPHORA = failover.c.load_balancer_id == amphora.c.load_balancer_id, failover.c.amphora_id == amphora.c.id
# SQLAlchemy would build the text of a statement with `IN` for each execution.
_IS_DEATH = sa.or_(*(failover.c.cause == cause for cause in _DEATH_CAUSES))
_HAS_DEATH = sa.exists().where(*_OF_AN_AMPHORA, _IS_DEATH, _IS_OPEN)
# Only retiring amphorae can have open fail-overs. So the database searches fail-overs of retiring amphorae only.
_IS_DEAD = sa.and_(amphora.c.state == AmphoraState.RETIRING.value, _HAS_DEATH.correlate(amphora))
_IS_REPLACING = sa.exists().where(failover.c.load_balancer_id == job.c.load_balancer_id, _IS_OPEN).correlate(job)
_IS_ADOPTED = sa.and_(adoption.c.load_balancer_id == job.c.load_balancer_id, adoption.c.ended_at.is_(None))
_HOLDS_VIPS = sa.exists().where(_IS_ADOPTED, adoption.c.vips_held).correlate(job)
_TAKES_VIPS = sa.exists().where(_IS_ADOPTED, ~adoption.c.vips_held, ~adoption.c.reporting).correlate(job)
_JOB_VALUES = {"replacing": _IS_REPLACING, "vips_held": _HOLDS_VIPS, "takes_vips": _TAKES_VIPS}
_JOB_ROW = JsonRow(*(_JOB_VALUES.get(name, job.c.get(name)) for name in RecordedJob.__struct_fields__))
_AMPHORA_VALUES = {
    "heard_at": amphora_heartbeat.c.seen_at,
    "holds_vip": amphora_heartbeat.c.holds_vip,
    "dead": _IS_DEAD,
}
_AMPHORA_ROW = JsonRow(*(_AMPHORA_VALUES.get(name, amphora.c.get(name)) for name in Amphora.__struct_fields__))
_INSERT = amphora.insert()
_HEARTBEAT_KEY = sa.select(amphora.c.heartbeat_key).where(amphora.c.id == sa.bindparam("of"))
_OF_LOAD_BALANCER = (
    sa.select(_AMPHORA_ROW)
    .select_from(amphora)
    .outerjoin(amphora_heartbeat, amphora_heartbeat.c.amphora_id == amphora.c.id)
    .where(amphora.c.load_balancer_id == sa.bindparam("of"))
    .order_by(amphora.c.created_at, amphora.c.id)
)
_WITH_WORK = (
    sa.select(_JOB_ROW, sa.case((amphora.c.id.is_not(None), _AMPHORA_ROW)))
    .select_from(job)
    .outerjoin(amphora, amphora.c.load_balancer_id == job.c.load_balancer_id)
    .outerjoin(amphora_heartbeat, amphora_heartbeat.c.amphora_id == amphora.c.id)
    .where(job.c.load_balancer_id == sa.bindparam("of"))
    .order_by(amphora.c.created_at, amphora.c.id)
)
_SERVING = (
    sa.select(
        *(amphora.c.id, amphora.c.load_balancer_id, amphora.c.state, amphora.c.confirmed, job.c.generation),
        *(object_status.c.operating, amphora.c.drifts, amphora.c.near_limit),
    )
    .join(job, job.c.load_balancer_id == amphora.c.load_balancer_id)
    .outerjoin(object_status, object_status.c.object_id == amphora.c.load_balancer_id)
    .where(amphora.c.load_balancer_id.in_(sa.select(amphora.c.load_balancer_id).where(amphora.c.id.in_(_IDS))))
    .order_by(amphora.c.created_at, amphora.c.id)
)
_WITH_HEARTBEAT = (
    sa.select(amphora.c.id, amphora_heartbeat.c.amphora_id)
    .outerjoin(amphora_heartbeat, amphora_heartbeat.c.amphora_id == amphora.c.id)
    .where(amphora.c.id.in_(_IDS))
)
_VALUES: dict[str, sa.BindParameter[Any]] = {
    column.name: sa.bindparam(f"new_{column.name}", type_=column.type)
    for column in amphora_heartbeat.c
    if column.name != "amphora_id"
}
_NEW_EPOCH, _NEW_SEQUENCE = _VALUES["epoch"], _VALUES["sequence"]
_INSERT_SEEN = amphora_heartbeat.insert().values(amphora_id=sa.bindparam("of"), **_VALUES)
_UPDATE_SEEN = (
    amphora_heartbeat.update()
    .where(
        amphora_heartbeat.c.amphora_id == sa.bindparam("of"),
        sa.or_(
            amphora_heartbeat.c.epoch < _NEW_EPOCH,
            sa.and_(amphora_heartbeat.c.epoch == _NEW_EPOCH, amphora_heartbeat.c.sequence < _NEW_SEQUENCE),
        ),
    )
    .values(**_VALUES)
)
_UPDATE_ALL_SEEN = BulkUpdate(
    amphora_heartbeat,
    LastHeartbeat,
    {"amphora_id": "of"},
    {name: f"new_{name}" for name in _VALUES},
    {name: f"n.{name}" for name in _VALUES},
    "o.epoch < n.epoch OR (o.epoch = n.epoch AND o.sequence < n.sequence)",
    _UPDATE_SEEN,
)


def insert_amphora(
    connection: sa.Connection, amphora_id: str, load_balancer_id: str, role: str, sealed_key: bytes
) -> None:
    """Insert the row of an amphora before its boot."""
    row: dict[str, Any] = {"id": amphora_id, "load_balancer_id": load_balancer_id, "role": role}
    row |= {"state": AmphoraState.BOOTING.value, "heartbeat_key": sealed_key, "created_at": time.time()}
    connection.execute(_INSERT, row)


def load_with_work(connection: sa.Connection, load_balancer_id: str) -> tuple[RecordedJob | None, tuple[Amphora, ...]]:
    """Return a load balancer's `job` row (or None) and its amphorae, the oldest first, from one statement."""
    rows = connection.execute(_WITH_WORK, {"of": load_balancer_id}).all()
    found = _DECODE_JOB(rows[0][0]) if rows else None
    return found, tuple(_to_amphora(text) for _job, text in rows if text is not None)


def load_amphorae(connection: sa.Connection, load_balancer_id: str) -> tuple[Amphora, ...]:
    """Return the amphorae of a load balancer, the oldest first."""
    rows = connection.execute(_OF_LOAD_BALANCER, {"of": load_balancer_id})
    return tuple(_to_amphora(text) for (text,) in rows)


def _to_amphora(text: str) -> Amphora:
    found = msgspec.structs.asdict(_DECODE_AMPHORA(text))
    plugged, partners = found.pop("plugged"), found.pop("partners")
    return Amphora(
        **found,
        plugged=_DECODE_PLUGGED(plugged) if plugged else (),
        partners=_DECODE_PARTNERS(partners) if partners else (),
    )


def update_amphora(connection: sa.Connection, amphora_id: str, **values: Any) -> None:
    """Update columns of an amphora's row; a retiring amphora stays retiring."""
    for name in _JSON_COLUMNS:
        if name in values:
            values[name] = msgspec.json.encode(values[name]).decode()
    if "state" in values:
        values["state"] = AmphoraState(values["state"]).value
    bound = {f"new_{name}": value for name, value in values.items()}
    connection.execute(_update_of(tuple(values)), {**bound, "of": amphora_id})


@lru_cache(maxsize=64)
def _update_of(names: tuple[str, ...]) -> sa.Update:
    """Return the UPDATE of these columns of an amphora.

    SQLAlchemy needs longer to build a statement than to execute it.
    """
    new: dict[str, Any] = {name: sa.bindparam(f"new_{name}", type_=amphora.c[name].type) for name in names}
    if "state" in new:
        stays = amphora.c.state == AmphoraState.RETIRING.value
        new["state"] = sa.case((stays, amphora.c.state), else_=new["state"])
    return amphora.update().where(amphora.c.id == sa.bindparam("of")).values(**new)


def lower_confirmed(connection: sa.Connection, amphora_id: str, confirmed: int, serves: int) -> bool:
    """Lower an amphora's confirmed generation to the served one; see `replace_confirmation`."""
    reason = f"it confirmed generation {confirmed} and serves {serves}"
    return replace_confirmation(connection, amphora_id, confirmed, {"confirmed": serves, "reason": reason})


def replace_confirmation(connection: sa.Connection, amphora_id: str, confirmed: int, values: Mapping[str, Any]) -> bool:
    """Update an amphora's row and make its load balancer due.

    Return False if the amphora has confirmed another generation since, or is being removed.
    """
    owner = connection.execute(sa.select(amphora.c.load_balancer_id).where(amphora.c.id == amphora_id)).scalar() or ""
    lock_jobs(connection, [owner])
    mine = amphora.c.id == amphora_id, amphora.c.load_balancer_id == owner, amphora.c.confirmed == confirmed
    ready = amphora.update().where(*mine, amphora.c.state == AmphoraState.READY.value)
    if not connection.execute(ready.values(**values)).rowcount:
        return False
    update_job(connection, owner, dirty=True, due_at=DUE_NOW)
    return True


def delete_amphora(connection: sa.Connection, amphora_id: str) -> None:
    """Delete the rows of an amphora, after its last resource."""
    connection.execute(amphora_heartbeat.delete().where(amphora_heartbeat.c.amphora_id == amphora_id))
    connection.execute(amphora.delete().where(amphora.c.id == amphora_id))


def key_location(amphora_id: str) -> SecretLocation:
    """Return the location to which an amphora's encrypted heartbeat key is bound."""
    return SecretLocation("amphora", (amphora_id, "heartbeat_key"))


def read_heartbeat_key(connection: sa.Connection, vault: Vault, amphora_id: str) -> Secret | None:
    """Return the key that signs an amphora's heartbeats; None if the amphora is not recorded."""
    sealed = connection.execute(_HEARTBEAT_KEY, {"of": amphora_id}).scalar()
    return None if sealed is None else vault.open(sealed, key_location(amphora_id))


def read_heartbeat_keys(
    connection: sa.Connection, vault: Vault, known: AbstractSet[str] = frozenset()
) -> dict[str, Secret]:
    """Return by amphora id all heartbeat keys that can be decrypted, except of the amphorae in `known`."""
    new = sorted(set(connection.execute(sa.select(amphora.c.id)).scalars()) - known)
    keys = {}
    for ids in chunks(new):
        for row in connection.execute(sa.select(amphora.c.id, amphora.c.heartbeat_key).where(amphora.c.id.in_(ids))):
            with contextlib.suppress(StoreError):
                keys[row.id] = vault.open(row.heartbeat_key, key_location(row.id))
    return keys


def load_serving_states(connection: sa.Connection, amphora_ids: Sequence[str]) -> dict[str, ServingState]:
    """Return the recorded load balancers of these amphorae with all their amphorae, by load balancer id."""
    found: dict[str, ServingState] = {}
    for ids in chunks(amphora_ids):
        for row in connection.execute(_SERVING, {"ids": ids}):
            known = ServingState(generation=row.generation, operating=row.operating)
            one = found.setdefault(row.load_balancer_id, known)
            one.amphorae[row.id] = AmphoraState(row.state)
            one.confirmed[row.id] = row.confirmed
            if row.drifts:
                one.drifting.add(row.id)
            if row.near_limit:
                one.near_limit[row.id] = row.near_limit
    return found


def load_balancer_ids(connection: sa.Connection) -> dict[str, str]:
    """Return the load balancer id of every recorded amphora."""
    return {row.id: row.load_balancer_id for row in connection.execute(_LOAD_BALANCER_IDS)}


def load_balancer_ids_by_age(connection: sa.Connection) -> list[tuple[str, str]]:
    """Return id and load balancer id of every recorded amphora, the oldest first."""
    return [(row.id, row.load_balancer_id) for row in connection.execute(_BY_AGE)]


def record_near_limit(connection: sa.Connection, changed: Mapping[str, str | None]) -> None:
    """Record, by amphora id, the resources near their limits; None if there is none."""
    for amphora_id, names in sorted(changed.items()):
        connection.execute(amphora.update().where(amphora.c.id == amphora_id).values(near_limit=names))


class _ReachableRow(msgspec.Struct, frozen=True, array_like=True):
    """The columns of `ReachableAmphora`, in its order."""

    id: str
    management_address: str
    load_balancer_id: str
    epoch: int | None


_REACHABLE = join_rows(
    amphora.outerjoin(amphora_heartbeat, amphora_heartbeat.c.amphora_id == amphora.c.id),
    amphora.c.id,
    *(amphora.c.id, amphora.c.management_address, amphora.c.load_balancer_id, amphora_heartbeat.c.epoch),
).where(amphora.c.state == AmphoraState.READY.value, amphora.c.management_address.is_not(None))


def list_reachable(connection: sa.Connection) -> list[ReachableAmphora]:
    """Return all ready amphorae, also warm spares, ordered by id."""
    rows = sorted(read_rows(connection, _REACHABLE, _ReachableRow), key=lambda row: row.id)
    return [
        ReachableAmphora(
            id=row.id,
            management_address=row.management_address,
            load_balancer_id=row.load_balancer_id,
            epoch=row.epoch or 0,
        )
        for row in rows
    ]


def last_heartbeats(connection: sa.Connection, amphora_ids: Sequence[str] | None = None) -> dict[str, tuple[int, int]]:
    """Return (epoch, sequence) of the last recorded heartbeat, of these amphorae or of all."""
    statement = sa.select(amphora_heartbeat.c.amphora_id, amphora_heartbeat.c.epoch, amphora_heartbeat.c.sequence)
    every = [statement]
    if amphora_ids is not None:
        every = [statement.where(amphora_heartbeat.c.amphora_id.in_(ids)) for ids in chunks(amphora_ids)]
    return {row.amphora_id: (row.epoch, row.sequence) for one in every for row in connection.execute(one)}


def record_heartbeats(
    connection: sa.Connection, heard: Sequence[LastHeartbeat], recorded: Container[str] = frozenset()
) -> None:
    """Record heartbeats in bulk; a newer heartbeat, recorded by another health manager, stays.

    The amphorae in `recorded` have rows, or were deleted since.
    """
    if _UPDATE_ALL_SEEN.execute(connection, heard) == len(heard):
        return
    # All writers change rows in the order of their ids, so that no deadlock occurs.
    unknown = sorted((one for one in heard if one.amphora_id not in recorded), key=lambda one: one.amphora_id)
    for some in chunks(unknown):
        # A deleted amphora gets no heartbeat row, because no code would ever delete that row.
        rows = connection.execute(_WITH_HEARTBEAT, {"ids": [one.amphora_id for one in some]})
        missing = {row.id for row in rows if row.amphora_id is None}
        _UPDATE_ALL_SEEN.execute(connection, [one for one in some if one.amphora_id not in missing])
        new = [_UPDATE_ALL_SEEN.parameters(one) for one in some if one.amphora_id in missing]
        _insert_heartbeats(connection, new)


def _insert_heartbeats(connection: sa.Connection, rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        return
    try:
        with connection.begin_nested():
            connection.execute(_INSERT_SEEN, rows)
    except IntegrityError:
        # Another health manager has just inserted a row for one of the amphorae. So the rows are inserted one by one,
        # and an existing row is updated.
        if len(rows) == 1:
            connection.execute(_UPDATE_SEEN, rows[0])
            return
        for row in rows:
            _insert_heartbeats(connection, [row])
