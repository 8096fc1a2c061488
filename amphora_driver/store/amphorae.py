# SPDX-License-Identifier: Apache-2.0
"""The amphorae of a load balancer.

Invariant: an amphora's row is written before anything is made for it and deleted after everything of it is gone, so
that nothing exists outside of which no row knows.
"""

from __future__ import annotations

import contextlib
import time
from enum import Enum
from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa

from amphora_driver.errors import StoreError
from amphora_driver.network.interface import Port, Subnet
from amphora_driver.store.tables import amphora, amphora_seen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amphora_driver.secret import Secret
    from amphora_driver.store.vault import Vault


class State(str, Enum):
    """Where an amphora is in its life."""

    BOOTING = "booting"
    READY = "ready"
    RETIRING = "retiring"


class Plugged(msgspec.Struct, frozen=True, kw_only=True):
    """A port the machine has, with what is known of its subnets."""

    port: Port
    subnets: tuple[Subnet, ...]


class Amphora(msgspec.Struct, frozen=True, kw_only=True):
    """One amphora as recorded; its heartbeat key stays in the store."""

    id: str
    load_balancer_id: str
    role: str
    state: State
    compute_id: str | None
    management_address: str | None
    confirmed: int
    plugged: tuple[Plugged, ...]


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


def of_load_balancer(connection: sa.Connection, load_balancer_id: str) -> tuple[Amphora, ...]:
    """Every amphora of a load balancer, the oldest first."""
    rows = connection.execute(
        sa.select(amphora)
        .where(amphora.c.load_balancer_id == load_balancer_id)
        .order_by(amphora.c.created_at, amphora.c.id)
    )
    return tuple(
        Amphora(
            id=row.id,
            load_balancer_id=row.load_balancer_id,
            role=row.role,
            state=State(row.state),
            compute_id=row.compute_id,
            management_address=row.management_address,
            confirmed=row.confirmed,
            plugged=msgspec.json.decode(row.plugged, type=tuple[Plugged, ...]) if row.plugged else (),
        )
        for row in rows
    )


def change(connection: sa.Connection, amphora_id: str, **values: Any) -> None:
    """Change columns of an amphora's row; a retiring amphora stays retiring whatever else is learned of it."""
    if "plugged" in values:
        values["plugged"] = msgspec.json.encode(values["plugged"]).decode()
    state = values.pop("state", None)
    if values:
        connection.execute(amphora.update().where(amphora.c.id == amphora_id).values(**values))
    if state is not None:
        connection.execute(
            amphora.update()
            .where(amphora.c.id == amphora_id, amphora.c.state != State.RETIRING.value)
            .values(state=State(state).value)
        )


def forget(connection: sa.Connection, amphora_id: str) -> None:
    """Delete the row of an amphora of which nothing is left."""
    connection.execute(amphora_seen.delete().where(amphora_seen.c.amphora_id == amphora_id))
    connection.execute(amphora.delete().where(amphora.c.id == amphora_id))


def heartbeat_key(connection: sa.Connection, vault: Vault, amphora_id: str) -> Secret | None:
    """The key an amphora signs its heartbeats with, or None if there is no such amphora."""
    sealed = connection.execute(sa.select(amphora.c.heartbeat_key).where(amphora.c.id == amphora_id)).scalar()
    return None if sealed is None else vault.open(sealed)


def heartbeat_keys(connection: sa.Connection, vault: Vault) -> dict[str, Secret]:
    """The keys of all amphorae, by amphora id; one that cannot be opened is left out."""
    keys = {}
    for row in connection.execute(sa.select(amphora.c.id, amphora.c.heartbeat_key)):
        with contextlib.suppress(StoreError):
            keys[row.id] = vault.open(row.heartbeat_key)
    return keys


def load_balancers_of(connection: sa.Connection, amphora_ids: Sequence[str]) -> dict[str, str]:
    """The load balancer of each amphora, for those that are recorded."""
    rows = connection.execute(sa.select(amphora.c.id, amphora.c.load_balancer_id).where(amphora.c.id.in_(amphora_ids)))
    return {row.id: row.load_balancer_id for row in rows}


def seen(connection: sa.Connection, reports: Sequence[tuple[str, float, int]]) -> None:
    """Write down in bulk when amphorae were last heard, as (id, seconds since 1970, generation)."""
    known = set(
        connection.execute(
            sa.select(amphora_seen.c.amphora_id).where(amphora_seen.c.amphora_id.in_([one[0] for one in reports]))
        ).scalars()
    )
    updates = [{"b_id": one[0], "b_at": one[1], "b_generation": one[2]} for one in reports if one[0] in known]
    inserts = [
        {"amphora_id": one[0], "seen_at": one[1], "generation": one[2]} for one in reports if one[0] not in known
    ]
    if updates:
        connection.execute(
            amphora_seen.update()
            .where(amphora_seen.c.amphora_id == sa.bindparam("b_id"))
            .values(seen_at=sa.bindparam("b_at"), generation=sa.bindparam("b_generation")),
            updates,
        )
    if inserts:
        connection.execute(amphora_seen.insert(), inserts)
