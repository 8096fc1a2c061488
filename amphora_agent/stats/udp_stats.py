# SPDX-License-Identifier: Apache-2.0
"""What is told of UDP and SCTP listeners.

Invariant: what is told as counted never falls, over exchanges of the kernel's table, restarts of the checker and of the
agent, and reboots; nothing is counted twice. Each life of the kernel's counters has a name of its own (`State.birth`).
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping
from typing import Any, Protocol

from amphora_agent.l4_daemon.client import State, Sums
from amphora_agent.paths import Paths, write_atomically
from amphora_agent.stats import haproxy_stats
from amphora_agent.stats.monotonic_counters import Totals
from amphora_agent.stats.stat_columns import COUNTED

_log = logging.getLogger(__name__)
# A checker that died is started again, and the kernel goes on meanwhile: so long what it said last is as good as known.
BELIEVED_SECONDS = 10.0


class Source(Protocol):
    """Who knows of virtual servers (`amphora_agent.l4_daemon.client.Checker`)."""

    def state(self) -> State | None: ...

    def last_words(self) -> State | None: ...


class VirtualLedger:
    """The last state and the sums. Safe to use from several threads."""

    def __init__(self, paths: Paths, source: Source) -> None:
        self._file = paths.virtual_totals
        self._source = source
        self._lock = threading.Lock()
        self._latest: State | None = None
        self._read_at = 0.0
        self._totals = self._restored()
        self._written = ""

    def _restored(self) -> Totals:
        try:
            return Totals.restored(json.loads(self._file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return Totals()
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            _log.warning("The counters in %s are lost: %s", self._file, error)
            return Totals()

    def sample(self) -> None:
        """Ask; a checker that does not answer is believed for a while."""
        with self._lock:
            state = self._source.state()
            ended = self._source.last_words()  # asked last: who ended between the two is not asked for any more
            if ended is not None:
                self._count(ended)
                self._latest = None
            if state is not None and (ended is None or state.birth != ended.birth):
                self._count(state)
                self._latest, self._read_at = state, time.monotonic()
            elif time.monotonic() - self._read_at > BELIEVED_SECONDS:
                self._latest = None

    def _count(self, state: State) -> None:
        rows = {haproxy_stats.key(name): _counts(sums) for name, sums in state.sums.items()}
        self._totals.read(state.birth, rows)
        self._totals.keep({state.birth})

    @property
    def rows(self) -> int:
        """How many listeners, pools and members there are."""
        latest = self._latest
        if latest is None:
            return 0
        pools = [one.pool for one in latest.listeners.values() if one.pool is not None]
        return len(latest.listeners) + sum(1 + len(pool.members) for pool in pools)

    def listeners(self) -> dict[str, dict[str, Any]]:
        """As a heartbeat has them."""
        with self._lock:
            return {
                name: {
                    "status": one.status,
                    "active_connections": one.active_connections,
                    **_told(haproxy_stats.Counters.of(self._totals.visible(haproxy_stats.key(name)))),
                }
                for name, one in (self._latest.listeners if self._latest is not None else {}).items()
            }

    def pools(self) -> dict[str, dict[str, Any]]:
        """As a heartbeat has them."""
        with self._lock:
            return {
                f"{one.pool.id}:{name}": {"status": one.pool.status, "members": dict(one.pool.members)}
                for name, one in (self._latest.listeners if self._latest is not None else {}).items()
                if one.pool is not None
            }

    def write(self) -> None:
        """Put the sums on disk, if they changed.

        Raises:
            OSError: the disk is full, for example.
        """
        with self._lock:
            if not self._totals.living:
                return  # there never was a virtual server
            text = json.dumps(self._totals.document(), separators=(",", ":"))
            if text != self._written:
                write_atomically(self._file, text)
                self._written = text


def _counts(sums: Sums) -> haproxy_stats.Counts:
    """The same in the columns of HAProxy's statistics."""
    named = {
        "stot": sums.total_connections,
        "conn_tot": sums.total_connections,
        "bin": sums.bytes_in,
        "bout": sums.bytes_out,
        "ereq": sums.request_errors,
    }
    return tuple(named.get(column, 0) for column in COUNTED)


def _told(total: haproxy_stats.Counters) -> Mapping[str, int]:
    return {
        "bytes_in": total.bytes_in,
        "bytes_out": total.bytes_out,
        "request_errors": total.request_errors,
        "total_connections": total.total_connections,
    }
