# SPDX-License-Identifier: Apache-2.0
"""Load balancers as they were read last, so that a job reads what changed and nothing else.

Invariant: `Trees.load` returns what `wanted.load_tree` would, whoever wrote in between. What is remembered is a tree
and the newest generation that is in it for certain; the rows of that generation and of newer ones are read and put into
it. Rows that were forgotten are not among those: so the number of objects has to be the one the database counts, or
everything is read anew. What is to be read back from Octavia is not remembered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from amphora_driver.model.enums import Kind
from amphora_driver.model.loadbalancer import L7Policy, Listener, LoadBalancer, Pool
from amphora_driver.render.cache import Cache
from amphora_driver.store import desired_objects

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import sqlalchemy as sa

    from amphora_driver.store.desired_objects import ObjectChange

    # The changed children of one kind, by their parent's id, then by their own.
    Children = dict[str | None, dict[str, ObjectChange]]

N = TypeVar("N")
# Objects of all remembered load balancers together: one takes about a kilobyte.
_CAPACITY = 50_000


class _Known(msgspec.Struct, frozen=True, kw_only=True):
    """A tree with everything up to a generation in it, read under a lease of this epoch."""

    generation: int
    epoch: int
    tree: LoadBalancer


class Trees:
    """The trees one controller has read; its threads share them.

    Args:
        capacity: how many objects to remember, of all load balancers together.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._known: Cache[_Known] = Cache(capacity)

    def load(self, connection: sa.Connection, row: Any, epoch: int) -> LoadBalancer:
        """The whole load balancer, as `wanted.load_tree` returns it.

        Args:
            connection: of a reading transaction.
            row: of the table `work`, read in this transaction before.
            epoch: of the caller's lease. Under one and the same, one generation is one tree: what is read back is asked
                for under a new one.

        Raises:
            UnknownObject: nothing is recorded under this id, or it is removed.
        """
        load_balancer_id, generation = row.load_balancer_id, int(row.generation)
        if row.read_back:
            self._known.drop(load_balancer_id)
            return desired_objects.load_tree(connection, load_balancer_id)
        known = self._known.get(load_balancer_id)
        if known is not None and (known.generation, known.epoch) == (generation, epoch):
            return known.tree
        tree = None
        if known is not None and known.generation <= generation:
            alive, changes = desired_objects.load_changes_since(connection, load_balancer_id, known.generation)
            tree = updated(known.tree, changes, known.generation)
            tree = tree if tree is not None and count(tree) == alive else None
        if tree is None:
            tree = desired_objects.load_tree(connection, load_balancer_id)
        self._known.put(load_balancer_id, _Known(generation=generation, epoch=epoch, tree=tree), count(tree))
        return tree


def count(tree: LoadBalancer) -> int:
    """How many objects there are, the load balancer among them."""
    pools = sum(1 + len(pool.members) + (pool.healthmonitor is not None) for pool in tree.pools)
    policies = sum(1 + len(policy.rules) for listener in tree.listeners for policy in listener.l7policies)
    return 1 + len(tree.listeners) + pools + policies


def updated(tree: LoadBalancer, changes: Sequence[ObjectChange], generation: int) -> LoadBalancer | None:
    """The tree with these changes in it; objects that did not change are the very same.

    Args:
        tree: with everything before `generation`, and perhaps not all of that one.
        changes: all that was recorded since then.
        generation: the newest one in the tree.

    Returns:
        The tree; None where only reading everything tells what there is.
    """
    by_kind: dict[Kind, Children] = {kind: {} for kind in Kind}
    for change in changes:
        by_kind[change.kind].setdefault(change.parent_id, {})[change.id] = change
    root = by_kind[Kind.LOAD_BALANCER].get(None, {}).get(tree.id)
    if root is None or root.node is None:
        return None
    try:
        now: LoadBalancer = msgspec.structs.replace(
            root.node, listeners=_listeners(tree, by_kind, generation), pools=_pools(tree, by_kind, generation)
        )
    except _ReadAnewError:
        return None
    return now


class _ReadAnewError(Exception):
    """What changed does not tell enough: objects are ordered by when they were made, for example."""


def _listeners(tree: LoadBalancer, by_kind: dict[Kind, Children], generation: int) -> tuple[Listener, ...]:
    rules = by_kind[Kind.L7RULE]

    def with_rules(policy: L7Policy) -> L7Policy:
        now = _merged(policy.rules, rules.get(policy.id, {}), generation)
        return policy if now is policy.rules else msgspec.structs.replace(policy, rules=now)

    def with_policies(listener: Listener) -> Listener:
        changed = by_kind[Kind.L7POLICY].get(listener.id, {})
        if not changed and not any(policy.id in rules for policy in listener.l7policies):
            return listener
        policies = _merged(listener.l7policies, changed, generation, _policy)
        if len({policy.position for policy in policies}) < len(policies):
            raise _ReadAnewError
        ordered = tuple(with_rules(policy) for policy in sorted(policies, key=lambda one: one.position))
        return listener if ordered == listener.l7policies else msgspec.structs.replace(listener, l7policies=ordered)

    changed = by_kind[Kind.LISTENER].get(tree.id, {})
    return tuple(with_policies(one) for one in _merged(tree.listeners, changed, generation, _listener))


def _pools(tree: LoadBalancer, by_kind: dict[Kind, Children], generation: int) -> tuple[Pool, ...]:
    def with_children(pool: Pool) -> Pool:
        members = by_kind[Kind.MEMBER].get(pool.id, {})
        monitors = by_kind[Kind.HEALTH_MONITOR].get(pool.id, {})
        if not members and not monitors:
            return pool
        before = () if pool.healthmonitor is None else (pool.healthmonitor,)
        now, members_now = _merged(before, monitors, generation), _merged(pool.members, members, generation)
        if now is before and members_now is pool.members:
            return pool
        if len(now) > 1:
            # One of them is not there any more, and counting pools would not show it.
            raise _ReadAnewError
        return msgspec.structs.replace(pool, members=members_now, healthmonitor=now[0] if now else None)

    changed = by_kind[Kind.POOL].get(tree.id, {})
    return tuple(with_children(one) for one in _merged(tree.pools, changed, generation, _pool))


def _merged(
    before: tuple[N, ...],
    changed: dict[str, ObjectChange],
    generation: int,
    complete: Callable[[Any, N], N] = lambda bare, _before: bare,
) -> tuple[N, ...]:
    """The children of one parent: those that stay in their places, then the new ones in the order they were made.

    Args:
        before: what there was.
        changed: what of it is new, changed or removed, by id.
        generation: the newest one in `before`.
        complete: gives a changed object the children it had.
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
            # Made anew under the same id: its place is another.
            raise _ReadAnewError
        elif change.node is not None:
            now = complete(change.node, one)
            found.append(one if now == one else now)
    added = [change for change in fresh.values() if change.node is not None]
    if any(change.created <= generation for change in added):
        raise _ReadAnewError
    found += [change.node for change in sorted(added, key=lambda one: (one.created, one.id))]
    same = len(found) == len(before) and all(now is then for now, then in zip(found, before, strict=True))
    return before if same else tuple(found)


def _listener(bare: Any, before: Listener) -> Listener:
    now: Listener = msgspec.structs.replace(bare, l7policies=before.l7policies)
    return now


def _policy(bare: Any, before: L7Policy) -> L7Policy:
    now: L7Policy = msgspec.structs.replace(bare, rules=before.rules)
    return now


def _pool(bare: Any, before: Pool) -> Pool:
    now: Pool = msgspec.structs.replace(bare, members=before.members, healthmonitor=before.healthmonitor)
    return now
