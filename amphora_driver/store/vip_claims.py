# SPDX-License-Identifier: Apache-2.0
"""Claims on VIP addresses of load balancers that Octavia has not created yet.

Invariant: the driver writes a claim before the first address is allocated. Cleanup therefore finds the addresses of a
load balancer that Octavia never created, also after a crash. A claim keeps a pending request until the network backend
has answered. It is deleted with the `job` row of its load balancer, or earlier by housekeeping.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from amphora_driver.database import clock
from amphora_driver.database.rows import chunks, to_struct
from amphora_driver.database.tables import job, vip_claim
from amphora_driver.model.network import VipRequest

# First and longest pause in seconds between requests to a network backend that has not allocated the VIPs yet. The
# backend may set another pause.
_FIRST_RETRY, _LONGEST_RETRY = 1.0, 30.0


class PendingVipRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that the network backend has not answered yet, the primary VIP first.

    The controller repeats the request at `again_at`, which is `pause` seconds after the last request. `pause` limits
    the wait if the clock is set back.
    """

    project_id: str
    vips: tuple[VipRequest, ...]
    since: float
    attempts: int = 1
    again_at: float = 0.0
    pause: float = 0.0
    reason: str = ""


def record_claim(connection: sa.Connection, load_balancer_id: str, network: str) -> str:
    """Write a claim before addresses are allocated, or update the time of an existing claim.

    Return the network backend to use, which is the one of the existing claim.
    """
    if _write_claim(connection, load_balancer_id, network):
        return network_of_claim(connection, load_balancer_id) or network
    return network


def _write_claim(connection: sa.Connection, load_balancer_id: str, network: str | None, **values: Any) -> bool:
    """Update a claim and its time, or insert it; return whether the claim existed."""
    values["claimed_at"] = clock.now(connection)
    changed = vip_claim.update().where(vip_claim.c.load_balancer_id == load_balancer_id).values(**values)
    if connection.execute(changed).rowcount:
        return True
    connection.execute(vip_claim.insert().values(load_balancer_id=load_balancer_id, network=network, **values))
    return False


def network_of_claim(connection: sa.Connection, load_balancer_id: str) -> str | None:
    """Return the network backend of a load balancer's claim; None if there is none."""
    mine = vip_claim.c.load_balancer_id == load_balancer_id
    return connection.execute(sa.select(vip_claim.c.network).where(mine)).scalar()


def read_pending_request(connection: sa.Connection, load_balancer_id: str) -> PendingVipRequest | None:
    """Return the pending request of a load balancer, or None."""
    row = connection.execute(sa.select(vip_claim).where(vip_claim.c.load_balancer_id == load_balancer_id)).first()
    if row is None or row.wanted is None:
        return None
    pending = msgspec.json.decode(row.wanted, type=PendingVipRequest)
    return msgspec.structs.replace(pending, project_id=row.project_id or "", reason=row.reason or "")


def schedule_retry(pending: PendingVipRequest, reason: str, again_in: float | None, now: float) -> PendingVipRequest:
    """Return the request with its next attempt, after `again_in` seconds or an exponential back-off."""
    pause = again_in
    if pause is None:
        pause = min(_FIRST_RETRY * 2.0 ** min(pending.attempts - 1, 16), _LONGEST_RETRY)
    return msgspec.structs.replace(
        pending, attempts=pending.attempts + 1, again_at=now + pause, pause=pause, reason=reason
    )


def write_pending_request(
    connection: sa.Connection, load_balancer_id: str, network: str | None, pending: PendingVipRequest
) -> None:
    """Store a pending request, because the backend needs more time."""
    wanted = msgspec.json.encode(pending).decode()
    values = {"project_id": pending.project_id, "wanted": wanted, "reason": pending.reason}
    _write_claim(connection, load_balancer_id, network, **values)


def clear_pending_request(connection: sa.Connection, load_balancer_id: str) -> None:
    """Delete the pending request, because the backend has answered."""
    answered = {"wanted": None, "reason": None, "claimed_at": clock.now(connection)}
    connection.execute(vip_claim.update().where(vip_claim.c.load_balancer_id == load_balancer_id).values(**answered))


class OrphanedClaim(msgspec.Struct, frozen=True, kw_only=True):
    """A claim without a load balancer, and the network backend of its addresses."""

    load_balancer_id: str
    network: str | None


def list_settled_claims(connection: sa.Connection, before: float) -> tuple[list[OrphanedClaim], list[str]]:
    """Return the old claims without a load balancer, and the load balancer ids of the other old claims.

    Claims with a pending request of an existing load balancer are not included.
    """
    rows = connection.execute(
        sa.select(vip_claim.c.load_balancer_id, vip_claim.c.network, job.c.load_balancer_id.label("known"))
        .outerjoin(job, job.c.load_balancer_id == vip_claim.c.load_balancer_id)
        .where(vip_claim.c.claimed_at < before, sa.or_(vip_claim.c.wanted.is_(None), job.c.load_balancer_id.is_(None)))
    ).all()
    orphaned = [to_struct(row, OrphanedClaim) for row in rows if row.known is None]
    return orphaned, [row.load_balancer_id for row in rows if row.known is not None]


def delete_claims(connection: sa.Connection, load_balancer_ids: Sequence[str]) -> None:
    """Delete claims."""
    for ids in chunks(load_balancer_ids):
        connection.execute(vip_claim.delete().where(vip_claim.c.load_balancer_id.in_(ids)))
