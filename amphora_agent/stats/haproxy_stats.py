# SPDX-License-Identifier: Apache-2.0
"""Read HAProxy's statistics.

Invariant: pure, and CSV only: HAProxy takes a minute to write ten thousand servers as JSON.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from operator import itemgetter

from amphora_agent.haproxy.config_parser import OWN
from amphora_agent.stats.stat_columns import COUNTED

# Asked again at the end: a worker that begins to stop in between calls its listeners stopped.
QUESTION = "show info;show stat -1 7 -1;show info"
# A held connection puts its prompt between the answers to one line: there, one question at a time.
HELD_QUESTIONS = ("show info", "show stat -1 7 -1", "show info")
# One row's counters, in the order of `COUNTED`.
Counts = tuple[int, ...]
NONE: Counts = (0,) * len(COUNTED)
_CONNECTIONS, _BYTES_IN, _BYTES_OUT, _REQUEST_ERRORS = map(COUNTED.index, ("stot", "bin", "bout", "ereq"))


@dataclass(frozen=True)
class Counters:
    """What is told of one listener."""

    bytes_in: int = 0
    bytes_out: int = 0
    request_errors: int = 0
    total_connections: int = 0

    @classmethod
    def of(cls, counts: Counts) -> Counters:
        return cls(counts[_BYTES_IN], counts[_BYTES_OUT], counts[_REQUEST_ERRORS], counts[_CONNECTIONS])


@dataclass(frozen=True)
class Listener:
    """One frontend."""

    status: str
    active_connections: int


@dataclass(frozen=True)
class Sample:
    """One answer of one worker. ``other_jobs`` counts the connections besides the one that asked.

    ``counts`` are those of all rows, each by `key`; ``known`` is what each of them looked like.
    """

    pid: int
    stopping: bool
    other_jobs: int
    listeners: dict[str, Listener]
    pools: dict[str, str]
    members: dict[str, dict[str, str]]
    counts: dict[str, Counts]
    known: dict[tuple[str, ...], Counts] = field(default_factory=dict, repr=False)


def key(proxy: str, name: str = "FRONTEND") -> str:
    """By what a row's counters are kept; no name has a comma in it."""
    return f"{proxy},{name}"


def parse(answer: str, before: Sample | None = None) -> Sample | None:
    """Read the answer to `QUESTION`; None if it is not one.

    Args:
        before: an earlier sample. Of ten thousand members most have counted nothing since.
    """
    info = dict(re.findall(r"^([A-Z][A-Za-z_ ]*): (\d+)$", answer, re.MULTILINE))
    head, separator, table = answer.partition("# pxname,")
    if not separator or "Pid" not in info or not head:
        return None
    lines = table.split("\n")
    columns = {name: place for place, name in enumerate(("pxname", *lines[0].split(",")))}
    # What one version does not count is 0, which the first column is made into.
    counted = itemgetter(*(columns.get(name, 0) for name in COUNTED))
    former = before.known if before is not None else {}
    known: dict[tuple[str, ...], Counts] = {}
    listeners: dict[str, Listener] = {}
    pools: dict[str, str] = {}
    members: dict[str, dict[str, str]] = {}
    counts: dict[str, Counts] = {}
    for line in lines[1:]:
        row = line.split(",")
        if len(row) < len(columns) // 2 or row[0].startswith(OWN):
            continue
        proxy, name, status = row[0], row[1], row[columns["status"]]
        if name == "FRONTEND":
            listeners[proxy] = Listener(status, int(row[columns["scur"]] or 0))
        elif name == "BACKEND":
            pools[proxy] = status
        else:
            members.setdefault(proxy, {})[name] = status
        row[0] = ""
        words = counted(row)
        found = known.get(words) or former.get(words) or tuple([int(word or 0) for word in words])
        counts[key(proxy, name)] = known[words] = found
    jobs = int(info.get("Jobs", 0)) - int(info.get("Unstoppable Jobs", 0)) - 1
    return Sample(int(info["Pid"]), info.get("Stopping") == "1", jobs, listeners, pools, members, counts, known)
