# SPDX-License-Identifier: Apache-2.0
"""Writes the changes that follow from new heartbeats to the database, in batches.

Invariant: the writer writes changes only. The next flush computes a failed batch again, with or without new heartbeats,
so no queue can overflow or get lost. A report affects only the load balancer of its amphora, and no report can block
the writes of other load balancers. A flush of at most `_PART` amphorae is one read and at most one write transaction
(`write_batch`), or several for thousands of rows.

A heartbeat that repeats the previous one causes no read. Its time is written with the times of all other amphorae, and
its counters at the interval of the statistics. The writer reads a load balancer after a change, and every
`_REFRESH_INTERVAL` seconds. If there is more work than time, times come first, then statuses, then statistics. A
postponed status is computed from the newest report, and a postponed counter is absolute, so no total is lost.
"""

from __future__ import annotations

import heapq
import logging
import random
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress

import msgspec
import sqlalchemy as sa

from amphora_driver import metrics
from amphora_driver.bounded_cache import Cache
from amphora_driver.database.engine import Database
from amphora_driver.errors import UnknownObject
from amphora_driver.health import statistics
from amphora_driver.health.amphora_findings import AmphoraFindings
from amphora_driver.health.amphora_reports import AmphoraReports, LastReport, share_text
from amphora_driver.health.stale_connections import StaleConnections
from amphora_driver.health.status import ListenerReport, Report, operating_statuses
from amphora_driver.health.write_batch import BatchWriter, Entry, HeartbeatTimes, Written, plain, split_entries
from amphora_driver.model.amphora import AmphoraState
from amphora_driver.model.enums import Operating
from amphora_driver.model.loadbalancer import LoadBalancer
from amphora_driver.store import amphorae, desired_objects, status_outbox
from amphora_driver.store.amphorae import ServingState

LOG = logging.getLogger(__name__)

# Seconds between two removals of deleted amphorae and load balancers from memory.
_CLEANUP_INTERVAL = 60.0
# The health manager reads a load balancer again after this number of seconds without a change, because a controller may
# have changed the rows. The time varies by a quarter, so that the reads spread.
_REFRESH_INTERVAL = 30.0
# A flush reads and writes at most this number of amphorae in one transaction, so that the times of heartbeats can be
# written in between.
_PART = 100
# Maximum number of statuses and rows of statistics in a transaction. A Galera conflict repeats these rows only.
_MAX_WRITTEN = 1000
# A flush starts no further part after this number of seconds. Statistics wait then, and other load balancers wait for
# the next flush.
_FLUSH_SECONDS = 1.0
# A flush that lasts for this number of seconds does not delay the times of heartbeats.
_LONG_FLUSH = 0.3
# Maximum number of objects of load balancers in memory. An object takes about 500 bytes.
_MAX_TREE_OBJECTS = 20_000
# A flush writes at most about this number of rows of statistics.
_MAX_STATISTICS = 5000


class _LoadBalancerState(msgspec.Struct):
    """The state of one load balancer, with the statuses and statistics rows written last.

    Attributes:
        listeners: the ids of its listeners; None if it is deleted.
        served: the newest generation that an amphora served when the listeners were read.
        silent: amphorae that became silent while their partner sends heartbeats.
        recorded: the load balancer and its amphorae at the last read.
        valid_until: time of the next read; a time of `time.monotonic()`.
        settled: whether the statuses follow from the reports.
        live: the amphorae that were not silent at the last read.
        counted: the amphorae whose statuses counted at the last read.
        counters: reported counters that are not written yet, by amphora and listener.
        counted_at: time of the last write of statistics.
        is_queued: whether statistics are due at a known time.
    """

    listeners: frozenset[str] | None = None
    served: int = -1
    statuses: dict[str, Operating] = {}
    rows: dict[statistics.Key, statistics.Row] = {}
    silent: frozenset[str] = frozenset()
    recorded: ServingState = msgspec.field(default_factory=lambda: ServingState(generation=0))
    valid_until: float = 0.0
    settled: bool = False
    live: list[str] = []
    counted: tuple[str, ...] = ()
    counters: dict[str, dict[str, ListenerReport]] = {}
    counted_at: float | None = None
    is_queued: bool = False

    def invalidate_changed_status(self, load_balancer_id: str, recorded: str | None) -> None:
        """Forget the written load balancer status if another process has changed it in the database."""
        own = self.statuses.get(load_balancer_id)
        if own is not None and own.value != recorded:
            self.statuses = {one: known for one, known in self.statuses.items() if one != load_balancer_id}
            self.settled = False

    def add_counters(self, amphora_id: str, counters: Mapping[str, ListenerReport]) -> None:
        """Add newer counters of an amphora to those that are not written yet."""
        self.counters = {**self.counters, amphora_id: {**self.counters.get(amphora_id, {}), **counters}}

    def retain(self, kept: Container[str]) -> None:
        """Drop the statistics of other amphorae and of deleted listeners from memory."""
        # The cleanup passes the amphorae of the fleet, so this method must not copy or iterate over them.
        listeners = self.listeners or frozenset()
        self.rows = {key: row for key, row in self.rows.items() if key[0] in listeners and key[1] in kept}


class _CurrentReports(msgspec.Struct, frozen=True):
    """The unexpired reports of the amphorae of one load balancer.

    Attributes:
        trusted: the amphorae whose statuses of members and listeners count.
        tree: the load balancer; None if it is deleted, or if its statuses follow from the reports already.
    """

    load_balancer_id: str
    state: _LoadBalancerState
    reports: dict[str, Report]
    trusted: tuple[str, ...]
    tree: LoadBalancer | None


class _PendingWrite(msgspec.Struct, frozen=True):
    """The rows to write for one load balancer, and its statuses after that write.

    Attributes:
        statuses: None if they are not computed.
        counts: whether the rows include all new counters.
    """

    state: _LoadBalancerState
    statuses: dict[str, Operating] | None
    entry: Entry
    counts: bool = False

    def record(self, now: float, statistics_interval: float) -> None:
        """Record that the rows are written."""
        state = self.state
        if self.statuses is not None:
            state.settled = True
            if self.entry.observations:
                state.statuses = self.statuses
        if self.counts:
            # The first interval has a random length, so that the writes of many load balancers spread.
            passed = random.random() * statistics_interval if state.counted_at is None else 0.0  # noqa: S311 - no secret
            state.counted_at = now - passed
            state.counters = {}
            statistics.record_written(state.rows, self.entry.rows)


class StatusWriter:
    """Writes changed reports to the database. Not thread-safe, except for `write_delayed_heartbeats`.

    Args:
        interval: seconds between two heartbeats of an amphora.
        on_due: called when a load balancer needs a push.
        on_departed: called with the ids of amphorae that have sent heartbeats and have no row any more.
        near_limit: percentage of a limited resource from which an amphora is near the limit.
        statistics_interval: seconds between two writes of the statistics of one load balancer.
        is_overloaded: returns whether statistics have to wait.
        on_heartbeats_written: called after each write of the times of heartbeats.
    """

    def __init__(
        self,
        database: Database,
        reports: AmphoraReports,
        interval: float = 3.0,
        on_due: Callable[[], None] = lambda: None,
        on_departed: Callable[[set[str]], None] = lambda _amphora_ids: None,
        near_limit: int = 85,
        statistics_interval: float = 0.0,
        is_overloaded: Callable[[], bool] = lambda: False,
        on_heartbeats_written: Callable[[], None] = lambda: None,
    ) -> None:
        self._database = database
        self._reports = reports
        self._stale_connections = StaleConnections(reports.expiry)
        self._findings = AmphoraFindings(database, interval, on_due, near_limit)
        self._on_departed = on_departed
        self._statistics_interval = statistics_interval
        self._is_overloaded = is_overloaded
        self._batches = BatchWriter(database)
        self._states: dict[str, _LoadBalancerState] = {}
        # The load balancers whose statuses were computed last. Their number of objects is limited.
        self._trees: Cache[LoadBalancer] = Cache(_MAX_TREE_OBJECTS)
        # Load balancer id by amphora id, as read from the database last.
        self._owners: dict[str, str] = {}
        # Amphorae with heartbeats since the last flush to the database.
        self._updated: dict[str, LastReport] = {}
        self._changed: set[str] = set()
        self._times = HeartbeatTimes(database, reports, on_heartbeats_written)
        # A heap of load balancers with new counters, each with the time at which they are due.
        self._statistics_due: list[tuple[float, str]] = []
        self._cleaned_up_at = time.monotonic()
        # Time at which the present flush began; None between two flushes.
        self._flush_begun: float | None = None

    def flush(self, *, last: bool = False) -> bool:
        """Write the changes since the last flush, and return whether Octavia needs an update.

        Raise StoreError if the database does not answer; the next flush repeats the writes. The last flush postpones
        no write.
        """
        self._flush_begun = begun = time.monotonic()
        try:
            return self._flush(begun, last=last)
        finally:
            self._flush_begun = None

    def _flush(self, begun: float, *, last: bool) -> bool:
        self._take_reports(begun)
        unread = self._find_unread(begun)
        parts = [unread[start : start + _PART] for start in range(0, len(unread), _PART)] or [[]]
        changed = len(parts) > 1 and self._write([], last=last)
        for number, part in enumerate(parts):
            is_late = not last and time.monotonic() - begun > _FLUSH_SECONDS
            if is_late and number > 0:
                metrics.count_postponed("statuses", sum(map(len, parts[number:])))
                break
            waits = is_late or (not last and self._is_overloaded())
            if waits:
                now = time.monotonic()
                metrics.count_postponed("statistics", sum(due <= now for due, _ in self._statistics_due))
            changed |= self._flush_part(part, last=last, with_statistics=part is parts[-1] and not waits)
        else:
            self._updated.clear()
            self._changed.clear()
        closed = self._close_stale_connections()
        self._remove_departed()
        return changed or closed

    def write_delayed_heartbeats(self) -> None:
        """Write the times of heartbeats if a flush in another thread delays them, or raise StoreError."""
        begun = self._flush_begun
        if begun is not None and time.monotonic() - begun >= _LONG_FLUSH:
            self._times.write_due()

    def _take_reports(self, now: float) -> None:
        # An amphora whose report changes between these two calls is in the result of the next flush.
        self._changed |= self._reports.take_changed()
        updated = self._times.take_updated()
        for amphora_id in self._changed - updated.keys() - self._updated.keys():
            if (report := self._reports.last_report(amphora_id)) is not None:
                updated[amphora_id] = report
        self._updated.update(updated)
        owners, states = self._owners, self._states
        for amphora_id in updated:
            load_balancer_id = owners.get(amphora_id, "")
            state = states.get(load_balancer_id)
            if state is not None and not state.is_queued:
                self._queue_statistics(load_balancer_id, now)

    def _queue_statistics(self, load_balancer_id: str, now: float, *, failed: bool = False) -> None:
        state = self._states.get(load_balancer_id)
        if state is not None and not state.is_queued:
            state.is_queued = True
            waits = not failed and state.counted_at is not None
            due = max(now, (state.counted_at or 0.0) + self._statistics_interval) if waits else now
            heapq.heappush(self._statistics_due, (due, load_balancer_id))

    def _find_unread(self, now: float) -> list[str]:
        """Return the amphorae whose load balancers have to be read from the database."""
        owners, states, changed = self._owners, self._states, self._changed
        return [
            one
            for one, report in self._updated.items()
            if one in changed or self._is_unread(states.get(owners.get(one, "")), one, report, now)
        ]

    def _is_unread(self, state: _LoadBalancerState | None, amphora_id: str, report: LastReport, now: float) -> bool:
        if state is None or not state.settled or now >= state.valid_until:
            return True
        recorded = state.recorded
        if not state.live:
            # At the last read of the rows, all reported values had expired. So the new report requires another read.
            return True
        if len(recorded.amphorae) > 1 and self._reports.live_ids(recorded.amphorae, now) != state.live:
            return True
        return self._findings.needs_attention(amphora_id, report, recorded)

    def _flush_part(self, amphora_ids: Sequence[str], *, last: bool, with_statistics: bool) -> bool:
        current = self._database.read(lambda c: self._collect_reports(c, amphora_ids)) if amphora_ids else []
        pending = {one.load_balancer_id: write for one in current if (write := self._compute_write(one)) is not None}
        due = self._take_due_statistics(last=last) if with_statistics else []
        # If the statuses of a load balancer cannot be computed, its statistics wait for the next flush.
        failed = {one.load_balancer_id for one in current} - pending.keys()
        try:
            for load_balancer_id in due:
                if load_balancer_id not in failed:
                    self._add_statistics(pending, load_balancer_id)
            changed = self._write(list(pending.values()), last=last)
        finally:
            # The statistics of a failed or refused write are due again.
            now = time.monotonic()
            for load_balancer_id in due:
                if load_balancer_id in failed or self._states[load_balancer_id].counters:
                    self._queue_statistics(load_balancer_id, now, failed=True)
        states = {one.load_balancer_id: one.state.recorded for one in current}
        self._findings.record(states, self._updated, self._record_refusal)
        for amphora_id in amphora_ids:
            self._updated.pop(amphora_id, None)
            self._changed.discard(amphora_id)
        return changed

    def _take_due_statistics(self, *, last: bool) -> list[str]:
        now = time.monotonic()
        due, rows = [], 0
        while self._statistics_due and (last or (self._statistics_due[0][0] <= now and rows < _MAX_STATISTICS)):
            _, load_balancer_id = heapq.heappop(self._statistics_due)
            state = self._states.get(load_balancer_id)
            if state is not None:
                state.is_queued = False
                rows += len(state.rows) + 1
                due.append(load_balancer_id)
        return due

    def _add_statistics(self, pending: dict[str, _PendingWrite], load_balancer_id: str) -> None:
        """Add the changed rows of a load balancer to its pending write."""
        state = self._states[load_balancer_id]
        for amphora_id, counters in self._reports.take_counters(state.recorded.amphorae).items():
            state.add_counters(amphora_id, counters)
        if state.listeners is None:
            state.counters = {}
            return
        live = self._reports.live_ids(state.recorded.amphorae, time.monotonic())
        reports = {one: Report(listeners=listeners) for one, listeners in state.counters.items()}
        changed = statistics.changed_rows(reports, load_balancer_id, state.listeners, state.rows, live)
        # The open connections of an amphora without heartbeats become 0. Its other counters keep their values.
        done = {row.key for row in changed}
        closed = [row for row in statistics.closed_connections(state.rows, live) if row.key not in done]
        before = pending.get(load_balancer_id) or _PendingWrite(state, None, Entry(load_balancer_id))
        entry = msgspec.structs.replace(before.entry, rows=(*changed, *closed))
        pending[load_balancer_id] = msgspec.structs.replace(before, entry=entry, counts=True)

    def _close_stale_connections(self) -> bool:
        """Set the connections of silent amphorae to 0, at most once per scan interval."""
        now = time.monotonic()
        if not self._stale_connections.is_due(now):
            return False
        heard = self._reports.heard_since(now - self._reports.expiry)
        clock = self._database.now()
        rows = self._database.read(lambda connection: self._stale_connections.find_rows(connection, clock, heard))
        if rows:
            self._database.write(lambda connection: statistics.write_rows(connection, rows))
        self._stale_connections.record_scan(now)
        for row in rows:
            if (state := self._states.get(row.load_balancer_id)) is not None:
                statistics.record_written(state.rows, [row])
        return bool(rows)

    def _collect_reports(self, connection: sa.Connection, amphora_ids: Sequence[str]) -> list[_CurrentReports]:
        """Return the reports of the load balancers of these amphorae, and refresh their states."""
        recorded = amphorae.load_serving_states(connection, list(amphora_ids))
        self._forget_unknown(set(amphora_ids) - {one for each in recorded.values() for one in each.amphorae})
        now = time.monotonic()
        return [
            self._collect_report(connection, load_balancer_id, one, now)
            for load_balancer_id, one in sorted(recorded.items())
        ]

    def _collect_report(
        self, connection: sa.Connection, load_balancer_id: str, one: ServingState, now: float
    ) -> _CurrentReports:
        trusted = [amphora_id for amphora_id, state in one.amphorae.items() if state is not AmphoraState.RETIRING]
        reports = self._reports.live_reports(one.amphorae, now)
        authoritative = self._reports.authoritative_amphora(trusted, now)
        live = tuple(each for each in trusted if each in reports)
        counted = (authoritative,) if authoritative is not None else live
        state = self._states.setdefault(load_balancer_id, _LoadBalancerState())
        self._owners.update(dict.fromkeys(one.amphorae, load_balancer_id))
        self._log_silent(load_balancer_id, state, [each for each in trusted if live and each not in reports])
        newest = max((reports[each].generation or 0 for each in live), default=0)
        # A faulty amphora may report a generation that does not exist yet. Without the limit, the writer would ignore
        # all real generations below the false one.
        served = min(newest, one.generation)
        if served > state.served:
            # A new generation may contain objects without statuses in the database, so all statuses are computed again.
            self._trees.drop(load_balancer_id)
            tree = self._load_tree(connection, load_balancer_id)
            state.listeners = None if tree is None else frozenset(listener.id for listener in tree.listeners)
            state.served, state.statuses = served, {}
            state.retain(one.amphorae)
            state.settled = False
        state.invalidate_changed_status(load_balancer_id, one.operating)
        if counted != state.counted or not self._changed.isdisjoint(one.amphorae):
            state.settled = False
        self._keep_counters(state.recorded.amphorae.keys() - one.amphorae.keys())
        state.recorded, state.counted, state.live = one, counted, list(reports)
        state.valid_until = now + _REFRESH_INTERVAL * random.uniform(0.75, 1.25)  # noqa: S311 - no secret
        self._queue_statistics(load_balancer_id, now)
        tree = None if state.settled or state.listeners is None else self._load_tree(connection, load_balancer_id)
        return _CurrentReports(load_balancer_id, state, reports, counted, tree)

    def _load_tree(self, connection: sa.Connection, load_balancer_id: str) -> LoadBalancer | None:
        """Return a load balancer from memory or from the database; None if it does not exist."""
        tree = self._trees.get(load_balancer_id)
        if tree is None:
            with suppress(UnknownObject):
                tree = desired_objects.load_tree(connection, load_balancer_id)
                self._trees.put(load_balancer_id, tree, sum(1 for _ in desired_objects.iter_subtree(tree)))
        return tree

    def _keep_counters(self, amphora_ids: Iterable[str]) -> None:
        """Move the last counters of deleted amphorae to their load balancers, whose totals include them."""
        for amphora_id, counters in self._reports.take_counters(amphora_ids).items():
            load_balancer_id = self._owners.get(amphora_id, "")
            if (state := self._states.get(load_balancer_id)) is not None:
                state.add_counters(amphora_id, counters)
                self._queue_statistics(load_balancer_id, time.monotonic())

    def _forget_unknown(self, amphora_ids: set[str]) -> None:
        self._keep_counters(amphora_ids)
        self._reports.forget(amphora_ids)
        self._times.forget(amphora_ids)
        for amphora_id in amphora_ids:
            self._owners.pop(amphora_id, None)

    def _log_silent(self, load_balancer_id: str, state: _LoadBalancerState, silent: list[str]) -> None:
        """Log once that an amphora is silent, because no status shows its silence while the partner serves."""
        now_silent = frozenset(each for each in silent if self._reports.last_report(each) is not None)
        for amphora_id in sorted(now_silent - state.silent):
            silence = "amphora %s of load balancer %s is silent, so only its partner amphora determines the statuses"
            LOG.warning(silence, amphora_id, load_balancer_id)
        state.silent = now_silent

    def _record_refusal(self, load_balancer_id: str, error: Exception) -> None:
        self._batches.record_refusal(load_balancer_id, error)
        if (state := self._states.get(load_balancer_id)) is not None:
            state.settled = False

    def _compute_write(self, current: _CurrentReports) -> _PendingWrite | None:
        try:
            return _compute_write(current)
        except (ValueError, ArithmeticError, LookupError) as error:
            # An invalid report about one load balancer must not prevent the statuses of others.
            self._record_refusal(current.load_balancer_id, error)
            return None

    def _write(self, pending: list[_PendingWrite], *, last: bool) -> bool:
        entries = [one.entry for one in pending if one.entry.rows or one.entry.observations]
        now, changed = time.monotonic(), False
        refused: set[str] = set()
        for some in split_entries(entries, _MAX_WRITTEN) or [[]]:
            with self._times.due(last=last) as heartbeats:
                written = self._batches.write(some, heartbeats) if some or heartbeats else Written()
            refused |= {one.load_balancer_id for one in some} - written.entries
            changed |= bool(written.unreported)
            changed |= any(one.rows for one in some if one.load_balancer_id in written.entries)
        for one in pending:
            if one.entry.load_balancer_id not in refused:
                one.record(now, self._statistics_interval)
        return changed

    def _remove_departed(self) -> None:
        """Drop the memory of deleted amphorae and load balancers, at most once per cleanup interval."""
        if time.monotonic() - self._cleaned_up_at < _CLEANUP_INTERVAL:
            return
        # The ids in memory are read before the rows. Each amphora has a row before its first heartbeat, so an id
        # without a row belongs to a deleted amphora.
        known = self._reports.known_ids()
        owners = self._database.read(amphorae.load_balancer_ids)
        departed = known - owners.keys()
        self._keep_counters(departed)
        self._reports.forget(departed)
        self._on_departed(departed)
        self._times.retain(owners)
        self._owners = {one: owners[one] for one in self._owners if one in owners}
        self._findings.retain(owners)
        served = set(owners.values())
        self._states = {one: state for one, state in self._states.items() if one in served or state.counters}
        for state in self._states.values():
            state.retain(owners)
        self._batches.forget_old_refusals()
        self._cleaned_up_at = time.monotonic()


def _compute_write(current: _CurrentReports) -> _PendingWrite:
    state = current.state
    if state.settled:
        return _PendingWrite(state, None, Entry(current.load_balancer_id))
    if current.tree is None:
        return _PendingWrite(state, {}, Entry(current.load_balancer_id))
    statuses = operating_statuses(current.tree, [current.reports[each] for each in current.trusted])
    written = state.statuses
    observations = [
        status_outbox.Observation(object_id=object_id, kind=one.kind, operating=one.status, reason=plain(one.reason))
        for object_id, one in statuses.items()
        if written.get(object_id) is not one.status
    ]
    computed = {share_text(object_id): one.status for object_id, one in statuses.items()}
    return _PendingWrite(state, computed, Entry(current.load_balancer_id, observations))
