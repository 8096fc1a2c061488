# SPDX-License-Identifier: Apache-2.0
"""Adoptions: requests and progress, and the rows of an adopted load balancer.

Invariant: the row holds the complete state, so any controller continues after a crash. A step is recorded before its
effect begins, and each effect can be repeated. While another provider has the load balancer in Octavia, no status of it
is reported. Every transaction that moves an adoption checks the step that it read.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from typing import Any

import msgspec
import sqlalchemy as sa

from amphora_driver.database import clock
from amphora_driver.database.rows import plain_columns, to_struct
from amphora_driver.database.tables import URGENT, amphora, job, object_status, request
from amphora_driver.database.tables_fleet import adoption, process
from amphora_driver.errors import Conflict, UnknownObject
from amphora_driver.model.loadbalancer import LoadBalancer
from amphora_driver.model.secret_refs import SecretName
from amphora_driver.store import desired_objects, failovers, generations, sealed_secrets, status_outbox
from amphora_driver.store.generations import Op
from amphora_driver.store.process_registry import ProcessKind
from amphora_driver.store.sealed_secrets import SealedSecret

_MAX_REASON = 1000
# The database keeps the row of an ended adoption for 30 days, so that an operator can read the result.
_KEPT_SECONDS = 30 * 86400.0
_SEE = "See: amphoractl loadbalancer adopt list."
# The migration that creates the table `adoption`. A controller of a version without this table would give the new
# amphorae the VIPs at once.
_REVISION = "0006"
# A controller without a heartbeat for this number of seconds does not run. It writes a heartbeat every 2 seconds.
_ALIVE_SECONDS = 7.0


class Step(str, Enum):
    """Steps of an adoption in their order, then those of the way back, then the ends."""

    WAITING = "waiting"
    # The load balancer becomes PENDING_UPDATE in Octavia, so no user changes it.
    LOCK = "lock"
    # The new amphorae boot and get the configuration without the VIPs.
    PREPARE = "prepare"
    # The new amphorae take and announce the VIPs. Until `CUT`, the former amphorae have the VIPs too.
    TAKE = "take"
    # The controller disables the ports of the former amphorae.
    CUT = "cut"
    # The controller enters the new provider in Octavia's tables.
    COMMIT = "commit"
    # The load balancer becomes ACTIVE in Octavia.
    REPORT = "report"
    # The former amphorae still exist, without traffic.
    KEEP = "keep"
    # The controller removes the machines, the ports and the security group of the former provider.
    REMOVE = "remove"

    # The load balancer becomes PENDING_UPDATE again, before the way back from `KEEP`.
    RELOCK = "relock"
    # The controller enters the former amphorae in Octavia's tables again, without their machines.
    REJOIN = "rejoin"
    # The controller enables the ports of the former amphorae, then disables those of the new ones.
    RESTORE = "restore"
    # The controller enters the former provider in Octavia's tables again.
    RETURN = "return"
    # The controller removes the new amphorae and this provider's rows of the load balancer.
    DISCARD = "discard"

    DONE = "done"
    REVERTED = "reverted"
    REFUSED = "refused"


ENDS = (Step.DONE, Step.REVERTED, Step.REFUSED)
# The way back is impossible or has begun already.
_FINAL = (Step.REMOVE, Step.RELOCK, Step.REJOIN, Step.RESTORE, Step.RETURN, Step.DISCARD, *ENDS)


class Adoption(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded adoption, see `tables_fleet.adoption`. `state` is the JSON of the rows before it."""

    load_balancer_id: str
    step: Step
    vips_held: bool
    reporting: bool
    paused: bool
    revert: bool
    state: str | None
    max_in_progress: int
    remove_after: float
    asked_by: str | None
    asked_at: float
    step_at: float
    committed_at: float | None
    ended_at: float | None
    reason: str | None


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the new amphorae.

    Attributes:
        served: every amphora serves the newest generation.
        pending: Octavia waits for the result of a change, or for a report of it.
        removing: the removal of the amphorae has begun.
    """

    recorded: bool
    served: bool = False
    pending: bool = False
    removing: bool = False
    amphorae: int = 0
    attempts: int = 0
    error: str | None = None


def request_adoptions(
    connection: sa.Connection,
    load_balancer_ids: Collection[str],
    *,
    max_in_progress: int,
    remove_after: float,
    asked_by: str | None,
) -> None:
    """Insert adoptions, which a controller starts; an ended one is replaced, and old ones are deleted.

    Args:
        connection: the transaction.
        load_balancer_ids: the load balancers, in the order of their start.
        max_in_progress: the next load balancer starts while fewer are between `LOCK` and `REPORT`.
        remove_after: seconds between the change of the provider and the removal of the former amphorae.
        asked_by: the operator.

    Raises:
        Conflict: this provider has one of the load balancers already, or adopts it.
    """
    now = connection.execute(sa.select(clock.now(connection))).scalar_one()
    connection.execute(adoption.delete().where(adoption.c.ended_at < now - _KEPT_SECONDS))
    for number, one in enumerate(load_balancer_ids):
        attempt = f"adopt load balancer {one}"
        if connection.execute(sa.select(job.c.op).where(job.c.load_balancer_id == one)).first() is not None:
            raise Conflict(attempt, "this provider has recorded it already", _SEE)
        mine = adoption.c.load_balancer_id == one
        connection.execute(adoption.delete().where(mine, adoption.c.ended_at.is_not(None)))
        if connection.execute(sa.select(adoption.c.step).where(mine)).first() is not None:
            raise Conflict(attempt, "its adoption is in progress", _SEE)
        # Adoptions start in the order of `asked_at`, so each load balancer of a request gets a later time.
        values = {"asked_at": now + number * 1e-3, "step_at": now, "asked_by": asked_by, "remove_after": remove_after}
        common = {"vips_held": True, "reporting": False, "paused": False, "revert": False}
        row = {"load_balancer_id": one, "step": Step.WAITING.value, "max_in_progress": max_in_progress}
        connection.execute(adoption.insert().values(**row, **common, **values))


def list_adoptions(connection: sa.Connection, *, only_open: bool = False) -> list[Adoption]:
    """Return the adoptions in the order of their requests."""
    query = sa.select(adoption).order_by(adoption.c.asked_at, adoption.c.load_balancer_id)
    if only_open:
        query = query.where(adoption.c.ended_at.is_(None))
    return [to_struct(row, Adoption, step=Step(row.step)) for row in connection.execute(query)]


def get_adoption(connection: sa.Connection, load_balancer_id: str, *, lock: bool = False) -> Adoption:
    """Return one adoption, or raise `UnknownObject`; `lock` locks the row in this transaction."""
    query = sa.select(adoption).where(adoption.c.load_balancer_id == load_balancer_id)
    row = connection.execute(query.with_for_update() if lock else query).first()
    if row is None:
        raise UnknownObject(f"find the adoption of load balancer {load_balancer_id}", "there is none", _SEE)
    return to_struct(row, Adoption, step=Step(row.step))


def list_unfit_controllers(connection: sa.Connection) -> list[str]:
    """Return the names of the running controllers whose version does not know adoptions."""
    revision = process.c.schema_revision
    query = sa.select(process.c.name).where(
        process.c.kind == ProcessKind.CONTROLLER.value,
        process.c.seen_at > clock.now(connection) - _ALIVE_SECONDS,
        sa.or_(revision.is_(None), revision < _REVISION),
    )
    return list(connection.execute(query.order_by(process.c.name)).scalars())


def move(connection: sa.Connection, found: Adoption, step: Step, reason: str | None = None, **values: Any) -> bool:
    """Record the next step.

    Return False if another process has moved the adoption since `found` was read, or an operator has requested a
    revert.
    """
    now = connection.execute(sa.select(clock.now(connection))).scalar_one()
    ended = {"ended_at": now} if step in ENDS else {}
    mine = (adoption.c.load_balancer_id == found.load_balancer_id, adoption.c.step == found.step.value)
    text = None if reason is None else reason[:_MAX_REASON]
    kept = {} if reason is None and step in _FINAL else {"reason": text}
    same = (adoption.c.step_at == found.step_at, adoption.c.revert == found.revert)
    changed = adoption.update().where(*mine, *same)
    return bool(connection.execute(changed.values(step=step.value, step_at=now, **kept, **ended, **values)).rowcount)


def set_reason(connection: sa.Connection, found: Adoption, reason: str | None) -> None:
    """Record the reason for which an adoption waits."""
    text = None if reason is None else reason[:_MAX_REASON]
    mine = (adoption.c.load_balancer_id == found.load_balancer_id, adoption.c.step == found.step.value)
    connection.execute(adoption.update().where(*mine).values(reason=text))


def set_paused(connection: sa.Connection, *, paused: bool) -> int:
    """Pause or resume all adoptions that have not started; return their number."""
    waiting = (adoption.c.step == Step.WAITING.value, adoption.c.paused != paused)
    return connection.execute(adoption.update().where(*waiting).values(paused=paused)).rowcount


def request_revert(connection: sa.Connection, load_balancer_id: str) -> None:
    """Request the way back to the former amphorae.

    Raises:
        Conflict: the former amphorae are being removed, or the way back has begun.
        UnknownObject: there is no adoption.
    """
    found = get_adoption(connection, load_balancer_id, lock=True)
    if found.step in _FINAL:
        raise Conflict(f"revert the adoption of load balancer {load_balancer_id}", f"its step is {found.step.value}")
    if found.step is Step.WAITING:
        move(connection, found, Step.REVERTED, "reverted before its start")
        return
    mine = adoption.c.load_balancer_id == load_balancer_id
    connection.execute(adoption.update().where(mine).values(revert=True))


def record_load_balancer(
    connection: sa.Connection, tree: LoadBalancer, contents: Mapping[SecretName, SealedSecret]
) -> None:
    """Insert the desired state and the job of a load balancer, without a report to Octavia."""
    row: dict[str, Any] = {"compute": tree.profile.compute, "network": tree.profile.network}
    row |= {"load_balancer_id": tree.id, "project_id": tree.project_id, "topology": tree.profile.topology.value}
    connection.execute(job.insert().values(**row, op=Op.APPLY, generation=1, committed=1, read_back=False))
    desired_objects.insert_objects(connection, tree.id, 1, list(desired_objects.iter_subtree(tree)))
    sealed_secrets.replace_secrets(connection, tree.id, contents)
    accepted = {"load_balancer_id": tree.id, "generation": 1, "accepted_at": time.time()}
    connection.execute(request.insert().values(**accepted, action="adopt loadbalancer", object_id=tree.id))


def read_progress(connection: sa.Connection, load_balancer_id: str) -> Progress:
    """Return the state of the new amphorae."""
    row = connection.execute(sa.select(*plain_columns(job)).where(job.c.load_balancer_id == load_balancer_id)).first()
    if row is None:
        return Progress(recorded=False)
    query = sa.select(amphora.c.state, amphora.c.confirmed).where(amphora.c.load_balancer_id == load_balancer_id)
    found = connection.execute(query).all()
    served = row.applied >= row.generation and all(one.confirmed >= row.generation for one in found)
    waiting = sa.select(object_status.c.object_id).where(
        object_status.c.load_balancer_id == load_balancer_id,
        sa.or_(object_status.c.pending.is_not(None), object_status.c.settled > object_status.c.reported),
    )
    return Progress(
        recorded=True,
        served=served,
        pending=connection.execute(waiting.limit(1)).first() is not None,
        removing=row.op == Op.DELETE,
        amphorae=len(found),
        attempts=row.attempts,
        error=row.error,
    )


def lift_hold(connection: sa.Connection, load_balancer_id: str) -> None:
    """Give the new amphorae the VIPs, with a new generation."""
    mine = adoption.c.load_balancer_id == load_balancer_id
    connection.execute(adoption.update().where(mine).values(vips_held=False))
    _advance(connection, load_balancer_id)


def begin_reports(connection: sa.Connection, load_balancer_id: str, tree: LoadBalancer) -> None:
    """Report all objects to Octavia, after the amphorae confirm a new generation."""
    _advance(connection, load_balancer_id)
    generation = connection.execute(
        sa.select(job.c.generation).where(job.c.load_balancer_id == load_balancer_id)
    ).scalar_one()
    objects = [(desired_objects.kind_of(one), one.id) for one in desired_objects.iter_subtree(tree)]
    status_outbox.expect_confirmation(connection, load_balancer_id, int(generation), objects)


def stop_reports(connection: sa.Connection, load_balancer_id: str) -> None:
    """Delete the statuses, so that nothing is reported after the return to the former provider."""
    connection.execute(object_status.delete().where(object_status.c.load_balancer_id == load_balancer_id))


def discard(connection: sa.Connection, load_balancer_id: str) -> None:
    """Begin the removal of the new amphorae. Octavia keeps the load balancer, and receives no report."""
    now = connection.execute(sa.select(clock.now(connection))).scalar_one()
    stop_reports(connection, load_balancer_id)
    failovers.finish_failovers(connection, load_balancer_id, failovers.FailoverOutcome.GONE, float(now))
    sealed_secrets.delete_secrets_of_load_balancer(connection, load_balancer_id)
    _advance(connection, load_balancer_id, op=Op.DELETE)


def forget(connection: sa.Connection, load_balancer_id: str) -> None:
    """Delete all rows of a load balancer without amphorae."""
    status_outbox.delete_load_balancer_rows(connection, load_balancer_id)


def _advance(connection: sa.Connection, load_balancer_id: str, op: str = Op.APPLY) -> None:
    """Increment the generation without a request of Octavia, and let the job be due before all others."""
    due: Iterable[tuple[Any, Any]] = {job.c.dirty: True, job.c.due_at: URGENT, job.c.attempts: 0, job.c.op: op}.items()
    mine = job.update().where(job.c.load_balancer_id == load_balancer_id)
    connection.execute(mine.ordered_values(*generations.advance_to(job.c.generation + 1), *due))
