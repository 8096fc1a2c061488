# SPDX-License-Identifier: Apache-2.0
"""Reads the states of few servers of a large backend by their numbers.

HAProxy finds a server's state only by number. The list of 10,000 states takes HAProxy 9 to 18 ms, and one state 0.2 ms.
The agent takes the numbers from one such list, and predicts the number of an added server: the lowest unused number.

Invariant: a row counts only with the expected name and a state that `show stat` expresses completely. Otherwise there
is no result, and the agent reads the list.

The number of servers is the agent's own count. Only the drift check finds servers that another program has added.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from amphora_agent.haproxy.config_parser import Server
from amphora_agent.haproxy.runtime_socket import Socket
from amphora_agent.haproxy.runtime_state import ServerState

# For fewer servers, the list is as fast.
LARGE = 500
_MAX_ASKED = 20
_TABLE = "# pxname,"
_LINE = re.compile(r"^(\d+) (\S+) (\d+) (\S+) ", re.MULTILINE)
# States in which a server has no administrative state, in HAProxy's words.
_ORDINARY = ("UP", "no check")
# The state of a disabled server. HAProxy has other words for a server that another server or a name disables.
_MAINTENANCE = "MAINT"


class Usage(NamedTuple):
    """HAProxy's numbers of a server and its backend, and the number of its running requests."""

    numbers: tuple[str, str]
    used: int


class ServerNumbers:
    """HAProxy's numbers of a backend and of its servers."""

    def __init__(self, backend: str, number: str, servers: dict[str, int]) -> None:
        self._backend = backend
        self._number = number
        self._servers = servers

    @classmethod
    def parse(cls, answer: str, backend: str) -> ServerNumbers | None:
        """Take the numbers from an answer to `show servers state`; None for a small backend."""
        found = [words for words in _LINE.findall(answer) if words[1] == backend]
        if len(found) < LARGE:
            return None
        return cls(backend, found[0][0], {name: int(number) for _, _, number, name in found})

    def __len__(self) -> int:
        return len(self._servers)

    def read(
        self, worker: Socket, names: Collection[str], wanted: Mapping[tuple[str, str], Server]
    ) -> dict[tuple[str, str], ServerState] | None:
        """Return the states of changed servers, and learn the numbers of added ones.

        Args:
            names: the changed servers, also the removed ones.
            wanted: those of the changed servers that the configuration has, by backend and name.

        Returns None if the states have to be read from the list.
        """
        kept = {name for name in names if (self._backend, name) in wanted}
        asked = {self._servers[name] for name in names if name in self._servers}
        asked.update(self._next_numbers(len(kept - self._servers.keys()), set(names) - kept))
        if len(asked) > _MAX_ASKED or not all(_is_ordinary(wanted[self._backend, name]) for name in kept):
            return None
        answer = worker.ask(";".join(f"show stat {self._number} 4 {number}" for number in sorted(asked)))
        rows = {row["svname"]: row for row in _rows(answer) if row["# pxname"] == self._backend}
        states = {name: _state(rows[name]) for name in names if name in rows}
        if states.keys() != kept or None in states.values():
            return None
        for name in names:
            self._servers.pop(name, None)
        self._servers.update({name: int(rows[name]["sid"]) for name in kept})
        return {(self._backend, name): state for name, state in states.items() if state is not None}

    def usage(self, worker: Socket, names: Collection[str]) -> dict[str, Usage] | None:
        """Return the usage of servers; None if it has to be read from the list."""
        if len(names) > _MAX_ASKED or not self._servers.keys() >= set(names):
            return None
        found = {}
        answer = worker.ask(";".join(f"show stat {self._number} 4 {self._servers[name]}" for name in names))
        for row in _rows(answer):
            number, used = row.get("sid", ""), row.get("scur", "")
            if row["# pxname"] == self._backend and used.isdecimal():
                found[row["svname"]] = Usage((self._number, number), int(used))
        return found if found.keys() == set(names) else None

    def _next_numbers(self, count: int, gone: Collection[str]) -> Iterator[int]:
        """Return the numbers that HAProxy gives to this many added servers."""
        if not count:
            return iter(())
        taken = {number for name, number in self._servers.items() if name not in gone}
        return itertools.islice((number for number in itertools.count(1) if number not in taken), count)


def _is_ordinary(server: Server) -> bool:
    """Whether `show stat` has everything that a verification compares."""
    elsewhere = server.checked and (server.value("addr") or server.value("port"))
    return not elsewhere and server.weight > 0


def _rows(answer: str) -> Iterator[dict[str, str]]:
    for table in answer.split(_TABLE)[1:]:
        # If the worker ends during its answer, columns are missing.
        yield from csv.DictReader((_TABLE + table).splitlines(), restval="")


def _state(row: Mapping[str, str]) -> ServerState | None:
    host, _, port = row.get("addr", "").rpartition(":")
    weight = row.get("uweight", "")
    numbers = (row.get("sid", ""), port, weight)
    maintenance = row.get("status") == _MAINTENANCE
    if not (maintenance or row.get("status") in _ORDINARY) or not all(number.isdecimal() for number in numbers):
        return None
    return ServerState(
        up=not maintenance,
        weight=int(weight),
        maintenance=maintenance,
        draining=False,
        address=host.strip("[]"),
        port=int(port),
        check_address="-",
        check_port=0,
    )
