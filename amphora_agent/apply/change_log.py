# SPDX-License-Identifier: Apache-2.0
"""Changes of HAProxy: the method, the reason, and the number.

Invariant: each start, runtime update, reload and stop of HAProxy has a reason.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any, Literal, get_args

from amphora_agent.haproxy.runtime_state import Loaded

How = Literal["start", "unchanged", "runtime", "reload", "stop"]


@dataclass(frozen=True)
class Change:
    """A change of HAProxy. A missing reason is a ValueError unless ``how`` is "unchanged"."""

    how: How
    reason: str

    def __post_init__(self) -> None:
        if not self.reason and self.how != "unchanged":
            raise ValueError(f"a {self.how} without a reason")


UNCHANGED = Change("unchanged", "")


@dataclass(frozen=True)
class ApplyResult:
    """The change that was made for a generation, and the configuration that HAProxy reports."""

    generation: int
    change: Change
    loaded: Loaded

    def document(self) -> dict[str, Any]:
        return {"generation": self.generation, **vars(self.change), "loaded": self.loaded.document()}


class ChangeLog:
    """Counts the changes since the agent started. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = dict.fromkeys(get_args(How), 0)
        self._last: dict[str, tuple[str, float]] = {}
        self._workers_ended = 0
        self._connections_ended = 0

    def count(self, change: Change) -> None:
        with self._lock:
            self._counts[change.how] += 1
            self._last[change.how] = change.reason, time.time()

    def count_ended_worker(self, connections: int) -> None:
        """Count an old worker that was ended with open connections."""
        with self._lock:
            self._workers_ended += 1
            self._connections_ended += connections

    def document(self) -> dict[str, Any]:
        """Return the counts for `GET /v2/info` and the diagnostics; ``at`` is in seconds since 1970."""
        with self._lock:
            found: dict[str, Any] = {how: {"count": count} for how, count in self._counts.items()}
            for how, (reason, at) in self._last.items():
                found[how] |= {"reason": reason, "at": round(at, 3)}
            found["workers_ended"] = {"count": self._workers_ended, "connections": self._connections_ended}
            return found
