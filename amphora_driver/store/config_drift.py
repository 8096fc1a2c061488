# SPDX-License-Identifier: Apache-2.0
"""Drift of amphorae from their confirmed configuration: findings, and revocation of confirmations.

Invariant: this module pushes nothing. It revokes an amphora's confirmation, on condition that it is still the audited
one, and makes the load balancer due. The plan then pushes the configuration again. `amphora.drift` describes the last
finding and its source. `amphora.drifts` says whether it still exists; an audit without findings, a confirmed push, or
an agent without complaints resets it. Both columns are for operators: no decision depends on them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa

from amphora_driver.database.tables import DUE_NOW, amphora, job
from amphora_driver.model.amphora import AmphoraState

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

# Maximum characters of a finding.
_MAX_DRIFT_TEXT = 500


class AuditCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """An amphora to audit: it has confirmed its idle load balancer's newest generation.

    `waited` is the time of its last audit (seconds since 1970), 0 for never.
    """

    amphora_id: str
    load_balancer_id: str
    generation: int
    waited: float = 0.0


_SETTLED: tuple[Any, ...] = (
    ~job.c.dirty,
    job.c.owner.is_(None),
    job.c.op == "apply",
    job.c.applied >= job.c.generation,
)
_READY = amphora.c.state == AmphoraState.READY.value


def list_audit_candidates(connection: sa.Connection, before: float, limit: int) -> list[AuditCandidate]:
    """Return amphorae with last audit and confirmation before a moment; the longest wait first.

    Args:
        connection: any.
        before: seconds since 1970.
        limit: maximum number.
    """
    waited = sa.func.coalesce(amphora.c.audited_at, 0.0)
    rows = connection.execute(
        sa.select(amphora.c.id, amphora.c.load_balancer_id, job.c.generation, waited.label("waited"))
        .join(job, job.c.load_balancer_id == amphora.c.load_balancer_id)
        .where(
            *_SETTLED,
            _READY,
            amphora.c.confirmed >= job.c.generation,
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
    """Return the number of amphorae that audits cover."""
    query = sa.select(sa.func.count()).select_from(amphora).where(_READY, amphora.c.confirmed > 0)
    return int(connection.execute(query).scalar_one())


def record_audit(connection: sa.Connection, amphora_ids: Sequence[str], now: float, drift: str | None = None) -> None:
    """Record the time and result of an audit.

    Args:
        connection: of a writing transaction.
        amphora_ids: the audited amphorae.
        now: seconds since 1970.
        drift: description of the difference. None: there is none; the last finding stays as history.
    """
    values: dict[str, Any] = {"audited_at": now, "drifts": drift is not None}
    if drift is not None:
        values["drift"] = drift[:_MAX_DRIFT_TEXT]
    for amphora_id in sorted(amphora_ids):
        connection.execute(amphora.update().where(amphora.c.id == amphora_id).values(**values))


def record_agent_finding(connection: sa.Connection, amphora_id: str, drift: str, moment: str = "") -> bool:
    """Record a finding that an agent has reported. Return False if it is recorded already.

    Args:
        connection: of a writing transaction.
        amphora_id: the amphora.
        drift: description of the finding.
        moment: the part of `drift` with the time, which identifies the finding.
    """
    known = sa.func.coalesce(amphora.c.drift, "").contains(moment, autoescape=True) if moment else sa.false()
    changed = connection.execute(
        amphora.update().where(amphora.c.id == amphora_id, ~known).values(drift=drift[:_MAX_DRIFT_TEXT])
    ).rowcount
    return bool(changed)


def set_drifting(connection: sa.Connection, drifting: Mapping[str, bool]) -> None:
    """Record, by amphora id, whether amphorae drift now."""
    for amphora_id, drifts in sorted(drifting.items()):
        connection.execute(amphora.update().where(amphora.c.id == amphora_id).values(drifts=drifts))


def lock_work_of_amphorae(connection: sa.Connection, amphora_ids: Collection[str]) -> None:
    """Lock the `job` rows of these amphorae until the end of the transaction, in a fixed order.

    Every transaction locks `job` before `amphora`, otherwise two may deadlock. Call this before
    `revoke_confirmation` if the same transaction writes `amphora` rows first.
    """
    owners = connection.execute(
        sa.select(amphora.c.load_balancer_id).where(amphora.c.id.in_(sorted(amphora_ids))).distinct()
    )
    _lock_work(connection, list(owners.scalars()))


def _lock_work(connection: sa.Connection, load_balancer_ids: Sequence[str]) -> None:
    for one in sorted(load_balancer_ids):
        mine = sa.select(job.c.epoch).where(job.c.load_balancer_id == one)
        connection.execute(mine.with_for_update())


def revoke_confirmation(
    connection: sa.Connection, amphora_id: str, confirmed: int, drift: str, *, replug: bool = False
) -> bool:
    """Revoke an amphora's confirmation, so that its configuration is pushed again.

    Args:
        connection: of a writing transaction.
        amphora_id: the amphora.
        confirmed: the confirmed generation at the audit.
        drift: description of the drift.
        replug: attach its ports again too, because an interface is missing.

    Returns:
        False if the amphora has confirmed another generation since, or is being removed.
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
        _make_due(connection, job.c.load_balancer_id == of)
    return bool(changed)


def revoke_all_confirmations(connection: sa.Connection, load_balancer_id: str, drift: str) -> list[str]:
    """Revoke the confirmations of all amphorae of a load balancer and return their ids.

    The load balancer becomes due even if no amphora has confirmed a generation.
    """
    _lock_work(connection, [load_balancer_id])
    rows = connection.execute(
        sa.select(amphora.c.id, amphora.c.confirmed)
        .where(amphora.c.load_balancer_id == load_balancer_id, _READY)
        .order_by(amphora.c.id)
    ).all()
    found = [row.id for row in rows if revoke_confirmation(connection, row.id, row.confirmed, drift)]
    _make_due(connection, job.c.load_balancer_id == load_balancer_id)
    return found


def advance_generation_beyond(connection: sa.Connection, load_balancer_id: str, generation: int, beyond: int) -> bool:
    """Advance a load balancer's generation beyond the one of an amphora.

    An agent refuses older generations than its own.
    No object waits for the new generation, and Octavia's commit state does not change.

    Args:
        connection: of a writing transaction.
        load_balancer_id: the load balancer.
        generation: its newest generation at the audit.
        beyond: the amphora's generation.

    Returns:
        False if the load balancer has changed since.
    """
    following = max(generation, beyond) + 1
    committed = sa.case((job.c.committed >= job.c.generation, following), else_=job.c.committed)
    # The order matters: MySQL and MariaDB assign from left to right and use the new values.
    changed = connection.execute(
        job.update()
        .where(job.c.load_balancer_id == load_balancer_id, job.c.generation == generation, *_SETTLED)
        .ordered_values((job.c.committed, committed), (job.c.generation, following))
    ).rowcount
    if changed:
        _make_due(connection, job.c.load_balancer_id == load_balancer_id)
    return bool(changed)


def _make_due(connection: sa.Connection, condition: Any) -> None:
    connection.execute(job.update().where(condition).values(dirty=True, due_at=DUE_NOW))
