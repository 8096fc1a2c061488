# SPDX-License-Identifier: Apache-2.0
"""What the controllers are to be told, kept up to date.

Invariant: nothing that HAProxy counted and that was still readable is missing from the totals. A worker that
is about to leave is held by a connection of ours until its last request is counted.
"""

from __future__ import annotations

import json
import logging
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from amphora_agent.errors import HaproxyError
from amphora_agent.haproxy.runtime import HeldWorker, Socket
from amphora_agent.paths import Paths, write_atomically
from amphora_agent.stats import collect
from amphora_agent.stats.totals import Totals

_log = logging.getLogger(__name__)


class Ledger:
    """Samples of HAProxy's workers and the sums over them. Safe to use from several threads."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._worker = Socket(paths.stats_socket)
        self._lock = threading.Lock()
        self._held: list[HeldWorker] = []
        self._latest: collect.Sample | None = None
        self._leaving_connections: dict[str, int] = {}
        self._totals = self._restored()
        self._written = ""

    def _restored(self) -> Totals:
        try:
            return Totals.restored(json.loads(self._paths.totals.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return Totals()
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("The counters in %s are lost: %s", self._paths.totals, error)
            return Totals()

    def sample(self) -> None:
        """Read every worker that lives."""
        with self._lock:
            self._sample()

    def hold(self) -> None:
        """Read the present worker, and keep it readable while it leaves."""
        with self._lock:
            self._sample()
            identity = _identity(self._latest.pid) if self._latest is not None else ""
            if not identity or any(held.identity == identity for held in self._held):
                return
            try:
                self._held.append(HeldWorker(self._paths.stats_socket, identity))
            except (OSError, HaproxyError) as error:
                _log.warning("Worker %s leaves uncounted: %s", identity, error)

    def _sample(self) -> None:
        living = self._sample_held()
        self._latest = None
        with suppress(HaproxyError):  # no HAProxy is a state like any other; `document` then names no object
            self._latest = collect.parse(self._worker.ask(collect.QUESTION))
        if self._latest is not None and (identity := _identity(self._latest.pid)):
            living.add(identity)
            self._read(identity, self._latest)
        self._totals.keep(living)

    def _read(self, identity: str, sample: collect.Sample) -> None:
        self._totals.read(identity, {name: found.counters for name, found in sample.listeners.items()})

    def _sample_held(self) -> set[str]:
        """Read the leaving workers; let go of those that nobody else holds."""
        living = set()
        present = self._latest.pid if self._latest is not None else None
        self._leaving_connections.clear()
        for held in list(self._held):
            try:
                sample = collect.parse("".join(map(held.ask, collect.HELD_QUESTIONS)))
            except HaproxyError:
                sample = None  # hard-stop-after, or a crash, was faster
            if sample is not None:
                self._read(held.identity, sample)
                if sample.pid != present:
                    for name, found in sample.listeners.items():
                        active = self._leaving_connections.get(name, 0) + found.active_connections
                        self._leaving_connections[name] = active
            # Twice in a row: a connection that one thread has accepted for another is no job of anybody's yet.
            idle = sample is not None and sample.stopping and sample.other_jobs <= 0
            if sample is None or (idle and held.was_idle):
                self._held.remove(held)
                held.close()
                continue
            held.was_idle = idle
            living.add(held.identity)
        return living

    def document(self, generation: int | None) -> dict[str, Any]:
        """What a heartbeat says."""
        with self._lock:
            sample = self._latest
            if sample is None:
                return {"generation": generation, "listeners": {}, "pools": {}}
            listeners = {}
            for name, found in sample.listeners.items():
                total = self._totals.visible(name)
                listeners[name] = {
                    "status": found.status,
                    "active_connections": found.active_connections + self._leaving_connections.get(name, 0),
                    "bytes_in": total.bytes_in,
                    "bytes_out": total.bytes_out,
                    "request_errors": total.request_errors,
                    "total_connections": total.total_connections,
                }
            pools = {
                name: {"status": status, "members": dict(sample.members.get(name, {}))}
                for name, status in sample.pools.items()
            }
            return {"generation": generation, "listeners": listeners, "pools": pools}

    def statuses(self) -> dict[str, dict[str, str]]:
        """Every member's status word."""
        with self._lock:
            return self._latest.members if self._latest is not None else {}

    def write(self) -> None:
        """Put the sums on disk, if they changed.

        Raises:
            OSError: the disk is full, for example.
        """
        with self._lock:
            text = json.dumps(self._totals.document())
            if text != self._written:
                write_atomically(self._paths.totals, text)
                self._written = text


def _identity(pid: int) -> str:
    """A process, told apart from any other that had or will have its number; empty if it is gone."""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2].split()
        return f"{pid}:{fields[19]}"
    return ""
