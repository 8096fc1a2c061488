# SPDX-License-Identifier: Apache-2.0
"""Cache of values, which never changes a result and never exceeds its capacity."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from threading import Lock
from typing import Generic, TypeVar

V = TypeVar("V")


class Cache(Generic[V]):
    """A cache that evicts the least recently used values. `capacity` limits the total weight."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._values: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self._weight = 0
        self._lock = Lock()

    def get(self, key: Hashable) -> V | None:
        with self._lock:
            found = self._values.get(key)
            if found is None:
                return None
            self._values.move_to_end(key)
            return found[0]

    def put(self, key: Hashable, value: V, weight: int = 1) -> V:
        with self._lock:
            before = self._values.pop(key, None)
            self._weight += weight - (before[1] if before else 0)
            self._values[key] = (value, weight)
            while self._weight > self._capacity and len(self._values) > 1:
                _, (_, gone) = self._values.popitem(last=False)
                self._weight -= gone
        return value

    def drop(self, key: Hashable) -> None:
        with self._lock:
            found = self._values.pop(key, None)
            self._weight -= found[1] if found else 0

    def clear(self) -> None:
        with self._lock:
            self._values.clear()
            self._weight = 0
