# SPDX-License-Identifier: Apache-2.0
"""Servers that a worker must leave alone when it is replaced, because the load balancer will.

Invariant: pure. A replaced worker answers one more request of each client that kept its connection, from the
configuration it has; it takes no orders any more ("Proxy is disabled"). So it is told before of members that go, are
disabled, move or get no weight, and they get no request which begins after the change; unless nobody else of their pool
is left to it, for then that request would fail. Requests that go on are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from amphora_agent.haproxy.config_parser import Configuration, Server
from amphora_agent.haproxy.runtime_state import State


def orders(wanted: Configuration, states: Mapping[tuple[str, str], State]) -> list[str]:
    """What to tell a worker that is about to be replaced.

    Args:
        wanted: what the next worker will run.
        states: what the present one says of its servers.
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
            going = {name: wanted.servers.get((backend, name)) for name in left}
            found += [f"set server {backend}/{name} state {_state(server)}" for name, server in going.items()]
    return found


def taken_back(order: str) -> str:
    """What to tell it if it is not replaced after all."""
    return f"{order.rpartition(' ')[0]} ready"


def _state(server: Server | None) -> str:
    """One that only lost its weight keeps the clients that are remembered to be its own."""
    return "drain" if server is not None and server.weight == 0 and not server.disabled else "maint"


def _stays(server: Server | None, state: State) -> bool:
    if server is None or server.disabled or server.weight == 0:
        return False
    host, _, port = server.address.rpartition(":")
    return (host.strip("[]"), port) == (state.address, str(state.port)) or not port.isdecimal()
