# SPDX-License-Identifier: Apache-2.0
"""VIPs on their way to a load balancer.

Invariant: a claim is written before the first address is taken. So an address whose load balancer never came is found
again, whatever died in between.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
import sqlalchemy as sa

from amphora_driver.store.tables import vip_claim, work

if TYPE_CHECKING:
    from collections.abc import Sequence


def note(connection: sa.Connection, load_balancer_id: str, network: str) -> str:
    """Addresses are about to be taken for this load balancer; again: the time counts anew.

    Returns:
        The network backend to take them from: this one, or the one that was noted the first time.
    """
    changed = connection.execute(
        vip_claim.update().where(vip_claim.c.load_balancer_id == load_balancer_id).values(claimed_at=time.time())
    ).rowcount
    if changed:
        return of(connection, load_balancer_id) or network
    connection.execute(
        vip_claim.insert().values(load_balancer_id=load_balancer_id, network=network, claimed_at=time.time())
    )
    return network


def of(connection: sa.Connection, load_balancer_id: str) -> str | None:
    """The network backend this load balancer's addresses were taken from; None if nothing was noted."""
    return connection.execute(
        sa.select(vip_claim.c.network).where(vip_claim.c.load_balancer_id == load_balancer_id)
    ).scalar()


class Orphan(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses of a load balancer that never came, and the network backend they were taken from."""

    load_balancer_id: str
    network: str | None


def settled(connection: sa.Connection, before: float) -> tuple[list[Orphan], list[str]]:
    """Claims made before this moment (seconds since 1970): those whose load balancer never came, and all others."""
    rows = connection.execute(
        sa.select(vip_claim.c.load_balancer_id, vip_claim.c.network, work.c.load_balancer_id.label("known"))
        .outerjoin(work, work.c.load_balancer_id == vip_claim.c.load_balancer_id)
        .where(vip_claim.c.claimed_at < before)
    ).all()
    return (
        [Orphan(load_balancer_id=row.load_balancer_id, network=row.network) for row in rows if row.known is None],
        [row.load_balancer_id for row in rows if row.known is not None],
    )


def drop(connection: sa.Connection, load_balancer_ids: Sequence[str]) -> None:
    """These claims are settled."""
    for load_balancer_id in load_balancer_ids:
        connection.execute(vip_claim.delete().where(vip_claim.c.load_balancer_id == load_balancer_id))
