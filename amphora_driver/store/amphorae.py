# SPDX-License-Identifier: Apache-2.0
"""The amphorae of a load balancer.

Invariant: an amphora's row is written before anything is made for it and deleted after everything of it is gone, so
that nothing exists outside of which no row knows.
"""

from __future__ import annotations

import contextlib
import time
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from amphora_driver.database.tables import DUE_NOW, amphora, amphora_seen, status, work
from amphora_driver.database.tables_fleet import failover
from amphora_driver.database.vault import SecretLocation
from amphora_driver.errors import StoreError
from amphora_driver.model.network import Port, Subnet

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from amphora_driver.database.vault import Vault
    from amphora_driver.secret import Secret

# Databases limit the number of values in one IN (...).
_CHUNK = 500
_LONGEST_VERSION = 64


class State(str, Enum):
    """Where an amphora is in its life."""

    BOOTING = "booting"
    READY = "ready"
    RETIRING = "retiring"


class Plugged(msgspec.Struct, frozen=True, kw_only=True):
    """A port the machine has, with what is known of its subnets."""

    port: Port
    subnets: tuple[Subnet, ...]


class Partner(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """Another amphora of the same load balancer: its id, and its address on the VIP's network."""

    id: str
    address: str


class Amphora(msgspec.Struct, frozen=True, kw_only=True):
    """One amphora as recorded; its heartbeat key stays in the store.

    Attributes:
        booted_at: when its machine was ordered (seconds since 1970).
        confirmed_at: when it confirmed what it serves.
        partners: those it knew to be its partners when it confirmed.
        heard_at: when it was heard last (seconds since 1970); None if never.
        holds_vip: what it said then; None if it did not say.
        handed_over: it was asked to give the VIPs to its partner, because it is about to go.
        drains_until: it did, and until then connections it still has may go on (seconds since 1970); None while the
            VIPs may still be there.
        dead: it is being replaced because it was neither heard nor answered: nothing is asked of it, and nobody counts
            on it.
        certificate_issued_at: when its certificate was issued (seconds since 1970; the end of it likewise).
        certificate_authority: who issued it: the id of an authority, None for the one of the files.
        trusts: whose client certificates it accepts (see `certificates.rotation`).
    """

    id: str
    load_balancer_id: str
    role: str
    state: State
    compute_id: str | None
    management_address: str | None
    confirmed: int
    plugged: tuple[Plugged, ...]
    booted_at: float | None = None
    confirmed_at: float | None = None
    partners: tuple[Partner, ...] = ()
    heard_at: float | None = None
    holds_vip: bool | None = None
    handed_over: bool = False
    drains_until: float | None = None
    dead: bool = False
    certificate_issued_at: float | None = None
    certificate_expires_at: float | None = None
    certificate_authority: int | None = None
    trusts: str | None = None


class Serving(msgspec.Struct, kw_only=True):
    """A load balancer's newest wanted generation and status; its amphorae, the oldest first, what they confirmed.

    `drifting` are those of them that are noted not to be as wanted now.
    """

    generation: int
    operating: str | None = None
    amphorae: dict[str, State] = {}
    confirmed: dict[str, int] = {}
    drifting: set[str] = set()


class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """The last heartbeat of an amphora: when (seconds since 1970), what it served, and its place among all of them.

    `holds_vip` and `agent_version` are None where it did not say.
    """

    amphora_id: str
    at: float
    generation: int
    epoch: int
    sequence: int
    holds_vip: bool | None = None
    agent_version: str | None = None


# Statements of every second are built once.
_IDS: sa.BindParameter[Any] = sa.bindparam("ids", expanding=True)
_ALL = sa.select(amphora.c.id, amphora.c.load_balancer_id)
# Of one moment, and at once; every column costs. Where both have one of the same name, the amphora's is not asked for.
_UNASKED = {
    *("project_id", "reread", "tickets_due", "owner", "writes", "leased_until", "free_at", "error"),
    *("heartbeat_key", "created_at", "ready_at", "reason"),
    *("image", "audited_at", "drift", "drifts"),
}
_OF_WORK = [column for column in work.c if column.name not in _UNASKED]
_OF_AMPHORA = [column for column in amphora.c if column.name not in {*_UNASKED, *(one.name for one in work.c)}]
# Causes of a fail-over that say that an amphora is dead: nobody hears it, and it does not answer either.
_DEATHS = ("silent", "never_spoke", "machine")
_OPEN = failover.c.ended_at.is_(None)
_DEAD = sa.exists().where(
    failover.c.load_balancer_id == amphora.c.load_balancer_id,
    failover.c.amphora_id == amphora.c.id,
    failover.c.cause.in_(_DEATHS),
    _OPEN,
)
# Only of those that are being replaced: of all others nobody needs to look.
_DEAD_NOW = sa.and_(amphora.c.state == State.RETIRING.value, _DEAD.correlate(amphora)).label("dead")
_REPLACING = (
    sa.exists().where(failover.c.load_balancer_id == work.c.load_balancer_id, _OPEN).correlate(work).label("replacing")
)
_OF_LOAD_BALANCER = (
    sa.select(*_OF_AMPHORA, amphora.c.load_balancer_id, amphora_seen.c.seen_at, amphora_seen.c.holds_vip, _DEAD_NOW)
    .outerjoin(amphora_seen, amphora_seen.c.amphora_id == amphora.c.id)
    .where(amphora.c.load_balancer_id == sa.bindparam("of"))
    .order_by(amphora.c.created_at, amphora.c.id)
)
_WITH_WORK = (
    sa.select(*_OF_WORK, *_OF_AMPHORA, amphora_seen.c.seen_at, amphora_seen.c.holds_vip, _DEAD_NOW, _REPLACING)
    .outerjoin(amphora, amphora.c.load_balancer_id == work.c.load_balancer_id)
    .outerjoin(amphora_seen, amphora_seen.c.amphora_id == amphora.c.id)
    .where(work.c.load_balancer_id == sa.bindparam("of"))
    .order_by(amphora.c.created_at, amphora.c.id)
)
_OF_SAME = (
    sa.select(
        *(amphora.c.id, amphora.c.load_balancer_id, amphora.c.state, amphora.c.confirmed, work.c.generation),
        *(status.c.operating, amphora.c.drifts),
    )
    .join(work, work.c.load_balancer_id == amphora.c.load_balancer_id)
    .outerjoin(status, status.c.object_id == amphora.c.load_balancer_id)
    .where(amphora.c.load_balancer_id.in_(sa.select(amphora.c.load_balancer_id).where(amphora.c.id.in_(_IDS))))
    .order_by(amphora.c.created_at, amphora.c.id)
)
_RECORDED = (
    sa.select(amphora.c.id, amphora_seen.c.amphora_id)
    .outerjoin(amphora_seen, amphora_seen.c.amphora_id == amphora.c.id)
    .where(amphora.c.id.in_(_IDS))
)
_NEW_EPOCH = sa.bindparam("new_epoch", type_=sa.BigInteger)
_NEW_SEQUENCE = sa.bindparam("new_sequence", type_=sa.BigInteger)
_VALUES = {
    "seen_at": sa.bindparam("new_at"),
    "generation": sa.bindparam("new_generation"),
    "epoch": _NEW_EPOCH,
    "sequence": _NEW_SEQUENCE,
    "holds_vip": sa.bindparam("new_holds_vip", type_=sa.Boolean),
    "agent_version": sa.bindparam("new_agent_version"),
}
_FIRST_SEEN = amphora_seen.insert().values(amphora_id=sa.bindparam("of"), **_VALUES)
_SEEN = (
    amphora_seen.update()
    .where(
        amphora_seen.c.amphora_id == sa.bindparam("of"),
        sa.or_(
            amphora_seen.c.epoch < _NEW_EPOCH,
            sa.and_(amphora_seen.c.epoch == _NEW_EPOCH, amphora_seen.c.sequence < _NEW_SEQUENCE),
        ),
    )
    .values(**_VALUES)
)


def record(connection: sa.Connection, amphora_id: str, load_balancer_id: str, role: str, sealed_key: bytes) -> None:
    """Write down an amphora that is about to be booted."""
    connection.execute(
        amphora.insert().values(
            id=amphora_id,
            load_balancer_id=load_balancer_id,
            role=role,
            state=State.BOOTING.value,
            confirmed=0,
            heartbeat_key=sealed_key,
            created_at=time.time(),
        )
    )


def with_work(connection: sa.Connection, load_balancer_id: str) -> tuple[Any, tuple[Amphora, ...]]:
    """The load balancer's row of `work` (None if there is none), but for who has the lease, and all its amphorae.

    `replacing` in it says whether a fail-over of it goes on.

    The oldest comes first.
    """
    rows = connection.execute(_WITH_WORK, {"of": load_balancer_id}).all()
    return (rows[0] if rows else None), _amphorae(rows)


def of_load_balancer(connection: sa.Connection, load_balancer_id: str) -> tuple[Amphora, ...]:
    """Every amphora of a load balancer, the oldest first."""
    return _amphorae(connection.execute(_OF_LOAD_BALANCER, {"of": load_balancer_id}).all())


def _amphorae(rows: Sequence[Any]) -> tuple[Amphora, ...]:
    return tuple(
        Amphora(
            id=row.id,
            load_balancer_id=row.load_balancer_id,
            role=row.role,
            state=State(row.state),
            compute_id=row.compute_id,
            management_address=row.management_address,
            confirmed=row.confirmed,
            plugged=_plugged(row.plugged),
            booted_at=row.booted_at,
            confirmed_at=row.confirmed_at,
            partners=_partners(row.partners),
            heard_at=row.seen_at,
            holds_vip=row.holds_vip,
            handed_over=row.handed_over,
            drains_until=row.drains_until,
            dead=bool(row.dead),
            certificate_issued_at=row.certificate_issued_at,
            certificate_expires_at=row.certificate_expires_at,
            certificate_authority=row.certificate_authority,
            trusts=row.trusts,
        )
        for row in rows
        if row.id is not None
    )


@lru_cache(maxsize=1024)
def _plugged(text: str | None) -> tuple[Plugged, ...]:
    return msgspec.json.decode(text, type=tuple[Plugged, ...]) if text else ()


@lru_cache(maxsize=1024)
def _partners(text: str | None) -> tuple[Partner, ...]:
    return msgspec.json.decode(text, type=tuple[Partner, ...]) if text else ()


def change(connection: sa.Connection, amphora_id: str, **values: Any) -> None:
    """Change columns of an amphora's row; a retiring amphora stays retiring whatever else is learned of it."""
    for name in ("plugged", "partners"):
        if name in values:
            values[name] = msgspec.json.encode(values[name]).decode()
    state = values.pop("state", None)
    if values:
        connection.execute(amphora.update().where(amphora.c.id == amphora_id).values(**values))
    if state is not None:
        connection.execute(
            amphora.update()
            .where(amphora.c.id == amphora_id, amphora.c.state != State.RETIRING.value)
            .values(state=State(state).value)
        )


def take_back(connection: sa.Connection, amphora_id: str, confirmed: int, serves: int) -> bool:
    """An amphora serves less than it confirmed: its load balancer is due; False if it has confirmed anew meanwhile."""
    owner = connection.execute(sa.select(amphora.c.load_balancer_id).where(amphora.c.id == amphora_id)).scalar()
    mine = work.c.load_balancer_id == owner
    # The row of `work` first, as every step does: two that lock in different orders wait for each other.
    connection.execute(sa.select(work.c.epoch).where(mine).with_for_update())
    changed = connection.execute(
        amphora.update()
        .where(
            amphora.c.id == amphora_id,
            amphora.c.load_balancer_id == owner,
            amphora.c.confirmed == confirmed,
            amphora.c.state == State.READY.value,
        )
        .values(confirmed=serves, reason=f"it confirmed generation {confirmed} and serves {serves}")
    ).rowcount
    if changed:
        connection.execute(work.update().where(mine).values(dirty=True, free_at=DUE_NOW))
    return bool(changed)


def forget(connection: sa.Connection, amphora_id: str) -> None:
    """Delete the row of an amphora of which nothing is left."""
    connection.execute(amphora_seen.delete().where(amphora_seen.c.amphora_id == amphora_id))
    connection.execute(amphora.delete().where(amphora.c.id == amphora_id))


def key_place(amphora_id: str) -> SecretLocation:
    """What the heartbeat key of this amphora is sealed for."""
    return SecretLocation("amphora", (amphora_id, "heartbeat_key"))


def heartbeat_key(connection: sa.Connection, vault: Vault, amphora_id: str) -> Secret | None:
    """The key an amphora signs its heartbeats with, or None if there is no such amphora."""
    sealed = connection.execute(sa.select(amphora.c.heartbeat_key).where(amphora.c.id == amphora_id)).scalar()
    return None if sealed is None else vault.open(sealed, key_place(amphora_id))


def heartbeat_keys(connection: sa.Connection, vault: Vault, known: AbstractSet[str] = frozenset()) -> dict[str, Secret]:
    """The keys of all amphorae but those that are known, by amphora id. A key that cannot be opened is left out."""
    new = sorted(set(connection.execute(sa.select(amphora.c.id)).scalars()) - known)
    keys = {}
    for start in range(0, len(new), _CHUNK):
        some = amphora.c.id.in_(new[start : start + _CHUNK])
        for row in connection.execute(sa.select(amphora.c.id, amphora.c.heartbeat_key).where(some)):
            with contextlib.suppress(StoreError):
                keys[row.id] = vault.open(row.heartbeat_key, key_place(row.id))
    return keys


def of_same_load_balancers(connection: sa.Connection, amphora_ids: Sequence[str]) -> dict[str, Serving]:
    """The load balancers of these amphorae with all their amphorae, by load balancer id.

    Amphorae that are not recorded, and load balancers that are not wanted by anybody any more, are left out.
    """
    found: dict[str, Serving] = {}
    for start in range(0, len(amphora_ids), _CHUNK):
        for row in connection.execute(_OF_SAME, {"ids": amphora_ids[start : start + _CHUNK]}):
            known = Serving(generation=row.generation, operating=row.operating)
            one = found.setdefault(row.load_balancer_id, known)
            one.amphorae[row.id] = State(row.state)
            one.confirmed[row.id] = row.confirmed
            if row.drifts:
                one.drifting.add(row.id)
    return found


def all_load_balancers(connection: sa.Connection) -> dict[str, str]:
    """The load balancer of every amphora that is recorded."""
    return {row.id: row.load_balancer_id for row in connection.execute(_ALL)}


def last_heard(connection: sa.Connection, amphora_ids: Sequence[str] | None = None) -> dict[str, tuple[int, int]]:
    """(epoch, sequence) of the last heartbeat written down, of these amphorae or of all."""
    statement = sa.select(amphora_seen.c.amphora_id, amphora_seen.c.epoch, amphora_seen.c.sequence)
    if amphora_ids is None:
        return {row.amphora_id: (row.epoch, row.sequence) for row in connection.execute(statement)}
    found = {}
    for start in range(0, len(amphora_ids), _CHUNK):
        some = amphora_seen.c.amphora_id.in_(amphora_ids[start : start + _CHUNK])
        for row in connection.execute(statement.where(some)):
            found[row.amphora_id] = (row.epoch, row.sequence)
    return found


def seen(connection: sa.Connection, heard: Sequence[Heard]) -> None:
    """Write down in bulk when amphorae were last heard; what another health manager heard later stays."""
    # One order for everybody, so that two writers wait for each other instead of deadlocking.
    ordered = sorted(heard, key=lambda one: one.amphora_id)
    for start in range(0, len(ordered), _CHUNK):
        _seen_chunk(connection, ordered[start : start + _CHUNK])


def _seen_chunk(connection: sa.Connection, heard: Sequence[Heard]) -> None:
    # An amphora that was deleted meanwhile gets no row: nobody would ever delete that one.
    rows = connection.execute(_RECORDED, {"ids": [one.amphora_id for one in heard]})
    known = {row.id: row.amphora_id is not None for row in rows}
    old = [_bound(one) for one in heard if known.get(one.amphora_id) is True]
    new = [one for one in heard if known.get(one.amphora_id) is False]
    if old:
        connection.execute(_SEEN, old)
    for one in new:
        try:
            with connection.begin_nested():
                connection.execute(_FIRST_SEEN, _bound(one))
        except IntegrityError:
            # Another health manager heard it for the first time in this very moment.
            connection.execute(_SEEN, _bound(one))


def _bound(one: Heard) -> dict[str, Any]:
    return {
        "of": one.amphora_id,
        "new_at": one.at,
        "new_generation": one.generation,
        "new_epoch": one.epoch,
        "new_sequence": one.sequence,
        "new_holds_vip": one.holds_vip,
        "new_agent_version": None if one.agent_version is None else one.agent_version[:_LONGEST_VERSION],
    }
