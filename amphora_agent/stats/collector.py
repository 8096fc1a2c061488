# SPDX-License-Identifier: Apache-2.0
"""What the controllers are to be told, kept up to date.

Invariant: nothing that HAProxy counted and that was still readable is missing from the totals, nor counted twice. A
worker that is about to leave is held by a connection of ours until its last request is counted; the supervisor
keeps a copy of that connection, so that not even the agent's death lets go of it. A worker's readings become
part of the sums for good only when its process is gone, not when it merely does not answer.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from amphora_agent.errors import AgentError, HaproxyError
from amphora_agent.haproxy.old_workers import LeavingWorker
from amphora_agent.haproxy.runtime_socket import Socket
from amphora_agent.paths import Paths, write_atomically
from amphora_agent.stats import former_workers, haproxy_stats
from amphora_agent.stats.monotonic_counters import Totals
from amphora_agent.stats.udp_stats import VirtualLedger

_log = logging.getLogger(__name__)
# To read or write the counters of a thousand members takes many milliseconds: not each second, nor with each heartbeat.
FEW_ROWS, WRITE_SECONDS = 100, 10.0
# HAProxy's own end to a worker (hard-stop-after) takes what was not counted; ours comes before it.
MARGIN_SECONDS = 2.0
CUT_SECONDS = 1.0


class Keeper(Protocol):
    """Who keeps connections while there is no agent. Every method raises `ServiceError`."""

    def keep(self, name: str, descriptor: int) -> None:
        """Keep a copy under a name."""

    def kept(self) -> dict[str, int]:
        """New copies of all that is kept, by name."""

    def drop(self, name: str) -> None:
        """Close what is kept under a name; no error if there is nothing."""


class Ledger:
    """Samples of HAProxy's workers and the sums over them. Safe to use from several threads.

    Args:
        keeper: None: what is held dies with the agent.
        virtual: knows of the listeners that HAProxy does not serve; None: there are none.
    """

    def __init__(self, paths: Paths, keeper: Keeper | None = None, virtual: VirtualLedger | None = None) -> None:
        self._paths = paths
        self._virtual = virtual
        self._keeper = keeper
        self._worker = Socket(paths.stats_socket)
        self._lock = threading.Lock()
        self._held: list[LeavingWorker] = []
        self._latest: haproxy_stats.Sample | None = None
        self._leaving: dict[str, haproxy_stats.Sample] = {}
        self._totals = self._restored()
        self._written: tuple[str, float, int] = "", 0.0, 0
        self._published = ""
        self._take_back()

    def _restored(self) -> Totals:
        try:
            return Totals.restored(json.loads(self._paths.totals.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return Totals()
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            _log.warning("The counters in %s are lost: %s", self._paths.totals, error)
            return Totals()

    def _take_back(self) -> None:
        """Go on holding what an agent before this one held."""
        if self._keeper is None:
            return
        try:
            kept = self._keeper.kept()
        except AgentError as error:
            _log.warning("%s", error)
            return
        for name, descriptor in kept.items():
            identity, _, until = name.rpartition("@")
            held = LeavingWorker(socket.socket(fileno=descriptor), identity, float(until))
            try:
                held.recover()
            except HaproxyError:
                self._let_go(held)
            else:
                self._held.append(held)

    # -- samples ---------------------------------------------------------------------------------------------

    def sample(self) -> None:
        """Read every worker that lives, and ask for what others than HAProxy serve."""
        with self._lock:
            self._sample()
        if self._virtual is not None:
            self._virtual.sample()

    def sample_servers(self, servers: Sequence[tuple[str, str]]) -> None:
        """Read these of the present worker, by HAProxy's numbers of backend and server."""
        with self._lock, suppress(HaproxyError):
            for backend, server in servers:
                answer = self._worker.ask(f"show info;show stat {backend} 4 {server}")
                if (found := haproxy_stats.parse(answer)) is not None and (identity := _identity(found.pid)):
                    self._totals.read_some(identity, found.counts)

    @property
    def is_large(self) -> bool:
        """Whether there is so much to read that it is not read whenever something happens."""
        latest = self._latest
        others = self._virtual.rows if self._virtual is not None else 0
        return others > FEW_ROWS or (latest is not None and len(latest.counts) > FEW_ROWS)

    def hold(self, drain: float) -> None:
        """Read the present worker, and keep it readable while it leaves.

        Args:
            drain: for how many seconds it may go on with the connections it has.
        """
        until = time.monotonic() + drain - min(MARGIN_SECONDS, drain / 4)
        with self._lock:
            self._sample()
            identity = _identity(self._latest.pid) if self._latest is not None else ""
            if not identity:
                return
            if (known := self._holding(identity)) is not None:
                known.until = until  # an earlier reload has failed
                return
            try:
                held = LeavingWorker.hold(self._paths.stats_socket, identity, until)
            except (OSError, HaproxyError) as error:
                _log.warning("Worker %s leaves uncounted: %s", identity, error)
                return
            self._held.append(held)
            try:
                if self._keeper is not None:
                    self._keeper.keep(held.name, held.fileno())
            except AgentError as error:
                _log.warning("%s", error)

    def finish(self, pid: int, grace: float) -> int:
        """Have a leaving worker end, with all it has counted, and let go of it.

        Args:
            grace: seconds for what it does by itself; the connections it has then are closed.

        Returns:
            How many they were.
        """
        with self._lock:
            held = next((one for one in self._held if one.pid == pid), None)
            return self._finish(held, grace, release=True) if held is not None else 0

    def finish_all(self, grace: float) -> int:
        """The same for all at once, but they stay until somebody ends them."""
        deadline = time.monotonic() + grace
        with self._lock:
            return sum(
                self._finish(held, max(0.0, deadline - time.monotonic()), release=False) for held in list(self._held)
            )

    def _finish(self, held: LeavingWorker, grace: float, *, release: bool) -> int:
        cut = 0
        try:
            cut = held.finish(grace, CUT_SECONDS)
            self._read_held(held)
        except HaproxyError:
            release = True
        if release:
            self._let_go(held)
        self._publish()
        return cut

    def _holding(self, identity: str) -> LeavingWorker | None:
        return next((held for held in self._held if held.identity == identity), None)

    def _let_go(self, held: LeavingWorker) -> None:
        self._leaving.pop(held.identity, None)
        if held in self._held:
            self._held.remove(held)
        with suppress(AgentError):
            if self._keeper is not None:
                self._keeper.drop(held.name)
        held.close()

    def _sample(self) -> None:
        before, self._latest = self._latest, None
        with suppress(HaproxyError):  # no HAProxy is a state like any other; `document` then names no object
            self._latest = haproxy_stats.parse(self._worker.ask(haproxy_stats.QUESTION), before)
        if self._latest is not None and (identity := _identity(self._latest.pid)):
            self._totals.read(identity, self._latest.counts)
        for held in list(self._held):
            self._sample_held(held)
        self._totals.keep({identity for identity in self._totals.living if _lives(identity)})
        self._publish()

    def _sample_held(self, held: LeavingWorker) -> None:
        """Read a leaving worker; let go of one that nobody else holds, and end one whose time is over."""
        present = self._latest is not None and self._latest.pid == held.pid
        try:
            if not present and self._may_wait(held):
                held.was_idle = False
                return
            sample = self._read_held(held)
        except HaproxyError:
            self._let_go(held)  # hard-stop-after, or a crash, was faster
            return
        if present:
            self._leaving.pop(held.identity, None)
            return
        # Twice in a row: a connection that one thread has accepted for another is no job of anybody's yet.
        idle = sample.stopping and sample.other_jobs <= 0
        if idle and held.was_idle:
            self._let_go(held)
        elif sample.stopping and time.monotonic() >= held.until:
            cut = self._finish(held, 0.0, release=True)
            _log.info("Worker %s has had its time; %d connections were closed", held.identity, cut)
        held.was_idle = idle

    def _may_wait(self, held: LeavingWorker) -> bool:
        """Whether there is no need to read all of it now: it has a thousand members, and it stays."""
        known = self._leaving.get(held.identity)
        large = known is not None and len(known.counts) > FEW_ROWS
        now = time.monotonic()
        return large and now < min(held.until, held.read_at + WRITE_SECONDS) and held.jobs() > 0

    def _read_held(self, held: LeavingWorker) -> haproxy_stats.Sample:
        sample = haproxy_stats.parse("".join(map(held.ask, haproxy_stats.HELD_QUESTIONS)))
        if sample is None:
            raise HaproxyError("read a leaving worker's statistics", "it answers something else")
        self._totals.read(held.identity, sample.counts)
        self._leaving[held.identity] = sample
        held.read_at = time.monotonic()
        return sample

    # -- what is told ----------------------------------------------------------------------------------------

    def _publish(self) -> None:
        """Tell the responder what has to be added to the present worker's counters."""
        if self._latest is None:
            return
        present = _identity(self._latest.pid)
        beside = self._totals.beside(present)
        sums = {row: beside[row] for row in self._latest.counts if row in beside}
        text = former_workers.compose(self._latest.pid, sums)
        if text != self._published:
            try:
                write_atomically(
                    self._paths.earlier, text, durable=False, mode=0o644
                )  # the responder is a user of its own
                self._published = text
            except OSError as error:
                _log.warning("Metrics are not told: %s", error)

    def document(self, generation: int | None) -> dict[str, Any]:
        """What a heartbeat says."""
        said = self._of_haproxy(generation)
        if self._virtual is not None:
            said["listeners"].update(self._virtual.listeners())
            said["pools"].update(self._virtual.pools())
        return said

    def _of_haproxy(self, generation: int | None) -> dict[str, Any]:
        with self._lock:
            sample = self._latest
            if sample is None:
                return {"generation": generation, "listeners": {}, "pools": {}}
            listeners = {}
            for name, found in sample.listeners.items():
                total = haproxy_stats.Counters.of(self._totals.visible(haproxy_stats.key(name)))
                leaving = (one.listeners[name] for one in self._leaving.values() if name in one.listeners)
                listeners[name] = {
                    "status": found.status,
                    "active_connections": found.active_connections + sum(one.active_connections for one in leaving),
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
            found = self._latest.members if self._latest is not None else {}
        others = self._virtual.pools() if self._virtual is not None else {}
        return {**found, **{name: pool["members"] for name, pool in others.items()}} if others else found

    def write(self) -> None:
        """Put the sums on disk, if they changed; many of them not each time.

        Raises:
            OSError: the disk is full, for example.
        """
        if self._virtual is not None:
            self._virtual.write()
        with self._lock:
            before, at, settlements = self._written
            rows = len(self._latest.counts) if self._latest is not None else 0
            soon = rows <= FEW_ROWS or settlements != self._totals.settlements
            if not soon and time.monotonic() - at < WRITE_SECONDS:
                return
            text = json.dumps(self._totals.document(), separators=(",", ":"))
            if text != before:
                write_atomically(self._paths.totals, text)
            self._written = text, time.monotonic(), self._totals.settlements


def _identity(pid: int) -> str:
    """A process, told apart from any other that had or will have its number; empty if it is gone."""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2].split()
        return f"{pid}:{fields[19]}" if fields[0] not in "ZX" else ""
    return ""


def _lives(identity: str) -> bool:
    pid = identity.partition(":")[0]
    return pid.isdecimal() and int(pid) != os.getpid() and _identity(int(pid)) == identity
