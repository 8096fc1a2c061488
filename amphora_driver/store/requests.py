# SPDX-License-Identifier: Apache-2.0
"""Record accepted calls: desired state and job, in one transaction.

Invariant: when a method returns, the desired rows are complete and a new generation is due. Every object that is
PENDING in Octavia waits for exactly that generation, and the history contains the call. When a method raises, it has
written nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from amphora_driver import failpoints
from amphora_driver.database.engine import Database, set_commit_marker
from amphora_driver.database.tables import DUE_NOW, job, request
from amphora_driver.errors import UnknownObject
from amphora_driver.model import from_octavia, l7policy_positions
from amphora_driver.model.enums import Kind
from amphora_driver.model.loadbalancer import HealthMonitor, L7Policy, Listener, LoadBalancer, Member, Node, Pool
from amphora_driver.model.secret_refs import SECRET_FIELDS, SecretName, secrets_in_fields, secrets_of_object
from amphora_driver.notifications.outbox import Announce, Event, announce_nothing
from amphora_driver.store import desired_objects, failovers, resizes, resyncs, sealed_secrets, status_outbox
from amphora_driver.store.generations import Op, commit_last_generation, update_job
from amphora_driver.store.resizes import Resize
from amphora_driver.store.sealed_secrets import SealedSecret

Validate = Callable[[Node], None]
ChooseProfile = Callable[[LoadBalancer], LoadBalancer]
Compare = Callable[[LoadBalancer, LoadBalancer], bool]
ValidateFit = Callable[[Node, LoadBalancer], None]
Contents = Mapping[SecretName, SealedSecret]

# The history of requests names kinds in the singular, for example `l7policy`.
_KIND_NAMES = {kind: kind.value[:-1] for kind in Kind} | {Kind.L7POLICY: "l7policy"}
LOG = logging.getLogger(__name__)
# The history of a load balancer keeps the requests of the last _HISTORY_LENGTH generations. Older requests are deleted
# at every _PURGE_INTERVAL-th generation.
_HISTORY_LENGTH = 200
_PURGE_INTERVAL = 50
_RESIZE = "resize"


class RequestRecorder:
    """Records users' requests.

    Args:
        validate: raises `UnsupportedOption` for an unsupported object. It receives the *changed* object, together with
            its parent if the result depends on both.
        validate_fit: the same for a listener or pool in its load balancer (see `desired_objects.load_l4_context`).
        announce: records a notification for other services in the transaction of the request.
    """

    def __init__(
        self,
        database: Database,
        validate: Validate,
        validate_fit: ValidateFit | None = None,
        announce: Announce = announce_nothing,
    ) -> None:
        self._database, self._announce = database, announce
        self._validate = validate
        self._validate_load_balancer = validate_fit

    def create_load_balancer(self, tree: LoadBalancer, *, read_back: bool, contents: Contents | None = None) -> None:
        """Record a new load balancer; `read_back`: Octavia delivered an incomplete tree."""
        nodes = list(desired_objects.iter_subtree(tree))
        for node in nodes:
            self._validate(node)
        self._validate_tree(tree)

        row: dict[str, Any] = {"compute": tree.profile.compute, "network": tree.profile.network}
        row |= {"load_balancer_id": tree.id, "project_id": tree.project_id, "topology": tree.profile.topology.value}

        def write(connection: sa.Connection) -> None:
            connection.execute(job.insert().values(**row, op=Op.APPLY, generation=1, read_back=read_back))
            desired_objects.insert_objects(connection, tree.id, 1, nodes)
            sealed_secrets.replace_secrets(connection, tree.id, contents or {})
            pending = [(desired_objects.kind_of(node), node.id) for node in nodes]
            self._announce(connection, tree.id, 1, Event.CREATE)
            _finish(connection, tree.id, 1, pending, "create loadbalancer", tree.id)

        self._database.write(write)

    def delete_load_balancer(self, load_balancer_id: str) -> None:
        """Record the deletion of a load balancer with all its objects."""
        now = self._database.now()

        def write(connection: sa.Connection) -> None:
            generation = _advance(connection, load_balancer_id, op=Op.DELETE)
            below = desired_objects.list_descendants(connection, [load_balancer_id])
            desired_objects.mark_removed(connection, generation, [load_balancer_id, *(one for _, one in below)])
            sealed_secrets.delete_secrets_of_load_balancer(connection, load_balancer_id)
            resyncs.cancel_reread(connection, load_balancer_id)
            failovers.finish_failovers(connection, load_balancer_id, failovers.FailoverOutcome.GONE, now)
            self._announce(connection, load_balancer_id, generation, Event.DELETE)
            _finish(connection, load_balancer_id, generation, below, "delete loadbalancer", load_balancer_id)

        self._database.write(write)

    def fail_over(self, load_balancer_id: str) -> None:
        """Record a fail-over: every amphora of the load balancer is replaced."""
        now = self._database.now()

        def write(connection: sa.Connection) -> None:
            generation = _advance(connection, load_balancer_id)
            trigger = failovers.FailoverTrigger(cause=failovers.Cause.ASKED, reason="Octavia requested a fail-over")
            failovers.open_failovers(connection, load_balancer_id, None, trigger, now)
            _finish(connection, load_balancer_id, generation, (), "failover loadbalancer", load_balancer_id)

        self._database.write(write)

    def preview_resize(self, load_balancer_id: str, choose: ChooseProfile, needs_new_amphorae: Compare) -> Resize:
        """Return the resize that `resize` would record, with the same refusals; write nothing."""

        def read(connection: sa.Connection) -> Resize:
            found = resizes.prepare_resize(connection, load_balancer_id, choose, needs_new_amphorae)
            self._validate_tree(found.tree)
            return found

        return self._database.read(read)

    def resize(
        self,
        load_balancer_id: str,
        choose: ChooseProfile,
        needs_new_amphorae: Compare,
        trigger: failovers.FailoverTrigger,
        *,
        pending: bool,
    ) -> Resize:
        """Record another profile, and the fail-over of all amphorae if the profile needs other amphorae.

        Args:
            load_balancer_id: the load balancer.
            choose: see `resizes.prepare_resize`, which also has the errors; so has `needs_new_amphorae`.
            trigger: the cause of the fail-over.
            pending: Octavia has set the load balancer PENDING_UPDATE, and waits for the result.
        """
        now = self._database.now()

        def write(connection: sa.Connection) -> Resize:
            generation = _advance(connection, load_balancer_id)
            found = resizes.prepare_resize(connection, load_balancer_id, choose, needs_new_amphorae)
            self._validate_tree(found.tree)
            desired_objects.update_objects(connection, generation, [found.tree])
            update_job(connection, load_balancer_id, topology=found.tree.profile.topology.value)
            if found.replaced:
                failovers.open_failovers(connection, load_balancer_id, found.replaced, trigger, now)
            if pending:
                _finish(connection, load_balancer_id, generation, (), _RESIZE, load_balancer_id)
            else:
                # Octavia takes no part in a resize and cannot revert the resize. So the driver commits this generation
                # at once.
                commit_last_generation(connection, load_balancer_id)
                _record_request(connection, load_balancer_id, generation, _RESIZE, load_balancer_id)
            return found

        return self._database.write(write)

    def _validate_tree(self, tree: LoadBalancer) -> None:
        """Validate every object of a load balancer in its load balancer."""
        if self._validate_load_balancer:
            for node in desired_objects.iter_subtree(tree):
                self._validate_load_balancer(node, tree)

    def create_object(
        self, kind: Kind, node: Node, *, for_listener: str | None = None, contents: Contents | None = None
    ) -> str:
        """Record a new object with its children and return its load balancer's id.

        `for_listener` is a listener that gets the new pool as default pool. Secrets that are not in `contents` are read
        from Octavia after its commit.
        """
        nodes = list(desired_objects.iter_subtree(node))
        for one in nodes:
            self._validate(one)

        def write(connection: sa.Connection) -> str:
            load_balancer_id, generation = _advance_owner(connection, str(desired_objects.parent_id(node)))
            self._validate_fit(connection, load_balancer_id, node)
            self._validate_with_parent(connection, load_balancer_id, node)
            whole = list(nodes)
            if isinstance(node, L7Policy):
                whole[0] = _shift_policies(connection, generation, node)
            touched = _affected_by_new(connection, generation, node)
            if isinstance(node, Member) and ":" in node.address:
                self._validate_addresses(connection, node)
            desired_objects.insert_objects(connection, load_balancer_id, generation, whole)
            _sync_secrets(connection, load_balancer_id, None, node, (), contents or {})
            if for_listener is not None:
                listener: Listener = desired_objects.load_object(connection, Kind.LISTENER, for_listener)
                served = msgspec.structs.replace(listener, default_pool_id=node.id)
                if nodes[1:]:
                    self._validate_fit(connection, load_balancer_id, served)
                desired_objects.update_objects(connection, generation, [served])
                touched.append((Kind.LISTENER, for_listener))
            new = [(desired_objects.kind_of(one), one.id) for one in nodes]
            _finish(connection, load_balancer_id, generation, touched, f"create {_KIND_NAMES[kind]}", node.id, new)
            return load_balancer_id

        return self._database.write(write)

    def update_object(
        self, kind: Kind, object_id: str, fields: Mapping[str, Any], *, contents: Contents | None = None
    ) -> str:
        """Record new values of an object's fields and return its load balancer's id.

        Secrets that are not in `contents` are read from Octavia after its commit.
        """
        if kind is Kind.L7RULE:
            # The validation of a regular expression is slow, so it runs before the transaction and its locks. The
            # validation inside the transaction finds this result in a cache.
            rule = self._database.read(lambda connection: desired_objects.load_object(connection, kind, object_id))
            self._validate(from_octavia.apply_changes(rule, fields))

        def write(connection: sa.Connection) -> str:
            load_balancer_id, generation = _advance_owner(connection, object_id)
            before = desired_objects.load_object(connection, kind, object_id)
            after = from_octavia.apply_changes(before, fields)
            self._validate(after)
            self._validate_fit(connection, load_balancer_id, after, getattr(before, "default_pool_id", None))
            if isinstance(after, L7Policy) and after.position != before.position:
                after = _shift_policies(connection, generation, after)
            desired_objects.update_objects(connection, generation, [after])
            if kind is Kind.LOAD_BALANCER:
                # Octavia does not report changed security groups of a VIP to the driver. So each other change of the
                # load balancer causes a read of the load balancer from Octavia.
                resyncs.request_object_reread(connection, load_balancer_id, kind, object_id)
                self._announce(connection, load_balancer_id, generation, Event.UPDATE)
            _sync_secrets(connection, load_balancer_id, before, after, fields, contents or {})
            _reread_unread_listeners(connection, load_balancer_id, before)
            touched = [(kind, object_id), *desired_objects.list_ancestors(connection, after)]
            _finish(connection, load_balancer_id, generation, touched, f"update {_KIND_NAMES[kind]}", object_id)
            return load_balancer_id

        return self._database.write(write)

    def delete_object(self, kind: Kind, object_id: str) -> str:
        """Record the deletion of an object with its descendants; return its load balancer's id."""

        def write(connection: sa.Connection) -> str:
            load_balancer_id, generation = _advance_owner(connection, object_id)
            node = desired_objects.load_object(connection, kind, object_id)
            gone = [(kind, object_id), *desired_objects.list_descendants(connection, [object_id])]
            touched = gone + desired_objects.list_ancestors(connection, node)
            if isinstance(node, Pool):
                desired_objects.clear_pool_references(connection, generation, node)
            desired_objects.mark_removed(connection, generation, [one for _, one in gone])
            if isinstance(node, L7Policy):
                _renumber_policies(connection, generation, node.listener_id)
            if type(node) in SECRET_FIELDS:
                sealed_secrets.delete_secrets_of_objects(connection, [object_id])
                _reread_unread_listeners(connection, load_balancer_id, node)
            _finish(connection, load_balancer_id, generation, touched, f"delete {_KIND_NAMES[kind]}", object_id)
            return load_balancer_id

        return self._database.write(write)

    def set_members(self, pool_id: str, members: Sequence[tuple[str, Callable[[], Member], Mapping[str, Any]]]) -> str:
        """Replace the members of a pool and return the load balancer's id.

        `members` has for each member its id, a function that builds a new member, and the fields for an existing
        member.
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
                self._validate(node)
            now = {**before, **{node.id: node for node in (*changed, *added)}}
            whole = msgspec.structs.replace(pool, members=tuple(now[member_id] for member_id, _, _ in members))
            self._validate(whole)
            self._validate_l4_pool(connection, load_balancer_id, whole)
            kept = {member_id for member_id, _, _ in members}
            gone = [member_id for member_id in before if member_id not in kept]
            desired_objects.insert_objects(connection, load_balancer_id, generation, added)
            desired_objects.update_objects(connection, generation, changed)
            desired_objects.mark_removed(connection, generation, gone)
            # Octavia sets even unchanged members of a batch to PENDING, so each of them needs a status.
            touched = [(Kind.MEMBER, one) for one in (*kept, *gone) if one in before]
            touched += [*desired_objects.list_ancestors(connection, pool), (Kind.POOL, pool_id)]
            new = [(Kind.MEMBER, node.id) for node in added]
            _finish(connection, load_balancer_id, generation, touched, "set members", pool_id, new)
            return load_balancer_id

        return self._database.write(write)

    def _validate_addresses(self, connection: sa.Connection, member: Member) -> None:
        """Find duplicate IPv6 members. Octavia compares text, but one address has many notations."""
        pool: Pool = desired_objects.load_object(connection, Kind.POOL, member.pool_id)
        others = desired_objects.load_children(connection, member.pool_id, Kind.MEMBER)
        self._validate(msgspec.structs.replace(pool, members=(*others.values(), member)))

    def _validate_with_parent(self, connection: sa.Connection, load_balancer_id: str, node: Node) -> None:
        """Validate a new object together with its parent, which may not support it."""
        if isinstance(node, L7Policy):
            listener: Listener = desired_objects.load_object(connection, Kind.LISTENER, node.listener_id)
            self._validate(msgspec.structs.replace(listener, l7policies=(node,)))
        elif isinstance(node, HealthMonitor):
            pool: Pool = desired_objects.load_object(connection, Kind.POOL, node.pool_id)
            self._validate(msgspec.structs.replace(pool, healthmonitor=node))
        elif isinstance(node, Member):
            pool = desired_objects.load_object(connection, Kind.POOL, node.pool_id)
            self._validate_l4_pool(connection, load_balancer_id, msgspec.structs.replace(pool, members=(node,)))

    def _validate_l4_pool(self, connection: sa.Connection, load_balancer_id: str, pool: Pool) -> None:
        """Validate UDP and SCTP members, which must have the address family of the VIPs."""
        if pool.uses_l4:
            self._validate_fit(connection, load_balancer_id, pool)

    def _validate_fit(
        self, connection: sa.Connection, load_balancer_id: str, node: Node, known: str | None = None
    ) -> None:
        """Validate a listener or pool in its load balancer; other objects do not depend on it."""
        validate = self._validate_load_balancer
        if validate and isinstance(node, LoadBalancer):
            validate(node, node)
        elif validate and isinstance(node, (Listener, Pool)):
            validate(node, desired_objects.load_l4_context(connection, load_balancer_id, node, known))


_LOCK = sa.select(job.c.generation, job.c.op).where(job.c.load_balancer_id == sa.bindparam("of")).with_for_update()
_LOCK_OWNER = (
    sa.select(job.c.load_balancer_id, job.c.generation, job.c.op)
    .where(job.c.load_balancer_id == desired_objects.LOAD_BALANCER_ID_OF_OBJECT.scalar_subquery())
    .with_for_update()
)
_ADVANCE = (
    job.update()
    .where(job.c.load_balancer_id == sa.bindparam("of"))
    .values(generation=sa.bindparam("new_generation"), op=sa.bindparam("new_op"))
    .values(dirty=True, due_at=DUE_NOW, attempts=0, error=None)
)
_REQUEST_MARKER = sa.select(request.c.id).where(
    request.c.id == sa.bindparam("row"), request.c.load_balancer_id == sa.bindparam("of")
)
_PURGE_REQUESTS = request.delete().where(
    request.c.load_balancer_id == sa.bindparam("of"), request.c.generation <= sa.bindparam("too_old")
)


def _advance_owner(connection: sa.Connection, object_id: str) -> tuple[str, int]:
    """Make the job of an object's load balancer due; return the load balancer's id and its new generation."""
    row = connection.execute(_LOCK_OWNER, {"of": object_id}).first()
    if row is None:
        # The object or its load balancer is missing. One of the next two calls raises an error that names the missing
        # object.
        load_balancer_id = desired_objects.load_balancer_id_of(connection, object_id)
        return load_balancer_id, _advance(connection, load_balancer_id)
    return row.load_balancer_id, _write_generation(connection, row.load_balancer_id, row, Op.APPLY)


def _advance(connection: sa.Connection, load_balancer_id: str, op: str = Op.APPLY) -> int:
    """Make the job of a load balancer due; return its new generation."""
    row = connection.execute(_LOCK, {"of": load_balancer_id}).first()
    if row is None:
        raise UnknownObject(
            f"change load balancer {load_balancer_id}",
            "this provider has no record of it",
            "An operator can restore it from Octavia: amphoractl resync.",
        )
    return _write_generation(connection, load_balancer_id, row, op)


def _write_generation(connection: sa.Connection, load_balancer_id: str, row: Any, op: str) -> int:
    generation = int(row.generation) + 1
    merged = Op.DELETE if Op.DELETE in (row.op, op) else op
    connection.execute(_ADVANCE, {"of": load_balancer_id, "new_generation": generation, "new_op": merged})
    return generation


def _finish(
    connection: sa.Connection,
    load_balancer_id: str,
    generation: int,
    touched: Iterable[tuple[Kind, str]],
    action: str,
    object_id: str,
    new: Iterable[tuple[Kind, str]] = (),
) -> None:
    """Record that Octavia's PENDING objects wait for the generation, and the request in the history."""
    everything = [*touched, (Kind.LOAD_BALANCER, load_balancer_id)]
    status_outbox.expect_confirmation(connection, load_balancer_id, generation, everything, new)
    _record_request(connection, load_balancer_id, generation, action, object_id)


def _record_request(
    connection: sa.Connection, load_balancer_id: str, generation: int, action: str, object_id: str
) -> None:
    accepted = {"load_balancer_id": load_balancer_id, "generation": generation, "accepted_at": time.time()}
    added = connection.execute(request.insert(), {**accepted, "action": action, "object_id": object_id})
    # If the connection is lost during COMMIT, the inserted row proves that the transaction was committed.
    (row,) = added.inserted_primary_key or (None,)
    set_commit_marker(connection, _REQUEST_MARKER, {"row": row, "of": load_balancer_id})
    if generation % _PURGE_INTERVAL == 0:
        connection.execute(_PURGE_REQUESTS, {"of": load_balancer_id, "too_old": generation - _HISTORY_LENGTH})
    failpoints.reach(failpoints.Point.INTENT_WRITTEN)


def _affected_by_new(connection: sa.Connection, generation: int, node: Node) -> list[tuple[Kind, str]]:
    """Return the objects that a new object affects: its ancestors, and members that it replaces.

    Octavia accepts an address and port once per pool. A recorded member with the same address and port is stale,
    because Octavia rolled the member back after the driver's answer. The driver removes it.
    """
    if not isinstance(node, Member):
        return desired_objects.list_ancestors(connection, node)
    listeners, stale = desired_objects.load_member_context(connection, node)
    for member_id in stale:
        LOG.warning(
            "new member %s has the address and port of recorded member %s; the driver removes the recorded member, "
            "because Octavia rolled back the recorded member's creation",
            node.id,
            member_id,
        )
    desired_objects.mark_removed(connection, generation, stale)
    found = [(Kind.POOL, node.pool_id), *((Kind.LISTENER, listener) for listener in listeners)]
    return [*found, *((Kind.MEMBER, member_id) for member_id in stale)]


def _sync_secrets(
    connection: sa.Connection,
    load_balancer_id: str,
    before: Node | None,
    after: Node,
    fields: Collection[str],
    contents: Contents,
) -> None:
    """Store the secrets that an object uses, and request a reread of missing secrets from Octavia.

    `fields` are the updated fields: a user may change a secret's content and set the same reference again.
    """
    if type(after) not in SECRET_FIELDS:
        return
    used, used_before = secrets_of_object(after), secrets_of_object(before) if before is not None else {}
    if not used and not used_before:
        return
    missing = sealed_secrets.sync_object_secrets(connection, load_balancer_id, after.id, used, contents)
    # A missing field usually means no change. But Octavia also omits `sni_container_refs` after the removal of the last
    # SNI certificate, so the listener is read from Octavia.
    is_unclear = isinstance(before, Listener) and before.sni_container_refs and "sni_container_refs" not in fields
    if missing or is_unclear or secrets_in_fields(after, fields).keys() - contents.keys():
        resyncs.request_object_reread(connection, load_balancer_id, desired_objects.kind_of(after), after.id)


def _reread_unread_listeners(connection: sa.Connection, load_balancer_id: str, changed: Node) -> None:
    """Request a reread of the tree if this change may have removed the reason for unread listeners."""
    listeners: Collection[Any] = ()
    if isinstance(changed, Listener):
        listeners = (changed,)
    elif isinstance(changed, Pool) and secrets_of_object(changed):
        listeners = desired_objects.load_children(connection, load_balancer_id, Kind.LISTENER).values()
    if any(one.unread for one in listeners):
        resyncs.request_tree_reread(connection, load_balancer_id)


def _shift_policies(connection: sa.Connection, generation: int, policy: L7Policy) -> L7Policy:
    """Shift the policies of a listener as Octavia does; return the given policy at its final position."""
    before: dict[str, L7Policy] = desired_objects.load_children(connection, policy.listener_id, Kind.L7POLICY)
    now = {one.id: one for one in l7policy_positions.insert_at_position(before.values(), policy)}
    own = now.pop(policy.id)
    desired_objects.update_objects(connection, generation, [one for one in now.values() if one != before[one.id]])
    return own


def _renumber_policies(connection: sa.Connection, generation: int, listener_id: str) -> None:
    """Close the gap in the positions of a listener's policies."""
    before: dict[str, L7Policy] = desired_objects.load_children(connection, listener_id, Kind.L7POLICY)
    now = l7policy_positions.renumber(before.values())
    desired_objects.update_objects(connection, generation, [one for one in now if one != before[one.id]])
