# SPDX-License-Identifier: Apache-2.0
"""Reads back the state of the running HAProxy and compares it with the configuration.

Invariant: the agent reads everything after a start or a reload, and afterwards only changed servers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from pathlib import Path

from amphora_agent.errors import HaproxyError
from amphora_agent.haproxy import runtime_state
from amphora_agent.haproxy.config_parser import Configuration
from amphora_agent.haproxy.runtime_socket import Socket
from amphora_agent.haproxy.runtime_state import Loaded, ServerState
from amphora_agent.haproxy.server_numbers import ServerNumbers, Usage
from amphora_agent.haproxy.tls_store import TlsStore


class Verifier:
    """Verifies the serving worker over its socket."""

    def __init__(self, worker: Socket) -> None:
        self._worker = worker
        # State that HAProxy's worker reported at the last successful verification; None after a failed verification.
        self._loaded: Loaded | None = None
        # HAProxy's numbers of servers, by backend.
        self._numbers: dict[str, ServerNumbers] = {}

    def invalidate(self) -> None:
        """Forget the last answer, because another worker will serve."""
        self._loaded = None

    def verify(
        self, wanted: Configuration, files: Path | None = None, touched: Collection[tuple[str, str]] | None = None
    ) -> Loaded:
        """Read back the running configuration; a `HaproxyError` names the first difference.

        Args:
            files: the directory of the TLS files to compare; None if the worker has read them from the disk.
            touched: the servers, by backend and name, that were changed since the last verification; None for all.
        """
        before, self._loaded = self._loaded, None
        if touched is None or before is None:
            self._numbers = {}
            found, different = self._verify_all(wanted)
        else:
            found, different = self._verify_changed(wanted, touched, before)
        if different:
            raise HaproxyError("verify that HAProxy runs the new configuration", different)
        if files is not None:
            store = TlsStore(self._worker, files)
            store.expect(wanted)
            store.verify()
        self._loaded = found
        return found

    def usage(self, backend: str, names: Collection[str]) -> dict[str, Usage] | None:
        """Return the usage of servers by their numbers; None for a small backend, or if a number is unknown."""
        numbers = self._numbers.get(backend) if self._loaded is not None else None
        return None if numbers is None else numbers.usage(self._worker, names)

    def _verify_all(self, wanted: Configuration) -> tuple[Loaded, str]:
        proxies = self._worker.ask(runtime_state.PROXIES)
        listeners, closed = runtime_state.listener_limits(proxies), runtime_state.closed_listeners(proxies)
        answer = self._worker.ask(runtime_state.SERVERS)
        servers = runtime_state.parse_servers(answer)
        loaded = Loaded(listeners, dict(Counter(backend for backend, _ in servers)))
        different = runtime_state.find_difference(wanted, listeners, servers)
        return loaded, different or (f"listener {closed[0]} accepts no connections" if closed else "")

    def _verify_changed(
        self, wanted: Configuration, touched: Collection[tuple[str, str]], before: Loaded
    ) -> tuple[Loaded, str]:
        proxies = self._worker.ask(runtime_state.PROXIES)
        members: dict[str, int] = {}
        servers: dict[tuple[str, str], ServerState] = {}
        for backend in sorted({backend for backend, _ in touched}):
            names = {name for each, name in touched if each == backend}
            members[backend], found = self._changed_servers(backend, names, wanted)
            servers |= found
        found_state = runtime_state.PartialState(
            runtime_state.listener_limits(proxies), runtime_state.backend_names(proxies), members, servers
        )
        loaded = Loaded(found_state.listeners, {**before.members, **members})
        return loaded, runtime_state.find_partial_difference(wanted, touched, found_state)

    def _changed_servers(
        self, backend: str, names: set[str], wanted: Configuration
    ) -> tuple[int, dict[tuple[str, str], ServerState]]:
        """Return the number of servers of a backend, and the states of the named ones."""
        numbers = self._numbers.pop(backend, None)
        servers = wanted.find_servers([(backend, name) for name in names])
        if numbers is not None and (states := numbers.read(self._worker, names, servers)) is not None:
            self._numbers[backend] = numbers
            return len(numbers), states
        answer = self._worker.ask(f"{runtime_state.SERVERS} {backend}")
        if (numbers := ServerNumbers.parse(answer, backend)) is not None:
            self._numbers[backend] = numbers
        return runtime_state.select_servers(answer, backend, names)
