# SPDX-License-Identifier: Apache-2.0
"""Cache of the load balancers whose statuses were computed last.

Invariant: the trees in memory have at most `most` objects together, for any size of the fleet; a single tree may exceed
the limit. A load balancer without changed reports needs no tree.
"""

from __future__ import annotations

from collections import OrderedDict

from amphora_driver.model.loadbalancer import LoadBalancer
from amphora_driver.store import desired_objects

# One object takes about 500 bytes.
_MOST_OBJECTS = 20_000


class RecentTrees:
    """The trees that were used last, by id of the load balancer. Not thread-safe."""

    def __init__(self, most: int = _MOST_OBJECTS) -> None:
        self._most = most
        self._trees: OrderedDict[str, tuple[LoadBalancer, int]] = OrderedDict()
        self._objects = 0

    def get(self, load_balancer_id: str) -> LoadBalancer | None:
        found = self._trees.get(load_balancer_id)
        if found is None:
            return None
        self._trees.move_to_end(load_balancer_id)
        return found[0]

    def put(self, tree: LoadBalancer) -> None:
        """Add or replace a tree, and drop those that were not used for the longest time."""
        self.forget(tree.id)
        objects = sum(1 for _ in desired_objects.iter_subtree(tree))
        self._trees[tree.id] = (tree, objects)
        self._objects += objects
        while self._objects > self._most and len(self._trees) > 1:
            self.forget(next(iter(self._trees)))

    def forget(self, load_balancer_id: str) -> None:
        _, objects = self._trees.pop(load_balancer_id, (None, 0))
        self._objects -= objects

    def __len__(self) -> int:
        return self._objects
