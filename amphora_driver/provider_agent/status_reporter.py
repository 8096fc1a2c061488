# SPDX-License-Identifier: Apache-2.0
"""Reports statuses and statistics to Octavia.

Invariant: the reporter sends no status before the transaction of the Octavia request has ended. Octavia calls the
driver inside that transaction. Octavia would lose an earlier status (the row does not exist yet) or overwrite it
(Octavia sets PENDING_UPDATE afterwards). So every accepted generation first passes a *barrier*: a status update of the
load balancer's row, which waits for the lock of that row until Octavia has committed. Afterwards the reporter sends
statuses from the outbox until Octavia accepts them.

One reporter at a time holds the duty. The duty moves when that reporter dies, or when its octavia-driver-agent accepts
nothing. The duty never moves during an update, because Octavia would apply that update after those of the next
reporter. Statistics need no duty: all hosts report them, each for its own listeners (`statistics_shares`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any

import sqlalchemy as sa
from octavia_lib.api.drivers import driver_lib
from octavia_lib.api.drivers import exceptions as octavia_errors
from oslo_config.cfg import ConfigOpts

from amphora_driver import failpoints, metrics
from amphora_driver.database.engine import Database
from amphora_driver.database.rows import chunks
from amphora_driver.errors import AmphoraDriverError
from amphora_driver.model.enums import Kind, Provisioning
from amphora_driver.notifications import outbox as notification_outbox
from amphora_driver.provider_agent import sync_transactions
from amphora_driver.provider_agent.octavia_audit import OctaviaAuditor
from amphora_driver.provider_agent.octavia_reader import OctaviaReader
from amphora_driver.provider_agent.refused_statuses import RefusalLog, failure_of
from amphora_driver.provider_agent.resync import Resyncer
from amphora_driver.provider_agent.statistics_shares import PARTS, StatisticsShares
from amphora_driver.queue import jobs, local_socket, notifier
from amphora_driver.store import listener_stats, process_registry, status_outbox

LOG = logging.getLogger(__name__)

# One call to Octavia has at most _MAX_DELETED deleted and _MAX_ROWS other objects, so that the call takes a quarter of
# its time-out (30 s). Octavia needs up to 0.5 s to delete an object, and 2 ms for another status.
_MAX_DELETED, _MAX_ROWS = 15, 300
# Maximum number of load balancers or objects in one transaction. On Galera, a write of another node to one of the rows
# aborts the whole transaction. Controllers write the `job` row of a new request at the same time as the provider agent,
# so these parts are smaller. A part of one round usually contains all rows, so that it costs one COMMIT.
_COMMITTED_PART, _REPORTED_PART = 25, 100
# UpdateStatusError with an object id means a refused status, which the sending methods handle. Without an object id,
# octavia-driver-agent is unreachable.
_UNREACHABLE = (
    AmphoraDriverError,
    octavia_errors.DriverAgentNotFound,
    octavia_errors.DriverAgentTimeout,
    octavia_errors.DriverError,
    octavia_errors.UpdateStatusError,
    octavia_errors.UpdateStatisticsError,
    OSError,
)
# If Octavia refuses the status of a child object, the load balancer's status waits too. This wait ends when the child's
# back-off exceeds this number of seconds.
_MAX_CHILD_BACKOFF = 2.0
# Age in seconds of the last round, above which the reporter counts as not working. A call to Octavia lasts at most 30
# s.
_MAX_ROUND_AGE = 45.0
_DUTY, _DUTY_SECONDS = "reporter", 10.0
# A reporter that cannot reach octavia-driver-agent waits this number of poll intervals, so that another host can take
# over the reports to Octavia.
_YIELD_INTERVALS = 2


class Reporter:
    """Passes barriers, starts reads from Octavia, and reports the contents of the outbox.

    The successor of a dead reporter has the same name, and so its duty at once. Without executors, the thread of
    `run_once` reads and compares.
    """

    def __init__(
        self,
        conf: ConfigOpts,
        database: Database,
        name: str | None = None,
        readers: Executor | None = None,
        auditors: Executor | None = None,
    ) -> None:
        self._conf = conf
        self._database = database
        self._name = name or jobs.process_name()
        self._library: driver_lib.DriverLibrary | None = None
        self._reader = OctaviaReader(conf, database, lambda: self.library, readers)
        self._auditor = OctaviaAuditor(conf, database, lambda: self.library, self._reader, auditors)
        self._held_until = self._yield_until = 0.0
        self._updating = self._reports_statistics = False
        self._resyncer = Resyncer(conf, database, lambda: self.library, self._reader, self._holds_duty, readers)
        self._rounds = 0
        self._round_at = time.monotonic()
        self._ended = threading.Event()
        # For each object with a refused status: the monotonic time of the next report, and the back-off in seconds.
        self._refused: dict[str, tuple[float, float]] = {}
        self._refusal_log = RefusalLog()
        self._last_reported = self._last_listener = ""
        self._shares = StatisticsShares(database, self._name)

    def run(self, is_stopped: Callable[[], bool]) -> None:
        """Report after every wake-up, and at least once per poll interval, until `is_stopped` returns True."""
        # A call with statistics takes 0.1 s. A separate thread makes these calls, so that the calls do not delay
        # reports of ACTIVE.
        threads = [
            threading.Thread(target=self._report_statistics_until_stopped, name="statistics", daemon=True),
            threading.Thread(target=self._update_registry_until_stopped, name="registry", daemon=True),
        ]
        for thread in threads:
            thread.start()
        with (
            local_socket.WakeupSocket(self._conf.amp_queue.socket_dir, local_socket.REPORTER) as wakeup,
            notifier.reporter_hints(self._conf, wakeup.wake),
        ):
            delay = 0.0
            while not is_stopped():
                # The wait is short, because the reporter notices a stop request only between two waits.
                wakeup.wait(min(delay, 0.5))
                delay = self.try_run_once()
        self._ended.set()
        for thread in threads:
            thread.join()
        jobs.release_duty(self._database, _DUTY, self._name)

    def _report_statistics_until_stopped(self) -> None:
        interval, yielded = self._conf.amp_queue.poll_interval, 0
        while not self._ended.wait(interval):
            if yielded:
                # After an error of octavia-driver-agent, this thread pauses, so that provider agents on other hosts can
                # report the statistics.
                yielded -= 1
                continue
            try:
                while not self._ended.is_set() and self.report_statistics(self._shares.parts()):
                    pass
            except _UNREACHABLE as error:
                failed = "the provider agent could not report statistics to Octavia and tries again: %s"
                LOG.warning(failed, failure_of(error))
                if not isinstance(error, AmphoraDriverError):
                    yielded = _YIELD_INTERVALS
                    self._release_shares()
            except Exception:
                # An error must not end this thread, because Octavia would get no statistics until the next start. The
                # poll interval is the back-off.
                LOG.exception(
                    "the provider agent could not report statistics to Octavia because of an unexpected error and "
                    "tries again"
                )

        self._release_shares()

    def _release_shares(self) -> None:
        with suppress(AmphoraDriverError):
            self._shares.release()

    def _update_registry_until_stopped(self) -> None:
        """Update the row of this process in the registry. The process works while it completes rounds.

        A hanging update of Octavia delays the rounds, so this thread renews the duty meanwhile.
        """
        kind = process_registry.ProcessKind.PROVIDER_AGENT
        registry = process_registry.ProcessRegistration(self._database, self._name, kind)
        before, ended = -1, False
        while not ended:
            rounds = self._rounds
            try:
                if self._updating:
                    jobs.acquire_duty(self._database, _DUTY, self._name, _DUTY_SECONDS)
                if self._reports_statistics:
                    self._shares.extend()
                registry.heartbeat(working=rounds != before)
            except AmphoraDriverError as error:
                LOG.warning(
                    "the provider agent could not update its row in the process registry and tries again: %s", error
                )
            except Exception:
                # An error must not end this thread. Without its renewals, the duty of the reporter would expire during
                # a long call to Octavia.
                LOG.exception(
                    "the provider agent could not update its row in the process registry because of an unexpected "
                    "error and tries again"
                )
            before = rounds
            ended = self._ended.wait(process_registry.HEARTBEAT_INTERVAL)
        try:
            registry.deregister()
        except AmphoraDriverError as error:
            LOG.warning(
                "the provider agent could not delete its row from the process registry and stops anyway: %s", error
            )

    def is_working(self) -> bool:
        """Return whether this process has begun a round recently, with or without the duty."""
        return time.monotonic() - self._round_at < _MAX_ROUND_AGE

    def try_run_once(self) -> float:
        """Run one round, log an error, and return the seconds until the next round."""
        try:
            return self.run_once()
        except _UNREACHABLE as error:
            failed = "the provider agent could not report statuses to Octavia and tries again: %s"
            LOG.warning(failed, failure_of(error))
            if not isinstance(error, AmphoraDriverError):
                self._yield_duty()
        return float(self._conf.amp_queue.poll_interval)

    def _yield_duty(self) -> None:
        """Leave the duty to a reporter on another host, whose octavia-driver-agent may accept updates.

        A hanging octavia-driver-agent may still execute an old update later. If this process kept the duty, no host
        would report statuses meanwhile.
        """
        self._held_until = 0.0
        self._yield_until = time.monotonic() + _YIELD_INTERVALS * self._conf.amp_queue.poll_interval
        with suppress(AmphoraDriverError):
            jobs.release_duty(self._database, _DUTY, self._name)

    def run_once(self) -> float:
        """Do all due work, and return the seconds until the next round without a wake-up."""
        self._rounds += 1
        self._round_at = time.monotonic()
        if not self._acquire_duty():
            return float(self._conf.amp_queue.poll_interval)
        waiting = self._pass_barriers()
        # A lease gives one reporter at a time the duty to report statuses. A call to Octavia may last longer than the
        # lease, so the reporter checks the duty before each call.
        while self._acquire_duty() and self._report_statuses():
            pass
        if self._acquire_duty():
            self._auditor.run_due()
            self._resyncer.run_due()
        return 0.05 if waiting else float(self._conf.amp_queue.poll_interval)

    @property
    def library(self) -> driver_lib.DriverLibrary:
        """octavia_lib's client, created at the first use of its sockets."""
        if self._library is None:
            octavia = self._conf.amp_octavia
            self._library = driver_lib.DriverLibrary(
                status_socket=octavia.status_socket, stats_socket=octavia.stats_socket, get_socket=octavia.get_socket
            )
        return self._library

    def _acquire_duty(self) -> bool:
        """Acquire or renew the duty if needed, and return whether this process holds the duty."""
        now = time.monotonic()
        if now < self._held_until:
            return True
        if now < self._yield_until:
            return False
        # The lease ends _DUTY_SECONDS / 2 after `_held_until`. A renewal before this end proves that no other reporter
        # has had the duty meanwhile.
        kept = now < self._held_until + _DUTY_SECONDS / 2
        if not jobs.acquire_duty(self._database, _DUTY, self._name, _DUTY_SECONDS):
            self._held_until = 0.0
            return False
        if not kept:
            self._auditor.reset()
        self._held_until = now + _DUTY_SECONDS / 2
        return True

    def _holds_duty(self) -> bool:
        """Return whether this process holds the duty, without renewing it. Thread-safe."""
        return time.monotonic() < self._held_until

    def _update_octavia(self, what: str, document: dict[str, list[dict[str, str]]]) -> None:
        """Send a status document to Octavia, measure the call, and keep the duty until its end."""
        self._updating = True
        try:
            with metrics.octavia_call(what):
                self.library.update_loadbalancer_status(document)
        finally:
            self._updating = False

    def _pass_barriers(self) -> bool:
        """Wait for Octavia's transactions, and return whether a transaction is open or a read is pending."""
        uncommitted = self._database.read(sync_transactions.list_uncommitted)
        rows = [row for row in uncommitted if self._reader.can_read(row.load_balancer_id)]
        if not rows:
            return False
        ids = [row.load_balancer_id for row in rows]
        operating = self._database.read(lambda connection: status_outbox.read_operating_statuses(connection, ids))
        barriers = {one: {"id": one, "operating_status": operating[one].value} for one in ids}
        failpoints.reach(failpoints.Point.BARRIER_NEXT)
        if not self._acquire_duty():
            return False
        failed = self._send_barriers(barriers)
        failpoints.reach(failpoints.Point.BARRIER_PASSED)
        behind = [row for row in rows if row.load_balancer_id not in failed]
        passed = sorted((row for row in behind if not _needs_read(row)), key=lambda row: str(row.load_balancer_id))
        # An error in one part must not prevent the comparison of the load balancers of earlier parts.
        self._auditor.schedule(row.load_balancer_id for row in behind)
        for part in chunks(passed, _COMMITTED_PART):
            self._mark_committed(part)
        failpoints.reach(failpoints.Point.COMMITTED)
        complete = [self._reader.read(row, self._auditor.verify_member_batches) for row in behind if _needs_read(row)]
        return len(passed) + sum(complete) < len(rows)

    def _mark_committed(self, rows: Sequence[Any]) -> None:
        self._database.write(lambda connection: sync_transactions.mark_committed(connection, rows))

    def _send_barriers(self, barriers: dict[str, dict[str, str]]) -> set[str]:
        """Send barriers, wait for them, and return the load balancers with a failed barrier."""
        try:
            self._update_octavia("barrier", {"loadbalancers": list(barriers.values())})
        except octavia_errors.UpdateStatusError as error:
            if error.status_object_id is None or len(barriers) == 1:
                raise
            self._refusal_log.log_call("test updates", error.fault_string)
        else:
            return set()
        failed = set()
        for load_balancer_id, barrier in barriers.items():
            if not self._acquire_duty():
                failed.add(load_balancer_id)
                continue
            try:
                self._update_octavia("barrier", {"loadbalancers": [barrier]})
            except octavia_errors.UpdateStatusError as error:
                # Until this update succeeds, the provider agent reports no statuses of the load balancer.
                pause = float(self._conf.amp_queue.poll_interval)
                self._refusal_log.log_object(
                    "test update", Kind.LOAD_BALANCER.value, load_balancer_id, pause, error.fault_string
                )
                failed.add(load_balancer_id)
        return failed

    def _report_statuses(self) -> bool:
        """Report the statuses of one call, and return whether Octavia may accept further statuses now."""
        found = self._database.read(
            lambda connection: status_outbox.list_due_reports(connection, _MAX_ROWS, self._last_reported)
        )
        reports = _limit_deletions([one for one in found if self._is_due(one)])
        if not reports:
            return False
        # The next call starts after the last load balancer of this call. So a load balancer with many statuses does not
        # delay the others.
        self._last_reported = reports[-1].load_balancer_id
        # Only the reporter with the duty may send statuses. A reporter without the duty could overwrite newer statuses
        # with old statuses.
        if not self._holds_duty():
            return True
        try:
            self._update_octavia("statuses", build_status_document(reports))
            accepted = list(reports)
        except octavia_errors.UpdateStatusError as error:
            if error.status_object_id is None:
                raise
            self._refusal_log.log_call("statuses", error.fault_string)
            due = (report for report in reports if self._is_due(report) and self._acquire_duty())
            accepted = [report for report in due if self._report_single(report)]
        failpoints.reach(failpoints.Point.REPORT_SENT)
        for part in chunks(accepted, _REPORTED_PART):
            self._write_accepted(part)
        failpoints.reach(failpoints.Point.REPORT_TAKEN)
        # If Octavia refuses every status, for example during an outage of its database, the round ends. Otherwise, it
        # would repeat the refused statuses for as long as the outage lasts, and this process would seem to hang.
        return bool(accepted)

    def _write_accepted(self, accepted: Sequence[status_outbox.StatusReport]) -> None:
        self._database.write(lambda connection: self._record_accepted(connection, accepted))
        metrics.count_reports("accepted", len(accepted))

    def _record_accepted(self, connection: sa.Connection, accepted: Sequence[status_outbox.StatusReport]) -> None:
        """Record which statuses Octavia has accepted, and make the notifications about them due."""
        if self._conf.amp_notifications.enabled:
            roots = [one for one in accepted if one.kind is Kind.LOAD_BALANCER]
            active = [one for one in roots if one.provisioning is Provisioning.ACTIVE]
            notification_outbox.release(connection, {one.object_id: one.applied for one in active})
            deleted = [one.object_id for one in roots if one.provisioning is Provisioning.DELETED]
            notification_outbox.release_deleted(connection, deleted)
        status_outbox.mark_reported(connection, accepted)

    def _is_due(self, report: status_outbox.StatusReport) -> bool:
        until, _ = self._refused.get(report.object_id, (0.0, 0.0))
        if until > time.monotonic():
            return False
        if until and report.kind is Kind.LOAD_BALANCER:
            self._refused.pop(report.object_id)
        return True

    def _report_single(self, report: status_outbox.StatusReport) -> bool:
        try:
            self._update_octavia("statuses", build_status_document([report]))
        except octavia_errors.UpdateStatusError as error:
            if error.status_object_id is None:
                raise
            ends = report.kind is Kind.LOAD_BALANCER and report.provisioning is Provisioning.DELETED
            if ends and self.library.get_loadbalancer(report.object_id) is None:
                # Octavia refuses the status DELETED for a load balancer that Octavia has already deleted or never
                # committed. So the reporter treats this report as accepted.
                return True
            backoff = min(2 * self._refused.get(report.object_id, (0.0, 0.125))[1], 60.0)
            metrics.count_reports("refused")
            self._refusal_log.log_object("status", report.kind.value, report.object_id, backoff, error.fault_string)
            self._refused[report.object_id] = (time.monotonic() + backoff, backoff)
            if backoff <= _MAX_CHILD_BACKOFF:
                # The status of the load balancer waits too, so that the load balancer stays PENDING. Octavia then
                # accepts no requests of users until the child's status is accepted.
                self._refused.setdefault(report.load_balancer_id, (time.monotonic() + backoff, 0.125))
            return False
        self._refused.pop(report.object_id, None)
        return True

    def report_statistics(self, parts: Collection[str] | None = None) -> bool:
        """Report the totals of listeners that have changed since their last report, in one call to Octavia.

        `parts` are the listeners of this host (`statistics_shares`); None for all. The result is whether the call was
        full, so that the totals of more listeners may be due.
        """
        after, mine = self._last_listener, None if parts is None or len(parts) == len(PARTS) else parts
        if mine is not None and not mine:
            return False
        totals = self._database.read(lambda c: listener_stats.list_due_totals(c, _MAX_ROWS, after, mine))
        if not totals or (parts is not None and not self._shares.may_call()):
            return False
        self._reports_statistics = True
        try:
            with metrics.octavia_call("statistics"):
                self.library.update_listener_statistics({"listeners": [one.to_octavia() for one in totals]})
        finally:
            self._reports_statistics = False
        self._database.write(lambda connection: listener_stats.mark_totals_reported(connection, totals))
        self._last_listener = totals[-1].listener_id
        return len(totals) == _MAX_ROWS


def build_status_document(reports: Sequence[status_outbox.StatusReport]) -> dict[str, list[dict[str, str]]]:
    """Return octavia_lib's status document for these reports."""
    found: dict[str, list[dict[str, str]]] = {}
    for report in reports:
        entry = {"id": report.object_id}
        if report.provisioning is not None:
            entry["provisioning_status"] = report.provisioning.value
        if report.operating is not None and report.provisioning is not Provisioning.DELETED:
            entry["operating_status"] = report.operating.value
        found.setdefault(report.kind.value, []).append(entry)
    return found


def _needs_read(row: Any) -> bool:
    return not row.committed or row.read_back or row.batch


def _limit_deletions(reports: Sequence[status_outbox.StatusReport]) -> list[status_outbox.StatusReport]:
    """Return the first reports, with at most `_MAX_DELETED` deletions."""
    deletions = [index for index, report in enumerate(reports) if report.provisioning is Provisioning.DELETED]
    return list(reports[: deletions[_MAX_DELETED]] if len(deletions) > _MAX_DELETED else reports)
