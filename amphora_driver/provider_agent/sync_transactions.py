# SPDX-License-Identifier: Apache-2.0
"""Database transactions of the provider agent. Each function is the content of one transaction.

Invariant: a transaction stores a result of Octavia only if the driver has accepted no request since the read began.
The reader holds no lock meanwhile. No transaction stores a result for a load balancer in deletion.

The argument `row` is the `job` row before the read. A result of False means that the row has changed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from amphora_driver.database.bulk_update import BulkUpdate
from amphora_driver.database.rows import force_index
from amphora_driver.database.tables import DUE_NOW, desired_object, job, object_status, request
from amphora_driver.model.enums import Kind, Provisioning
from amphora_driver.model.loadbalancer import Listener, LoadBalancer, Member, Pool
from amphora_driver.model.secret_refs import SecretName, secrets_of_object, secrets_of_tree, ticket_secret_name
from amphora_driver.store import desired_objects, generations, resyncs, sealed_secrets, status_outbox
from amphora_driver.store.generations import Op
from amphora_driver.store.sealed_secrets import SealedSecret

NO_CONTENT = "Octavia returned no content for a secret reference. Check that the secret exists and can be read"


class _Committed(msgspec.Struct, frozen=True, array_like=True):
    """The generation of a load balancer whose Octavia transaction has ended."""

    load_balancer_id: str
    committed: int


# One statement: with an UPDATE for each row, controllers would wait for the lock of the first row until the last one.
_GENERATION = sa.bindparam("upto", type_=sa.BigInteger)
_MARK_COMMITTED = BulkUpdate(
    job,
    _Committed,
    {"load_balancer_id": "of"},
    {"committed": "upto"},
    {"committed": "n.committed"},
    "o.committed < n.committed",
    job.update()
    .where(job.c.load_balancer_id == sa.bindparam("of"), job.c.committed < _GENERATION)
    .values(committed=_GENERATION),
)


def list_uncommitted(connection: sa.Connection) -> Sequence[Any]:
    """Return load balancers that need a read, or that may have an open transaction in Octavia."""
    batch = sa.exists().where(
        request.c.load_balancer_id == job.c.load_balancer_id,
        request.c.generation > job.c.committed,
        request.c.action == "set members",
    )
    columns = (job.c.load_balancer_id, job.c.generation, job.c.committed, job.c.read_back, job.c.reread)
    open_jobs = job.c.exceptional == sa.true(), sa.or_(job.c.committed < job.c.generation, job.c.read_back)
    query = force_index(sa.select(*columns, batch.label("batch")), job, "exceptional")
    return connection.execute(query.where(*open_jobs)).all()


def list_recently_changed(connection: sa.Connection, since: float) -> list[str]:
    """Return load balancers with an unfinished job, or a request since that time (seconds since 1970)."""
    recent = sa.select(request.c.load_balancer_id).where(request.c.accepted_at > since)
    unfinished = sa.select(job.c.load_balancer_id).where(job.c.dirty, job.c.op != Op.SPARES)
    return list(connection.execute(recent.union(unfinished)).scalars())


def mark_committed(connection: sa.Connection, rows: Sequence[Any]) -> None:
    """Record the end of the Octavia transactions of these jobs, up to their generations."""
    _MARK_COMMITTED.execute(connection, [_Committed(row.load_balancer_id, row.generation) for row in rows])


def update_due_job(connection: sa.Connection, load_balancer_id: str, **values: Any) -> None:
    """Change the job of a load balancer and make it due."""
    statement = job.update().where(job.c.load_balancer_id == load_balancer_id)
    connection.execute(statement.values(dirty=True, due_at=DUE_NOW, **values))


def store_tree(
    connection: sa.Connection,
    row: Any,
    tree: LoadBalancer,
    contents: Mapping[SecretName, SealedSecret],
    reason: str = NO_CONTENT,
) -> bool:
    """Make Octavia's tree the desired state of the same generation, including its new objects.

    A secret without a content from Octavia or from an earlier read gets the reason.
    """
    if not is_unchanged(connection, row):
        return False
    _replace_tree(connection, row.generation, tree)
    missing = SealedSecret(reason=reason)
    recorded = sealed_secrets.load_secrets(connection, tree.id)
    known = {name: one for name, one in recorded.items() if one.content is not None}
    used = {name: contents.get(name, known.get(name, missing)) for name in secrets_of_tree(tree)}
    sealed_secrets.delete_secrets(connection, recorded.keys() - used.keys() - {ticket_secret_name(tree.id)})
    sealed_secrets.replace_secrets(connection, tree.id, used)
    resyncs.finish_reread(connection, tree.id)
    mark_committed(connection, [row])
    return True


def store_objects(
    connection: sa.Connection,
    row: Any,
    nodes: Sequence[LoadBalancer | Listener | Pool],
    contents: Mapping[SecretName, SealedSecret],
    reason: str = NO_CONTENT,
) -> bool:
    """Make single objects from Octavia the desired state; see `store_tree`."""
    if not is_unchanged(connection, row):
        return False
    for node in nodes:
        if desired_objects.refresh_object(connection, row.generation, node):
            used = secrets_of_object(node)
            sealed_secrets.sync_object_secrets(connection, row.load_balancer_id, node.id, used, contents)
    tree = desired_objects.load_tree(connection, row.load_balancer_id)
    recorded = sealed_secrets.load_secrets(connection, row.load_balancer_id)
    missing = {name: SealedSecret(reason=reason) for name in secrets_of_tree(tree) if name not in recorded}
    sealed_secrets.replace_secrets(connection, row.load_balancer_id, missing)
    resyncs.finish_reread(connection, row.load_balancer_id)
    mark_committed(connection, [row])
    return True


def fail_unreadable(connection: sa.Connection, row: Any, reason: str) -> None:
    """Set a load balancer to ERROR that Octavia has committed but does not return."""
    status_outbox.fail_generation(connection, row.load_balancer_id, row.generation, reason)
    mark_committed(connection, [row])


def delete_unknown(connection: sa.Connection, load_balancer_id: str) -> None:
    """Start the deletion of a load balancer that Octavia does not know, for example after a rollback."""
    current = sa.select(job.c.generation).where(job.c.load_balancer_id == load_balancer_id)
    generation = connection.execute(current).scalar_one()
    descendants = desired_objects.list_descendants(connection, [load_balancer_id])
    everything = [(Kind.LOAD_BALANCER, load_balancer_id), *descendants]
    desired_objects.mark_removed(connection, generation + 1, [object_id for _, object_id in everything])
    status_outbox.expect_confirmation(connection, load_balancer_id, generation + 1, everything)
    update_due_job(connection, load_balancer_id, op=Op.DELETE, generation=generation + 1, committed=generation + 1)


def adopt_octavia_tree(
    connection: sa.Connection,
    row: Any,
    tree: LoadBalancer,
    contents: Mapping[SecretName, SealedSecret],
    gone: Collection[str],
) -> bool:
    """Make a differing Octavia tree the desired state of a new generation.

    Octavia gets a status only of the objects that wait for one, because no user saw a change that Octavia rolled back.
    Octavia does not have the recorded objects `gone`, and the tree does not contain objects removed before the read.
    """
    if not is_unchanged(connection, row):
        return False
    generations.bump_generation(connection, tree.id, row.generation)
    _replace_tree(connection, row.generation + 1, tree)
    for one in sorted(gone):
        connection.execute(object_status.delete().where(object_status.c.object_id == one))
    sealed_secrets.delete_secrets_of_objects(connection, sorted(gone))
    kept, no_content = sealed_secrets.load_secrets(connection, tree.id), SealedSecret(reason=NO_CONTENT)
    missing = {
        name: contents.get(name, kept.get(name, no_content))
        for name in secrets_of_tree(tree)
        if name not in kept or kept[name].content is None
    }
    sealed_secrets.replace_secrets(connection, tree.id, missing)
    update_due_job(connection, tree.id)
    return True


def _replace_tree(connection: sa.Connection, generation: int, tree: LoadBalancer) -> None:
    added = desired_objects.replace_tree(connection, generation, tree)
    objects = [(desired_objects.kind_of(node), node.id) for node in added]
    status_outbox.expect_confirmation(connection, tree.id, generation, objects)


class MemberBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A request that removed members of a pool and created or changed others in one Octavia transaction.

    Attributes:
        sample: a member that the batch created, or else a member that only this batch has changed.
        created: whether the batch created the sample, whose existence then shows the result.
        removed: ids of the removed members.
    """

    sample: Member
    created: bool
    removed: list[str]


def list_member_batches(connection: sa.Connection, row: Any) -> list[MemberBatch]:
    """Return the batches that removed members, have a sample, and may have an open transaction."""
    requested = (
        sa.select(request.c.generation, request.c.object_id)
        .join(desired_object, desired_object.c.id == request.c.object_id)
        .join(job, job.c.load_balancer_id == request.c.load_balancer_id)
        .where(
            request.c.load_balancer_id == row.load_balancer_id,
            request.c.action == "set members",
            request.c.generation > row.committed,
            request.c.generation <= row.generation,
            ~desired_object.c.removed,
            job.c.op != Op.DELETE,
        )
        .order_by(request.c.generation)
    )
    each = (_load_batch(connection, one.object_id, one.generation) for one in connection.execute(requested).all())
    return [batch for batch in each if batch is not None]


def _load_batch(connection: sa.Connection, pool_id: str, generation: int) -> MemberBatch | None:
    of_batch = (
        desired_object.c.parent_id == pool_id,
        desired_object.c.kind == Kind.MEMBER.value,
        sa.or_(desired_object.c.created == generation, desired_object.c.generation == generation),
    )
    rows = connection.execute(sa.select(desired_object).where(*of_batch)).all()
    removed = [one.id for one in rows if one.removed and one.generation == generation]
    # One member that this batch created or changed (`sample`) shows whether Octavia has committed the batch. The sample
    # may be a member that a later request removed, because Octavia shows removed members until it receives DELETED.
    candidates = [one for one in rows if one.id not in removed]
    sample = max(candidates, key=lambda one: one.created == generation, default=None)
    if sample is None or not removed:
        return None
    member = msgspec.json.decode(sample.body, type=Member)
    return MemberBatch(sample=member, created=sample.created == generation, removed=removed)


def restore_members(connection: sa.Connection, row: Any, removed: Collection[str]) -> bool:
    """Restore the members that uncommitted batches removed."""
    if not is_unchanged(connection, row):
        return False
    generation = row.generation + 1
    update_due_job(connection, row.load_balancer_id, generation=generation, committed=generation)
    for one in sorted(removed):
        changed = desired_object.update().where(desired_object.c.id == one)
        connection.execute(changed.values(removed=False, generation=generation))
    # The outbox may still contain DELETED for these restored members. This call requests a new status, which replaces
    # DELETED after the amphorae have confirmed the new generation.
    members = [(Kind.MEMBER, one) for one in sorted(removed)]
    status_outbox.expect_confirmation(connection, row.load_balancer_id, generation, members)
    return True


def load_settled(connection: sa.Connection, load_balancer_id: str) -> tuple[Any, LoadBalancer, set[str]] | None:
    """Return a load balancer without open changes in Octavia: its row, its tree, its removed objects.

    The result is None while a change is open, and for a load balancer that does not exist or is in deletion. A change
    is open until the report of its statuses. Until then Octavia keeps objects in deletion, references to these objects,
    and L7 positions.

    The ids of removed objects include those that Octavia still has because it refused their DELETED. A read of these
    ids must precede the read from Octavia, because a later read would miss objects with a new report.
    """
    row = connection.execute(_WORK_ROW, {"of": load_balancer_id}).first()
    if row is None or row.op == Op.DELETE or row.read_back or row.committed < row.generation:
        return None
    if connection.execute(_UNREPORTED, {"of": load_balancer_id}).first() is not None:
        return None
    removed = set(connection.execute(_REMOVED, {"of": load_balancer_id}).scalars())
    return row, desired_objects.load_tree(connection, load_balancer_id), removed


def is_present(connection: sa.Connection, load_balancer_id: str) -> bool:
    """Return whether a load balancer exists and is not in deletion."""
    row = connection.execute(_WORK_ROW, {"of": load_balancer_id}).first()
    return row is not None and row.op != Op.DELETE


_WORK_ROW = sa.select(
    job.c.load_balancer_id, job.c.generation, job.c.committed, job.c.read_back, job.c.reread, job.c.op
).where(job.c.load_balancer_id == sa.bindparam("of"))
_REMOVED = sa.select(desired_object.c.id).where(
    desired_object.c.load_balancer_id == sa.bindparam("of"), desired_object.c.removed
)
# Matches an object whose ERROR Octavia has received. An object that a user has deleted does not match, because Octavia
# must still receive DELETED for such an object.
_FAILURE_REPORTED = sa.and_(
    object_status.c.provisioning == Provisioning.ERROR.value,
    object_status.c.settled <= object_status.c.reported,
    object_status.c.object_id.not_in(_REMOVED),
)
_IN_CHANGE = sa.or_(object_status.c.provisioning.is_(None), ~_FAILURE_REPORTED)
_LAST_REPORT = sa.and_(
    object_status.c.kind == Kind.LOAD_BALANCER.value, object_status.c.settled > object_status.c.reported
)
_OPEN = sa.or_(sa.and_(object_status.c.pending.is_not(None), _IN_CHANGE), _LAST_REPORT)
_OF_LOAD_BALANCER = object_status.c.load_balancer_id == sa.bindparam("of")
_UNREPORTED = sa.select(object_status.c.object_id).where(_OF_LOAD_BALANCER, _OPEN).limit(1)


def is_unchanged(connection: sa.Connection, row: Any) -> bool:
    """Return whether a `job` row has not changed, and lock it until the end of the transaction."""
    now = connection.execute(_WORK_ROW.with_for_update(), {"of": row.load_balancer_id}).first()
    if now is None or now.op == Op.DELETE:
        return False
    return (now.generation, bool(now.read_back), now.reread) == (row.generation, bool(row.read_back), row.reread)
