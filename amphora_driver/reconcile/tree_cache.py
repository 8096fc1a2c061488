# SPDX-License-Identifier: Apache-2.0
"""Cache of load balancer trees: a job reads only the changed objects.

Invariant: `TreeCache.load` returns the result of `desired_objects.load_tree`, also after writes of other processes. A
cache entry is a tree and the newest generation that it certainly contains. Rows of that generation and newer rows are
read and merged. Deleted rows are not among them: if the number of objects differs from the count in the database, the
cache reads the whole tree. A tree that must be read back from Octavia is not cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa

from amphora_driver.bounded_cache import Cache
from amphora_driver.model.enums import Kind
from amphora_driver.model.loadbalancer import L7Policy, Listener, LoadBalancer, Pool
from amphora_driver.store import desired_objects
from amphora_driver.store.desired_objects import ObjectChange

# Changed child objects of one kind, by id of the parent and id of the child.
Children = dict[str | None, dict[str, ObjectChange]]

N = TypeVar("N")
_POOL_CHILDREN = ("members", "healthmonitor")
# Maximum number of objects in the cache. An object takes about a kilobyte.
_CAPACITY = 50_000


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A tree that contains all changes up to a generation, read under a lease of this epoch."""

    generation: int
    epoch: int
    tree: LoadBalancer


class TreeCache:
    """The trees that one controller has read, for all its threads; `capacity` is their number of objects."""

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._entries: Cache[_Entry] = Cache(capacity)

    def load(self, connection: sa.Connection, row: Any, epoch: int) -> LoadBalancer:
        """Return the complete tree of a load balancer, as `desired_objects.load_tree` does.

        `row` is of the table `job`, read in the same transaction. Within one `epoch` of the lease, a generation has one
        tree: a read-back from Octavia needs a new epoch.

        Raises:
            UnknownObject: the load balancer is not recorded, or it is removed.
        """
        load_balancer_id, generation = row.load_balancer_id, int(row.generation)
        if row.read_back:
            self._entries.drop(load_balancer_id)
            return desired_objects.load_tree(connection, load_balancer_id)
        entry = self._entries.get(load_balancer_id)
        if entry is not None and (entry.generation, entry.epoch) == (generation, epoch):
            return entry.tree
        tree = None
        if entry is not None and entry.generation <= generation:
            alive, changes = desired_objects.load_changes_since(connection, load_balancer_id, entry.generation)
            tree = merge_changes(entry.tree, changes, entry.generation)
            tree = tree if tree is not None and count_objects(tree) == alive else None
        if tree is None:
            tree = desired_objects.load_tree(connection, load_balancer_id)
        self._entries.put(load_balancer_id, _Entry(generation=generation, epoch=epoch, tree=tree), count_objects(tree))
        return tree


def count_objects(tree: LoadBalancer) -> int:
    """Return the number of objects, including the load balancer."""
    pools = sum(1 + len(pool.members) + (pool.healthmonitor is not None) for pool in tree.pools)
    policies = sum(1 + len(policy.rules) for listener in tree.listeners for policy in listener.l7policies)
    return 1 + len(tree.listeners) + pools + policies


def merge_changes(tree: LoadBalancer, changes: Sequence[ObjectChange], generation: int) -> LoadBalancer | None:
    """Return the tree with the changes merged; None if the whole tree must be read.

    The tree contains all changes before `generation`, and possibly not all of that generation. Unchanged objects keep
    their identity.
    """
    by_kind: dict[Kind, Children] = {kind: {} for kind in Kind}
    for change in changes:
        by_kind[change.kind].setdefault(change.parent_id, {})[change.id] = change
    root = by_kind[Kind.LOAD_BALANCER].get(None, {}).get(tree.id)
    if root is None or root.node is None:
        return None
    try:
        listeners, pools = _merge_listeners(tree, by_kind, generation), _merge_pools(tree, by_kind, generation)
    except _FullReadNeededError:
        return None
    now: LoadBalancer = msgspec.structs.replace(root.node, listeners=listeners, pools=pools)
    return now


class _FullReadNeededError(Exception):
    """The changes do not determine the tree, for example the order of objects by creation."""


def _merge_listeners(tree: LoadBalancer, by_kind: dict[Kind, Children], generation: int) -> tuple[Listener, ...]:
    rules = by_kind[Kind.L7RULE]

    def with_rules(policy: L7Policy) -> L7Policy:
        now = _merge_children(policy.rules, rules.get(policy.id, {}), generation)
        return policy if now is policy.rules else msgspec.structs.replace(policy, rules=now)

    def with_policies(listener: Listener) -> Listener:
        changed = by_kind[Kind.L7POLICY].get(listener.id, {})
        if not changed and not any(policy.id in rules for policy in listener.l7policies):
            return listener
        policies = _merge_children(listener.l7policies, changed, generation, ("rules",))
        if len({policy.position for policy in policies}) < len(policies):
            raise _FullReadNeededError
        ordered = tuple(with_rules(policy) for policy in sorted(policies, key=lambda one: one.position))
        return listener if ordered == listener.l7policies else msgspec.structs.replace(listener, l7policies=ordered)

    changed = by_kind[Kind.LISTENER].get(tree.id, {})
    return tuple(with_policies(one) for one in _merge_children(tree.listeners, changed, generation, ("l7policies",)))


def _merge_pools(tree: LoadBalancer, by_kind: dict[Kind, Children], generation: int) -> tuple[Pool, ...]:
    def with_children(pool: Pool) -> Pool:
        members = by_kind[Kind.MEMBER].get(pool.id, {})
        monitors = by_kind[Kind.HEALTH_MONITOR].get(pool.id, {})
        if not members and not monitors:
            return pool
        before = () if pool.healthmonitor is None else (pool.healthmonitor,)
        now = _merge_children(before, monitors, generation)
        members_now = _merge_children(pool.members, members, generation)
        if now is before and members_now is pool.members:
            return pool
        if len(now) > 1:
            # A pool has at most one health monitor, so one of these monitors was deleted. Only a full read shows which
            # monitor remains.
            raise _FullReadNeededError
        return msgspec.structs.replace(pool, members=members_now, healthmonitor=now[0] if now else None)

    changed = by_kind[Kind.POOL].get(tree.id, {})
    return tuple(with_children(one) for one in _merge_children(tree.pools, changed, generation, _POOL_CHILDREN))


def _merge_children(
    before: tuple[N, ...], changed: dict[str, ObjectChange], generation: int, children: Sequence[str] = ()
) -> tuple[N, ...]:
    """Return the children of one parent: the existing ones in their order, then new ones by creation.

    A changed object keeps the existing values of its attributes `children`.
    """
    if not changed:
        return before
    found: list[N] = []
    fresh = dict(changed)
    for one in before:
        change = fresh.pop(one.id, None)  # type: ignore[attr-defined]
        if change is None:
            found.append(one)
        elif change.created > generation:
            # The object was deleted and created again with the same id. Only a full read shows its new position among
            # the children.
            raise _FullReadNeededError
        elif change.node is not None:
            now: N = msgspec.structs.replace(change.node, **{name: getattr(one, name) for name in children})
            found.append(one if now == one else now)
    added = [change for change in fresh.values() if change.node is not None]
    if any(change.created <= generation for change in added):
        raise _FullReadNeededError
    found += [change.node for change in sorted(added, key=lambda one: (one.created, one.id))]
    same = len(found) == len(before) and all(now is then for now, then in zip(found, before, strict=True))
    return before if same else tuple(found)
