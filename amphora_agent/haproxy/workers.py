# SPDX-License-Identifier: Apache-2.0
"""HAProxy's processes as its master lists them, and which of them have to go.

Invariant: pure. Source: ``show proc`` on the master's socket (HAProxy management guide, 9.4).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Workers that were replaced and still have connections: as many copies of HAProxy in memory.
MOST_REPLACED = 8
_LINE = re.compile(r"^(?P<pid>\d+)\s+(?P<kind>master|worker)\s+(?P<reloads>\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Workers:
    """``reloads`` is how often the master has reloaded, ``present`` the worker of the last time if there is one.

    ``replaced`` are those before it, the oldest first.
    """

    reloads: int
    present: int | None
    replaced: tuple[int, ...]


def parse(answer: str) -> Workers | None:
    """Read the answer to ``show proc``; None if it is not one."""
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


def too_many(workers: Workers, most: int | None) -> tuple[int, ...]:
    """The replaced workers that have to end before the present one is replaced too.

    Args:
        most: how many may go on at once; None is `MOST_REPLACED`.
    """
    room = max(0, (most or MOST_REPLACED) - 1)
    return workers.replaced[: max(0, len(workers.replaced) - room)]
