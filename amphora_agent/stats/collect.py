# SPDX-License-Identifier: Apache-2.0
"""Read HAProxy's statistics.

Invariant: pure, and CSV only: HAProxy takes a minute to write ten thousand servers as JSON.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from amphora_agent.haproxy.configuration import OWN

QUESTION = "show info;show stat -1 7 -1"
# A held connection puts its prompt between the answers to one line: there, one question at a time.
HELD_QUESTIONS = ("show info", "show stat -1 1 -1")


@dataclass(frozen=True)
class Counters:
    """What one listener has counted since its worker started."""

    bytes_in: int = 0
    bytes_out: int = 0
    request_errors: int = 0
    total_connections: int = 0

    def __add__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def fell_below(self, other: Counters) -> bool:
        return any(getattr(self, f.name) < getattr(other, f.name) for f in fields(self))


@dataclass(frozen=True)
class Listener:
    """One frontend."""

    status: str
    active_connections: int
    counters: Counters


@dataclass(frozen=True)
class Sample:
    """One answer of one worker. ``other_jobs`` counts the connections besides the one that asked."""

    pid: int
    stopping: bool
    other_jobs: int
    listeners: dict[str, Listener]
    pools: dict[str, str]
    members: dict[str, dict[str, str]]


def parse(answer: str) -> Sample | None:
    """Read the answer to `QUESTION`; None if it is not one."""
    info = dict(re.findall(r"^([A-Z][A-Za-z_ ]*): (\d+)$", answer, re.MULTILINE))
    head, separator, table = answer.partition("# pxname,")
    if not separator or "Pid" not in info or not head:
        return None
    lines = table.split("\n")
    columns = {name: place for place, name in enumerate(("pxname", *lines[0].split(",")))}
    listeners: dict[str, Listener] = {}
    pools: dict[str, str] = {}
    members: dict[str, dict[str, str]] = {}
    for line in lines[1:]:
        row = line.split(",")
        if len(row) < len(columns) // 2 or row[0].startswith(OWN):
            continue
        proxy, name, status = row[0], row[1], row[columns["status"]]
        if name == "FRONTEND":
            listeners[proxy] = _listener(row, columns, status)
        elif name == "BACKEND":
            pools[proxy] = status
        else:
            members.setdefault(proxy, {})[name] = status
    jobs = int(info.get("Jobs", 0)) - int(info.get("Unstoppable Jobs", 0)) - 1
    return Sample(int(info["Pid"]), info.get("Stopping") == "1", jobs, listeners, pools, members)


def _listener(row: list[str], columns: dict[str, int], status: str) -> Listener:
    def number(column: str) -> int:
        return int(row[columns[column]] or 0)

    counters = Counters(number("bin"), number("bout"), number("ereq"), number("stot"))
    return Listener(status, number("scur"), counters)
