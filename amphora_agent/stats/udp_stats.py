# SPDX-License-Identifier: Apache-2.0
"""Statistics and member states of UDP and SCTP listeners. Counters never decrease."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from amphora_agent.l4.counters import Counters
from amphora_agent.l4_daemon.client import CheckerClient, CheckerState, ListenerState
from amphora_agent.paths import Paths, write_atomically
from amphora_agent.stats import haproxy_stats
from amphora_agent.stats.former_workers import COUNTED
from amphora_agent.stats.monotonic_counters import MonotonicCounters

# While the L4 daemon does not answer, the agent reports the last known state for this number of seconds. The kernel
# forwards packets while the daemon restarts.
STALE_SECONDS = 10.0


class UdpStats:
    """The last state and the counters of all UDP and SCTP listeners. Thread-safe."""

    def __init__(self, paths: Paths, source: CheckerClient) -> None:
        self._file = paths.virtual_totals
        self._source = source
        self._lock = threading.Lock()
        self._latest: CheckerState | None = None
        self._read_at = 0.0
        self._totals = MonotonicCounters.load(self._file)
        self._written = ""

    def sample(self) -> None:
        """Read the state of the daemon. Without an answer the last state is valid for `STALE_SECONDS`."""
        with self._lock:
            state = self._source.read_state()
            # The L4 daemon may end during the request for its state. Its final state is therefore read afterwards.
            ended = self._source.take_final_state()
            if ended is not None:
                self._count(ended)
                self._latest = None
            if state is not None and (ended is None or state.birth != ended.birth):
                self._count(state)
                self._latest, self._read_at = state, time.monotonic()
            elif time.monotonic() - self._read_at > STALE_SECONDS:
                self._latest = None

    def _count(self, state: CheckerState) -> None:
        rows = {haproxy_stats.key(name): _counts(sums) for name, sums in state.sums.items()}
        self._totals.read(state.birth, rows)
        self._totals.settle_others({state.birth})

    @property
    def rows(self) -> int:
        """The number of listeners, pools and members."""
        return sum(1 if one.pool is None else 2 + len(one.pool.members) for one in self._listeners().values())

    def _listeners(self) -> Mapping[str, ListenerState]:
        latest = self._latest
        return {} if latest is None else latest.listeners

    def listeners(self) -> dict[str, dict[str, Any]]:
        """Return the listeners in the format of a heartbeat."""
        with self._lock:
            return {
                name: {
                    "status": one.status,
                    "active_connections": one.active_connections,
                    **asdict(haproxy_stats.Counters.of(self._totals.total(haproxy_stats.key(name)))),
                }
                for name, one in self._listeners().items()
            }

    def pools(self) -> dict[str, dict[str, Any]]:
        """Return the pools in the format of a heartbeat."""
        with self._lock:
            return {
                f"{one.pool.id}:{name}": {"status": one.pool.status, "members": dict(one.pool.members)}
                for name, one in self._listeners().items()
                if one.pool is not None
            }

    def write(self) -> None:
        """Write the counters to disk if they have changed; raises OSError."""
        with self._lock:
            if not self._totals.running:
                # An amphora that never had a UDP or SCTP listener needs no file of counters.
                return
            text = self._totals.text()
            if text != self._written:
                write_atomically(self._file, text)
                self._written = text


def _counts(sums: Counters) -> haproxy_stats.Counts:
    """Return counters in the columns of HAProxy's statistics."""
    total = sums.total_connections
    named = {"stot": total, "conn_tot": total, "bin": sums.bytes_in, "bout": sums.bytes_out}
    named["ereq"] = sums.request_errors
    return tuple(named.get(column, 0) for column in COUNTED)
