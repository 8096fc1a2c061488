# SPDX-License-Identifier: Apache-2.0
"""What Octavia has said, written down: each function is the whole content of one transaction.

Invariant: what was read counts only if nothing was accepted since: whoever reads holds no lock meanwhile. A load
balancer that is to go wants to know nothing any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa

from amphora_driver.database.tables import DUE_NOW, request, status, wanted_object, work
from amphora_driver.model.enums import Kind, Provisioning
from amphora_driver.model.loadbalancer import Member
from amphora_driver.model.secret_refs import secrets_of_object, secrets_of_tree, ticket_secret_name
from amphora_driver.store import desired_objects, generations, pending_rereads, sealed_secrets, status_outbox
from amphora_driver.store.requests import Op
from amphora_driver.store.sealed_secrets import SealedSecret

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from amphora_driver.model.loadbalancer import Listener, LoadBalancer, Pool
    from amphora_driver.model.secret_refs import SecretName

NOT_GIVEN = "Octavia handed nothing over under a reference: look whether the secret is there and can be read"


def uncommitted(connection: sa.Connection) -> Sequence[Any]:
    """Load balancers with a generation whose transaction in Octavia may still be open, or that are to be read."""
    batch = sa.exists().where(
        request.c.load_balancer_id == work.c.load_balancer_id,
        request.c.generation > work.c.committed,
        request.c.action == "set members",
    )
    return connection.execute(
        sa.select(
            work.c.load_balancer_id,
            work.c.generation,
            work.c.committed,
            work.c.read_back,
            work.c.reread,
            batch.label("batch"),
        ).where(sa.or_(work.c.committed < work.c.generation, work.c.read_back))
    ).all()


def recently_changed(connection: sa.Connection, since: float) -> list[str]:
    """Load balancers for which something was accepted after that time (seconds since 1970), or is being done."""
    recent = sa.select(request.c.load_balancer_id).where(request.c.accepted_at > since)
    return list(
        connection.execute(
            recent.union(sa.select(work.c.load_balancer_id).where(work.c.dirty, work.c.op != Op.SPARES))
        ).scalars()
    )


def mark_committed(connection: sa.Connection, passed: Sequence[tuple[str, int]]) -> None:
    """Octavia's transactions have ended for these load balancers, up to these generations."""
    for load_balancer_id, generation in passed:
        connection.execute(
            work.update()
            .where(work.c.load_balancer_id == load_balancer_id, work.c.committed < generation)
            .values(committed=generation)
        )


def take_tree(
    connection: sa.Connection,
    row: Any,
    tree: LoadBalancer,
    contents: Mapping[SecretName, SealedSecret],
    reason: str = NOT_GIVEN,
) -> bool:
    """The tree Octavia has now is the wanted one; its new objects wait for the same generation.

    Args:
        connection: of `Database.write`.
        row: what was to be read, as it was seen before.
        tree: what was read.
        contents: what came of the secrets it uses.
        reason: why nothing came of the others, as far as nothing is known of them.

    Returns:
        Whether it counts.
    """
    if not is_as_seen(connection, row):
        return False
    added = desired_objects.replace_tree(connection, row.generation, tree)
    status_outbox.expect_confirmation(
        connection, tree.id, row.generation, [(desired_objects.kind_of(node), node.id) for node in added]
    )
    lost = SealedSecret(reason=reason)
    recorded = sealed_secrets.load_secrets(connection, tree.id)
    known = {name: one for name, one in recorded.items() if one.content is not None}
    used = dict.fromkeys(secrets_of_tree(tree))
    sealed_secrets.delete_secrets(connection, recorded.keys() - used.keys() - {ticket_secret_name(tree.id)})
    sealed_secrets.replace_secrets(
        connection, tree.id, {name: contents.get(name, known.get(name, lost)) for name in used}
    )
    pending_rereads.finish_reread(connection, tree.id)
    mark_committed(connection, [(tree.id, row.generation)])
    return True


def take_objects(
    connection: sa.Connection,
    row: Any,
    nodes: Sequence[LoadBalancer | Listener | Pool],
    contents: Mapping[SecretName, SealedSecret],
    reason: str = NOT_GIVEN,
) -> bool:
    """What Octavia has of these objects is wanted; secrets of which nothing is known are missing for this reason."""
    if not is_as_seen(connection, row):
        return False
    for node in nodes:
        if desired_objects.refresh_object(connection, row.generation, node):
            used = secrets_of_object(node)
            sealed_secrets.sync_object_secrets(connection, row.load_balancer_id, node.id, used, contents)
    tree = desired_objects.load_tree(connection, row.load_balancer_id)
    recorded = sealed_secrets.load_secrets(connection, row.load_balancer_id)
    lost = {name: SealedSecret(reason=reason) for name in dict.fromkeys(secrets_of_tree(tree)) if name not in recorded}
    sealed_secrets.replace_secrets(connection, row.load_balancer_id, lost)
    pending_rereads.finish_reread(connection, row.load_balancer_id)
    mark_committed(connection, [(row.load_balancer_id, row.generation)])
    return True


def fail(connection: sa.Connection, row: Any, reason: str) -> None:
    """Octavia has committed what it will not hand over: its user is told."""
    status_outbox.fail_generation(connection, row.load_balancer_id, row.generation, reason)
    mark_committed(connection, [(row.load_balancer_id, row.generation)])


def abandon(connection: sa.Connection, load_balancer_id: str) -> None:
    """Octavia rolled the creation back: everything made for it goes again."""
    generation = connection.execute(
        sa.select(work.c.generation).where(work.c.load_balancer_id == load_balancer_id)
    ).scalar_one()
    everything = [
        (Kind.LOAD_BALANCER, load_balancer_id),
        *desired_objects.list_descendants(connection, [load_balancer_id]),
    ]
    desired_objects.mark_removed(connection, generation + 1, [object_id for _, object_id in everything])
    status_outbox.expect_confirmation(connection, load_balancer_id, generation + 1, everything)
    connection.execute(
        work.update()
        .where(work.c.load_balancer_id == load_balancer_id)
        .values(op=Op.DELETE, generation=generation + 1, committed=generation + 1, dirty=True, free_at=DUE_NOW)
    )


def correct(
    connection: sa.Connection,
    row: Any,
    tree: LoadBalancer,
    contents: Mapping[SecretName, SealedSecret],
    gone: Collection[str],
) -> bool:
    """Octavia has kept something else than we recorded: that is wanted from the next generation on.

    Nobody is told, as far as Octavia waits for nothing: of what it rolled back no user ever heard.

    Args:
        connection: of `Database.write`.
        row: the work row as it was before Octavia was asked.
        tree: what Octavia has, without what was removed before it was asked: of that it may have been told meanwhile,
            and what it was told of has no row any more that would say so.
        contents: what came of the secrets it uses.
        gone: ids of objects that Octavia does not have.

    Returns:
        Whether it counts.
    """
    if not is_as_seen(connection, row):
        return False
    generation = row.generation + 1
    generations.bump_generation(connection, tree.id, row.generation)
    added = desired_objects.replace_tree(connection, generation, tree)
    status_outbox.expect_confirmation(
        connection, tree.id, generation, [(desired_objects.kind_of(node), node.id) for node in added]
    )
    for one in sorted(gone):
        connection.execute(status.delete().where(status.c.object_id == one))
    sealed_secrets.delete_secrets_of_objects(connection, sorted(gone))
    kept, lost = sealed_secrets.load_secrets(connection, tree.id), SealedSecret(reason=NOT_GIVEN)
    missing = [name for name in dict.fromkeys(secrets_of_tree(tree)) if name not in kept or kept[name].content is None]
    sealed_secrets.replace_secrets(
        connection, tree.id, {name: contents.get(name, kept.get(name, lost)) for name in missing}
    )
    connection.execute(work.update().where(work.c.load_balancer_id == tree.id).values(dirty=True, free_at=DUE_NOW))
    return True


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """One request that took members of a pool away and brought or changed others, all in one transaction of Octavia's.

    Attributes:
        sample: a member that came with it, or else one that it has changed and nobody has since.
        came: whether the sample came with it: then it is there or not, whatever was done to it later.
        removed: ids of the members it has removed.
    """

    sample: Member
    came: bool
    removed: list[str]


def batches(connection: sa.Connection, row: Any) -> list[Batch]:
    """Batches of members whose transactions are not known to have ended, each by its own generation.

    What tells nothing is left out: one that has removed nothing, or neither brought nor changed anything; and what goes
    with its pool or load balancer anyway.
    """
    asked = (
        sa.select(request.c.generation, request.c.object_id)
        .join(wanted_object, wanted_object.c.id == request.c.object_id)
        .join(work, work.c.load_balancer_id == request.c.load_balancer_id)
        .where(
            request.c.load_balancer_id == row.load_balancer_id,
            request.c.action == "set members",
            request.c.generation > row.committed,
            request.c.generation <= row.generation,
            ~wanted_object.c.removed,
            work.c.op != Op.DELETE,
        )
        .order_by(request.c.generation)
    )
    each = (_batch(connection, one.object_id, one.generation) for one in connection.execute(asked).all())
    return [batch for batch in each if batch is not None]


def _batch(connection: sa.Connection, pool_id: str, generation: int) -> Batch | None:
    mine = (
        wanted_object.c.parent_id == pool_id,
        wanted_object.c.kind == Kind.MEMBER.value,
        sa.or_(wanted_object.c.created == generation, wanted_object.c.generation == generation),
    )
    rows = connection.execute(sa.select(wanted_object).where(*mine)).all()
    removed = [one.id for one in rows if one.removed and one.generation == generation]
    # Octavia shows one that a later request removes until it is told: it tells of its own batch all the same.
    telling = [one for one in rows if one.id not in removed]
    sample = max(telling, key=lambda one: one.created == generation, default=None)
    if sample is None or not removed:
        return None
    member = msgspec.json.decode(sample.body, type=Member)
    return Batch(sample=member, came=sample.created == generation, removed=removed)


def undo(connection: sa.Connection, row: Any, removed: Collection[str]) -> bool:
    """What batches have removed stays, since Octavia has kept nothing of them; False if it does not count."""
    if not is_as_seen(connection, row):
        return False
    generation = row.generation + 1
    connection.execute(
        work.update()
        .where(work.c.load_balancer_id == row.load_balancer_id)
        .values(generation=generation, committed=generation, dirty=True, free_at=DUE_NOW)
    )
    for one in sorted(removed):
        changed = wanted_object.update().where(wanted_object.c.id == one)
        connection.execute(changed.values(removed=False, generation=generation))
    # Perhaps it is noted already that they are gone: nobody says so before they are back.
    status_outbox.expect_confirmation(
        connection, row.load_balancer_id, generation, [(Kind.MEMBER, one) for one in sorted(removed)]
    )
    return True


def settled(connection: sa.Connection, load_balancer_id: str) -> tuple[Any, LoadBalancer, set[str]] | None:
    """A load balancer nobody is changing in Octavia, as it is recorded; None while somebody is, or if it is gone.

    What Octavia has not been told of counts as being changed: until then it keeps what is being deleted, and the
    references to it and the places it takes up. It is told of the load balancer itself last.

    Also the ids of objects that are removed, and that Octavia has all the same, since it would not hear of them: read
    after it was asked, this would not name those of which it was told meanwhile.
    """
    row = connection.execute(_SEEN, {"of": load_balancer_id}).first()
    if row is None or row.op == Op.DELETE or row.read_back or row.committed < row.generation:
        return None
    if connection.execute(_UNTOLD, {"of": load_balancer_id}).first() is not None:
        return None
    leaving = set(connection.execute(_LEAVING, {"of": load_balancer_id}).scalars())
    return row, desired_objects.load_tree(connection, load_balancer_id), leaving


def stays(connection: sa.Connection, load_balancer_id: str) -> bool:
    """Whether a load balancer is there, and not to go."""
    row = connection.execute(_SEEN, {"of": load_balancer_id}).first()
    return row is not None and row.op != Op.DELETE


_SEEN = sa.select(
    work.c.load_balancer_id, work.c.generation, work.c.committed, work.c.read_back, work.c.reread, work.c.op
).where(work.c.load_balancer_id == sa.bindparam("of"))
_LEAVING = sa.select(wanted_object.c.id).where(
    wanted_object.c.load_balancer_id == sa.bindparam("of"), wanted_object.c.removed
)
# What failed goes on waiting, but Octavia has heard of it: only what is being deleted is there still.
_HEARD_OF_FAILURE = sa.and_(
    status.c.provisioning == Provisioning.ERROR.value,
    status.c.settled <= status.c.reported,
    status.c.object_id.not_in(_LEAVING),
)
_UNTOLD = (
    sa.select(status.c.object_id)
    .where(
        status.c.load_balancer_id == sa.bindparam("of"),
        sa.or_(
            sa.and_(status.c.pending.is_not(None), sa.or_(status.c.provisioning.is_(None), ~_HEARD_OF_FAILURE)),
            sa.and_(status.c.kind == Kind.LOAD_BALANCER.value, status.c.settled > status.c.reported),
        ),
    )
    .limit(1)
)


def is_as_seen(connection: sa.Connection, row: Any) -> bool:
    """Whether nothing was accepted, read or decided since a row was seen; it stays so until the transaction ends."""
    now = connection.execute(_SEEN.with_for_update(), {"of": row.load_balancer_id}).first()
    return (
        now is not None
        and now.op != Op.DELETE
        and (now.generation, bool(now.read_back), now.reread) == (row.generation, bool(row.read_back), row.reread)
    )
