# SPDX-License-Identifier: Apache-2.0
"""How this amphora was changed, and how often.

Invariant: nothing that replaced, changed or ended a running HAProxy is without a reason.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any, Literal

How = Literal["start", "unchanged", "runtime", "reload", "stop"]


@dataclass(frozen=True)
class Deed:
    """What was done to HAProxy, and why.

    Raises:
        ValueError: something was done, but no reason is given.
    """

    how: How
    reason: str

    def __post_init__(self) -> None:
        if not self.reason and self.how != "unchanged":
            raise ValueError(f"a {self.how} without a reason")


UNCHANGED = Deed("unchanged", "")


class Tally:
    """Counts deeds since the agent began. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {"start": 0, "unchanged": 0, "runtime": 0, "reload": 0, "stop": 0}
        self._last: dict[str, tuple[str, float]] = {}
        self._workers_ended = 0
        self._connections_ended = 0

    def count(self, deed: Deed) -> None:
        with self._lock:
            self._counts[deed.how] += 1
            self._last[deed.how] = deed.reason, time.time()

    def count_ended_worker(self, connections: int) -> None:
        """A replaced worker was ended before its last connection was."""
        with self._lock:
            self._workers_ended += 1
            self._connections_ended += connections

    def document(self) -> dict[str, Any]:
        """What `GET /v2/info` and `GET /v2/diagnostics` show; ``at`` in seconds since 1970."""
        with self._lock:
            found: dict[str, Any] = {how: {"count": count} for how, count in self._counts.items()}
            for how, (reason, at) in self._last.items():
                found[how] |= {"reason": reason, "at": round(at, 3)}
            found["workers_ended"] = {"count": self._workers_ended, "connections": self._connections_ended}
            return found
