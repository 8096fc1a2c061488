# SPDX-License-Identifier: Apache-2.0
"""Warm spares: amphorae that are booted in advance and belong to no load balancer yet.

Invariant: a pool of them is a row of `work` (op `spares`), so that it has a lease, a job and a history of failures like
a load balancer; its id follows from what it keeps, so that nobody has to look whether there is one. A spare belongs to
its pool or to one load balancer, never to both: it is taken in one transaction, and only while it is ready; the pool
lets go of one only after it has marked it in the same way. Rows are locked in the order load balancer, pool, amphora.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import msgspec
import sqlalchemy as sa

from amphora_driver.database.tables import URGENT, amphora, amphora_seen, work
from amphora_driver.model.loadbalancer import Profile
from amphora_driver.store.amphorae import State

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

# What a pool's job is to do (`work.op`), and what its amphorae are (`amphora.role`).
OP = "spares"
ROLE = "SPARE"
# Ids of pools are made from this one and what they keep (RFC 9562, 5.5).
_NAMESPACE = uuid.UUID("6d0f2a4e-6a55-4f0c-9a0b-0f6a1f5c2b7d")


class SparePoolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a pool keeps: how many machines (None: as configured) of which kind."""

    number: int | None = None
    compute: str | None = None
    network: str | None = None
    compute_flavor: str | None = None
    compute_zone: str | None = None
    image_tag: str | None = None
    volume_zone: str | None = None
    management_network: str | None = None

    @property
    def id(self) -> str:
        """The id of the pool that keeps these."""
        return str(uuid.uuid5(_NAMESPACE, msgspec.json.encode(self).decode()))

    def profile(self) -> Profile:
        """What its machines are booted with."""
        return Profile(**{name: getattr(self, name) for name in self.__struct_fields__ if name != "number"})


class SparePoolState(msgspec.Struct, frozen=True, kw_only=True):
    """A pool as its own job sees it.

    Attributes:
        spec: what it keeps.
        number: how many are wanted now; 0 where nobody takes any.
        users: how many load balancers take spares from it.
        unfit: which of them nobody is to take any more, and why.
        heard: when anybody was heard last, by the clock by which it is noted when amphorae were; None if never.
        sees: whether silence means anything: the health managers hear, and there is no mass failure.
    """

    spec: SparePoolSpec
    number: int
    users: int
    unfit: dict[str, str] = {}
    heard: float | None = None
    sees: bool = False


class Spare(msgspec.Struct, frozen=True, kw_only=True):
    """One spare; times in seconds since 1970."""

    id: str
    management_address: str | None
    image: str | None
    expires_at: float | None
    heard_at: float | None


def spec_of(profile: Profile, compute: str | None, network: str | None, configured: int) -> SparePoolSpec | None:
    """What a load balancer's pool keeps; None if it wants no spares.

    Args:
        profile: the load balancer's.
        compute: the compute backend it is with.
        network: the network backend it is with.
        configured: how many are kept for those whose flavor does not say.
    """
    if not (configured if profile.warm_spares is None else profile.warm_spares):
        return None
    return SparePoolSpec(
        number=profile.warm_spares,
        compute=compute,
        network=network,
        compute_flavor=profile.compute_flavor,
        compute_zone=profile.compute_zone,
        image_tag=profile.image_tag,
        volume_zone=profile.volume_zone,
        management_network=profile.management_network,
    )


def unfit_reason(spare: Spare, image: str | None, now: float, lasting: float) -> str | None:
    """Why a spare is not to be taken; None if it may be.

    Args:
        spare: which one.
        image: what a machine that is booted now would have; None where the backend does not say.
        now: seconds since 1970.
        lasting: seconds for which its certificate has to be valid still.
    """
    if image is not None and spare.image is not None and spare.image != image:
        return f"it was booted from {spare.image}, and {image} is wanted now"
    if spare.expires_at is not None and spare.expires_at < now + lasting:
        return "its certificate is about to expire"
    return None


def list_ready_spares(connection: sa.Connection, pool_id: str) -> tuple[Spare, ...]:
    """Spares that can be taken as far as the rows say, those that were heard last first."""
    columns = (
        amphora.c.id, amphora.c.management_address, amphora.c.image, amphora.c.certificate_expires_at,
        amphora_seen.c.seen_at,
    )  # fmt: skip
    rows = connection.execute(
        sa.select(*columns)
        .outerjoin(amphora_seen, amphora_seen.c.amphora_id == amphora.c.id)
        .where(amphora.c.load_balancer_id == pool_id, amphora.c.state == State.READY.value)
    )
    found = [
        Spare(
            id=row.id,
            management_address=row.management_address,
            image=row.image,
            expires_at=row.certificate_expires_at,
            heard_at=row.seen_at,
        )
        for row in rows
    ]
    return tuple(sorted(found, key=lambda one: -(one.heard_at or 0.0)))


def last_heartbeat_at(connection: sa.Connection) -> float | None:
    """When any amphora at all was heard last, by the health managers' clocks; None if none ever was."""
    found: float | None = connection.execute(sa.select(sa.func.max(amphora_seen.c.seen_at))).scalar()
    return found


def count_users(connection: sa.Connection, pool_id: str) -> int:
    """How many load balancers take spares from a pool."""
    counted = sa.select(sa.func.count()).where(work.c.spare_pool == pool_id)
    return int(connection.execute(counted).scalar_one())


def list_pools(connection: sa.Connection) -> Sequence[sa.Row[Any]]:
    """The rows of all pools."""
    return connection.execute(sa.select(work).where(work.c.op == OP).order_by(work.c.load_balancer_id)).all()


def set_spare_pool(
    connection: sa.Connection, load_balancer_id: str, spec: SparePoolSpec | None, former: str | None
) -> None:
    """Have a load balancer take its spares from the pool that keeps these, which is made if there is none.

    Args:
        connection: of a writing transaction, under the load balancer's lease.
        load_balancer_id: which one.
        spec: what it wants; None for no spares.
        former: the pool it was with.
    """
    sought = None if spec is None else spec.id
    for pool_id in sorted({one for one in (former, sought) if one is not None}):
        if not make_pool_due(connection, pool_id) and spec is not None and pool_id == sought:
            _insert_pool(connection, spec)
    connection.execute(work.update().where(work.c.load_balancer_id == load_balancer_id).values(spare_pool=sought))


def _insert_pool(connection: sa.Connection, spec: SparePoolSpec) -> None:
    # Two at the same time: the second one fails, and is tried again.
    connection.execute(
        work.insert().values(
            load_balancer_id=spec.id,
            compute=spec.compute,
            network=spec.network,
            op=OP,
            # Nothing is served, so that none is ever behind.
            generation=0,
            committed=0,
            applied=0,
            spares=msgspec.json.encode(spec).decode(),
            dirty=True,
            free_at=URGENT,
            attempts=0,
            epoch=0,
        )
    )


def make_pool_due(connection: sa.Connection, pool_id: str) -> bool:
    """Have a pool looked at at once; False if there is none."""
    due = work.update().where(work.c.load_balancer_id == pool_id, work.c.op == OP).values(dirty=True, free_at=URGENT)
    return bool(connection.execute(due).rowcount)


def assign_spare(connection: sa.Connection, amphora_id: str, pool_id: str, load_balancer_id: str, role: str) -> bool:
    """Give a spare to a load balancer; False if it is not there to be taken any more.

    Args:
        connection: of a writing transaction, under the load balancer's lease.
        amphora_id: the spare.
        pool_id: whose it is.
        load_balancer_id: whose it becomes.
        role: what it becomes there.
    """
    make_pool_due(connection, pool_id)
    taken = connection.execute(
        amphora.update()
        .where(
            amphora.c.id == amphora_id,
            amphora.c.load_balancer_id == pool_id,
            amphora.c.state == State.READY.value,
        )
        .values(load_balancer_id=load_balancer_id, role=role)
    )
    return bool(taken.rowcount)


def retire_spare(connection: sa.Connection, amphora_id: str, pool_id: str, reason: str) -> None:
    """Let nobody take an amphora of a pool any more; it is removed after this.

    Args:
        connection: of a writing transaction, under the pool's lease.
        amphora_id: which one; nothing happens if it was taken meanwhile.
        pool_id: whose.
        reason: why.
    """
    connection.execute(
        amphora.update()
        .where(amphora.c.id == amphora_id, amphora.c.load_balancer_id == pool_id)
        .values(state=State.RETIRING.value, reason=reason)
    )


def delete_unused_pool(connection: sa.Connection, pool_id: str) -> bool:
    """Remove the row of a pool that nobody uses and that has no amphorae; False if somebody came meanwhile.

    Args:
        connection: of a writing transaction, under the pool's lease: who joins waits for it.
        pool_id: which one.
    """
    left = sa.select(sa.func.count()).where(amphora.c.load_balancer_id == pool_id)
    if count_users(connection, pool_id) or connection.execute(left).scalar_one():
        return False
    return bool(connection.execute(work.delete().where(work.c.load_balancer_id == pool_id, work.c.op == OP)).rowcount)
