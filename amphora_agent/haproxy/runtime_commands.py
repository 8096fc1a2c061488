# SPDX-License-Identifier: Apache-2.0
"""Carries out runtime actions on HAProxy's stats socket.

Invariant: HAProxy reports errors as ordinary text, so any answer other than a known success is an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from amphora_agent.errors import HaproxyError
from amphora_agent.haproxy import runtime_actions as act
from amphora_agent.haproxy.features import Features
from amphora_agent.haproxy.runtime_socket import Socket
from amphora_agent.haproxy.runtime_state import parse_servers
from amphora_agent.haproxy.server_numbers import Usage
from amphora_agent.haproxy.tls_store import TlsStore

if TYPE_CHECKING:
    from amphora_agent.stats.collector import Collector

REMOVAL_SECONDS = 0.1
_POLL_SECONDS = 0.002
# Maximum number of commands in one line, which HAProxy limits to 16 KiB.
_MAX_BATCH = 50
# Maximum number of removed servers whose counters are read with one command each. For more servers, one command for all
# is faster.
MAX_COUNTED_SEPARATELY = 10
_ADDED = "New server registered."
_DELETED = "Server deleted."


class ActionRunner:
    """Changes a running worker; the TLS files are in a directory.

    HAProxy deletes the counters of a server with the server, so the runner reads the counters before. `usage` returns
    the usage of servers of a backend by their names, or None if HAProxy's list of the whole backend is necessary.
    """

    def __init__(
        self,
        worker: Socket,
        features: Features,
        counters: Collector,
        directory: Path,
        usage: Callable[[str, Collection[str]], dict[str, Usage] | None] = lambda *_: None,
    ) -> None:
        self._worker = worker
        self._features = features
        self._counters = counters
        self._files = TlsStore(worker, directory)
        self._usage_by_number = usage

    def run(self, actions: Iterable[act.Action]) -> None:
        """Carry out actions in their order. Consecutive removals of one backend are one step.

        Raises HaproxyError after a failed action; the earlier actions are done. Raises OSError for a missing file.
        """
        for backend, group in groupby(actions, lambda one: one.backend if isinstance(one, act.RemoveServer) else None):
            if backend is not None:
                self._remove(backend, [action for action in group if isinstance(action, act.RemoveServer)])
            else:
                for action in group:
                    self._run(action)
        self._files.verify()

    def _run(self, action: act.Action) -> None:
        match action:
            case act.AddServer():
                self._add(action)
            case act.ComputeCookies(backend, key, names):
                # HAProxy 2.6 computes the dynamic cookies of new servers only when a command sets the key. So the
                # command sets the same key again.
                self._worker.order(f"set dynamic-cookie-key backend {backend} {key}")
                self._order_all([f"enable server {backend}/{name}" for name in names])
            case act.ReplaceServer():
                self._replace(action)
            case act.RemoveServer():
                self._remove(action.backend, [action])
            case act.LoadFile() | act.UnloadFile() | act.AddToCrtList() | act.RemoveFromCrtList() | act.AddTicketKeys():
                self._files.run(action)
            case _:
                self._set(action)

    def _set(self, action: act.SetAction) -> None:
        worker = self._worker
        match action:
            case act.SetWeight(backend, name, weight):
                worker.order(f"set server {backend}/{name} weight {weight}")
            case act.SetMaintenance(backend, name, maintenance):
                worker.order(f"set server {backend}/{name} state {'maint' if maintenance else 'ready'}")
            case act.SetAddress(backend, name, address, port):
                # The answer to `set server addr` differs between versions of HAProxy, so the agent ignores the answer.
                # The agent verifies the address afterwards.
                worker.ask(f"set server {backend}/{name} addr {address} port {port}")
            case act.SetCheck(backend, name, check_address, check_port):
                place = f"check-addr {check_address}" if check_address is not None else ""
                port_word = ("port " if place else "check-port ") + str(check_port) if check_port is not None else ""
                worker.order(f"set server {backend}/{name} {place} {port_word}")
            case act.SetServerMaxconn(backend, name, maxconn):
                worker.order(f"set maxconn server {backend}/{name} {maxconn}")
            case act.SetFrontendMaxconn(frontend, limit):
                worker.order(f"set maxconn frontend {frontend} {limit or self._process_limit()}")

    def _process_limit(self) -> int:
        """Return the limit of the process, which also limits a listener without a limit."""
        for line in self._worker.ask("show info").splitlines():
            name, _, value = line.partition(": ")
            if name == "Maxconn" and value.isdecimal():
                return int(value)
        raise HaproxyError("read HAProxy's connection limit", "HAProxy's answer does not contain the limit")

    def _add(self, action: act.AddServer) -> None:
        server, name = action.server, f"{action.backend}/{action.server.name}"
        first = ("init-state", "down") if action.awaits_check else ()
        commands = [" ".join(("add server", name, server.address, *server.keywords, *first))]
        if server.checked:
            commands.append(f"enable health {name}")
        if not server.disabled and not action.awaits_cookie:
            commands.append(f"enable server {name}")
        # If a command fails, the answer differs from `_ADDED`, and `order` raises an error.
        self._worker.order("; ".join(commands), _ADDED)

    def _replace(self, action: act.ReplaceServer) -> None:
        """Remove a server and add it again with other keywords, without an interruption of clients.

        The added server starts in the state "up", so the removed server has to be up. Another server has to serve
        meanwhile.
        """
        name = action.server.name
        if not action.idle:
            found = parse_servers(self._worker.ask(f"show servers state {action.backend}"))
            serving = {server for (_, server), state in found.items() if state.serves}
            if name not in serving:
                raise HaproxyError(
                    f"replace member {name}", "the member is not up, but HAProxy would report its replacement as up"
                )
            if not serving & action.others:
                raise HaproxyError(f"replace member {name}", "no other member can serve during the replacement")
        try:
            self._remove(action.backend, [act.RemoveServer(action.backend, name, action.idle)])
        except HaproxyError:
            if not action.idle:
                self._worker.order(f"set server {action.backend}/{name} state ready")
            raise
        self._add(act.AddServer(action.backend, action.server))

    def _remove(self, backend: str, actions: Sequence[act.RemoveServer]) -> None:
        """Remove servers from a backend, after a short wait for their running requests.

        Draining comes first, because maintenance closes only the connections that are idle at that moment. A later idle
        connection would delay the deletion by five seconds.
        """
        names = {action.name for action in actions}
        deadline = time.monotonic() + REMOVAL_SECONDS
        draining = [action.name for action in actions if not action.disabled]
        self._order_all([f"set server {backend}/{name} state drain" for name in draining])
        found = self._usage(backend, names)
        while any(found[name].used for name in draining if name in found) and time.monotonic() < deadline:
            # HAProxy's command `wait` (since 3.0) can wait for one server only, so the agent polls HAProxy for all
            # servers.
            time.sleep(_POLL_SECONDS)
            found = self._usage(backend, names)
        self._order_all([f"set server {backend}/{action.name} state maint" for action in actions])
        deadline = max(deadline, time.monotonic() + REMOVAL_SECONDS / 2)
        if self._features.wait_command:
            # HAProxy's command `wait` accepts one server only, so the agent waits for the last server. If HAProxy then
            # refuses to delete another server, `_delete` tries again.
            left = max(1, int(1000 * (deadline - time.monotonic())))
            self._worker.ask(f"wait {left}ms srv-removable {backend}/{actions[-1].name}")
        # Counters of a server in maintenance are final, so they are read before its deletion.
        if found and len(names) <= MAX_COUNTED_SEPARATELY:
            self._counters.sample_servers([use.numbers for use in found.values()])
        else:
            self._counters.sample()
        deadline = max(deadline, time.monotonic() + REMOVAL_SECONDS / 2)
        deleted = []
        try:
            for action in actions:
                self._delete(f"{backend}/{action.name}", deadline)
                deleted.append((backend, action.name))
        finally:
            self._counters.settle_servers(deleted)

    def _delete(self, server: str, deadline: float) -> None:
        """Delete a server in maintenance, as soon as HAProxy has closed its idle connections.

        HAProxy 2.8 keeps a server with a connection that became idle in maintenance for five seconds. Maintenance after
        a drain ends such a connection at once.
        """
        command, tried = f"del server {server}", False
        while (answer := self._worker.ask(command).strip()) != _DELETED:
            if time.monotonic() >= deadline:
                raise HaproxyError(f"run the command '{command}' in HAProxy", answer or "the answer is empty")
            if not tried:
                self._worker.order(f"set server {server} state drain; set server {server} state maint")
                tried = True
            time.sleep(_POLL_SECONDS)

    def _order_all(self, commands: Sequence[str]) -> None:
        for first in range(0, len(commands), _MAX_BATCH):
            self._worker.order("; ".join(commands[first : first + _MAX_BATCH]))

    def _usage(self, backend: str, names: set[str]) -> dict[str, Usage]:
        """Return the usage of servers. In a large backend, the list of all servers takes HAProxy 8 ms."""
        if len(names) <= MAX_COUNTED_SEPARATELY and (known := self._usage_by_number(backend, names)) is not None:
            return known
        return self._listed_usage(backend, names)

    def _listed_usage(self, backend: str, names: set[str]) -> dict[str, Usage]:
        answer = self._worker.ask(f"show servers conn {backend}") + "\n"
        head = answer.partition("\n")[0].split()
        if "used_cur" not in head:
            return {}
        # In HAProxy's answer, the line of column names begins with "#", but the lines of values do not. So the index of
        # a value is one less.
        column = head.index("used_cur") - 1
        found = {}
        for name, words in _lines_of(answer, backend, names):
            backend_number, _, number = words[1].partition("/")
            found[name] = Usage((backend_number, number), int(words[column]))
        return found


def _lines_of(answer: str, backend: str, names: set[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the words of the lines of these servers. Few of 10,000 lines are found by a search."""
    if len(names) > MAX_COUNTED_SEPARATELY:
        for line in answer.splitlines()[1:]:
            name = line.partition(" ")[0].removeprefix(f"{backend}/")
            if name in names:
                yield name, line.split()
        return
    for name in names:
        begin = answer.find(f"\n{backend}/{name} ")
        if begin >= 0:
            yield name, answer[begin : answer.find("\n", begin + 1)].split()
