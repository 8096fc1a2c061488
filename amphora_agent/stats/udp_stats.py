# SPDX-License-Identifier: Apache-2.0
"""Statistics and member states of UDP and SCTP listeners.

Invariant: reported counters never decrease, over replacements of the kernel's table, restarts of the L4 daemon and of
the agent, and reboots. Nothing is counted twice: `CheckerState.birth` identifies each table of the kernel.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping
from typing import Any, Protocol

from amphora_agent.l4_daemon.client import CheckerState, ServerTotals
from amphora_agent.paths import Paths, write_atomically
from amphora_agent.stats import haproxy_stats
from amphora_agent.stats.monotonic_counters import MonotonicCounters
from amphora_agent.stats.stat_columns import COUNTED

_log = logging.getLogger(__name__)
# Seconds for which the last state of a failed daemon is valid: the kernel forwards traffic during its restart.
STALE_SECONDS = 10.0


class Source(Protocol):
    """The source of states (`amphora_agent.l4_daemon.client.CheckerClient`)."""

    def read_state(self) -> CheckerState | None: ...

    def take_final_state(self) -> CheckerState | None: ...


class UdpStats:
    """The last state and the counters. Thread-safe."""

    def __init__(self, paths: Paths, source: Source) -> None:
        self._file = paths.virtual_totals
        self._source = source
        self._lock = threading.Lock()
        self._latest: CheckerState | None = None
        self._read_at = 0.0
        self._totals = self._restored()
        self._written = ""

    def _restored(self) -> MonotonicCounters:
        try:
            return MonotonicCounters.restored(json.loads(self._file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return MonotonicCounters()
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            _log.warning("Cannot read the counters in %s: %s; counting starts at zero", self._file, error)
            return MonotonicCounters()

    def sample(self) -> None:
        """Read the state of the daemon. Without an answer the last state is valid for `STALE_SECONDS`."""
        with self._lock:
            state = self._source.read_state()
            ended = self._source.take_final_state()  # read after the state, because the daemon may end in between
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
        latest = self._latest
        if latest is None:
            return 0
        pools = [one.pool for one in latest.listeners.values() if one.pool is not None]
        return len(latest.listeners) + sum(1 + len(pool.members) for pool in pools)

    def listeners(self) -> dict[str, dict[str, Any]]:
        """Return them in the format of a heartbeat."""
        with self._lock:
            return {
                name: {
                    "status": one.status,
                    "active_connections": one.active_connections,
                    **_heartbeat_fields(haproxy_stats.Counters.of(self._totals.total(haproxy_stats.key(name)))),
                }
                for name, one in (self._latest.listeners if self._latest is not None else {}).items()
            }

    def pools(self) -> dict[str, dict[str, Any]]:
        """Return them in the format of a heartbeat."""
        with self._lock:
            return {
                f"{one.pool.id}:{name}": {"status": one.pool.status, "members": dict(one.pool.members)}
                for name, one in (self._latest.listeners if self._latest is not None else {}).items()
                if one.pool is not None
            }

    def write(self) -> None:
        """Write the counters to disk if they have changed.

        Raises:
            OSError: they cannot be written, for example because the disk is full.
        """
        with self._lock:
            if not self._totals.running:
                return  # no UDP or SCTP listener was ever served
            text = json.dumps(self._totals.document(), separators=(",", ":"))
            if text != self._written:
                write_atomically(self._file, text)
                self._written = text


def _counts(sums: ServerTotals) -> haproxy_stats.Counts:
    """Return counters in the columns of HAProxy's statistics."""
    named = {
        "stot": sums.total_connections,
        "conn_tot": sums.total_connections,
        "bin": sums.bytes_in,
        "bout": sums.bytes_out,
        "ereq": sums.request_errors,
    }
    return tuple(named.get(column, 0) for column in COUNTED)


def _heartbeat_fields(total: haproxy_stats.Counters) -> Mapping[str, int]:
    return {
        "bytes_in": total.bytes_in,
        "bytes_out": total.bytes_out,
        "request_errors": total.request_errors,
        "total_connections": total.total_connections,
    }
