# SPDX-License-Identifier: Apache-2.0
"""HAProxy's workers, as its master lists them (``show proc``, management guide, 9.4)."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Maximum number of HAProxy's old workers after a reload. Each worker needs the memory of a whole HAProxy.
MAX_OLD_WORKERS = 8
_LINE = re.compile(r"^(?P<pid>\d+)\s+(?P<kind>master|worker)\s+(?P<reloads>\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Workers:
    """The master's number of reloads, and the pids of its workers.

    ``replaced`` begins with the oldest one. ``present`` is None if the last worker did not start.
    """

    reloads: int
    present: int | None
    replaced: tuple[int, ...]


def parse(answer: str) -> Workers | None:
    """Parse the answer to ``show proc``; None for another text."""
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

    After the reload there are at most `limit` old workers; None means `MAX_OLD_WORKERS`.
    """
    retained = max(0, (limit or MAX_OLD_WORKERS) - 1)
    return workers.replaced[: max(0, len(workers.replaced) - retained)]
