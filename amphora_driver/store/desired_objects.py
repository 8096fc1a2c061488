# SPDX-License-Identifier: Apache-2.0
"""Rows of the desired state: one row per object of a load balancer.

Invariant: after every accepted call the rows of a load balancer are complete and consistent. Children have rows of
their own, so a small change to a large load balancer reads and writes a few small rows. All functions work inside the
caller's transaction.

A changed row carries the newest generation. A cached tree therefore needs only the rows of its generation and later
ones, which `load_changes_since` returns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import msgspec
import sqlalchemy as sa

from amphora_driver.database.rows import CHUNK, chunks
from amphora_driver.database.tables import desired_object
from amphora_driver.errors import UnknownObject
from amphora_driver.model.enums import Kind
from amphora_driver.model.loadbalancer import CHILDREN, MODEL_CLASSES, Listener, LoadBalancer, Member, Node, Pool


class _Vip(msgspec.Struct, frozen=True):
    address: str = ""


class _Body(msgspec.Struct, frozen=True):
    """The shown fields of a recorded load balancer."""

    name: str | None = None
    vip: _Vip = _Vip()
    additional_vips: tuple[_Vip, ...] = ()


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

_decode_body = msgspec.json.Decoder(_Body).decode

_OBJECT = desired_object.c
_IDS: sa.BindParameter[Any] = sa.bindparam("ids", expanding=True)
_OF: sa.BindParameter[Any] = sa.bindparam("of")
_OF_KIND: sa.BindParameter[Any] = sa.bindparam("of_kind")
_NEW_GENERATION: sa.BindParameter[Any] = sa.bindparam("new_generation")
LOAD_BALANCER_ID_OF_OBJECT = sa.select(_OBJECT.load_balancer_id).where(_OBJECT.id == _OF, ~_OBJECT.removed)
_ONE = sa.select(_OBJECT.body).where(_OBJECT.id == _OF, _OBJECT.kind == _OF_KIND, ~_OBJECT.removed)
_ROOTS = sa.select(_OBJECT.id, _OBJECT.body).where(_OBJECT.id.in_(_IDS), _OBJECT.kind == _OF_KIND, ~_OBJECT.removed)
_CHILDREN = sa.select(_OBJECT.id, _OBJECT.body).where(
    _OBJECT.parent_id == sa.bindparam("under"), _OBJECT.kind == _OF_KIND, ~_OBJECT.removed
)
_BELOW = sa.select(_OBJECT.kind, _OBJECT.id).where(_OBJECT.parent_id.in_(_IDS), ~_OBJECT.removed)
_USERS = sa.select(_OBJECT.kind, _OBJECT.id, _OBJECT.parent_id).where(
    _OBJECT.refers_to == sa.bindparam("pool"), ~_OBJECT.removed
)
_TREE = (
    sa.select(_OBJECT.kind, _OBJECT.parent_id, _OBJECT.body)
    .where(_OBJECT.load_balancer_id == _OF, ~_OBJECT.removed)
    .order_by(_OBJECT.created, _OBJECT.id)
)
_ALIVE = (
    sa.select(sa.func.count()).select_from(desired_object).where(_OBJECT.load_balancer_id == _OF, ~_OBJECT.removed)
).scalar_subquery()
# The result always contains the row of the load balancer. Otherwise, a result without changed objects would lack the
# number of objects (`alive`).
_SINCE = sa.select(
    *(_OBJECT.id, _OBJECT.kind, _OBJECT.parent_id, _OBJECT.created, _OBJECT.removed, _OBJECT.body),
    _ALIVE.label("alive"),
).where(_OBJECT.load_balancer_id == _OF, sa.or_(_OBJECT.generation >= sa.bindparam("known"), _OBJECT.id == _OF))
# Listeners and L7 policies that refer to a pool, and the pool's members with a given address and port. In a member's
# JSON, address and port are followed by another field or by the end, so the query has two patterns.
_AROUND = sa.union_all(
    _USERS,
    sa.select(_OBJECT.kind, _OBJECT.id, _OBJECT.parent_id).where(
        *(_OBJECT.parent_id == sa.bindparam("pool"), _OBJECT.kind == Kind.MEMBER.value, ~_OBJECT.removed),
        sa.or_(*(_OBJECT.body.contains(sa.bindparam(name, type_=sa.Text())) for name in ("endpoint", "at_the_end"))),
    ),
)
_UPDATE = (
    desired_object.update()
    .where(_OBJECT.id == _OF)
    .values(body=sa.bindparam("new_body"), generation=_NEW_GENERATION, refers_to=sa.bindparam("new_reference"))
)
_REMOVE = (
    desired_object.update().where(_OBJECT.id.in_(_IDS)).values(removed=True, generation=_NEW_GENERATION, refers_to=None)
)


class ObjectChange(msgspec.Struct, frozen=True, kw_only=True):
    """A new, changed or removed object; `node` has no children, and is None if it is removed."""

    id: str
    kind: Kind
    parent_id: str | None
    created: int
    node: Any


def kind_of(node: Node) -> Kind:
    """Return the kind of a model object."""
    return _KIND_OF[type(node)]


def parent_id(node: Node) -> str | None:
    """Return the id of an object's parent; None for a load balancer."""
    field = _PARENT_FIELD.get(kind_of(node))
    return None if field is None else cast("str", getattr(node, field))


def iter_subtree(node: Node) -> Iterator[Node]:
    """Yield an object and all its descendants, parents first."""
    yield node
    for field in CHILDREN.get(kind_of(node), ()):
        children = getattr(node, field) or ()
        for child in children if isinstance(children, tuple) else (children,):
            yield from iter_subtree(child)


def load_balancer_id_of(connection: sa.Connection, object_id: str) -> str:
    """Return the id of an object's load balancer; raise `UnknownObject` if the object is not recorded."""
    found = connection.execute(LOAD_BALANCER_ID_OF_OBJECT, {"of": object_id}).scalar()
    if found is None:
        raise UnknownObject(f"find the load balancer of {object_id}", "nothing is recorded under this id")
    return str(found)


def insert_objects(connection: sa.Connection, load_balancer_id: str, generation: int, nodes: Iterable[Node]) -> None:
    """Insert new objects. Children are not included: pass them too, see `iter_subtree`."""
    rows = [_row(load_balancer_id, generation, node) for node in nodes]
    for some in chunks(rows):
        connection.execute(desired_object.insert(), some)


def load_object(connection: sa.Connection, kind: Kind, object_id: str) -> Any:
    """Return one object without its children; raise `UnknownObject` if it is not recorded."""
    body = connection.execute(_ONE, {"of": object_id, "of_kind": kind.value}).scalar()
    if body is None:
        raise UnknownObject(f"find {kind.value[:-1]} {object_id}", "nothing is recorded under this id")
    return _DECODERS[kind].decode(body)


def load_roots(connection: sa.Connection, load_balancer_ids: Iterable[str]) -> dict[str, LoadBalancer]:
    """Return recorded load balancers without their children, by id."""
    found = {}
    for ids in chunks(sorted(set(load_balancer_ids))):
        for row in connection.execute(_ROOTS, {"ids": ids, "of_kind": Kind.LOAD_BALANCER.value}):
            found[row.id] = _DECODERS[Kind.LOAD_BALANCER].decode(row.body)
    return found


def update_objects(connection: sa.Connection, generation: int, nodes: Iterable[Node]) -> None:
    """Update the attributes of recorded objects."""
    rows = [
        {"of": node.id, "new_body": _body(node), "new_generation": generation, "new_reference": _reference(node)}
        for node in nodes
    ]
    if rows:
        connection.execute(_UPDATE, rows)


def load_children(connection: sa.Connection, parent: str, kind: Kind) -> dict[str, Any]:
    """Return the children of one kind of a parent, by id."""
    rows = connection.execute(_CHILDREN, {"under": parent, "of_kind": kind.value})
    return {row.id: _DECODERS[kind].decode(row.body) for row in rows}


def load_member_context(connection: sa.Connection, member: Member) -> tuple[list[str], list[str]]:
    """Return ids of listeners that use a member's pool, and of members with its address and port.

    The database searches the bodies as text: reading all bodies would cost a thousand times more.
    """
    # The pattern for LIKE needs no escaping, because a validated address contains neither % nor _.
    endpoint = f'"address":"{member.address}","protocol_port":{member.protocol_port}'
    values = {"pool": member.pool_id, "endpoint": f"{endpoint},", "at_the_end": f"{endpoint}}}"}
    rows = connection.execute(_AROUND, values).all()
    users = [row.id if row.kind == Kind.LISTENER.value else row.parent_id for row in rows if row.kind != Kind.MEMBER]
    return users, [row.id for row in rows if row.kind == Kind.MEMBER and row.id != member.id]


def list_descendants(connection: sa.Connection, object_ids: Sequence[str]) -> list[tuple[Kind, str]]:
    """Return all descendants of these objects, as (kind, id)."""
    found: list[tuple[Kind, str]] = []
    parents = list(object_ids)
    while parents:
        rows = connection.execute(_BELOW, {"ids": parents[:CHUNK]}).all()
        parents = parents[CHUNK:] + [row.id for row in rows]
        found += [(Kind(row.kind), row.id) for row in rows]
    return found


def mark_removed(connection: sa.Connection, generation: int, object_ids: Sequence[str]) -> None:
    """Mark objects as removed. The rows stay until the removal is confirmed and reported."""
    for ids in chunks(object_ids):
        connection.execute(_REMOVE, {"ids": ids, "new_generation": generation})


def purge_objects(connection: sa.Connection, object_ids: Sequence[str]) -> None:
    """Delete the rows of removed objects."""
    for ids in chunks(object_ids):
        connection.execute(desired_object.delete().where(_OBJECT.id.in_(ids)))


def users_of_pool(connection: sa.Connection, pool_id: str) -> list[tuple[Kind, str, str]]:
    """Return the listeners and L7 policies that refer to a pool, as (kind, id, id of the listener)."""
    rows = connection.execute(_USERS, {"pool": pool_id})
    return [(Kind(row.kind), row.id, row.id if row.kind == Kind.LISTENER.value else row.parent_id) for row in rows]


def clear_pool_references(connection: sa.Connection, generation: int, pool: Pool) -> None:
    """Clear the references to a deleted pool, as Octavia does without another call."""
    for kind, object_id, _ in users_of_pool(connection, pool.id):
        field = "default_pool_id" if kind is Kind.LISTENER else "redirect_pool_id"
        node: Any = load_object(connection, kind, object_id)
        update_objects(connection, generation, [msgspec.structs.replace(node, **{field: None})])


def load_l4_context(
    connection: sa.Connection, load_balancer_id: str, node: Listener | Pool, known_pool: str | None = None
) -> LoadBalancer:
    """Return a load balancer with only the children that are validated together with a listener or pool.

    Only UDP and SCTP listeners and pools have such children: the default pool of a listener with its members, or the
    listeners of a pool. A `known_pool` is not read, because it was validated behind this listener before.
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
    """Return a complete load balancer, children in the order of creation; see `load_object`."""
    # A load balancer may have thousands of members. To save time, the keys are texts, and `with_children` is called
    # only for objects that may have children.
    decoders = {kind.value: decoder for kind, decoder in _DECODERS.items()}
    by_parent: dict[tuple[str, str | None], list[Any]] = defaultdict(list)
    for kind, parent, body in connection.execute(_TREE, {"of": load_balancer_id}):
        by_parent[kind, parent].append(decoders[kind].decode(body))
    roots = by_parent.get((Kind.LOAD_BALANCER.value, None))
    if not roots:
        raise UnknownObject(f"read load balancer {load_balancer_id}", "nothing is recorded under this id")

    def with_children(kind: Kind, node: Any) -> Any:
        fields: dict[str, Any] = {}
        for field, child_kind in CHILDREN[kind].items():
            found = by_parent.get((child_kind.value, node.id), [])
            if child_kind in CHILDREN:
                found = [with_children(child_kind, child) for child in found]
            fields[field] = next(iter(found), None) if child_kind is Kind.HEALTH_MONITOR else tuple(found)
        if kind is Kind.LISTENER:
            fields["l7policies"] = tuple(sorted(fields["l7policies"], key=lambda one: one.position))
        return msgspec.structs.replace(node, **fields)

    return cast("LoadBalancer", with_children(Kind.LOAD_BALANCER, roots[0]))


def load_changes_since(
    connection: sa.Connection, load_balancer_id: str, generation: int
) -> tuple[int, list[ObjectChange]]:
    """Return the number of a load balancer's objects, and the changes since a generation.

    Changes of the generation itself are included. Purged rows are not among the changes: only the number shows them.
    """
    rows = connection.execute(_SINCE, {"of": load_balancer_id, "known": generation}).all()
    changes = []
    for row in rows:
        kind = Kind(row.kind)
        node = None if row.removed else _DECODERS[kind].decode(row.body)
        changes.append(ObjectChange(id=row.id, kind=kind, parent_id=row.parent_id, created=row.created, node=node))
    return (int(rows[0].alive) if rows else 0), changes


def replace_tree(connection: sa.Connection, generation: int, tree: LoadBalancer) -> list[Node]:
    """Replace the rows by those of this tree. Return the objects that were not recorded before."""
    query = sa.select(_OBJECT.id, _OBJECT.body, _OBJECT.removed).where(_OBJECT.load_balancer_id == tree.id)
    rows = connection.execute(query).all()
    recorded = {row.id: row.body for row in rows if not row.removed}
    # Octavia still returns objects whose deletion is in progress, so recorded removals are excluded.
    removed = {row.id for row in rows if row.removed}
    nodes = {node.id: node for node in iter_subtree(tree) if node.id not in removed}
    purge_objects(connection, [object_id for object_id in recorded if object_id not in nodes])
    added = [node for object_id, node in nodes.items() if object_id not in recorded]
    insert_objects(connection, tree.id, generation, added)
    known = [_with_local_fields(node, recorded[one]) for one, node in nodes.items() if one in recorded]
    update_objects(connection, generation, [node for node in known if _body(node) != recorded[node.id]])
    return added


def refresh_object(connection: sa.Connection, generation: int, node: LoadBalancer | Listener | Pool) -> bool:
    """Update a recorded object with attributes read from Octavia; return False if it is removed."""
    row = connection.execute(_ONE, {"of": node.id, "of_kind": kind_of(node).value}).first()
    if row is None:
        return False
    ordered = _with_local_fields(node, row.body)
    if _body(ordered) != row.body:
        update_objects(connection, generation, [ordered])
    return True


def _with_local_fields(node: Node, recorded: str) -> Node:
    """Return an object read from Octavia with the fields that only this driver keeps.

    These fields are the choices at a load balancer's creation, and the order of SNI certificates. Octavia's database
    keeps no order, and clients that send no host name receive the first certificate.
    """
    if isinstance(node, LoadBalancer):
        whole: LoadBalancer = _DECODERS[Kind.LOAD_BALANCER].decode(recorded)
        # Octavia takes VIP addresses only at the creation, so an address that was allocated later is in the driver's
        # record only.
        kept = ("profile", "flavor", "availability_zone", "vip", "additional_vips")
        return msgspec.structs.replace(node, **{name: getattr(whole, name) for name in kept})
    if not isinstance(node, Listener) or not node.sni_container_refs:
        return node
    before: Listener = _DECODERS[Kind.LISTENER].decode(recorded)
    if sorted(before.sni_container_refs or ()) != sorted(node.sni_container_refs):
        return node
    return msgspec.structs.replace(node, sni_container_refs=before.sni_container_refs)


def list_ancestors(connection: sa.Connection, node: Node) -> list[tuple[Kind, str]]:
    """Return the pool, policy and listeners that Octavia sets PENDING_UPDATE together with this object."""
    kind, parent = kind_of(node), str(parent_id(node))
    if kind in (Kind.MEMBER, Kind.HEALTH_MONITOR):
        users = users_of_pool(connection, parent)
        return [(Kind.POOL, parent), *((Kind.LISTENER, listener) for _, _, listener in users)]
    if kind is Kind.POOL:
        return [(Kind.LISTENER, listener) for _, _, listener in users_of_pool(connection, node.id)]
    if kind is Kind.L7POLICY:
        return [(Kind.LISTENER, parent)]
    if kind is Kind.L7RULE:
        policy = load_object(connection, Kind.L7POLICY, parent)
        return [(Kind.L7POLICY, policy.id), (Kind.LISTENER, policy.listener_id)]
    return []


def _body(node: Node) -> str:
    children = CHILDREN.get(kind_of(node), {}).items()
    nothing: dict[str, Any] = {field: None if kind is Kind.HEALTH_MONITOR else () for field, kind in children}
    return _ENCODER.encode(msgspec.structs.replace(node, **nothing) if nothing else node).decode()


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


def read_name_and_addresses(body: str | None) -> tuple[str | None, tuple[str, ...]]:
    """Return the name and the VIP addresses of a recorded load balancer."""
    if body is None:
        return None, ()
    try:
        found = _decode_body(body)
    except msgspec.DecodeError:
        # The function returns no name and no addresses for an unreadable row, so lists still show all load
        # balancers.
        return None, ()
    return found.name, tuple(vip.address for vip in (found.vip, *found.additional_vips) if vip.address)
