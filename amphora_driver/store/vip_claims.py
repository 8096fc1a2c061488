# SPDX-License-Identifier: Apache-2.0
"""VIPs on their way to a load balancer.

Invariant: a claim is written before the first address is taken. So an address whose load balancer never came is found
again, whatever died in between. What was asked of a backend that needs time stays in it until that has answered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import sqlalchemy as sa

from amphora_driver.database import clock
from amphora_driver.database.tables import vip_claim, work
from amphora_driver.model.network import VipRequest

if TYPE_CHECKING:
    from collections.abc import Sequence


# Seconds before a backend that does not say when is asked again: the first time, and at the most.
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked of a network backend that has not answered yet.

    Attributes:
        project_id: whose addresses these will be.
        vips: what was asked for, the primary VIP first.
        since: when it was asked first (seconds since 1970); the like for what follows.
        attempts: how often it was asked.
        again_at: when it is asked again.
        pause: after how many seconds that was to be; a clock that was set back makes it no longer.
        reason: what has kept it so far.
    """

    project_id: str
    vips: tuple[VipRequest, ...]
    since: float
    attempts: int = 1
    again_at: float = 0.0
    pause: float = 0.0
    reason: str = ""


def note(connection: sa.Connection, load_balancer_id: str, network: str) -> str:
    """Addresses are about to be taken for this load balancer; again: the time counts anew.

    Returns:
        The network backend to take them from: this one, or the one that was noted the first time.
    """
    changed = connection.execute(
        vip_claim.update()
        .where(vip_claim.c.load_balancer_id == load_balancer_id)
        .values(claimed_at=clock.now(connection))
    ).rowcount
    if changed:
        return of(connection, load_balancer_id) or network
    connection.execute(
        vip_claim.insert().values(load_balancer_id=load_balancer_id, network=network, claimed_at=clock.now(connection))
    )
    return network


def of(connection: sa.Connection, load_balancer_id: str) -> str | None:
    """The network backend this load balancer's addresses were taken from; None if nothing was noted."""
    return connection.execute(
        sa.select(vip_claim.c.network).where(vip_claim.c.load_balancer_id == load_balancer_id)
    ).scalar()


def wish_of(connection: sa.Connection, load_balancer_id: str) -> Wish | None:
    """What the backend was asked for this load balancer and has not answered; None if it has, or was never asked."""
    row = connection.execute(sa.select(vip_claim).where(vip_claim.c.load_balancer_id == load_balancer_id)).first()
    if row is None or row.wanted is None:
        return None
    return msgspec.structs.replace(
        msgspec.json.decode(row.wanted, type=Wish), project_id=row.project_id or "", reason=row.reason or ""
    )


def later(wish: Wish, reason: str, again_in: float | None, now: float) -> Wish:
    """The wish with its next attempt: `again_in` seconds from now, or after an exponential back-off if None."""
    pause = again_in
    if pause is None:
        pause = min(_FIRST_PAUSE * 2.0 ** min(wish.attempts - 1, 16), _LONGEST_PAUSE)
    return msgspec.structs.replace(wish, attempts=wish.attempts + 1, again_at=now + pause, pause=pause, reason=reason)


def keep(connection: sa.Connection, load_balancer_id: str, network: str | None, wish: Wish) -> None:
    """The backend needs more time for this."""
    values = {
        "project_id": wish.project_id,
        "wanted": msgspec.json.encode(wish).decode(),
        "reason": wish.reason,
        "claimed_at": clock.now(connection),
    }
    mine = vip_claim.c.load_balancer_id == load_balancer_id
    if connection.execute(vip_claim.update().where(mine).values(**values)).rowcount == 0:
        connection.execute(vip_claim.insert().values(load_balancer_id=load_balancer_id, network=network, **values))


def answered(connection: sa.Connection, load_balancer_id: str) -> None:
    """The addresses are known."""
    connection.execute(
        vip_claim.update()
        .where(vip_claim.c.load_balancer_id == load_balancer_id)
        .values(wanted=None, reason=None, claimed_at=clock.now(connection))
    )


class Orphan(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses of a load balancer that never came, and the network backend they were taken from."""

    load_balancer_id: str
    network: str | None


def settled(connection: sa.Connection, before: float) -> tuple[list[Orphan], list[str]]:
    """Claims made before this moment (seconds since 1970): those whose load balancer never came, and all others.

    One whose load balancer waits for its addresses is neither.
    """
    rows = connection.execute(
        sa.select(vip_claim.c.load_balancer_id, vip_claim.c.network, work.c.load_balancer_id.label("known"))
        .outerjoin(work, work.c.load_balancer_id == vip_claim.c.load_balancer_id)
        .where(vip_claim.c.claimed_at < before, sa.or_(vip_claim.c.wanted.is_(None), work.c.load_balancer_id.is_(None)))
    ).all()
    return (
        [Orphan(load_balancer_id=row.load_balancer_id, network=row.network) for row in rows if row.known is None],
        [row.load_balancer_id for row in rows if row.known is not None],
    )


def drop(connection: sa.Connection, load_balancer_ids: Sequence[str]) -> None:
    """These claims are settled."""
    for load_balancer_id in load_balancer_ids:
        connection.execute(vip_claim.delete().where(vip_claim.c.load_balancer_id == load_balancer_id))
