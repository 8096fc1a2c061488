# SPDX-License-Identifier: Apache-2.0
"""The parser of HAProxy's statistics as CSV. As JSON, HAProxy writes ten thousand servers in a minute."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from operator import itemgetter

from amphora_agent.change_priority import GiveWay, never_wait
from amphora_agent.haproxy.config_parser import AGENT_PREFIX
from amphora_agent.stats.former_workers import COUNTED

# A stopping worker reports its listeners as stopped. The second `show info` shows whether the worker began to stop
# before the end of `show stat`.
QUESTION = "show info;show stat -1 7 -1;show info"
# In HAProxy's interactive mode, each command has its own answer, so these commands are sent one by one.
HELD_QUESTIONS = ("show info", "show stat -1 7 -1", "show info")
_INFO = re.compile(r"^([A-Z][A-Za-z_ ]*): (\d+)$", re.MULTILINE)
# Counters of one row of HAProxy's statistics, in the order of `COUNTED`.
Counts = tuple[int, ...]
NONE: Counts = (0,) * len(COUNTED)
# The parser needs 4 to 10 microseconds for a row.
_ROWS_AT_ONCE = 50
_CONNECTIONS, _BYTES_IN, _BYTES_OUT, _REQUEST_ERRORS = map(COUNTED.index, ("stot", "bin", "bout", "ereq"))


@dataclass(frozen=True)
class Counters:
    """The counters of one listener in a heartbeat."""

    bytes_in: int = 0
    bytes_out: int = 0
    request_errors: int = 0
    total_connections: int = 0

    @classmethod
    def of(cls, counts: Counts) -> Counters:
        return cls(counts[_BYTES_IN], counts[_BYTES_OUT], counts[_REQUEST_ERRORS], counts[_CONNECTIONS])


@dataclass(frozen=True)
class Listener:
    """The state of one frontend."""

    status: str
    active_connections: int


@dataclass(frozen=True)
class WorkerLoad:
    """The open connections of a worker, and their limit.

    ``listener_percent`` is the usage of the listener that is next to a limit of its own; None without such a limit.
    """

    pid: int
    connections: int
    max_connections: int
    listener_percent: int | None


@dataclass(frozen=True)
class Sample:
    """The parsed answer of one worker.

    ``other_jobs`` excludes the connection that asked. ``pools`` has the status of each backend, ``members`` the status
    of each server by backend. ``counts`` has the counters of all rows by `key`. ``known`` has the parsed counters by
    their text, for the next call of `parse`.
    """

    pid: int
    stopping: bool
    other_jobs: int
    listeners: dict[str, Listener]
    pools: dict[str, str]
    members: dict[str, dict[str, str]]
    counts: dict[str, Counts]
    known: dict[tuple[str, ...], Counts] = field(default_factory=dict, repr=False)
    load: WorkerLoad | None = None


def key(proxy: str, name: str = "FRONTEND") -> str:
    """Return the key of a row; names contain no comma."""
    return f"{proxy},{name}"


def parse(answer: str, before: Sample | None = None, give_way: GiveWay = never_wait) -> Sample | None:
    """Parse the answer to `QUESTION`; None for another format. Rows as in ``before`` are not parsed again.

    `give_way` is called after some rows.
    """
    head, separator, table = answer.partition("# pxname,")
    # A search through 10,000 rows would delay the other threads of the agent.
    end = table.find("\nName: ")
    info = dict(_INFO.findall(head) + (_INFO.findall(table, end) if end >= 0 else []))
    if not separator or "Pid" not in info or not head:
        return None
    lines = table.split("\n")
    columns = {name: place for place, name in enumerate(("pxname", *lines[0].split(",")))}
    # If this version of HAProxy lacks a counter, column 0 replaces the counter's column. The parser empties column 0 of
    # each row, so the missing counter is 0.
    counted = itemgetter(*(columns.get(name, 0) for name in COUNTED))
    former = before.known if before is not None else {}
    known: dict[tuple[str, ...], Counts] = {}
    listeners: dict[str, Listener] = {}
    pools: dict[str, str] = {}
    members: dict[str, dict[str, str]] = {}
    counts: dict[str, Counts] = {}
    most = int(info.get("Maxconn", 0))
    shares: list[int] = []
    for number, line in enumerate(lines[1:]):
        if number % _ROWS_AT_ONCE == 0:
            give_way()
        row = line.split(",")
        if len(row) < len(columns) // 2 or row[0].startswith(AGENT_PREFIX):
            continue
        proxy, name, status = row[0], row[1], row[columns["status"]]
        if name == "FRONTEND":
            listeners[proxy] = Listener(status, int(row[columns["scur"]] or 0))
            # A listener whose limit equals that of the process has no limit of its own.
            if 0 < (limit := int(row[columns["slim"]] or 0)) < most:
                shares.append(min(100, 100 * listeners[proxy].active_connections // limit))
        elif name == "BACKEND":
            pools[proxy] = status
        else:
            members.setdefault(proxy, {})[name] = status
        row[0] = ""
        words = counted(row)
        found = known.get(words) or former.get(words) or tuple([int(word or 0) for word in words])
        counts[key(proxy, name)] = known[words] = found
    jobs = int(info.get("Jobs", 0)) - int(info.get("Unstoppable Jobs", 0)) - 1
    load = WorkerLoad(int(info["Pid"]), int(info.get("CurrConns", 0)), most, max(shares, default=None))
    return Sample(load.pid, info.get("Stopping") == "1", jobs, listeners, pools, members, counts, known, load)
