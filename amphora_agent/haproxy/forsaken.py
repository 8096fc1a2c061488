# SPDX-License-Identifier: Apache-2.0
"""Servers that a replaced worker must leave alone, because the load balancer has.

Invariant: pure. A replaced worker answers one more request of each client that kept its connection, from the
configuration it has. It is told of members that were removed, disabled, moved or given no weight, so that they get no
request which begins after the change; unless nobody else of their pool is left to it, for then that request would fail.
Requests that go on are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from amphora_agent.haproxy.configuration import Configuration, Server
from amphora_agent.haproxy.readback import State


def orders(wanted: Configuration, states: Mapping[tuple[str, str], State]) -> list[str]:
    """What to tell a replaced worker.

    Args:
        wanted: what the present worker runs.
        states: what the replaced one says of its servers.
    """
    serving: dict[str, list[str]] = {}
    for (backend, name), state in states.items():
        if state.serves:
            serving.setdefault(backend, []).append(name)
    found = []
    for backend, names in serving.items():
        if backend not in wanted.backends:
            continue  # nobody but clients of a listener that is gone can come here
        left = [name for name in names if not _stays(wanted.servers.get((backend, name)), states[backend, name])]
        if len(left) < len(names):
            found += [f"set server {backend}/{name} state maint" for name in left]
    return found


def _stays(server: Server | None, state: State) -> bool:
    if server is None or server.disabled or server.weight == 0:
        return False
    host, _, port = server.address.rpartition(":")
    return (host.strip("[]"), port) == (state.address, str(state.port)) or not port.isdecimal()
