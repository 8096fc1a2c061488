# SPDX-License-Identifier: Apache-2.0
"""Writes the changes that follow from new heartbeats to the database, in batches.

Invariant: the writer writes changes only. The next flush computes a failed batch again, with or without new heartbeats,
so no queue can overflow or get lost. A report affects only the load balancer of its amphora, and no report can block
the writes of other load balancers. For any number of load balancers, a flush is one read and at most one write
transaction (`write_batch`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec
import sqlalchemy as sa

from amphora_driver.database.engine import Database
from amphora_driver.errors import UnknownObject
from amphora_driver.health import statistics
from amphora_driver.health.amphora_reports import AmphoraReports, LastReport
from amphora_driver.health.drift_reports import DriftReports, UnrepairedDrift
from amphora_driver.health.lost_configs import LostConfig, LostConfigDetector
from amphora_driver.health.near_limits import NearLimits
from amphora_driver.health.stale_connections import StaleConnections
from amphora_driver.health.status import Report, Statuses, operating_statuses
from amphora_driver.health.write_batch import BatchWriter, Entry, apply_or_split
from amphora_driver.model.amphora import AmphoraState, describe_resources
from amphora_driver.model.loadbalancer import LoadBalancer
from amphora_driver.store import amphorae, config_drift, desired_objects, status_outbox
from amphora_driver.store.amphorae import LastHeartbeat
from amphora_driver.untrusted_text import printable

LOG = logging.getLogger(__name__)

# Minimum seconds between two writes of the heartbeat times, which are the only changes in an idle system.
_HEARTBEAT_WRITE_INTERVAL = 1.0
# Seconds between two removals of deleted amphorae and load balancers from memory.
_CLEANUP_INTERVAL = 60.0
_MAX_REASON = 255


class _LoadBalancerState(msgspec.Struct):
    """The tree of one load balancer (None if deleted), and the statuses and statistics rows written last.

    Attributes:
        served: the newest generation that an amphora served when the tree was read.
        silent: amphorae that became silent while their partner sends heartbeats.
    """

    tree: LoadBalancer | None = None
    served: int = -1
    statuses: Statuses = {}
    rows: dict[statistics.Key, statistics.Row] = {}
    silent: frozenset[str] = frozenset()

    def invalidate_changed_status(self, load_balancer_id: str, recorded: str | None) -> None:
        """Forget the written load balancer status if another process has changed it in the database."""
        own = self.statuses.get(load_balancer_id)
        if own is not None and own.status.value != recorded:
            self.statuses = {one: known for one, known in self.statuses.items() if one != load_balancer_id}

    def retain(self, amphora_ids: Iterable[str]) -> None:
        """Drop the statistics of other amphorae and of deleted listeners from memory."""
        kept = set(amphora_ids)
        listeners = {listener.id for listener in self.tree.listeners} if self.tree is not None else set()
        self.rows = {key: row for key, row in self.rows.items() if key[0] in listeners and key[1] in kept}


class _CurrentReports(msgspec.Struct, frozen=True):
    """The unexpired reports of the amphorae of one load balancer.

    Attributes:
        reports: the reports of all amphorae, because each amphora has counted requests.
        trusted: the amphorae whose statuses of members and listeners count.
        drifting: the amphorae with the mark "drifting".
        near_limit: the recorded resources near their limits, by amphora id.
    """

    load_balancer_id: str
    state: _LoadBalancerState
    reports: dict[str, Report]
    trusted: tuple[str, ...]
    confirmed: dict[str, int]
    drifting: set[str]
    near_limit: dict[str, str] = {}


class _PendingWrite(msgspec.Struct, frozen=True):
    """The rows to write for one load balancer, and its statuses after that write."""

    state: _LoadBalancerState
    statuses: Statuses
    entry: Entry


class StatusWriter:
    """Writes changed reports to the database. Not thread-safe.

    Args:
        interval: seconds between two heartbeats of an amphora.
        on_due: called when a load balancer needs a push.
        on_departed: called with the ids of amphorae that have sent heartbeats and have no row any more.
        near_limit: percentage of a limited resource from which an amphora is near the limit.
    """

    def __init__(
        self,
        database: Database,
        reports: AmphoraReports,
        interval: float = 3.0,
        on_due: Callable[[], None] = lambda: None,
        on_departed: Callable[[set[str]], None] = lambda _amphora_ids: None,
        near_limit: int = 85,
    ) -> None:
        self._database = database
        self._reports = reports
        self._lost_configs = LostConfigDetector(interval)
        self._stale_connections = StaleConnections(reports.expiry)
        self._drift_reports = DriftReports(interval)
        self._near_limits = NearLimits(interval, near_limit)
        self._on_due = on_due
        self._on_departed = on_departed
        self._batches = BatchWriter(database)
        self._states: dict[str, _LoadBalancerState] = {}
        # Amphorae with heartbeats since the last flush to the database.
        self._updated: dict[str, LastReport] = {}
        # The last heartbeat of each amphora, until its write to the database.
        self._heartbeats: dict[str, LastHeartbeat] = {}
        self._heartbeats_written_at = 0.0
        self._cleaned_up_at = time.monotonic()

    def flush(self, *, last: bool = False) -> bool:
        """Write the changes since the last flush, and return whether Octavia needs an update.

        Raise StoreError if the database does not answer; the next flush repeats the writes. The last flush postpones
        no write.
        """
        self._updated.update(self._reports.take_updated())
        current = self._database.read(self._collect_reports) if self._updated else []
        now = time.monotonic()
        changed = self._write([one for each in current if (one := self._compute_write(each)) is not None], last=last)
        for record in (self._record_lost_configs, self._record_drift, self._record_near_limits):
            apply_or_split(current, partial(record, now=now), self._record_refusal)
        self._updated.clear()
        closed = self._close_stale_connections()
        self._remove_departed()
        return changed or closed

    def _close_stale_connections(self) -> bool:
        """Set the connections of silent amphorae to 0, at most once per scan interval."""
        now = time.monotonic()
        if not self._stale_connections.is_due(now):
            return False
        heard = self._reports.heard_since(now - self._reports.expiry)
        rows = self._database.read(lambda connection: self._stale_connections.find_rows(connection, heard))
        if rows:
            self._database.write(lambda connection: statistics.write_rows(connection, rows))
        self._stale_connections.record_scan(now)
        for row in rows:
            if (state := self._states.get(row.load_balancer_id)) is not None:
                statistics.record_written(state.rows, [row])
        return bool(rows)

    def _collect_reports(self, connection: sa.Connection) -> list[_CurrentReports]:
        """Return the reports of each load balancer with updated amphorae, and refresh its state."""
        recorded = amphorae.load_serving_states(connection, list(self._updated))
        self._collect_heartbeats({amphora_id for one in recorded.values() for amphora_id in one.amphorae})
        now = time.monotonic()
        current = []
        for load_balancer_id, one in sorted(recorded.items()):
            trusted = [amphora_id for amphora_id, state in one.amphorae.items() if state is not AmphoraState.RETIRING]
            reports = self._reports.live_reports(one.amphorae, now)
            authoritative = self._reports.authoritative_amphora(trusted, now)
            live = tuple(each for each in trusted if each in reports)
            counted = (authoritative,) if authoritative is not None else live
            state = self._states.setdefault(load_balancer_id, _LoadBalancerState())
            self._log_silent(load_balancer_id, state, [each for each in trusted if each not in reports])
            newest = max((reports[each].generation or 0 for each in live), default=0)
            # A faulty amphora may report a generation that does not exist yet. Without this limit, all real generations
            # below it would be ignored.
            served = min(newest, one.generation)
            if served > state.served:
                # A new generation may contain objects without statuses in the database, so all statuses are computed
                # again.
                state.tree, state.served, state.statuses = _load_tree(connection, load_balancer_id), served, {}
                state.retain(one.amphorae)
            state.invalidate_changed_status(load_balancer_id, one.operating)
            marks = (one.confirmed, one.drifting, one.near_limit)
            current.append(_CurrentReports(load_balancer_id, state, reports, counted, *marks))
        return current

    def _log_silent(self, load_balancer_id: str, state: _LoadBalancerState, silent: list[str]) -> None:
        """Log once that an amphora is silent, because no status shows its silence while the partner serves."""
        now_silent = frozenset(each for each in silent if self._reports.last_report(each) is not None)
        for amphora_id in sorted(now_silent - state.silent):
            silence = (
                "amphora %s of load balancer %s is silent: the health manager receives heartbeats only from the "
                "partner amphora"
            )
            LOG.warning(silence, amphora_id, load_balancer_id)
        state.silent = now_silent

    def _record_refusal(self, current: _CurrentReports, error: Exception) -> None:
        self._batches.record_refusal(current.load_balancer_id, error)

    def _confirmed_and_updated(
        self, current: Sequence[_CurrentReports]
    ) -> tuple[dict[str, int], dict[str, LastReport]]:
        """Return the confirmed generations and the new heartbeats of the amphorae of these load balancers."""
        confirmed = {amphora_id: generation for one in current for amphora_id, generation in one.confirmed.items()}
        return confirmed, {amphora_id: last for amphora_id, last in self._updated.items() if amphora_id in confirmed}

    def _record_lost_configs(self, current: Sequence[_CurrentReports], now: float) -> None:
        """Make load balancers due if their amphorae have lost their configuration."""
        confirmed, updated = self._confirmed_and_updated(current)
        suspected = self._lost_configs.find_lost(updated, confirmed, now)
        if not suspected:
            return

        def write(connection: sa.Connection) -> list[LostConfig]:
            config_drift.lock_work_of_amphorae(connection, [one.amphora_id for one in suspected])
            lower = partial(amphorae.lower_confirmed, connection)
            return [one for one in suspected if lower(one.amphora_id, one.confirmed, one.serves)]

        lost = self._database.write(write)
        for one in lost:
            lost_config = (
                "amphora %s confirmed generation %d of its configuration but serves generation %d; "
                "a controller pushes the configuration again"
            )
            LOG.warning(lost_config, one.amphora_id, one.confirmed, one.serves)
        self._lost_configs.clear(suspected)
        if lost:
            self._on_due()

    def _record_drift(self, current: Sequence[_CurrentReports], now: float) -> None:
        """Record the drift that agents report, and make load balancers with unrepaired drift due."""
        confirmed, updated = self._confirmed_and_updated(current)
        marked = {amphora_id for one in current for amphora_id in one.drifting}
        marks = self._drift_reports.find_changed_marks(updated, confirmed, marked)
        unrepaired = self._drift_reports.find_unrepaired(updated, confirmed, now)
        notices = self._drift_reports.find_notices(updated, now)
        if not (unrepaired or notices or marks):
            return

        def write(connection: sa.Connection) -> tuple[int, list[str]]:
            config_drift.lock_work_of_amphorae(connection, [one.amphora_id for one in unrepaired])
            config_drift.set_drifting(connection, marks)
            record = partial(config_drift.record_agent_finding, connection)
            recorded = [
                one for one, each in sorted(notices.items()) if record(one, _plain(each.sentence), each.found_at)
            ]
            revoke = partial(config_drift.revoke_confirmation, connection)
            revoked = [
                revoke(one.amphora_id, one.confirmed, _plain(_push_reason(one)), replug=one.replug)
                for one in unrepaired
            ]
            return sum(revoked), recorded

        due, recorded = self._database.write(write)
        for amphora_id in recorded:
            LOG.warning(
                "the agent of amphora %s reports configuration drift, which the health manager records: %s",
                amphora_id,
                _plain(notices[amphora_id].sentence),
            )
        for one in unrepaired:
            LOG.warning(
                "the health manager requests that a controller pushes the configuration to amphora %s again: %s",
                one.amphora_id,
                _plain(_push_reason(one)),
            )
        self._drift_reports.record_pushes(unrepaired, now)
        self._drift_reports.record_notices(updated, now)
        if due:
            self._on_due()

    def _record_near_limits(self, current: Sequence[_CurrentReports], now: float) -> None:
        """Record which amphorae came near a limit, or left it."""
        _, updated = self._confirmed_and_updated(current)
        marked = {amphora_id: names for one in current for amphora_id, names in one.near_limit.items()}
        changed = self._near_limits.find_changed(updated, marked, now)
        if not changed:
            return
        self._database.write(lambda connection: amphorae.record_near_limit(connection, changed))
        for amphora_id, names in sorted(changed.items()):
            if names:
                words = describe_resources(names.split(","))
                LOG.warning("amphora %s is near its limit of: %s; the status page shows a warning", amphora_id, words)
            else:
                LOG.info("amphora %s is no longer near a limit; the warning on the status page ends", amphora_id)

    def _collect_heartbeats(self, recorded: set[str]) -> None:
        self._reports.forget(self._updated.keys() - recorded)
        for amphora_id in self._updated.keys() & recorded:
            last = self._updated[amphora_id]
            epoch, sequence = last.order
            self._heartbeats[amphora_id] = LastHeartbeat(
                amphora_id=amphora_id,
                at=last.wall,
                generation=last.generation,
                epoch=epoch,
                sequence=sequence,
                holds_vip=last.holds_vip,
                agent_version=last.agent_version,
            )

    def _compute_write(self, current: _CurrentReports) -> _PendingWrite | None:
        try:
            return _compute_write(current)
        except (ValueError, ArithmeticError, LookupError) as error:
            # An invalid report about one load balancer must not prevent the statuses of others.
            self._record_refusal(current, error)
            return None

    def _write(self, pending: list[_PendingWrite], *, last: bool) -> bool:
        entries = [one.entry for one in pending if one.entry.rows or one.entry.observations]
        now = time.monotonic()
        due = last or now - self._heartbeats_written_at >= _HEARTBEAT_WRITE_INTERVAL
        heartbeats = list(self._heartbeats.values()) if due else []
        if not (entries or heartbeats):
            return False
        written = self._batches.write(entries, heartbeats)
        for one in pending:
            entry = one.entry
            if entry.load_balancer_id not in written.entries:
                continue
            if entry.observations:
                one.state.statuses = one.statuses
            statistics.record_written(one.state.rows, entry.rows)
        if heartbeats:
            self._heartbeats.clear()
            self._heartbeats_written_at = now
        return bool(written.unreported or any(one.rows for one in entries if one.load_balancer_id in written.entries))

    def _remove_departed(self) -> None:
        """Drop the memory of deleted amphorae and load balancers, at most once per cleanup interval."""
        if time.monotonic() - self._cleaned_up_at < _CLEANUP_INTERVAL:
            return
        # The known ids are read before the rows. An amphora has a row before it sends heartbeats, so an id without a
        # row belongs to a deleted amphora.
        known = self._reports.known_ids()
        owners = self._database.read(amphorae.load_balancer_ids)
        self._reports.forget(known - owners.keys())
        self._on_departed(known - owners.keys())
        self._heartbeats = {amphora_id: one for amphora_id, one in self._heartbeats.items() if amphora_id in owners}
        self._lost_configs.retain(set(owners))
        self._drift_reports.retain(set(owners))
        self._near_limits.retain(set(owners))
        served = set(owners.values())
        self._states = {one: state for one, state in self._states.items() if one in served}
        for state in self._states.values():
            state.retain(owners)
        self._batches.forget_old_refusals()
        self._cleaned_up_at = time.monotonic()


def _load_tree(connection: sa.Connection, load_balancer_id: str) -> LoadBalancer | None:
    try:
        return desired_objects.load_tree(connection, load_balancer_id)
    except UnknownObject:
        return None


def _compute_write(current: _CurrentReports) -> _PendingWrite:
    state = current.state
    if state.tree is None:
        return _PendingWrite(state, {}, Entry(current.load_balancer_id))
    statuses = operating_statuses(state.tree, [current.reports[each] for each in current.trusted])
    written = state.statuses
    observations = [
        status_outbox.Observation(object_id=object_id, kind=one.kind, operating=one.status, reason=_plain(one.reason))
        for object_id, one in statuses.items()
        if object_id not in written or written[object_id].status is not one.status
    ]
    listener_ids = {listener.id for listener in state.tree.listeners}
    changed = statistics.changed_rows(current.reports, current.load_balancer_id, listener_ids, state.rows)
    # The open connections of an amphora without heartbeats become 0. Its other counters keep their values.
    closed = statistics.closed_connections(state.rows, current.reports)
    return _PendingWrite(state, statuses, Entry(current.load_balancer_id, observations, (*changed, *closed)))


def _push_reason(one: UnrepairedDrift) -> str:
    reason = f"its agent could not repair: {one.kinds}"
    return f"{one.found_at}, {reason}" if one.found_at else reason


def _plain(reason: str) -> str:
    """Return a reason, which quotes the amphora, with the characters that every database can store."""
    return printable(reason, _MAX_REASON)
