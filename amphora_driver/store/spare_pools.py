# SPDX-License-Identifier: Apache-2.0
"""Pools of warm spares: amphorae that boot in advance and belong to no load balancer yet.

Invariant: a pool is a row of `job` (op `spares`), and has a lease, a job and failures like a load balancer. The id of a
pool is a hash of its specification. A spare belongs to a pool or to one load balancer, never to both: one transaction
assigns a spare, and only a ready one. The pool sets a ready spare RETIRING before the removal. Transactions lock rows
in the order load balancer, pool, amphora.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from amphora_driver.database.rows import load_as, plain_columns
from amphora_driver.database.tables import URGENT, amphora, amphora_heartbeat, job
from amphora_driver.model.amphora import AmphoraState
from amphora_driver.model.loadbalancer import Profile
from amphora_driver.store.generations import update_job

OP = "spares"
ROLE = "SPARE"
# Namespace of the ids of spare pools, which are UUIDs of version 5 (RFC 9562, section 5.5).
_NAMESPACE = uuid.UUID("6d0f2a4e-6a55-4f0c-9a0b-0f6a1f5c2b7d")


class SparePoolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Specification of a pool: number (None: as configured) and properties of the machines."""

    number: int | None = None
    compute: str | None = None
    network: str | None = None
    compute_flavor: str | None = None
    compute_zone: str | None = None
    image_tag: str | None = None
    volume_zone: str | None = None
    management_network: str | None = None
    compute_zones: tuple[str, ...] | None = None

    @property
    def id(self) -> str:
        """The id of the pool with this specification."""
        values = msgspec.structs.asdict(self)
        # Controllers of the previous version do not know `compute_zones`. Without zones, both versions must compute the
        # same id.
        if self.compute_zones is None:
            del values["compute_zones"]
        return str(uuid.uuid5(_NAMESPACE, msgspec.json.encode(values).decode()))

    def profile(self) -> Profile:
        """Return the profile for booting its machines."""
        return Profile(**{name: getattr(self, name) for name in self.__struct_fields__ if name != "number"})


class SparePoolState(msgspec.Struct, frozen=True, kw_only=True):
    """Input for the plan of a pool.

    Attributes:
        number: desired number of spares now; 0 if no load balancer uses the pool.
        users: number of load balancers that use the pool.
        unfit: spares that must not be assigned, with the reason.
        last_heartbeat_at: time of the last heartbeat of any amphora, by the health managers' clocks; None if never.
        detection_works: whether silence is meaningful: health managers receive heartbeats, and there is no mass
            failure.
    """

    spec: SparePoolSpec
    number: int
    users: int
    unfit: dict[str, str] = {}
    last_heartbeat_at: float | None = None
    detection_works: bool = False


class Spare(msgspec.Struct, frozen=True, kw_only=True):
    """One spare; `expires_at` is the end of its certificate, `heard_at` the time of its last heartbeat."""

    id: str
    management_address: str | None
    image: str | None
    expires_at: float | None
    heard_at: float | None
    host: str | None = None
    zone: str | None = None


def spec_of(profile: Profile, compute: str | None, network: str | None, configured: int) -> SparePoolSpec | None:
    """Return the specification of a load balancer's pool; None if it uses no spares.

    `configured` is the number of spares for a flavor that sets none.
    """
    if not (configured if profile.warm_spares is None else profile.warm_spares):
        return None
    names = ("compute_flavor", "compute_zone", "compute_zones", "image_tag", "volume_zone", "management_network")
    machine = {name: getattr(profile, name) for name in names}
    return SparePoolSpec(number=profile.warm_spares, compute=compute, network=network, **machine)


def unfit_reason(spare: Spare, image: str | None, now: float, validity: float) -> str | None:
    """Return the reason for which a spare must not be assigned; None if it may be assigned.

    Args:
        image: image of a machine that boots now; None if the backend does not report it.
        validity: seconds for which the certificate must still be valid.
    """
    if image is not None and spare.image is not None and spare.image != image:
        return f"its image is {spare.image}, the current image is {image}"
    if spare.expires_at is not None and spare.expires_at < now + validity:
        return "its certificate expires soon"
    return None


def list_ready_spares(connection: sa.Connection, pool_id: str) -> tuple[Spare, ...]:
    """Return the ready spares of a pool, the most recent heartbeat first."""
    times = amphora.c.certificate_expires_at.label("expires_at"), amphora_heartbeat.c.seen_at.label("heard_at")
    query = (
        sa.select(
            *(amphora.c.id, amphora.c.management_address, amphora.c.image, amphora.c.host, amphora.c.zone), *times
        )
        .outerjoin(amphora_heartbeat, amphora_heartbeat.c.amphora_id == amphora.c.id)
        .where(amphora.c.load_balancer_id == pool_id, amphora.c.state == AmphoraState.READY.value)
    )
    return tuple(sorted(load_as(connection, Spare, query), key=lambda one: -(one.heard_at or 0.0)))


def last_heartbeat_at(connection: sa.Connection) -> float | None:
    """Return the time of the last heartbeat of any amphora, by the health managers' clocks; None if never."""
    found: float | None = connection.execute(sa.select(sa.func.max(amphora_heartbeat.c.seen_at))).scalar()
    return found


def count_users(connection: sa.Connection, pool_id: str) -> int:
    """Return the number of load balancers that use a pool."""
    counted = sa.select(sa.func.count()).where(job.c.spare_pool == pool_id)
    return int(connection.execute(counted).scalar_one())


def list_pools(connection: sa.Connection) -> Sequence[sa.Row[Any]]:
    """Return the `job` rows of all pools, without the column `reread`, which pools do not use."""
    columns = plain_columns(job, "reread")
    return connection.execute(sa.select(*columns).where(job.c.op == OP).order_by(job.c.load_balancer_id)).all()


def set_spare_pool(
    connection: sa.Connection, load_balancer_id: str, spec: SparePoolSpec | None, former: str | None
) -> None:
    """Set the pool of a load balancer, and insert the pool if it does not exist.

    The caller holds the load balancer's lease. `spec` None means no spares, `former` is the previous pool.
    """
    new_pool = None if spec is None else spec.id
    for pool_id in sorted({one for one in (former, new_pool) if one is not None}):
        if not make_pool_due(connection, pool_id) and spec is not None and pool_id == new_pool:
            _insert_pool(connection, spec)
    update_job(connection, load_balancer_id, spare_pool=new_pool)


def _insert_pool(connection: sa.Connection, spec: SparePoolSpec) -> None:
    # If two controllers insert the same pool, the second insert fails, and its job is retried.
    row = {"load_balancer_id": spec.id, "compute": spec.compute, "network": spec.network, "op": OP, "due_at": URGENT}
    # The generation is always zero, because a spare pool has no configuration to serve.
    connection.execute(job.insert().values(**row, generation=0, spares=msgspec.json.encode(spec).decode()))


def make_pool_due(connection: sa.Connection, pool_id: str) -> bool:
    """Make a pool due now; return False if it does not exist."""
    return update_job(connection, pool_id, job.c.op == OP, dirty=True, due_at=URGENT)


def assign_spare(connection: sa.Connection, amphora_id: str, pool_id: str, load_balancer_id: str, role: str) -> bool:
    """Assign a spare to a load balancer; return False if the spare is not available any more.

    The caller holds the load balancer's lease.
    """
    make_pool_due(connection, pool_id)
    mine = amphora.update().where(amphora.c.id == amphora_id, amphora.c.load_balancer_id == pool_id)
    ready = mine.where(amphora.c.state == AmphoraState.READY.value)
    return bool(connection.execute(ready.values(load_balancer_id=load_balancer_id, role=role)).rowcount)


def retire_spare(connection: sa.Connection, amphora_id: str, pool_id: str, reason: str) -> None:
    """Set a spare RETIRING, so that it cannot be assigned; a later step of the pool removes it.

    Nothing happens if the spare was assigned in the meantime. The caller holds the pool's lease.
    """
    mine = amphora.update().where(amphora.c.id == amphora_id, amphora.c.load_balancer_id == pool_id)
    connection.execute(mine.values(state=AmphoraState.RETIRING.value, reason=reason))


def delete_unused_pool(connection: sa.Connection, pool_id: str) -> bool:
    """Delete a pool without users and amphorae; return False if it has any.

    The caller holds the pool's lease, so `set_spare_pool` waits for the row lock.
    """
    remaining = sa.select(sa.func.count()).where(amphora.c.load_balancer_id == pool_id)
    if count_users(connection, pool_id) or connection.execute(remaining).scalar_one():
        return False
    return bool(connection.execute(job.delete().where(job.c.load_balancer_id == pool_id, job.c.op == OP)).rowcount)
