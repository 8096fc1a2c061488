# SPDX-License-Identifier: Apache-2.0
"""Commands that drain removed servers in the old worker before a reload.

Invariant: pure. After its replacement a worker accepts no commands ("Proxy is disabled"), but it serves one more
request of each client that kept its connection, with its old configuration. So servers that are removed, disabled,
moved or get the weight 0 are drained before. A backend without any other server is left out, because that request
would then fail. Running requests continue.
"""

from __future__ import annotations

from collections.abc import Mapping

from amphora_agent.haproxy.config_parser import Configuration, Server
from amphora_agent.haproxy.runtime_state import ServerState


def drain_commands(wanted: Configuration, states: Mapping[tuple[str, str], ServerState]) -> list[str]:
    """Return the commands for the worker that is about to be replaced.

    Args:
        wanted: the configuration of the next worker.
        states: the states of the servers in the present one.
    """
    serving: dict[str, list[str]] = {}
    for (backend, name), state in states.items():
        if state.serves:
            serving.setdefault(backend, []).append(name)
    found = []
    for backend, names in serving.items():
        if backend not in wanted.backends:
            continue  # only clients of a removed listener can reach it
        removed = [name for name in names if not _stays(wanted.servers.get((backend, name)), states[backend, name])]
        if len(removed) < len(names):
            servers = {name: wanted.servers.get((backend, name)) for name in removed}
            found += [f"set server {backend}/{name} state {_state(server)}" for name, server in servers.items()]
    return found


def ready_command(command: str) -> str:
    """Return the command that reverts a drain command, for a reload that failed."""
    return f"{command.rpartition(' ')[0]} ready"


def _state(server: Server | None) -> str:
    """Return "drain" for a server with weight 0, which keeps its persistent clients; otherwise "maint"."""
    return "drain" if server is not None and server.weight == 0 and not server.disabled else "maint"


def _stays(server: Server | None, state: ServerState) -> bool:
    if server is None or server.disabled or server.weight == 0:
        return False
    host, _, port = server.address.rpartition(":")
    return (host.strip("[]"), port) == (state.address, str(state.port)) or not port.isdecimal()
