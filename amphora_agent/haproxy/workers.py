# SPDX-License-Identifier: Apache-2.0
"""HAProxy's workers: the list from the master, the excess ones, and the interface to their counters.

Invariant: pure. Source: ``show proc`` on the master's socket (HAProxy management guide, 9.4).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

# Old workers with connections: each is a copy of HAProxy in memory.
MAX_OLD_WORKERS = 8
_LINE = re.compile(r"^(?P<pid>\d+)\s+(?P<kind>master|worker)\s+(?P<reloads>\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Workers:
    """The master's number of reloads, the pid of the present worker, and the pids of the old ones.

    The old ones are sorted, oldest first. ``present`` is None if the last worker did not start.
    """

    reloads: int
    present: int | None
    replaced: tuple[int, ...]


def parse(answer: str) -> Workers | None:
    """Parse the answer to ``show proc``; None if it is another text."""
    reloads: int | None = None
    present: int | None = None
    replaced: list[tuple[int, int]] = []
    for match in _LINE.finditer(answer):
        pid, age = int(match.group("pid")), int(match.group("reloads"))
        if match.group("kind") == "master":
            reloads = age
        elif age == 0:
            present = pid
        else:
            replaced.append((age, pid))
    if reloads is None:
        return None
    return Workers(reloads, present, tuple(pid for _, pid in sorted(replaced, key=lambda one: -one[0])))


def excess_workers(workers: Workers, limit: int | None) -> tuple[int, ...]:
    """Return the old workers that have to end before the next reload.

    Args:
        limit: the number of old workers after the reload; None for `MAX_OLD_WORKERS`.
    """
    room = max(0, (limit or MAX_OLD_WORKERS) - 1)
    return workers.replaced[: max(0, len(workers.replaced) - room)]


class WorkerCounters(Protocol):
    """Reads the counters of all workers to the end (`amphora_agent.stats.collector`).

    A worker never ends before its last counters are read, unless it crashes.
    """

    def sample(self) -> None:
        """Read the counters of each worker."""

    def sample_servers(self, servers: Sequence[tuple[str, str]]) -> None:
        """Read these servers of the present worker, by HAProxy's numbers of backend and server."""

    def hold(self, drain: float) -> None:
        """Keep a connection to the present worker, which may go on for so many seconds after its replacement."""

    def finish(self, pid: int, grace: float) -> int:
        """End an old worker; return the number of connections that were closed after so many seconds."""

    def finish_all(self, grace: float) -> int:
        """Close the connections of all workers that shut down; the caller ends the workers."""
