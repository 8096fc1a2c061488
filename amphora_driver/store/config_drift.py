# SPDX-License-Identifier: Apache-2.0
"""Amphorae that are not what they confirmed: what is noted of them, and how they are given their configuration again.

Invariant: nothing is pushed from here. An amphora's confirmation is taken back, under the condition that it still is
the one that was looked at, and its load balancer is due: the plan does the rest. `amphora.drift` says in words what was
found last and by whom, `amphora.drifts` whether that still is so: a comparison that finds nothing, a push that is
confirmed and an agent that has nothing more to complain of end it. Both are for people: nothing is decided by them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa

from amphora_driver.database.tables import URGENT, amphora, work
from amphora_driver.store.amphorae import State

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

# Characters of what is noted.
_MAX_DRIFT_TEXT = 500


class AuditCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """An amphora to compare: it has confirmed its load balancer's newest generation, and nothing is being done to it.

    `waited` is since when it has not been compared (seconds since 1970), 0 for never.
    """

    amphora_id: str
    load_balancer_id: str
    generation: int
    waited: float = 0.0


_SETTLED: tuple[Any, ...] = (
    ~work.c.dirty,
    work.c.owner.is_(None),
    work.c.op == "apply",
    work.c.applied >= work.c.generation,
)
_READY = amphora.c.state == State.READY.value


def list_audit_candidates(connection: sa.Connection, before: float, limit: int) -> list[AuditCandidate]:
    """Amphorae that were compared last, and confirmed what they serve, before this moment; who waits longest is first.

    Args:
        connection: any.
        before: seconds since 1970.
        limit: the most of them.
    """
    waited = sa.func.coalesce(amphora.c.audited_at, 0.0)
    rows = connection.execute(
        sa.select(amphora.c.id, amphora.c.load_balancer_id, work.c.generation, waited.label("waited"))
        .join(work, work.c.load_balancer_id == amphora.c.load_balancer_id)
        .where(
            *_SETTLED,
            _READY,
            amphora.c.confirmed >= work.c.generation,
            waited < before,
            sa.func.coalesce(amphora.c.confirmed_at, 0.0) < before,
        )
        .order_by(waited, amphora.c.id)
        .limit(limit)
    )
    return [
        AuditCandidate(
            amphora_id=row.id, load_balancer_id=row.load_balancer_id, generation=row.generation, waited=row.waited
        )
        for row in rows
    ]


def count_auditable(connection: sa.Connection) -> int:
    """How many amphorae there are that may have to be compared."""
    query = sa.select(sa.func.count()).select_from(amphora).where(_READY, amphora.c.confirmed > 0)
    return int(connection.execute(query).scalar_one())


def record_audit(connection: sa.Connection, amphora_ids: Sequence[str], now: float, drift: str | None = None) -> None:
    """Note that amphorae were compared just now, and what differs.

    Args:
        connection: of a writing transaction.
        amphora_ids: which ones.
        now: seconds since 1970.
        drift: what differs, in words; None: nothing does any more, and what was found last stays as history.
    """
    values: dict[str, Any] = {"audited_at": now, "drifts": drift is not None}
    if drift is not None:
        values["drift"] = drift[:_MAX_DRIFT_TEXT]
    for amphora_id in sorted(amphora_ids):
        connection.execute(amphora.update().where(amphora.c.id == amphora_id).values(**values))


def record_agent_finding(connection: sa.Connection, amphora_id: str, drift: str, moment: str = "") -> bool:
    """Note what an amphora has said itself; False if it is noted already.

    Args:
        connection: of a writing transaction.
        amphora_id: which one.
        drift: what it has found, in words.
        moment: those of them that say when: no other finding has the same.
    """
    known = sa.func.coalesce(amphora.c.drift, "").contains(moment, autoescape=True) if moment else sa.false()
    changed = connection.execute(
        amphora.update().where(amphora.c.id == amphora_id, ~known).values(drift=drift[:_MAX_DRIFT_TEXT])
    ).rowcount
    return bool(changed)


def set_drifting(connection: sa.Connection, drifting: Mapping[str, bool]) -> None:
    """Note of amphorae, by id, whether they are not as wanted now."""
    for amphora_id, is_so in sorted(drifting.items()):
        connection.execute(amphora.update().where(amphora.c.id == amphora_id).values(drifts=is_so))


def lock_work_of_amphorae(connection: sa.Connection, amphora_ids: Collection[str]) -> None:
    """Lock the rows of `work` of these amphorae until the end, in one order.

    Every step locks `work` before `amphora`: two that lock in different orders wait for each other. To be called before
    anything is written of amphorae that are to be taken back in the same transaction.
    """
    owners = connection.execute(
        sa.select(amphora.c.load_balancer_id).where(amphora.c.id.in_(sorted(amphora_ids))).distinct()
    )
    _lock_work(connection, list(owners.scalars()))


def _lock_work(connection: sa.Connection, load_balancer_ids: Sequence[str]) -> None:
    for one in sorted(load_balancer_ids):
        mine = sa.select(work.c.epoch).where(work.c.load_balancer_id == one)
        connection.execute(mine.with_for_update())


def revoke_confirmation(
    connection: sa.Connection, amphora_id: str, confirmed: int, drift: str, *, replug: bool = False
) -> bool:
    """Have an amphora given again what it confirmed; False if it has confirmed something else meanwhile, or is to go.

    Args:
        connection: of a writing transaction.
        amphora_id: which one.
        confirmed: what it had confirmed when it was looked at.
        drift: why, in words.
        replug: its ports are to be attached again, too: an interface is gone.
    """
    values: dict[str, Any] = {"confirmed": max(confirmed - 1, 0), "drift": drift[:_MAX_DRIFT_TEXT], "drifts": True}
    if replug:
        values["plugged"] = None
    lock_work_of_amphorae(connection, [amphora_id])
    changed = connection.execute(
        amphora.update()
        .where(amphora.c.id == amphora_id, amphora.c.confirmed == confirmed, amphora.c.confirmed > 0, _READY)
        .values(**values)
    ).rowcount
    if changed:
        of = sa.select(amphora.c.load_balancer_id).where(amphora.c.id == amphora_id).scalar_subquery()
        _make_due(connection, work.c.load_balancer_id == of)
    return bool(changed)


def revoke_all_confirmations(connection: sa.Connection, load_balancer_id: str, drift: str) -> list[str]:
    """Have every amphora of a load balancer given its configuration again; returns which.

    Its load balancer is due even where none has confirmed anything.
    """
    _lock_work(connection, [load_balancer_id])
    rows = connection.execute(
        sa.select(amphora.c.id, amphora.c.confirmed)
        .where(amphora.c.load_balancer_id == load_balancer_id, _READY)
        .order_by(amphora.c.id)
    ).all()
    found = [row.id for row in rows if revoke_confirmation(connection, row.id, row.confirmed, drift)]
    _make_due(connection, work.c.load_balancer_id == load_balancer_id)
    return found


def advance_generation_beyond(connection: sa.Connection, load_balancer_id: str, generation: int, beyond: int) -> bool:
    """Take a generation greater than one that an amphora has from somewhere else: it takes no older one.

    Nobody is told: no object waits for it, and what Octavia has committed counts as committed still.

    Args:
        connection: of a writing transaction.
        load_balancer_id: whose.
        generation: its newest one when it was looked at.
        beyond: what the amphora has.
    """
    following = max(generation, beyond) + 1
    committed = sa.case((work.c.committed >= work.c.generation, following), else_=work.c.committed)
    # In this order: MySQL and MariaDB assign from left to right, and go on with what was assigned.
    changed = connection.execute(
        work.update()
        .where(work.c.load_balancer_id == load_balancer_id, work.c.generation == generation, *_SETTLED)
        .ordered_values((work.c.committed, committed), (work.c.generation, following))
    ).rowcount
    if changed:
        _make_due(connection, work.c.load_balancer_id == load_balancer_id)
    return bool(changed)


def _make_due(connection: sa.Connection, which: Any) -> None:
    # What is urgent already stays so.
    at = sa.case((work.c.free_at < 0.0, URGENT), else_=0.0)
    connection.execute(work.update().where(which).values(dirty=True, free_at=at))
