# SPDX-License-Identifier: Apache-2.0
"""What users want, row by row.

Invariant: after every accepted call the rows of a load balancer are complete and right by themselves. One object is
one row (its children are rows of their own), so that a small change to a large load balancer reads and writes a few
small rows. All functions work inside the caller's transaction.

A row changes under the generation that is wanted then, the newest one: so what was read before stays true of all rows
but those of that generation and later ones, which `load_changes_since` tells.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, cast

import msgspec
import sqlalchemy as sa

from amphora_driver.database.tables import wanted_object
from amphora_driver.errors import UnknownObject
from amphora_driver.model.enums import Kind
from amphora_driver.model.loadbalancer import MODEL_CLASSES, L7Policy, L7Rule, Listener, LoadBalancer, Member, Pool

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from amphora_driver.model.loadbalancer import HealthMonitor, Node

_KIND_OF: dict[type, Kind] = {shape: kind for kind, shape in MODEL_CLASSES.items()}
_PARENT_FIELD: dict[Kind, str] = {
    Kind.LISTENER: "loadbalancer_id",
    Kind.POOL: "loadbalancer_id",
    Kind.MEMBER: "pool_id",
    Kind.HEALTH_MONITOR: "pool_id",
    Kind.L7POLICY: "listener_id",
    Kind.L7RULE: "l7policy_id",
}
_REFERENCE_FIELD: dict[Kind, str] = {Kind.LISTENER: "default_pool_id", Kind.L7POLICY: "redirect_pool_id"}
_ENCODER = msgspec.json.Encoder()
_DECODERS: dict[Kind, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(cast("type[Any]", shape)) for kind, shape in MODEL_CLASSES.items()
}
# Databases limit the number of values in one IN (...).
_CHUNK = 500

# What every call of Octavia's needs is built once: putting a statement together costs more than running it.
# `LOAD_BALANCER_ID_OF_OBJECT` is the load balancer of an object, for statements of others.
_IDS: sa.BindParameter[Any] = sa.bindparam("ids", expanding=True)
LOAD_BALANCER_ID_OF_OBJECT = sa.select(wanted_object.c.load_balancer_id).where(
    wanted_object.c.id == sa.bindparam("of"), ~wanted_object.c.removed
)
_ONE = sa.select(wanted_object.c.body).where(
    wanted_object.c.id == sa.bindparam("of"), wanted_object.c.kind == sa.bindparam("of_kind"), ~wanted_object.c.removed
)
_CHILDREN = sa.select(wanted_object.c.id, wanted_object.c.body).where(
    wanted_object.c.parent_id == sa.bindparam("under"),
    wanted_object.c.kind == sa.bindparam("of_kind"),
    ~wanted_object.c.removed,
)
_BELOW = sa.select(wanted_object.c.kind, wanted_object.c.id).where(
    wanted_object.c.parent_id.in_(_IDS), ~wanted_object.c.removed
)
_USERS = sa.select(wanted_object.c.kind, wanted_object.c.id, wanted_object.c.parent_id).where(
    wanted_object.c.refers_to == sa.bindparam("pool"), ~wanted_object.c.removed
)
_TREE = (
    sa.select(wanted_object.c.kind, wanted_object.c.parent_id, wanted_object.c.body)
    .where(wanted_object.c.load_balancer_id == sa.bindparam("of"), ~wanted_object.c.removed)
    .order_by(wanted_object.c.created, wanted_object.c.id)
)
_ALIVE = (
    sa.select(sa.func.count())
    .select_from(wanted_object)
    .where(wanted_object.c.load_balancer_id == sa.bindparam("of"), ~wanted_object.c.removed)
    .scalar_subquery()
)
# The load balancer's own row is always among them, so that the number of all comes from the same moment.
_SINCE = sa.select(
    wanted_object.c.id,
    wanted_object.c.kind,
    wanted_object.c.parent_id,
    wanted_object.c.created,
    wanted_object.c.removed,
    wanted_object.c.body,
    _ALIVE.label("alive"),
).where(
    wanted_object.c.load_balancer_id == sa.bindparam("of"),
    sa.or_(wanted_object.c.generation >= sa.bindparam("known"), wanted_object.c.id == sa.bindparam("of")),
)
# The objects that point at a pool, and the members it has at one address and port: at once.
_AROUND = sa.union_all(
    _USERS,
    sa.select(wanted_object.c.kind, wanted_object.c.id, wanted_object.c.parent_id).where(
        wanted_object.c.parent_id == sa.bindparam("pool"),
        wanted_object.c.kind == Kind.MEMBER.value,
        ~wanted_object.c.removed,
        # The port is followed by another field or ends the object.
        sa.or_(
            *(wanted_object.c.body.contains(sa.bindparam(name, type_=sa.Text())) for name in ("endpoint", "at_the_end"))
        ),
    ),
)
_INSERT = wanted_object.insert()
_UPDATE = (
    wanted_object.update()
    .where(wanted_object.c.id == sa.bindparam("of"))
    .values(
        body=sa.bindparam("new_body"),
        generation=sa.bindparam("new_generation"),
        refers_to=sa.bindparam("new_reference"),
    )
)
_REMOVE = (
    wanted_object.update()
    .where(wanted_object.c.id.in_(_IDS))
    .values(removed=True, generation=sa.bindparam("new_generation"), refers_to=None)
)
_PURGE = wanted_object.delete().where(wanted_object.c.id.in_(_IDS))


class ObjectChange(msgspec.Struct, frozen=True, kw_only=True):
    """One object that may be new, changed or removed.

    Attributes:
        created: the generation it came with.
        node: the object without its children; None if it is not wanted any more.
    """

    id: str
    kind: Kind
    parent_id: str | None
    created: int
    node: Any


def kind_of(node: Node) -> Kind:
    """The kind of a model object."""
    return _KIND_OF[type(node)]


def parent_id(node: Node) -> str | None:
    """The id of the object a node hangs under; None for a load balancer."""
    field = _PARENT_FIELD.get(kind_of(node))
    return None if field is None else cast("str", getattr(node, field))


def iter_subtree(node: Node) -> Iterator[Node]:
    """A node and everything below it, parents first."""
    yield node
    children: Sequence[Node] = ()
    if isinstance(node, LoadBalancer):
        children = (*node.listeners, *node.pools)
    elif isinstance(node, Listener):
        children = node.l7policies
    elif isinstance(node, L7Policy):
        children = node.rules
    elif isinstance(node, Pool):
        children = (*node.members, *((node.healthmonitor,) if node.healthmonitor else ()))
    for child in children:
        yield from iter_subtree(child)


def load_balancer_id_of(connection: sa.Connection, object_id: str) -> str:
    """The id of the load balancer an object belongs to.

    Raises:
        UnknownObject: nothing is recorded under this id, or it is removed.
    """
    found = connection.execute(LOAD_BALANCER_ID_OF_OBJECT, {"of": object_id}).scalar()
    if found is None:
        raise UnknownObject(f"find the load balancer of {object_id}", "nothing is recorded under this id")
    return str(found)


def insert_objects(connection: sa.Connection, load_balancer_id: str, generation: int, nodes: Iterable[Node]) -> None:
    """Write down new objects, each without its children (list those too, `iter_subtree` does)."""
    rows = [_row(load_balancer_id, generation, node) for node in nodes]
    for start in range(0, len(rows), _CHUNK):
        connection.execute(_INSERT, rows[start : start + _CHUNK])


def load_object(connection: sa.Connection, kind: Kind, object_id: str) -> Any:
    """One object without its children.

    Raises:
        UnknownObject: nothing is recorded under this id, or it is removed.
    """
    body = connection.execute(_ONE, {"of": object_id, "of_kind": kind.value}).scalar()
    if body is None:
        raise UnknownObject(f"find {kind.value[:-1]} {object_id}", "nothing is recorded under this id")
    return _DECODERS[kind].decode(body)


def update_objects(connection: sa.Connection, generation: int, nodes: Iterable[Node]) -> None:
    """Replace the attributes of recorded objects."""
    rows = [
        {"of": node.id, "new_body": _body(node), "new_generation": generation, "new_reference": _reference(node)}
        for node in nodes
    ]
    if rows:
        connection.execute(_UPDATE, rows)


def load_children(connection: sa.Connection, parent: str, kind: Kind) -> dict[str, Any]:
    """The objects of one kind that hang under a parent, by id."""
    rows = connection.execute(_CHILDREN, {"under": parent, "of_kind": kind.value})
    return {row.id: _DECODERS[kind].decode(row.body) for row in rows}


def load_member_context(connection: sa.Connection, member: Member) -> tuple[list[str], list[str]]:
    """What a new member touches.

    The bodies are searched as text, in the database: to read them all would cost a thousand times more.

    Returns:
        The ids of the listeners that use its pool, and of members the pool has at exactly this address and port.
    """
    # An address has none of the characters that mean something to LIKE: it was checked before.
    endpoint = f'"address":"{member.address}","protocol_port":{member.protocol_port}'
    wish = {"pool": member.pool_id, "endpoint": f"{endpoint},", "at_the_end": f"{endpoint}}}"}
    rows = connection.execute(_AROUND, wish).all()
    users = [row.id if row.kind == Kind.LISTENER.value else row.parent_id for row in rows if row.kind != Kind.MEMBER]
    return users, [row.id for row in rows if row.kind == Kind.MEMBER and row.id != member.id]


def list_descendants(connection: sa.Connection, object_ids: Sequence[str]) -> list[tuple[Kind, str]]:
    """Everything that hangs below these objects, as (kind, id)."""
    found: list[tuple[Kind, str]] = []
    layer = list(object_ids)
    while layer:
        rows = connection.execute(_BELOW, {"ids": layer[:_CHUNK]}).all()
        layer = layer[_CHUNK:] + [row.id for row in rows]
        found += [(Kind(row.kind), row.id) for row in rows]
    return found


def mark_removed(connection: sa.Connection, generation: int, object_ids: Sequence[str]) -> None:
    """Mark objects as no longer wanted. The rows stay until the removal is confirmed and reported."""
    for start in range(0, len(object_ids), _CHUNK):
        connection.execute(_REMOVE, {"ids": object_ids[start : start + _CHUNK], "new_generation": generation})


def purge_objects(connection: sa.Connection, object_ids: Sequence[str]) -> None:
    """Forget removed objects for good."""
    for start in range(0, len(object_ids), _CHUNK):
        connection.execute(_PURGE, {"ids": object_ids[start : start + _CHUNK]})


def users_of_pool(connection: sa.Connection, pool_id: str) -> list[tuple[Kind, str, str]]:
    """Listeners and L7 policies that point at a pool, as (kind, id, id of the listener)."""
    rows = connection.execute(_USERS, {"pool": pool_id})
    return [(Kind(row.kind), row.id, row.id if row.kind == Kind.LISTENER.value else row.parent_id) for row in rows]


def load_l4_context(
    connection: sa.Connection, load_balancer_id: str, node: Listener | Pool, known_pool: str | None = None
) -> LoadBalancer:
    """A load balancer, and of its children those that virtual servers serve together with one of them.

    Others are not read: they say nothing about whether a listener or pool fits.

    Args:
        node: a listener, or a pool with the members that are looked at.
        known_pool: a pool that is not to be read, since it fitted behind this listener before.

    Returns:
        The load balancer with the default pool of a listener and all its members, or with the listeners of a pool.

    Raises:
        UnknownObject: the load balancer is not recorded, or it is removed.
    """
    found: LoadBalancer = load_object(connection, Kind.LOAD_BALANCER, load_balancer_id)
    if isinstance(node, Pool):
        users = users_of_pool(connection, node.id) if node.uses_l4 and node.members else []
        fronts = [load_object(connection, kind, one) for kind, one, _ in users if kind is Kind.LISTENER]
        return msgspec.structs.replace(found, listeners=tuple(fronts))
    if not node.uses_l4 or node.default_pool_id in (None, known_pool):
        return found
    body = connection.execute(_ONE, {"of": node.default_pool_id, "of_kind": Kind.POOL.value}).scalar()
    if body is None:
        return found
    pool: Pool = _DECODERS[Kind.POOL].decode(body)
    members = load_children(connection, pool.id, Kind.MEMBER)
    return msgspec.structs.replace(found, pools=(msgspec.structs.replace(pool, members=tuple(members.values())),))


def load_tree(connection: sa.Connection, load_balancer_id: str) -> LoadBalancer:
    """The whole load balancer with everything that is wanted of it, children in the order they were made.

    Raises:
        UnknownObject: nothing is recorded under this id, or it is removed.
    """
    rows = connection.execute(_TREE, {"of": load_balancer_id})
    by_parent: dict[tuple[Kind, str | None], list[Any]] = defaultdict(list)
    for row in rows:
        kind = Kind(row.kind)
        by_parent[kind, row.parent_id].append(_DECODERS[kind].decode(row.body))
    roots = by_parent[Kind.LOAD_BALANCER, None]
    if not roots:
        raise UnknownObject(f"read load balancer {load_balancer_id}", "nothing is recorded under this id")

    def policy(bare: L7Policy) -> L7Policy:
        rules: list[L7Rule] = by_parent[Kind.L7RULE, bare.id]
        return msgspec.structs.replace(bare, rules=tuple(rules))

    def listener(bare: Listener) -> Listener:
        policies = [policy(child) for child in by_parent[Kind.L7POLICY, bare.id]]
        return msgspec.structs.replace(bare, l7policies=tuple(sorted(policies, key=lambda one: one.position)))

    def pool(bare: Pool) -> Pool:
        members: list[Member] = by_parent[Kind.MEMBER, bare.id]
        monitors: list[HealthMonitor] = by_parent[Kind.HEALTH_MONITOR, bare.id]
        return msgspec.structs.replace(bare, members=tuple(members), healthmonitor=monitors[0] if monitors else None)

    root: LoadBalancer = roots[0]
    return msgspec.structs.replace(
        root,
        listeners=tuple(listener(bare) for bare in by_parent[Kind.LISTENER, load_balancer_id]),
        pools=tuple(pool(bare) for bare in by_parent[Kind.POOL, load_balancer_id]),
    )


def load_changes_since(
    connection: sa.Connection, load_balancer_id: str, generation: int
) -> tuple[int, list[ObjectChange]]:
    """What was recorded of a load balancer under a generation or later ones; and how many objects it has now.

    Rows that were forgotten meanwhile are not among the changes: only the number shows it.
    """
    rows = connection.execute(_SINCE, {"of": load_balancer_id, "known": generation}).all()
    changes = []
    for row in rows:
        kind = Kind(row.kind)
        node = None if row.removed else _DECODERS[kind].decode(row.body)
        changes.append(ObjectChange(id=row.id, kind=kind, parent_id=row.parent_id, created=row.created, node=node))
    return (int(rows[0].alive) if rows else 0), changes


def replace_tree(connection: sa.Connection, generation: int, tree: LoadBalancer) -> list[Node]:
    """Make the rows say exactly this tree, and return its objects that were not recorded before."""
    rows = connection.execute(
        sa.select(wanted_object.c.id, wanted_object.c.body, wanted_object.c.removed).where(
            wanted_object.c.load_balancer_id == tree.id
        )
    ).all()
    recorded = {row.id: row.body for row in rows if not row.removed}
    # Octavia shows what is being deleted too, and does not say so.
    removed = {row.id for row in rows if row.removed}
    nodes = {node.id: node for node in iter_subtree(tree) if node.id not in removed}
    purge_objects(connection, [object_id for object_id in recorded if object_id not in nodes])
    added = [node for object_id, node in nodes.items() if object_id not in recorded]
    insert_objects(connection, tree.id, generation, added)
    known = [
        _with_local_fields(node, recorded[object_id]) for object_id, node in nodes.items() if object_id in recorded
    ]
    update_objects(connection, generation, [node for node in known if _body(node) != recorded[node.id]])
    return added


def refresh_object(connection: sa.Connection, generation: int, node: LoadBalancer | Listener | Pool) -> bool:
    """Take the attributes of a recorded object from what was read of it; False if it is not wanted any more."""
    row = connection.execute(_ONE, {"of": node.id, "of_kind": kind_of(node).value}).first()
    if row is None:
        return False
    ordered = _with_local_fields(node, row.body)
    if _body(ordered) != row.body:
        update_objects(connection, generation, [ordered])
    return True


def _with_local_fields(node: Node, recorded: str) -> Node:
    """The node with what only we know: what a load balancer's creation chose, and the order of SNI certificates.

    Octavia's database keeps no order of them, and the first one is shown to clients that name no host.
    """
    if isinstance(node, LoadBalancer):
        whole: LoadBalancer = _DECODERS[Kind.LOAD_BALANCER].decode(recorded)
        # Octavia is told of addresses once, when it asks for them: those that came later are known only here.
        return msgspec.structs.replace(
            node,
            profile=whole.profile,
            flavor=whole.flavor,
            availability_zone=whole.availability_zone,
            vip=whole.vip,
            additional_vips=whole.additional_vips,
        )
    if not isinstance(node, Listener) or not node.sni_container_refs:
        return node
    before: Listener = _DECODERS[Kind.LISTENER].decode(recorded)
    if sorted(before.sni_container_refs or ()) != sorted(node.sni_container_refs):
        return node
    return msgspec.structs.replace(node, sni_container_refs=before.sni_container_refs)


def _body(node: Node) -> str:
    bare: Any = node
    if isinstance(node, LoadBalancer):
        bare = msgspec.structs.replace(node, listeners=(), pools=())
    elif isinstance(node, Listener):
        bare = msgspec.structs.replace(node, l7policies=())
    elif isinstance(node, Pool):
        bare = msgspec.structs.replace(node, members=(), healthmonitor=None)
    elif isinstance(node, L7Policy):
        bare = msgspec.structs.replace(node, rules=())
    return _ENCODER.encode(bare).decode()


def _reference(node: Node) -> str | None:
    field = _REFERENCE_FIELD.get(kind_of(node))
    return None if field is None else cast("str | None", getattr(node, field))


def _row(load_balancer_id: str, generation: int, node: Node) -> dict[str, Any]:
    return {
        "id": node.id,
        "kind": kind_of(node).value,
        "load_balancer_id": load_balancer_id,
        "parent_id": parent_id(node),
        "refers_to": _reference(node),
        "created": generation,
        "generation": generation,
        "removed": False,
        "body": _body(node),
    }
