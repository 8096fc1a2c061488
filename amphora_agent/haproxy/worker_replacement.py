# SPDX-License-Identifier: Apache-2.0
"""The data of an old worker for the next one: check results, stick tables, drained servers."""

from __future__ import annotations

import re
from collections.abc import Mapping

from amphora_agent.haproxy.config_file import PEERS
from amphora_agent.haproxy.config_parser import Configuration, Server
from amphora_agent.haproxy.runtime_state import ServerState

_VERSION = "1"
# Positions of columns in HAProxy's server-state file (management guide, 9.3).
_BACKEND, _NAME, _ADDRESS, _ADMIN, _WEIGHT, _INITIAL_WEIGHT, _PORT, _FIELDS = 1, 3, 4, 6, 7, 8, 18, 25
_MAINTENANCE_BY_CONFIGURATION = "5"
NO_STATES = f"{_VERSION}\n"
"""The content of an empty server-state file."""

TABLES = "show table;show peers"
"""The question to a worker about its stick tables."""
_USED = re.compile(r"^# table: .*\bused:([1-9]\d*)", re.MULTILINE)
_TABLE = re.compile(r"^# table: ", re.MULTILINE)
_FLAGS = re.compile(rf"\bid={PEERS} disabled=\d+ flags=(0x[0-9a-f]+)")
_LEARNED = 0x3


def compose_states(answer: str, wanted: Configuration) -> str:
    """Return the server-state file for a worker with the configuration `wanted`.

    The file has the results of health checks from the old worker's answer to ``show servers state``. Weight and
    maintenance come from the new configuration. Servers without a check, or with another address, are left out.
    """
    lines = answer.split("\n")
    if lines[0].strip() != _VERSION:
        return NO_STATES
    kept = [_VERSION]
    for line in lines[1:]:
        if line.startswith("#"):
            kept.append(line)
            continue
        fields = line.split(" ")
        if len(fields) < _FIELDS:
            continue
        server = wanted.servers.get((fields[_BACKEND], fields[_NAME]))
        place = fields[_ADDRESS].lower(), fields[_PORT]
        if server is None or not server.checked or (server.endpoint[0].lower(), server.endpoint[1]) != place:
            continue
        fields[_ADMIN] = _MAINTENANCE_BY_CONFIGURATION if server.disabled else "0"
        fields[_WEIGHT] = fields[_INITIAL_WEIGHT] = str(server.weight)
        kept.append(" ".join(fields))
    return "\n".join(kept) + "\n"


def drain_commands(wanted: Configuration, states: Mapping[tuple[str, str], ServerState]) -> list[str]:
    """Return the commands that drain removed servers in the worker before a reload.

    A replaced worker accepts no commands. But the worker serves one more request of each client with an open
    connection, with its old configuration. So the agent drains servers that the `wanted` configuration removes,
    disables or moves, and servers with the new weight 0. A backend without any other server is left out, because that
    request would fail. Running requests continue.
    """
    serving: dict[str, list[str]] = {}
    for (backend, name), state in states.items():
        if state.serves:
            serving.setdefault(backend, []).append(name)
    found = []
    for backend, names in serving.items():
        if backend not in wanted.backends:
            # Only clients of a removed listener could reach a removed backend, so its servers need no drain.
            continue
        removed = [name for name in names if not _stays(wanted.servers.get((backend, name)), states[backend, name])]
        if len(removed) < len(names):
            servers = {name: wanted.servers.get((backend, name)) for name in removed}
            found += [f"set server {backend}/{name} state {_drained(server)}" for name, server in servers.items()]
    return found


def ready_command(command: str) -> str:
    """Return the command that reverts a drain command, for a reload that failed."""
    return f"{command.rpartition(' ')[0]} ready"


def _drained(server: Server | None) -> str:
    """Return "drain" for a server with weight 0, which keeps its persistent clients; otherwise "maint"."""
    return "drain" if server is not None and server.weight == 0 and not server.disabled else "maint"


def _stays(server: Server | None, state: ServerState) -> bool:
    if server is None or server.disabled or server.weight == 0:
        return False
    return server.endpoint == (state.address, str(state.port)) or not server.endpoint[1].isdecimal()


def has_entries(answer: str) -> bool:
    """Whether the answer to `TABLES` shows a table with entries."""
    return _USED.search(answer) is not None


def would_lose_entries(answer: str, *, has_predecessor: bool = False) -> bool:
    """Whether a reload now would lose entries of stick tables, according to the answer to `TABLES`.

    A worker sends its tables to its successor only after it has learned the tables of its own predecessor. Learning
    takes about 100 ms after a reload, and five seconds for a worker without a predecessor. If the predecessor had not
    learned its tables, the worker waits five seconds, and five more for other peers (HAProxy 2.6 and 2.8, not 3.0).
    Source: ``show peers`` before and after reloads.

    With `has_predecessor`, the previous worker had entries.
    """
    flags = _FLAGS.search(answer)
    some = has_entries(answer) or (has_predecessor and _TABLE.search(answer) is not None)
    return some and flags is not None and int(flags.group(1), 16) & _LEARNED != _LEARNED
