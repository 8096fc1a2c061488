# SPDX-License-Identifier: Apache-2.0
"""What was rendered before, by what it was rendered from.

Invariant: a memory never changes a result, and never holds more than its capacity. `forget` empties all of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from threading import Lock
from typing import Generic, TypeVar
from weakref import WeakSet

V = TypeVar("V")

_ALL: WeakSet[Memory[object]] = WeakSet()


class Memory(Generic[V]):
    """Values by key; what was not asked for longest goes first.

    Args:
        capacity: the weight of everything that is kept, together.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kept: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self._weight = 0
        self._lock = Lock()
        _ALL.add(self)  # type: ignore[arg-type]

    def recall(self, key: Hashable) -> V | None:
        """What is remembered under this key."""
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                return None
            self._kept.move_to_end(key)
            return found[0]

    def keep(self, key: Hashable, value: V, weight: int = 1) -> V:
        """Remember a value; returns it."""
        with self._lock:
            before = self._kept.pop(key, None)
            self._weight += weight - (before[1] if before else 0)
            self._kept[key] = (value, weight)
            while self._weight > self._capacity and len(self._kept) > 1:
                _, (_, gone) = self._kept.popitem(last=False)
                self._weight -= gone
        return value

    def drop(self, key: Hashable) -> None:
        """Forget one value."""
        with self._lock:
            found = self._kept.pop(key, None)
            self._weight -= found[1] if found else 0

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._kept.clear()
            self._weight = 0


def forget() -> None:
    """Empty every memory."""
    for memory in tuple(_ALL):
        memory.clear()
