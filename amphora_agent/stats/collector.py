# SPDX-License-Identifier: Apache-2.0
"""The collector of statistics: it samples HAProxy's workers and keeps the counters.

Invariant: no readable counter of HAProxy is missing from the totals or counted twice. A connection of the agent keeps a
stopping worker readable until its last request is counted. The service manager stores a copy of the connection, which
survives the exit of the agent. The readings of a worker are settled only when its process has exited.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from amphora_agent.change_priority import BackgroundWork, ChangePriority, never_wait
from amphora_agent.errors import AgentError, HaproxyError
from amphora_agent.haproxy.old_workers import OldWorker
from amphora_agent.haproxy.runtime_socket import Socket
from amphora_agent.paths import Paths, write_atomically
from amphora_agent.services.control import ServiceManager
from amphora_agent.stats import former_workers, haproxy_stats
from amphora_agent.stats.monotonic_counters import MonotonicCounters
from amphora_agent.stats.udp_stats import UdpStats

_log = logging.getLogger(__name__)
# With more than FEW_ROWS rows of counters, the agent reads and writes the counters only every WRITE_SECONDS, because
# this work takes long.
FEW_ROWS, WRITE_SECONDS = 100, 10.0
# An old worker is ended this number of seconds before HAProxy's `hard-stop-after`, so that the agent can still read its
# final counters.
MARGIN_SECONDS = 2.0
CUT_SECONDS = 1.0
# HAProxy serves no client while it writes its statistics (50 ms for 10,000 servers in HAProxy 2.6). So after a sample,
# the collector pauses PAUSE_FACTOR times as long as HAProxy needed, at most MAX_PAUSE_SECONDS.
PAUSE_FACTOR, MAX_PAUSE_SECONDS = 100.0, 5.0


class Collector:
    """Samples of HAProxy's workers, and counters over them. Thread-safe.

    ``priority``: the priority of changes over regular samples and heartbeats.
    """

    def __init__(self, paths: Paths, store: ServiceManager | None = None, udp: UdpStats | None = None) -> None:
        self.priority = ChangePriority()
        self._paths = paths
        self._udp = udp
        self._store = store
        self._worker = Socket(paths.stats_socket)
        self._lock = threading.Lock()
        self._held: list[OldWorker] = []
        self._latest: haproxy_stats.Sample | None = None
        self._leaving: dict[str, haproxy_stats.Sample] = {}
        self._totals = MonotonicCounters.load(paths.totals)
        self._written: tuple[str, float, int] = "", 0.0, 0
        self._published = ""
        # The identity of the worker that answered last; empty without an answer.
        self._present = ""
        self._answer_seconds = 0.0
        self._recover_held()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Take the lock. A sample that has the lock no longer waits for changes, one of which may wait here."""
        with self.priority.waiting_for_background():
            self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    def _recover_held(self) -> None:
        """Recover the connections that a former agent has stored."""
        if self._store is None:
            return
        try:
            kept = self._store.kept()
        except AgentError as error:
            _log.warning(
                "After its restart, the agent could not connect to HAProxy's old workers, so the last "
                "traffic counters of these workers are lost: %s",
                error,
            )
            return
        for name, descriptor in kept.items():
            identity, _, until = name.rpartition("@")
            held = OldWorker(socket.socket(fileno=descriptor), identity, float(until))
            try:
                held.recover()
            except HaproxyError:
                self._release(held)
            else:
                self._held.append(held)

    def sample(self, work: BackgroundWork | None = None) -> None:
        """Read each running worker and the L4 daemon. As background `work`, it gives way to changes."""
        with self._locked():
            self._sample(work or BackgroundWork(self.priority, 0.0))
        if self._udp is not None:
            self._udp.sample()

    def sample_servers(self, servers: Sequence[tuple[str, str]]) -> None:
        """Read these servers of the present worker, by HAProxy's ids of backend and server."""
        with self._locked(), suppress(HaproxyError):
            for backend, server in servers:
                self._present = ""
                answer = self._worker.ask(f"show info;show stat {backend} 4 {server}")
                if (found := haproxy_stats.parse(answer)) is not None and (identity := _identity(found.pid)):
                    self._totals.read_some(identity, found.counts)
                    self._present = identity

    def settle_servers(self, servers: Iterable[tuple[str, str]]) -> None:
        """Add the last readings of deleted servers to the sums permanently, by names of backend and server.

        A server of the same name may be added before the next sample, and counts from zero.
        """
        with self._locked():
            for backend, name in servers:
                self._totals.settle(self._present, haproxy_stats.key(backend, name))

    @property
    def is_large(self) -> bool:
        """Whether a sample costs so much that it is not taken at each change."""
        latest = self._latest
        others = self._udp.rows if self._udp is not None else 0
        return others > FEW_ROWS or (latest is not None and len(latest.counts) > FEW_ROWS)

    @property
    def pause(self) -> float:
        """The minimum number of seconds until the next regular sample.

        An old worker has to be read before its end, so there is no pause with an old worker. A reload does not shorten
        a pause that has begun.
        """
        latest = self._latest
        if self._held or latest is None or len(latest.counts) <= FEW_ROWS:
            return 0.0
        return min(MAX_PAUSE_SECONDS, PAUSE_FACTOR * self._answer_seconds)

    @property
    def load(self) -> haproxy_stats.WorkerLoad | None:
        """The connections of the present worker in the last sample; None if HAProxy did not answer."""
        latest = self._latest
        return latest.load if latest is not None else None

    def hold(self, drain: float) -> None:
        """Read the present worker, and keep it readable while it stops, for ``drain`` seconds."""
        until = time.monotonic() + drain - min(MARGIN_SECONDS, drain / 4)
        with self._locked():
            self._sample(BackgroundWork(self.priority, 0.0))
            identity = _identity(self._latest.pid) if self._latest is not None else ""
            if not identity:
                return
            # After a failed reload, the collector is already connected to this worker, so only the end of its drain
            # changes.
            if (known := next((held for held in self._held if held.identity == identity), None)) is not None:
                known.until = until
                return
            try:
                held = OldWorker.hold(self._paths.stats_socket, identity, until)
            except (OSError, HaproxyError) as error:
                _log.warning(
                    "The agent could not stay connected to HAProxy's old worker (process %s, as id:start time), so the "
                    "last traffic counters of this worker are lost: %s",
                    identity,
                    error,
                )
                return
            self._held.append(held)
            try:
                if self._store is not None:
                    self._store.keep(held.name, held.fileno())
            except AgentError as error:
                _log.warning(
                    "The agent could not store its connection to HAProxy's old worker (process %s, as id:start time); "
                    "a restart of the agent would lose the last counters of this worker: %s",
                    identity,
                    error,
                )

    def finish(self, pid: int, grace: float) -> int:
        """End a stopping worker after ``grace`` seconds; returns the number of closed connections."""
        with self._locked():
            held = next((one for one in self._held if one.pid == pid), None)
            return self._finish(held, grace, release=True) if held is not None else 0

    def finish_all(self, grace: float) -> int:
        """End all stopping workers and read their counters; the workers stay until they are released."""
        deadline = time.monotonic() + grace
        with self._locked():
            return sum(
                self._finish(held, max(0.0, deadline - time.monotonic()), release=False) for held in list(self._held)
            )

    def _finish(self, held: OldWorker, grace: float, *, release: bool) -> int:
        cut = 0
        try:
            cut = held.finish(grace, CUT_SECONDS)
            self._read_held(held)
        except HaproxyError:
            release = True
        if release:
            self._release(held)
        self._publish()
        return cut

    def _release(self, held: OldWorker) -> None:
        self._leaving.pop(held.identity, None)
        if held in self._held:
            self._held.remove(held)
        with suppress(AgentError):
            if self._store is not None:
                self._store.drop(held.name)
        held.close()

    def _sample(self, work: BackgroundWork) -> None:
        found = None
        begun = time.monotonic()
        try:
            with suppress(HaproxyError):
                # Without an answer of HAProxy, `_latest` becomes None, and the heartbeat has no objects of HAProxy.
                answer = self._worker.ask(haproxy_stats.QUESTION, between=work.give_way)
                self._answer_seconds = time.monotonic() - begun - work.waited
                found = haproxy_stats.parse(answer, self._latest, work.give_way)
        finally:
            # Other threads read `_latest` without the lock, also while HAProxy answers. So `_latest` changes in one
            # assignment.
            self._latest = found
        self._present = _identity(self._latest.pid) if self._latest is not None else ""
        if self._latest is not None and self._present:
            self._totals.read(self._present, self._latest.counts)
        for held in list(self._held):
            self._sample_held(held)
        self._totals.settle_others({identity for identity in self._totals.running if _is_running(identity)})
        self._publish()

    def _sample_held(self, held: OldWorker) -> None:
        """Read a stopping worker. Release it when it is idle; end it when its drain time is over."""
        present = self._latest is not None and self._latest.pid == held.pid
        try:
            if not present and self._can_skip(held):
                held.was_idle = False
                return
            sample = self._read_held(held)
        except HaproxyError:
            # The old worker has crashed or has reached the time `hard-stop-after`, so its connection is closed.
            self._release(held)
            return
        if present:
            self._leaving.pop(held.identity, None)
            return
        # HAProxy does not count a connection that moves between its threads. So an old worker is idle only after two
        # samples without connections.
        idle = sample.stopping and sample.other_jobs <= 0
        if idle and held.was_idle:
            self._release(held)
        elif sample.stopping and time.monotonic() >= held.until:
            cut = self._finish(held, 0.0, release=True)
            _log.info(
                "The agent ended HAProxy's old worker (process %s, as id:start time), because its drain time is over, "
                "and closed %d connections",
                held.identity,
                cut,
            )
        held.was_idle = idle

    def _can_skip(self, held: OldWorker) -> bool:
        """Whether this sample can be left out: the worker has many rows and still has connections."""
        known = self._leaving.get(held.identity)
        large = known is not None and len(known.counts) > FEW_ROWS
        now = time.monotonic()
        return large and now < min(held.until, held.read_at + WRITE_SECONDS) and held.jobs() > 0

    def _read_held(self, held: OldWorker) -> haproxy_stats.Sample:
        sample = haproxy_stats.parse("".join(map(held.ask, haproxy_stats.HELD_QUESTIONS)))
        if sample is None:
            raise HaproxyError("read the statistics of HAProxy's old worker", "its answer has an unknown format")
        self._totals.read(held.identity, sample.counts)
        self._leaving[held.identity] = sample
        held.read_at = time.monotonic()
        return sample

    def _publish(self) -> None:
        """Write the counters of former workers for the responder."""
        if self._latest is None:
            return
        present = _identity(self._latest.pid)
        others = self._totals.totals_without(present)
        sums = {row: others[row] for row in self._latest.counts if row in others}
        text = former_workers.compose(self._latest.pid, sums)
        if text != self._published:
            try:
                # The responder runs as another user and must read this file.
                write_atomically(self._paths.earlier, text, durable=False, mode=0o644)
                self._published = text
            except OSError as error:
                _log.warning(
                    "The agent cannot write the counters of HAProxy's former workers for the responder, and retries in "
                    "its next sample: %s",
                    error,
                )

    def document(self, generation: int | None) -> dict[str, Any]:
        document = self._haproxy_document(generation)
        if self._udp is not None:
            document["listeners"].update(self._udp.listeners())
            document["pools"].update(self._udp.pools())
        return document

    def _haproxy_document(self, generation: int | None) -> dict[str, Any]:
        with self._lock:
            sample = self._latest
            if sample is None:
                return {"generation": generation, "listeners": {}, "pools": {}}
            listeners = {}
            for name, found in sample.listeners.items():
                total = haproxy_stats.Counters.of(self._totals.total(haproxy_stats.key(name)))
                leaving = (one.listeners[name] for one in self._leaving.values() if name in one.listeners)
                active = found.active_connections + sum(one.active_connections for one in leaving)
                listeners[name] = {"status": found.status, "active_connections": active, **asdict(total)}
            pools = {
                name: {"status": status, "members": dict(sample.members.get(name, {}))}
                for name, status in sample.pools.items()
            }
            return {"generation": generation, "listeners": listeners, "pools": pools}

    def statuses(self) -> dict[str, dict[str, str]]:
        with self._lock:
            found = self._latest.members if self._latest is not None else {}
        others = self._udp.pools() if self._udp is not None else {}
        return {**found, **{name: pool["members"] for name, pool in others.items()}} if others else found

    def write(self, work: BackgroundWork | None = None) -> None:
        """Write changed counters to disk, many rows less often; raises OSError. `work` gives way to changes."""
        if self._udp is not None:
            self._udp.write()
        with self._lock:
            before, at, settlements = self._written
            rows = len(self._latest.counts) if self._latest is not None else 0
            soon = rows <= FEW_ROWS or settlements != self._totals.settlements
            if not soon and time.monotonic() - at < WRITE_SECONDS:
                return
            text = self._totals.text(work.give_way if work is not None else never_wait)
            if text != before:
                write_atomically(self._paths.totals, text)
            self._written = text, time.monotonic(), self._totals.settlements


def _identity(pid: int) -> str:
    """Return a unique identity of a process: its id and start time; empty if it has exited."""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2].split()
        return f"{pid}:{fields[19]}" if fields[0] not in "ZX" else ""
    return ""


def _is_running(identity: str) -> bool:
    pid = identity.partition(":")[0]
    return pid.isdecimal() and int(pid) != os.getpid() and _identity(int(pid)) == identity
