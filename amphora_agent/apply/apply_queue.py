# SPDX-License-Identifier: Apache-2.0
"""The queue of concurrent requests that change this amphora.

Invariant: one request runs at a time, and the newest generation in the queue runs next. After a success, the older
requests in the queue return the same result, because they are outdated. After a failure, the next newest request runs,
so that a wrong bundle does not discard another change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class _Waiting(Generic[T]):
    generation: int
    kind: Hashable
    result: T | None = None


class ApplyQueue(Generic[T]):
    """Runs one request at a time. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._busy = False
        self._waiting: list[_Waiting[T]] = []

    @property
    def waiting(self) -> int:
        """The number of requests in the queue, without the running one."""
        return len(self._waiting)

    def run_in_turn(self, generation: int, kind: Hashable, work: Callable[[], T]) -> T:
        """Run `work` in its turn, or return the result of a newer request of the same kind."""
        request = _Waiting[T](generation, kind)
        with self._changed:
            self._waiting.append(request)
            self._changed.wait_for(lambda: request.result is not None or (not self._busy and self._newest() is request))
            self._waiting.remove(request)
            if request.result is not None:
                return request.result
            self._busy = True
        result: T | None = None
        try:
            result = work()
        finally:
            with self._changed:
                self._busy = False
                for other in self._waiting:
                    if result is not None and other.kind == kind and other.generation < generation:
                        other.result = result
                self._changed.notify_all()
        return result

    def _newest(self) -> _Waiting[T]:
        return max(self._waiting, key=lambda one: one.generation)
