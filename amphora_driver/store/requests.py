# SPDX-License-Identifier: Apache-2.0
"""An accepted call becomes wanted state and a job, in one transaction.

Invariant: when a method returns, the wanted rows are complete, a new generation is due, every object Octavia has put
PENDING is noted as waiting for exactly that generation, and the call stands in the history. When it raises, nothing
was written.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa

from amphora_driver import failpoints
from amphora_driver.database.engine import set_commit_marker
from amphora_driver.database.tables import DUE_NOW, request, work
from amphora_driver.errors import UnknownObject
from amphora_driver.model import from_octavia, l7policy_positions
from amphora_driver.model.enums import Kind
from amphora_driver.model.loadbalancer import HealthMonitor, L7Policy, Listener, LoadBalancer, Member, Node, Pool
from amphora_driver.model.secret_refs import SECRET_FIELDS, SecretName, secrets_in_fields, secrets_of_object
from amphora_driver.store import desired_objects, failovers, pending_rereads, sealed_secrets, status_outbox
from amphora_driver.store.sealed_secrets import SealedSecret

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from amphora_driver.database.engine import Database

    Check = Callable[[Node], None]
    Fits = Callable[[Node, LoadBalancer], None]
    Contents = Mapping[SecretName, SealedSecret]


# Objects as the history calls them.
_KIND_NAMES = {kind: kind.value[:-1] for kind in Kind} | {Kind.L7POLICY: "l7policy"}
LOG = logging.getLogger(__name__)
# Requests remembered for a load balancer: about so many of its newest ones.
_HISTORY_LENGTH = 200
_PURGE_INTERVAL = 50


class Op:
    """What a job is to do; later words beat earlier ones."""

    APPLY = "apply"
    DELETE = "delete"
    # The row is a pool of warm spares (store/spare_pools.py), not a load balancer.
    SPARES = "spares"


class RequestRecorder:
    """Records what users want.

    Args:
        database: where to.
        check: raises `UnsupportedOption` for an object that cannot be served; called with what the object *becomes*,
            and with what it hangs under where only both together say whether it can.
        fits: the same for a listener or pool that its load balancer, as `wanted.around` has it, cannot serve.
    """

    def __init__(self, database: Database, check: Check, fits: Fits | None = None) -> None:
        self._database = database
        self._check = check
        self._fits = fits

    def create_load_balancer(self, tree: LoadBalancer, *, read_back: bool, contents: Contents | None = None) -> None:
        """A new load balancer.

        Args:
            tree: as far as it is known.
            read_back: the tree is incomplete, it is read from Octavia after the commit.
            contents: what came of the secrets it uses.
        """
        nodes = list(desired_objects.iter_subtree(tree))
        for node in nodes:
            self._check(node)
            if self._fits:
                self._fits(node, tree)

        def write(connection: sa.Connection) -> None:
            connection.execute(
                work.insert().values(
                    load_balancer_id=tree.id,
                    project_id=tree.project_id,
                    topology=tree.profile.topology.value,
                    compute=tree.profile.compute,
                    network=tree.profile.network,
                    op=Op.APPLY,
                    generation=1,
                    committed=0,
                    applied=0,
                    read_back=read_back,
                    dirty=True,
                    free_at=0.0,
                    attempts=0,
                    epoch=0,
                )
            )
            desired_objects.insert_objects(connection, tree.id, 1, nodes)
            sealed_secrets.replace_secrets(connection, tree.id, contents or {})
            status_outbox.expect_confirmation(
                connection, tree.id, 1, [(desired_objects.kind_of(node), node.id) for node in nodes]
            )
            _record_request(connection, tree.id, 1, "create loadbalancer", tree.id)

        self._database.write(write)

    def delete_load_balancer(self, load_balancer_id: str) -> None:
        """The load balancer and everything in it."""
        now = self._database.now()

        def write(connection: sa.Connection) -> None:
            generation = _advance(connection, load_balancer_id, op=Op.DELETE)
            everything = [
                (Kind.LOAD_BALANCER, load_balancer_id),
                *desired_objects.list_descendants(connection, [load_balancer_id]),
            ]
            desired_objects.mark_removed(connection, generation, [object_id for _, object_id in everything])
            sealed_secrets.delete_secrets_of_load_balancer(connection, load_balancer_id)
            pending_rereads.cancel_reread(connection, load_balancer_id)
            failovers.finish_failovers(connection, load_balancer_id, failovers.FailoverOutcome.GONE, now)
            status_outbox.expect_confirmation(connection, load_balancer_id, generation, everything)
            _record_request(connection, load_balancer_id, generation, "delete loadbalancer", load_balancer_id)

        self._database.write(write)

    def fail_over(self, load_balancer_id: str) -> None:
        """Every amphora of the load balancer is to be replaced by a new one."""
        now = self._database.now()

        def write(connection: sa.Connection) -> None:
            generation = _advance(connection, load_balancer_id)
            why = failovers.FailoverTrigger(cause=failovers.Cause.ASKED, reason="fail-over was asked for")
            failovers.open_failovers(connection, load_balancer_id, None, why, now)
            status_outbox.expect_confirmation(
                connection, load_balancer_id, generation, [(Kind.LOAD_BALANCER, load_balancer_id)]
            )
            _record_request(connection, load_balancer_id, generation, "failover loadbalancer", load_balancer_id)

        self._database.write(write)

    def create(
        self, kind: Kind, node: Node, *, for_listener: str | None = None, contents: Contents | None = None
    ) -> str:
        """A new object below a load balancer, whose id is returned.

        Args:
            kind: what it is.
            node: the object, with children where it was given any.
            for_listener: the listener a new pool becomes the default pool of.
            contents: what came of the secrets it uses; the rest is read from Octavia after its commit.
        """
        nodes = list(desired_objects.iter_subtree(node))
        for one in nodes:
            self._check(one)

        def write(connection: sa.Connection) -> str:
            load_balancer_id, generation = _advance_owner(connection, str(desired_objects.parent_id(node)))
            self._check_fit(connection, load_balancer_id, node)
            self._check_place(connection, load_balancer_id, node)
            whole = list(nodes)
            if isinstance(node, L7Policy):
                whole[0] = _shift_policies(connection, generation, node)
            around = _affected_by_new(connection, generation, node)
            if isinstance(node, Member) and ":" in node.address:
                self._check_spelling(connection, node)
            desired_objects.insert_objects(connection, load_balancer_id, generation, whole)
            _sync_secrets(connection, load_balancer_id, None, node, (), contents or {})
            if for_listener is not None:
                listener: Listener = desired_objects.load_object(connection, Kind.LISTENER, for_listener)
                served = msgspec.structs.replace(listener, default_pool_id=node.id)
                if nodes[1:]:
                    self._check_fit(connection, load_balancer_id, served)
                desired_objects.update_objects(connection, generation, [served])
                around.append((Kind.LISTENER, for_listener))
            new = [(desired_objects.kind_of(one), one.id) for one in nodes]
            self._finish(
                connection, load_balancer_id, generation, around, f"create {_KIND_NAMES[kind]}", node.id, new=new
            )
            return load_balancer_id

        return self._database.write(write)

    def update(self, kind: Kind, object_id: str, fields: Mapping[str, Any], *, contents: Contents | None = None) -> str:
        """Some fields of an object change, by the names of the model; returns the load balancer's id.

        Args:
            kind: what it is.
            object_id: which one.
            fields: the new values.
            contents: what came of the secrets these fields name; the rest is read from Octavia after its commit.
        """
        if kind is Kind.L7RULE:
            # The check of a regular expression must not hold the locks of the transaction, where its result is cached.
            rule = self._database.read(lambda connection: desired_objects.load_object(connection, kind, object_id))
            self._check(from_octavia.apply_changes(rule, fields))

        def write(connection: sa.Connection) -> str:
            load_balancer_id, generation = _advance_owner(connection, object_id)
            before = desired_objects.load_object(connection, kind, object_id)
            after = from_octavia.apply_changes(before, fields)
            self._check(after)
            self._check_fit(connection, load_balancer_id, after, getattr(before, "default_pool_id", None))
            if isinstance(after, L7Policy) and after.position != before.position:
                after = _shift_policies(connection, generation, after)
            desired_objects.update_objects(connection, generation, [after])
            if kind is Kind.LOAD_BALANCER:
                # Octavia changes the security groups of a VIP without a word to us.
                pending_rereads.request_object_reread(connection, load_balancer_id, kind, object_id)
            _sync_secrets(connection, load_balancer_id, before, after, fields, contents or {})
            _reread_unread_listeners(connection, load_balancer_id, before)
            touched = [(kind, object_id), *_ancestors(connection, after)]
            self._finish(connection, load_balancer_id, generation, touched, f"update {_KIND_NAMES[kind]}", object_id)
            return load_balancer_id

        return self._database.write(write)

    def delete(self, kind: Kind, object_id: str) -> str:
        """An object and everything below it goes; returns the load balancer's id."""

        def write(connection: sa.Connection) -> str:
            load_balancer_id, generation = _advance_owner(connection, object_id)
            node = desired_objects.load_object(connection, kind, object_id)
            gone = [(kind, object_id), *desired_objects.list_descendants(connection, [object_id])]
            touched = gone + _ancestors(connection, node)
            if isinstance(node, Pool):
                _clear_pool_references(connection, generation, node)
            desired_objects.mark_removed(connection, generation, [one for _, one in gone])
            if isinstance(node, L7Policy):
                _renumber_policies(connection, generation, node.listener_id)
            if type(node) in SECRET_FIELDS:
                sealed_secrets.delete_secrets_of_objects(connection, [object_id])
                _reread_unread_listeners(connection, load_balancer_id, node)
            self._finish(connection, load_balancer_id, generation, touched, f"delete {_KIND_NAMES[kind]}", object_id)
            return load_balancer_id

        return self._database.write(write)

    def set_members(self, pool_id: str, members: Sequence[tuple[str, Callable[[], Member], Mapping[str, Any]]]) -> str:
        """The members of a pool become exactly these; returns the load balancer's id.

        Args:
            pool_id: the pool.
            members: for each wanted member its id, a way to build it if it is new, and the fields named for it if not.
        """

        def write(connection: sa.Connection) -> str:
            load_balancer_id, generation = _advance_owner(connection, pool_id)
            pool: Pool = desired_objects.load_object(connection, Kind.POOL, pool_id)
            before = desired_objects.load_children(connection, pool_id, Kind.MEMBER)
            added: list[Node] = []
            changed: list[Node] = []
            for member_id, build, fields in members:
                if member_id not in before:
                    added.append(build())
                elif (after := from_octavia.apply_changes(before[member_id], fields)) != before[member_id]:
                    changed.append(after)
            for node in (*added, *changed):
                self._check(node)
            now = {**before, **{node.id: node for node in (*changed, *added)}}
            whole = msgspec.structs.replace(pool, members=tuple(now[member_id] for member_id, _, _ in members))
            self._check(whole)
            self._check_virtual(connection, load_balancer_id, whole)
            kept = {member_id for member_id, _, _ in members}
            gone = [member_id for member_id in before if member_id not in kept]
            desired_objects.insert_objects(connection, load_balancer_id, generation, added)
            desired_objects.update_objects(connection, generation, changed)
            desired_objects.mark_removed(connection, generation, gone)
            # Octavia puts every member of the request PENDING, also those that come out unchanged.
            touched = [(Kind.MEMBER, one) for one in (*kept, *gone) if one in before] + _ancestors(connection, pool)
            touched.append((Kind.POOL, pool_id))
            new = [(Kind.MEMBER, node.id) for node in added]
            self._finish(connection, load_balancer_id, generation, touched, "set members", pool_id, new=new)
            return load_balancer_id

        return self._database.write(write)

    def _check_spelling(self, connection: sa.Connection, member: Member) -> None:
        """Octavia compares addresses as text, but those of IPv6 can be written in many ways: look at the whole pool."""
        pool: Pool = desired_objects.load_object(connection, Kind.POOL, member.pool_id)
        others = desired_objects.load_children(connection, member.pool_id, Kind.MEMBER)
        self._check(msgspec.structs.replace(pool, members=(*others.values(), member)))

    def _check_place(self, connection: sa.Connection, load_balancer_id: str, node: Node) -> None:
        """What a new object hangs under may be nothing for it: look at both together."""
        if isinstance(node, L7Policy):
            listener: Listener = desired_objects.load_object(connection, Kind.LISTENER, node.listener_id)
            self._check(msgspec.structs.replace(listener, l7policies=(node,)))
        elif isinstance(node, HealthMonitor):
            pool: Pool = desired_objects.load_object(connection, Kind.POOL, node.pool_id)
            self._check(msgspec.structs.replace(pool, healthmonitor=node))
        elif isinstance(node, Member):
            pool = desired_objects.load_object(connection, Kind.POOL, node.pool_id)
            self._check_virtual(connection, load_balancer_id, msgspec.structs.replace(pool, members=(node,)))

    def _check_virtual(self, connection: sa.Connection, load_balancer_id: str, pool: Pool) -> None:
        """Members that packets reach unchanged depend on the VIPs: only their calls read the load balancer."""
        if pool.uses_l4:
            self._check_fit(connection, load_balancer_id, pool)

    def _check_fit(
        self, connection: sa.Connection, load_balancer_id: str, node: Node, known: str | None = None
    ) -> None:
        """Only listeners and pools depend on the load balancer: calls about anything else do not read it."""
        if self._fits and isinstance(node, LoadBalancer):
            self._fits(node, node)
        elif self._fits and isinstance(node, (Listener, Pool)):
            self._fits(node, desired_objects.load_l4_context(connection, load_balancer_id, node, known))

    def _finish(
        self,
        connection: sa.Connection,
        load_balancer_id: str,
        generation: int,
        touched: Iterable[tuple[Kind, str]],
        action: str,
        object_id: str,
        *,
        new: Iterable[tuple[Kind, str]] = (),
    ) -> None:
        everything = [*touched, (Kind.LOAD_BALANCER, load_balancer_id)]
        status_outbox.expect_confirmation(connection, load_balancer_id, generation, everything, new)
        _record_request(connection, load_balancer_id, generation, action, object_id)


# What every call of Octavia's needs is built once: putting a statement together costs more than running it.
_LOCK = sa.select(work.c.generation, work.c.op).where(work.c.load_balancer_id == sa.bindparam("of")).with_for_update()
# Only the row of `work` is locked: whoever changes anything of a load balancer does so first.
_LOCK_OWNER = (
    sa.select(work.c.load_balancer_id, work.c.generation, work.c.op)
    .where(work.c.load_balancer_id == desired_objects.LOAD_BALANCER_ID_OF_OBJECT.scalar_subquery())
    .with_for_update()
)
_ADVANCE = (
    work.update()
    .where(work.c.load_balancer_id == sa.bindparam("of"))
    .values(
        generation=sa.bindparam("new_generation"),
        op=sa.bindparam("new_op"),
        dirty=True,
        free_at=DUE_NOW,
        attempts=0,
        error=None,
    )
)
_INSERT_REQUEST = request.insert()
_REQUEST_MARKER = sa.select(request.c.id).where(
    request.c.id == sa.bindparam("row"), request.c.load_balancer_id == sa.bindparam("of")
)
_PURGE_REQUESTS = request.delete().where(
    request.c.load_balancer_id == sa.bindparam("of"), request.c.generation <= sa.bindparam("too_old")
)


def _advance_owner(connection: sa.Connection, object_id: str) -> tuple[str, int]:
    """The load balancer an object belongs to and its next generation; its job is made due at once.

    Raises:
        UnknownObject: nothing is recorded under this id, or it is removed.
    """
    row = connection.execute(_LOCK_OWNER, {"of": object_id}).first()
    if row is None:
        # Either it or its load balancer is not there: one of these says which.
        load_balancer_id = desired_objects.load_balancer_id_of(connection, object_id)
        return load_balancer_id, _advance(connection, load_balancer_id)
    return row.load_balancer_id, _write_generation(connection, row.load_balancer_id, row, Op.APPLY)


def _advance(connection: sa.Connection, load_balancer_id: str, op: str = Op.APPLY) -> int:
    """The next generation of a load balancer, and its job made due at once."""
    row = connection.execute(_LOCK, {"of": load_balancer_id}).first()
    if row is None:
        raise UnknownObject(
            f"change load balancer {load_balancer_id}",
            "this provider has no record of it",
            "An operator can read it in again from Octavia.",
        )
    return _write_generation(connection, load_balancer_id, row, op)


def _write_generation(connection: sa.Connection, load_balancer_id: str, row: Any, op: str) -> int:
    generation = int(row.generation) + 1
    todo = Op.DELETE if Op.DELETE in (row.op, op) else op
    connection.execute(_ADVANCE, {"of": load_balancer_id, "new_generation": generation, "new_op": todo})
    return generation


def _record_request(
    connection: sa.Connection, load_balancer_id: str, generation: int, action: str, object_id: str
) -> None:
    added = connection.execute(
        _INSERT_REQUEST,
        {
            "load_balancer_id": load_balancer_id,
            "generation": generation,
            "action": action,
            "object_id": object_id,
            "accepted_at": time.time(),
        },
    )
    # No two calls ever have the same row.
    (row,) = added.inserted_primary_key or (None,)
    set_commit_marker(connection, _REQUEST_MARKER, {"row": row, "of": load_balancer_id})
    if generation % _PURGE_INTERVAL == 0:
        # A generation is one request.
        connection.execute(_PURGE_REQUESTS, {"of": load_balancer_id, "too_old": generation - _HISTORY_LENGTH})
    # The last thing of every call.
    failpoints.reach(failpoints.Point.INTENT_WRITTEN)


def _affected_by_new(connection: sa.Connection, generation: int, node: Node) -> list[tuple[Kind, str]]:
    """What a new object brings into motion: its ancestors, and a member whose place it takes.

    Octavia's own table takes an address and port of a pool once. If we still know another member there, Octavia never
    kept it: it rolled the creation back after our answer. We let go of it without anybody having deleted it.
    """
    if not isinstance(node, Member):
        return _ancestors(connection, node)
    listeners, ghosts = desired_objects.load_member_context(connection, node)
    for ghost in ghosts:
        LOG.warning("member %s takes the place of %s, which Octavia never kept", node.id, ghost)
    desired_objects.mark_removed(connection, generation, ghosts)
    found = [(Kind.POOL, node.pool_id), *((Kind.LISTENER, listener) for listener in listeners)]
    return [*found, *((Kind.MEMBER, ghost) for ghost in ghosts)]


def _ancestors(connection: sa.Connection, node: Node) -> list[tuple[Kind, str]]:
    """What Octavia puts PENDING_UPDATE together with this object: its pool, its policy, every listener that uses it."""
    kind = desired_objects.kind_of(node)
    parent = desired_objects.parent_id(node)
    if kind in (Kind.MEMBER, Kind.HEALTH_MONITOR):
        users = desired_objects.users_of_pool(connection, str(parent))
        return [(Kind.POOL, str(parent)), *((Kind.LISTENER, listener) for _, _, listener in users)]
    if kind is Kind.POOL:
        return [(Kind.LISTENER, listener) for _, _, listener in desired_objects.users_of_pool(connection, node.id)]
    if kind is Kind.L7POLICY:
        return [(Kind.LISTENER, str(parent))]
    if kind is Kind.L7RULE:
        policy = desired_objects.load_object(connection, Kind.L7POLICY, str(parent))
        return [(Kind.L7POLICY, policy.id), (Kind.LISTENER, policy.listener_id)]
    return []


def _sync_secrets(
    connection: sa.Connection,
    load_balancer_id: str,
    before: Node | None,
    after: Node,
    fields: Collection[str],
    contents: Contents,
) -> None:
    """Keep the secrets an object uses now; those whose content is not at hand are read from Octavia.

    Args:
        before: the object as it was; None for a new one.
        fields: those an update names: the user may have changed the content and named the same reference again.
    """
    if type(after) not in SECRET_FIELDS:
        return
    used, used_before = secrets_of_object(after), secrets_of_object(before) if before is not None else {}
    if not used and not used_before:
        return
    missing = sealed_secrets.sync_object_secrets(connection, load_balancer_id, after.id, used, contents)
    # Octavia does not say so when the last SNI certificate is taken away: an update that names none may be that.
    unsaid = isinstance(before, Listener) and before.sni_container_refs and "sni_container_refs" not in fields
    if missing or unsaid or secrets_in_fields(after, fields).keys() - contents.keys():
        pending_rereads.request_object_reread(connection, load_balancer_id, desired_objects.kind_of(after), after.id)


def _reread_unread_listeners(connection: sa.Connection, load_balancer_id: str, changed: Node) -> None:
    """Octavia may hand over now what it did not, if this was the reason: read everything once more.

    Args:
        changed: the object as it was, before its update or removal.
    """
    listeners: Collection[Any] = ()
    if isinstance(changed, Listener):
        listeners = (changed,)
    elif isinstance(changed, Pool) and secrets_of_object(changed):
        listeners = desired_objects.load_children(connection, load_balancer_id, Kind.LISTENER).values()
    if any(one.unread for one in listeners):
        pending_rereads.request_tree_reread(connection, load_balancer_id)


def _shift_policies(connection: sa.Connection, generation: int, policy: L7Policy) -> L7Policy:
    """Shift the policies of the same listener as Octavia does; returns the one they make room for, at its place."""
    before: dict[str, L7Policy] = desired_objects.load_children(connection, policy.listener_id, Kind.L7POLICY)
    now = {one.id: one for one in l7policy_positions.insert_at_position(before.values(), policy)}
    own = now.pop(policy.id)
    desired_objects.update_objects(connection, generation, [one for one in now.values() if one != before[one.id]])
    return own


def _renumber_policies(connection: sa.Connection, generation: int, listener_id: str) -> None:
    """Close the gap a policy has left."""
    before: dict[str, L7Policy] = desired_objects.load_children(connection, listener_id, Kind.L7POLICY)
    desired_objects.update_objects(
        connection, generation, [one for one in l7policy_positions.renumber(before.values()) if one != before[one.id]]
    )


def _clear_pool_references(connection: sa.Connection, generation: int, pool: Pool) -> None:
    """Octavia empties the references to a deleted pool without another call; so do we."""
    for kind, object_id, _ in desired_objects.users_of_pool(connection, pool.id):
        field = "default_pool_id" if kind is Kind.LISTENER else "redirect_pool_id"
        node: Any = desired_objects.load_object(connection, kind, object_id)
        desired_objects.update_objects(connection, generation, [msgspec.structs.replace(node, **{field: None})])
