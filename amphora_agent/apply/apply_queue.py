# SPDX-License-Identifier: Apache-2.0
"""Who is next, of those that want to change this amphora at once.

Invariant: one at a time; of those that wait the newest generation is next, whatever order they came in. When it
succeeds, those that wait with an older one are answered with what it did: their state is a past one by then. When it
fails, the next newest is tried: nobody's change is lost because of another one that was wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class _Waiting(Generic[T]):
    """One that waits, and the outcome of a newer one as soon as there is one."""

    def __init__(self, generation: int, kind: Hashable) -> None:
        self.generation = generation
        self.kind = kind
        self.outcome: T | None = None


class Turns(Generic[T]):
    """Lets threads in. Safe to use from several of them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._busy = False
        self._waiting: list[_Waiting[T]] = []

    @property
    def waiting(self) -> int:
        """How many there are, besides the one whose turn it is."""
        return len(self._waiting)

    def take(self, generation: int, kind: Hashable, work: Callable[[], T]) -> T:
        """Do some work when it is its turn, or not at all if a newer one of its kind did better meanwhile.

        Returns:
            What the work returned: this one, or the newer one.
        """
        me = _Waiting[T](generation, kind)
        with self._changed:
            self._waiting.append(me)
            self._changed.wait_for(lambda: me.outcome is not None or (not self._busy and self._next() is me))
            self._waiting.remove(me)
            if me.outcome is not None:
                return me.outcome
            self._busy = True
        outcome: T | None = None
        try:
            outcome = work()
        finally:
            with self._changed:
                self._busy = False
                for other in self._waiting:
                    if outcome is not None and other.kind == kind and other.generation < generation:
                        other.outcome = outcome
                self._changed.notify_all()
        return outcome

    def _next(self) -> _Waiting[T]:
        return max(self._waiting, key=lambda one: one.generation)  # the first of those that are equal
