# SPDX-License-Identifier: Apache-2.0
"""Drift of amphorae from their confirmed configuration: findings, and revocation of confirmations.

Invariant: this module pushes nothing. It revokes an amphora's confirmation if the amphora still confirms the audited
generation, and makes the load balancer due. The plan then pushes the configuration again. `amphora.drift` describes the
last finding and its source, `amphora.drifts` says whether the drift still exists. An audit without findings, a
confirmed push, or an agent without complaints resets `drifts`. Both columns are for operators only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from amphora_driver.database.rows import chunks, load_as
from amphora_driver.database.tables import DUE_NOW, amphora, job
from amphora_driver.model.amphora import AmphoraState
from amphora_driver.store.amphorae import replace_confirmation
from amphora_driver.store.generations import SETTLED, advance_to, lock_jobs, update_job

_MAX_DRIFT_TEXT = 500
_READY = amphora.c.state == AmphoraState.READY.value


class AuditCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """An amphora that serves the newest generation; `waited`: time of the last audit, 0 for never."""

    amphora_id: str
    load_balancer_id: str
    generation: int
    waited: float = 0.0


def list_audit_candidates(connection: sa.Connection, before: float, limit: int) -> list[AuditCandidate]:
    """Return amphorae with last audit and confirmation before a moment; the longest wait first."""
    waited = sa.func.coalesce(amphora.c.audited_at, 0.0)
    columns = amphora.c.id.label("amphora_id"), amphora.c.load_balancer_id, job.c.generation, waited.label("waited")
    query = (
        sa.select(*columns)
        .join(job, job.c.load_balancer_id == amphora.c.load_balancer_id)
        .where(*SETTLED, _READY, amphora.c.confirmed >= job.c.generation)
        .where(waited < before, sa.func.coalesce(amphora.c.confirmed_at, 0.0) < before)
        .order_by(waited, amphora.c.id)
    )
    return load_as(connection, AuditCandidate, query.limit(limit))


def count_auditable(connection: sa.Connection) -> int:
    """Return the number of amphorae that audits cover."""
    query = sa.select(sa.func.count()).select_from(amphora).where(_READY, amphora.c.confirmed > 0)
    return int(connection.execute(query).scalar_one())


def record_audit(connection: sa.Connection, amphora_ids: Sequence[str], now: float, drift: str | None = None) -> None:
    """Record the time and result of an audit; without drift, the last finding stays as history."""
    values: dict[str, Any] = {"audited_at": now, "drifts": drift is not None}
    if drift is not None:
        values["drift"] = drift[:_MAX_DRIFT_TEXT]
    # The ids are sorted, so that deadlocks are rare. `Database.write` repeats a transaction after a deadlock.
    for ids in chunks(sorted(amphora_ids)):
        connection.execute(amphora.update().where(amphora.c.id.in_(ids)).values(**values))


def record_agent_finding(connection: sa.Connection, amphora_id: str, drift: str, moment: str = "") -> bool:
    """Record a finding that an agent has reported. Return False if the finding is recorded already.

    `moment`, the part of `drift` with the time, identifies the finding.
    """
    known = sa.func.coalesce(amphora.c.drift, "").contains(moment, autoescape=True) if moment else sa.false()
    new = amphora.update().where(amphora.c.id == amphora_id, ~known)
    return bool(connection.execute(new.values(drift=drift[:_MAX_DRIFT_TEXT])).rowcount)


def set_drifting(connection: sa.Connection, drifting: Mapping[str, bool]) -> None:
    """Record, by amphora id, whether amphorae drift now."""
    for amphora_id, drifts in sorted(drifting.items()):
        connection.execute(amphora.update().where(amphora.c.id == amphora_id).values(drifts=drifts))


def lock_work_of_amphorae(connection: sa.Connection, amphora_ids: Collection[str]) -> None:
    """Lock the `job` rows of these amphorae, see `generations.lock_jobs`.

    A transaction that writes `amphora` rows before `revoke_confirmation` calls this function first.
    """
    owners = sa.select(amphora.c.load_balancer_id).where(amphora.c.id.in_(sorted(amphora_ids))).distinct()
    lock_jobs(connection, connection.execute(owners).scalars().all())


def revoke_confirmation(
    connection: sa.Connection, amphora_id: str, confirmed: int, drift: str, *, replug: bool = False
) -> bool:
    """Revoke an amphora's confirmation for a new push; see `replace_confirmation`.

    With `replug`, the controller also attaches the amphora's ports again, because an interface is missing.
    """
    values: dict[str, Any] = {"confirmed": max(confirmed - 1, 0), "drift": drift[:_MAX_DRIFT_TEXT], "drifts": True}
    if replug:
        values["plugged"] = None
    return confirmed > 0 and replace_confirmation(connection, amphora_id, confirmed, values)


def revoke_all_confirmations(connection: sa.Connection, load_balancer_id: str, drift: str) -> list[str]:
    """Revoke the confirmations of all amphorae of a load balancer and return their ids.

    The load balancer becomes due even if no amphora has confirmed a generation.
    """
    lock_jobs(connection, [load_balancer_id])
    ready = sa.select(amphora.c.id, amphora.c.confirmed).where(amphora.c.load_balancer_id == load_balancer_id, _READY)
    rows = connection.execute(ready.order_by(amphora.c.id)).all()
    found = [row.id for row in rows if revoke_confirmation(connection, row.id, row.confirmed, drift)]
    update_job(connection, load_balancer_id, dirty=True, due_at=DUE_NOW)
    return found


def advance_generation_beyond(connection: sa.Connection, load_balancer_id: str, generation: int, beyond: int) -> bool:
    """Advance a generation beyond that of an amphora, because an agent refuses older generations.

    No object waits for the new generation, and Octavia's commit state does not change.
    Return False if the load balancer has changed since the audit.
    """
    mine = job.c.load_balancer_id == load_balancer_id
    advance = job.update().where(mine, job.c.generation == generation, *SETTLED)
    following = advance_to(max(generation, beyond) + 1)
    if not connection.execute(advance.ordered_values(*following)).rowcount:
        return False
    update_job(connection, load_balancer_id, dirty=True, due_at=DUE_NOW)
    return True
