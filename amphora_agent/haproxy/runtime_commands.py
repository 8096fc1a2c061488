# SPDX-License-Identifier: Apache-2.0
"""Carries out runtime actions on HAProxy's stats socket.

Invariant: only known success answers count as success. HAProxy reports errors as ordinary text, so any other answer is
an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from amphora_agent.errors import HaproxyError
from amphora_agent.haproxy.features import MINIMAL_FEATURES, Features
from amphora_agent.haproxy.runtime_actions import (
    Action,
    AddServer,
    AddTicketKeys,
    AddToCrtList,
    ComputeCookies,
    LoadFile,
    RemoveFromCrtList,
    RemoveServer,
    ReplaceServer,
    SetAddress,
    SetCheck,
    SetFrontendMaxconn,
    SetMaintenance,
    SetServerMaxconn,
    SetWeight,
    UnloadFile,
)
from amphora_agent.haproxy.runtime_socket import Socket
from amphora_agent.haproxy.runtime_state import parse_servers
from amphora_agent.haproxy.tls_store import TlsStore

REMOVAL_SECONDS = 0.1
_POLL_SECONDS = 0.002
_MAX_BATCH = 50
"""Commands on one line; HAProxy reads at most 16 KiB."""
MAX_COUNTED_SEPARATELY = 10
"""For more servers it is faster to read the counters of all servers at once."""
CounterReader = Callable[[Sequence[tuple[str, str]] | None], None]
_ADDED = "New server registered."
_DELETED = "Server deleted."


def run_actions(
    actions: Iterable[Action],
    worker: Socket,
    directory: Path = Path(),
    features: Features = MINIMAL_FEATURES,
    read_counters: CounterReader = lambda _: None,
) -> None:
    """Change the running worker.

    Args:
        directory: of the files that the new configuration names.
        features: of this HAProxy.
        read_counters: reads the counters of servers, by HAProxy's numbers of backend and server, or of all (None).
            Called before servers are deleted, because their counters are deleted too.

    Raises:
        HaproxyError: an action failed; the actions before it are done.
        OSError: a file is missing.
    """
    files = TlsStore(worker, directory)
    for removal, group in groupby(actions, lambda action: action.backend if isinstance(action, RemoveServer) else None):
        if removal is not None:
            _remove(
                worker,
                removal,
                [action for action in group if isinstance(action, RemoveServer)],
                features,
                read_counters,
            )
        else:
            _run(worker, group, files, features, read_counters)
    files.verify()


def _run(
    worker: Socket, actions: Iterable[Action], files: TlsStore, features: Features, read_counters: CounterReader
) -> None:
    for action in actions:
        match action:
            case LoadFile() | UnloadFile() | AddToCrtList() | RemoveFromCrtList() | AddTicketKeys():
                files.run(action)
            case AddServer():
                _add(worker, action)
            case ComputeCookies():
                _compute_cookies(worker, action)
            case ReplaceServer():
                _replace(worker, action, features, read_counters)
            case _:
                _set(worker, action)


def _set(worker: Socket, action: Action) -> None:
    match action:
        case SetWeight():
            worker.order(f"set server {action.backend}/{action.name} weight {action.weight}")
        case SetMaintenance():
            state = "maint" if action.maintenance else "ready"
            worker.order(f"set server {action.backend}/{action.name} state {state}")
        case SetAddress():
            # The answer is a sentence that differs between versions; `runtime_state` verifies the effect.
            worker.ask(f"set server {action.backend}/{action.name} addr {action.address} port {action.port}")
        case SetCheck():
            address = f"check-addr {action.address}" if action.address is not None else ""
            port = ("port " if address else "check-port ") + str(action.port) if action.port is not None else ""
            worker.order(f"set server {action.backend}/{action.name} {address} {port}")
        case SetServerMaxconn():
            worker.order(f"set maxconn server {action.backend}/{action.name} {action.maxconn}")
        case SetFrontendMaxconn():
            worker.order(f"set maxconn frontend {action.frontend} {action.maxconn or _process_limit(worker)}")
        case _:
            raise HaproxyError(f"change HAProxy by {type(action).__name__}", "the action is unknown")


def _process_limit(worker: Socket) -> int:
    """Return the connection limit of the process, which also limits a listener without its own limit."""
    for line in worker.ask("show info").splitlines():
        name, _, value = line.partition(": ")
        if name == "Maxconn" and value.isdecimal():
            return int(value)
    raise HaproxyError("ask HAProxy for its connection limit", "the answer has none")


def _add(worker: Socket, action: AddServer) -> None:
    server, name = action.server, f"{action.backend}/{action.server.name}"
    first = ("init-state", "down") if action.awaits_check else ()
    commands = [" ".join(("add server", name, server.address, *server.keywords, *first))]
    if server.checked:
        commands.append(f"enable health {name}")
    if not server.disabled and not action.awaits_cookie:
        commands.append(f"enable server {name}")
    worker.order("; ".join(commands), _ADDED)  # a command that fails adds other text


def _replace(worker: Socket, action: ReplaceServer, features: Features, read_counters: CounterReader) -> None:
    """Remove a server and add it again with other keywords, if that interrupts no client.

    The added server starts in the state "up", so it has to be up now. Another server has to serve meanwhile.
    """
    name = action.server.name
    if not action.idle:
        found = parse_servers(worker.ask(f"show servers state {action.backend}"))
        serving = {server for (_, server), state in found.items() if state.serves}
        if name not in serving:
            raise HaproxyError(f"replace member {name}", "it is not up, and HAProxy would forget that")
        if not serving & action.others:
            raise HaproxyError(f"replace member {name}", "no other member serves")
    try:
        _remove(worker, action.backend, [RemoveServer(action.backend, name, action.idle)], features, read_counters)
    except HaproxyError:
        if not action.idle:
            worker.order(f"set server {action.backend}/{name} state ready")
        raise
    _add(worker, AddServer(action.backend, action.server))


def _compute_cookies(worker: Socket, action: ComputeCookies) -> None:
    """Have HAProxy compute the cookies of all servers, and then enable the new ones.

    HAProxy 2.6 computes the cookies when the key is set, and none when a server is added.
    """
    worker.order(f"set dynamic-cookie-key backend {action.backend} {action.key}")
    _order_all(worker, [f"enable server {action.backend}/{name}" for name in action.names])


def _remove(
    worker: Socket, backend: str, actions: Sequence[RemoveServer], features: Features, read_counters: CounterReader
) -> None:
    """Remove servers from a backend, after a short wait for their running requests.

    Draining comes first, because maintenance closes only the connections that are idle at that moment: a later idle
    connection would delay the deletion by five seconds. All servers are removed together: HAProxy reports connections
    for a whole backend, so a thousand members need no thousand questions.
    """
    names = {action.name for action in actions}
    deadline = time.monotonic() + REMOVAL_SECONDS
    draining = [action.name for action in actions if not action.disabled]
    _order_all(worker, [f"set server {backend}/{name} state drain" for name in draining])
    found = _usage(worker, backend, names)
    while any(found[name].used for name in draining if name in found) and time.monotonic() < deadline:
        # The command 'wait' (3.0) accepts one server only.
        time.sleep(_POLL_SECONDS)
        found = _usage(worker, backend, names)
    _order_all(worker, [f"set server {backend}/{action.name} state maint" for action in actions])
    deadline = max(deadline, time.monotonic() + REMOVAL_SECONDS / 2)
    if features.wait_command:
        _await_removable(worker, backend, actions, deadline)
    # The servers get no more requests, so their counters are final.
    read_counters([use.numbers for use in found.values()] if found and len(names) <= MAX_COUNTED_SEPARATELY else None)
    deadline = max(deadline, time.monotonic() + REMOVAL_SECONDS / 2)
    for action in actions:
        _delete(worker, f"{backend}/{action.name}", deadline)


def _delete(worker: Socket, server: str, deadline: float) -> None:
    """Delete a server in maintenance, as soon as HAProxy's threads have closed its idle connections.

    A server that was disabled during a request may have a connection that became idle afterwards. HAProxy 2.8 keeps the
    connection and the server for five more seconds, unless the server enters maintenance again.
    """
    command, tried = f"del server {server}", False
    while (answer := worker.ask(command).strip()) != _DELETED:
        if time.monotonic() >= deadline:
            raise HaproxyError(f"have HAProxy do '{command}'", answer or "the answer is empty")
        if not tried:
            worker.order(f"set server {server} state drain; set server {server} state maint")
            tried = True
        time.sleep(_POLL_SECONDS)


def _await_removable(worker: Socket, backend: str, actions: Sequence[RemoveServer], deadline: float) -> None:
    """Wait until HAProxy can delete the last server; the others are ready by then, or `_delete` retries."""
    left = max(1, int(1000 * (deadline - time.monotonic())))
    worker.ask(f"wait {left}ms srv-removable {backend}/{actions[-1].name}")


def _order_all(worker: Socket, commands: Sequence[str]) -> None:
    """Send commands without an answer, many on one line."""
    for first in range(0, len(commands), _MAX_BATCH):
        worker.order("; ".join(commands[first : first + _MAX_BATCH]))


class _Usage(NamedTuple):
    """HAProxy's numbers of a server and its backend, and the number of its connections in use."""

    numbers: tuple[str, str]
    used: int


def _usage(worker: Socket, backend: str, names: Collection[str]) -> dict[str, _Usage]:
    """Return the usage of some servers of a backend."""
    lines = worker.ask(f"show servers conn {backend}").splitlines()
    head = lines[0].split() if lines else []
    if "used_cur" not in head:
        return {}
    column = head.index("used_cur") - 1  # the first word of the head is '#'
    found = {}
    for line in lines[1:]:
        name = line.partition(" ")[0].removeprefix(f"{backend}/")
        if name in names:
            words = line.split()
            backend_number, _, number = words[1].partition("/")
            found[name] = _Usage((backend_number, number), int(words[column]))
    return found
