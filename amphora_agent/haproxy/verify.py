# SPDX-License-Identifier: Apache-2.0
"""What HAProxy runs, beside what it should run.

Invariant: what is confirmed was asked of the worker that serves; of what was as wanted when it was asked last, only
what a change has touched is asked again, and nothing is taken for known after a start or a reload.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from pathlib import Path

from amphora_agent.errors import HaproxyError
from amphora_agent.haproxy import runtime_state
from amphora_agent.haproxy.config_parser import Configuration
from amphora_agent.haproxy.runtime_socket import Socket
from amphora_agent.haproxy.runtime_state import Loaded, State
from amphora_agent.haproxy.tls_store import HeldFiles


class Inspection:
    """Asks one worker after the other.

    Args:
        worker: the socket of the one that serves.
    """

    def __init__(self, worker: Socket) -> None:
        self._worker = worker
        self._loaded: Loaded | None = None  # what was asked last, if that was as wanted

    def forget(self) -> None:
        """Another worker will serve: nothing is known of it."""
        self._loaded = None

    def verify(
        self, wanted: Configuration, files: Path | None = None, touched: Collection[tuple[str, str]] | None = None
    ) -> Loaded:
        """Compare what HAProxy runs with what it should.

        Args:
            files: the directory of the files that it is to have read; None if nothing else was ever in its memory.
            touched: the servers, by backend and name, that were changed since this found no difference the last time;
                None for all.

        Raises:
            HaproxyError: naming the first difference.
        """
        before, self._loaded = self._loaded, None
        if touched is None or before is None:
            found, different = self._whole(wanted)
        else:
            found, different = self._changed(wanted, touched, before)
        if different:
            raise HaproxyError("confirm the configuration", different)
        if files is not None:
            held = HeldFiles(self._worker, files)
            held.expect(wanted)
            held.confirm()
        self._loaded = found
        return found

    def _whole(self, wanted: Configuration) -> tuple[Loaded, str]:
        proxies = self._worker.ask(runtime_state.PROXIES)
        listeners, deaf = runtime_state.limits(proxies), runtime_state.deaf(proxies)
        answer = self._worker.ask(runtime_state.SERVERS)
        servers = runtime_state.states(answer)
        loaded = Loaded(listeners, dict(Counter(backend for backend, _ in servers)))
        different = runtime_state.difference(wanted, listeners, servers)
        return loaded, different or (f"listener {deaf[0]} takes no connection" if deaf else "")

    def _changed(
        self, wanted: Configuration, touched: Collection[tuple[str, str]], before: Loaded
    ) -> tuple[Loaded, str]:
        proxies = self._worker.ask(runtime_state.PROXIES)
        members: dict[str, int] = {}
        servers: dict[tuple[str, str], State] = {}
        for backend in sorted({backend for backend, _ in touched}):
            answer = self._worker.ask(f"{runtime_state.SERVERS} {backend}")
            names = {name for each, name in touched if each == backend}
            members[backend], found = runtime_state.some(answer, backend, names)
            servers |= found
        glance = runtime_state.Glance(runtime_state.limits(proxies), runtime_state.backends(proxies), members, servers)
        loaded = Loaded(glance.listeners, {**before.members, **members})
        return loaded, runtime_state.changed_difference(wanted, touched, glance)
