# SPDX-License-Identifier: Apache-2.0
"""HAProxy's stats socket.

Invariant: an answer is a success only if it is one that is known to mean success. HAProxy reports errors as
text like any other, so whatever is not recognised is an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from amphora_agent.errors import HaproxyError
from amphora_agent.haproxy.features import FEWEST, Abilities
from amphora_agent.haproxy.runtime_actions import (
    AddServer,
    AddTicketKeys,
    ForgetFile,
    ListCertificate,
    LoadFile,
    NameServers,
    RemoveServer,
    ReplaceServer,
    SetAddress,
    SetCheck,
    SetFrontendMaxconn,
    SetMaintenance,
    SetServerMaxconn,
    SetWeight,
    Step,
    UnlistCertificate,
)
from amphora_agent.haproxy.runtime_socket import Socket
from amphora_agent.haproxy.runtime_state import states
from amphora_agent.haproxy.tls_store import HeldFiles

REMOVAL_SECONDS = 0.1
_POLL_SECONDS = 0.002
_AT_ONCE = 50
"""Commands on one line: HAProxy reads at most 16 KiB."""
MOST_COUNTED_APART = 10
"""More servers than these are counted sooner together with all others."""
Count = Callable[[Sequence[tuple[str, str]] | None], None]
_ADDED = "New server registered."
_DELETED = "Server deleted."


def carry_out(
    steps: Iterable[Step],
    worker: Socket,
    directory: Path = Path(),
    abilities: Abilities = FEWEST,
    count: Count = lambda _: None,
) -> None:
    """Change the running worker.

    Args:
        directory: of the files that the new configuration names.
        abilities: what this HAProxy can do.
        count: reads counters of servers, by HAProxy's numbers of backend and server, or (None) of all; called before
            servers are deleted, which takes theirs along.

    Raises:
        HaproxyError: it did not do one of the steps; those before it are done.
        OSError: a file is not there.
    """
    files = HeldFiles(worker, directory)
    for removal, group in groupby(steps, lambda step: step.backend if isinstance(step, RemoveServer) else None):
        if removal is not None:
            _remove(worker, removal, [step for step in group if isinstance(step, RemoveServer)], abilities, count)
        else:
            _change(worker, group, files, abilities, count)
    files.confirm()


def _change(worker: Socket, steps: Iterable[Step], files: HeldFiles, abilities: Abilities, count: Count) -> None:
    for step in steps:
        match step:
            case LoadFile() | ForgetFile() | ListCertificate() | UnlistCertificate() | AddTicketKeys():
                files.change(step)
            case AddServer():
                _add(worker, step)
            case NameServers():
                _name(worker, step)
            case ReplaceServer():
                _replace(worker, step, abilities, count)
            case _:
                _set(worker, step)


def _set(worker: Socket, step: Step) -> None:
    match step:
        case SetWeight():
            worker.order(f"set server {step.backend}/{step.name} weight {step.weight}")
        case SetMaintenance():
            state = "maint" if step.maintenance else "ready"
            worker.order(f"set server {step.backend}/{step.name} state {state}")
        case SetAddress():
            # What it answers is a sentence that differs between versions: `readback` looks at what came of it.
            worker.ask(f"set server {step.backend}/{step.name} addr {step.address} port {step.port}")
        case SetCheck():
            address = f"check-addr {step.address}" if step.address is not None else ""
            port = ("port " if address else "check-port ") + str(step.port) if step.port is not None else ""
            worker.order(f"set server {step.backend}/{step.name} {address} {port}")
        case SetServerMaxconn():
            worker.order(f"set maxconn server {step.backend}/{step.name} {step.maxconn}")
        case SetFrontendMaxconn():
            worker.order(f"set maxconn frontend {step.frontend} {step.maxconn or _most(worker)}")
        case _:
            raise HaproxyError(f"change HAProxy by {type(step).__name__}", "nobody knows how")


def _most(worker: Socket) -> int:
    """How many connections the process takes, and with it a listener without a limit of its own."""
    for line in worker.ask("show info").splitlines():
        name, _, value = line.partition(": ")
        if name == "Maxconn" and value.isdecimal():
            return int(value)
    raise HaproxyError("ask HAProxy how many connections it takes", "it did not say")


def _add(worker: Socket, step: AddServer) -> None:
    server, name = step.server, f"{step.backend}/{step.server.name}"
    first = ("init-state", "down") if step.unproven else ()
    commands = [" ".join(("add server", name, server.address, *server.keywords, *first))]
    if server.checked:
        commands.append(f"enable health {name}")
    if not server.disabled and not step.waits:
        commands.append(f"enable server {name}")
    worker.order("; ".join(commands), _ADDED)  # whatever fails says something else besides


def _replace(worker: Socket, step: ReplaceServer, abilities: Abilities, count: Count) -> None:
    """Take a server away and add it again with other keywords, if nobody notices.

    It comes back as one that is up, so it has to be up now; and somebody else has to serve in the meantime.
    """
    name = step.server.name
    if not step.idle:
        found = states(worker.ask(f"show servers state {step.backend}"))
        serving = {server for (_, server), state in found.items() if state.serves}
        if name not in serving:
            raise HaproxyError(f"replace member {name}", "it is not up, which would be forgotten")
        if not serving & step.others:
            raise HaproxyError(f"replace member {name}", "nobody else serves")
    try:
        _remove(worker, step.backend, [RemoveServer(step.backend, name, step.idle)], abilities, count)
    except HaproxyError:
        if not step.idle:
            worker.order(f"set server {step.backend}/{name} state ready")
        raise
    _add(worker, AddServer(step.backend, step.server))


def _name(worker: Socket, step: NameServers) -> None:
    """Have HAProxy compute the cookies of servers it knows.

    HAProxy 2.6 computes those of all servers whenever the key is set, and none when a server is added.
    """
    worker.order(f"set dynamic-cookie-key backend {step.backend} {step.key}")
    _order_all(worker, [f"enable server {step.backend}/{name}" for name in step.names])


def _remove(worker: Socket, backend: str, steps: Sequence[RemoveServer], abilities: Abilities, count: Count) -> None:
    """Take servers out of a backend, waiting a moment for the requests they still answer.

    Draining comes first because maintenance closes the connections that are idle at that moment: one that becomes
    idle later would keep the server from being deleted for another five seconds. All of them go together: the question
    who is still busy is about the whole backend, and would be asked a thousand times for a thousand members.
    """
    names = {step.name for step in steps}
    deadline = time.monotonic() + REMOVAL_SECONDS
    draining = [step.name for step in steps if not step.disabled]
    _order_all(worker, [f"set server {backend}/{name} state drain" for name in draining])
    found = _uses(worker, backend, names)
    while any(found[name].used for name in draining if name in found) and time.monotonic() < deadline:
        # The question is about all of them at once, which 'wait' (3.0) has no words for.
        time.sleep(_POLL_SECONDS)
        found = _uses(worker, backend, names)
    _order_all(worker, [f"set server {backend}/{step.name} state maint" for step in steps])
    deadline = max(deadline, time.monotonic() + REMOVAL_SECONDS / 2)
    if abilities.waiting:
        _await_removable(worker, backend, steps, deadline)
    # They get no more requests.
    count([use.numbers for use in found.values()] if found and len(names) <= MOST_COUNTED_APART else None)
    deadline = max(deadline, time.monotonic() + REMOVAL_SECONDS / 2)
    for step in steps:
        _delete(worker, f"{backend}/{step.name}", deadline)


def _delete(worker: Socket, server: str, deadline: float) -> None:
    """Delete a server that is in maintenance, as soon as the threads that own its idle connections have closed them.

    One that was disabled while it answered may have connections that became idle after that. HAProxy 2.8 keeps them for
    five seconds more, and the server with them, unless its maintenance begins once more.
    """
    command, tried = f"del server {server}", False
    while (answer := worker.ask(command).strip()) != _DELETED:
        if time.monotonic() >= deadline:
            raise HaproxyError(f"have HAProxy do '{command}'", answer or "it said nothing")
        if not tried:
            worker.order(f"set server {server} state drain; set server {server} state maint")
            tried = True
        time.sleep(_POLL_SECONDS)


def _await_removable(worker: Socket, backend: str, steps: Sequence[RemoveServer], deadline: float) -> None:
    """Let HAProxy say when the last ones can go; those before them can by then, or are asked for once more."""
    left = max(1, int(1000 * (deadline - time.monotonic())))
    worker.ask(f"wait {left}ms srv-removable {backend}/{steps[-1].name}")


def _order_all(worker: Socket, commands: Sequence[str]) -> None:
    """Give commands that have nothing to answer, many at once."""
    for first in range(0, len(commands), _AT_ONCE):
        worker.order("; ".join(commands[first : first + _AT_ONCE]))


class _Use(NamedTuple):
    """HAProxy's numbers of a server and its backend, and how many connections to it are used now."""

    numbers: tuple[str, str]
    used: int


def _uses(worker: Socket, backend: str, names: Collection[str]) -> dict[str, _Use]:
    """What some servers of a backend do."""
    lines = worker.ask(f"show servers conn {backend}").splitlines()
    head = lines[0].split() if lines else []
    if "used_cur" not in head:
        return {}
    column = head.index("used_cur") - 1  # the first word of the head is its '#'
    found = {}
    for line in lines[1:]:
        name = line.partition(" ")[0].removeprefix(f"{backend}/")
        if name in names:
            words = line.split()
            backend_number, _, number = words[1].partition("/")
            found[name] = _Use((backend_number, number), int(words[column]))
    return found
