# SPDX-License-Identifier: Apache-2.0
"""Telling Octavia what has become of what it asked for.

Invariant: Octavia hears of nothing before its own transaction has ended. Its driver methods run inside that
transaction; a status sent then is lost (the row is not there yet) or overwritten (it becomes PENDING_UPDATE
afterwards). So every accepted generation first passes a *barrier*: a status update of the load balancer's own row,
which waits for the row's lock until Octavia has committed. Only then are statuses sent, from the outbox, until
Octavia has taken them.

One reporter at a time is enough; the duty moves when it dies or its host's agent of Octavia takes nothing, and never
while it has something to say under way: Octavia would hear that after what the next one says.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

from octavia_lib.api.drivers import driver_lib
from octavia_lib.api.drivers import exceptions as octavia_errors

from amphora_driver import failpoints, metrics
from amphora_driver.errors import AmphoraDriverError
from amphora_driver.model.enums import Kind, Provisioning
from amphora_driver.provider_agent import sync_transactions
from amphora_driver.provider_agent.octavia_audit import Auditor
from amphora_driver.provider_agent.octavia_reader import Reader
from amphora_driver.provider_agent.resync import Resyncer
from amphora_driver.queue import jobs, local_socket, notifier
from amphora_driver.store import listener_stats, process_registry, status_outbox

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Executor

    from oslo_config.cfg import ConfigOpts

    from amphora_driver.database.engine import Database

LOG = logging.getLogger(__name__)

# A deleted row costs Octavia about 34 ms, but for a member it loads the whole pool: half a second among a thousand on a
# busy machine. A call is given up after 30 s, while Octavia goes on with it: to try again then doubles its work. Others
# cost about 2 ms.
_MOST_DELETED = 15
_MOST_ROWS = 300
# What it means that Octavia is away for now: its agent is not there, does not answer, or hangs up. octavia_lib raises
# the same error for "not reached" and for "refused"; only the latter names an object.
_AWAY = (
    AmphoraDriverError,
    octavia_errors.DriverAgentNotFound,
    octavia_errors.DriverAgentTimeout,
    octavia_errors.DriverError,
    octavia_errors.UpdateStatusError,
    octavia_errors.UpdateStatisticsError,
    OSError,
)
# How long a load balancer waits for a child whose status Octavia refuses, in seconds: longer is no passing trouble.
_CHILD_FIRST = 2.0
# Seconds without a turn after which this process is said not to do its duty: longer than Octavia may take to answer.
_IDLE = 45.0
_DUTY = "reporter"
_DUTY_SECONDS = 10.0
# Who could not reach Octavia's agent of its host leaves the duty to others for so many of their intervals.
_ASIDE = 2


class Ending(Protocol):
    """What tells whether it is time to end."""

    def is_set(self) -> bool:
        """Whether it is."""


class Reporter:
    """Passes barriers, has trees read back, and empties the outbox.

    Args:
        conf: our options.
        database: where the outbox is.
        name: of this process. Who comes after one that has died has its name, and so its duty at once.
        hands: who reads from Octavia; without, whoever takes a turn.
        auditing: who compares with what Octavia has; without, whoever takes a turn.
    """

    def __init__(
        self,
        conf: ConfigOpts,
        database: Database,
        name: str | None = None,
        hands: Executor | None = None,
        auditing: Executor | None = None,
    ) -> None:
        self._conf = conf
        self._database = database
        self._name = name or jobs.process_name()
        self._library: driver_lib.DriverLibrary | None = None
        self._reader = Reader(conf, database, lambda: self.library, hands)
        self._auditor = Auditor(conf, database, lambda: self.library, self._reader, auditing)
        self._held_until = self._aside_until = 0.0
        # Whether Octavia is being told something just now.
        self._telling = False
        self._resyncer = Resyncer(conf, database, lambda: self.library, self._reader, self._speaks, hands)
        self._turns = 0
        self._turned_at = time.monotonic()
        self._ended = threading.Event()
        # Objects Octavia would not take: not tried again before this time (seconds, monotonic).
        self._refused: dict[str, tuple[float, float]] = {}
        # The load balancer that was reported last.
        self._turn = ""

    def run(self, ending: Ending) -> None:
        """Work whenever somebody rings, and now and then anyway."""
        # Statistics have a socket of their own, and a call takes a tenth of a second: nobody's ACTIVE waits for them.
        counting = threading.Thread(target=self._count, name="statistics", daemon=True)
        signing = threading.Thread(target=self._sign, name="registry", daemon=True)
        counting.start()
        signing.start()
        with (
            local_socket.WakeupSocket(self._conf.queue.doorbell_dir, local_socket.REPORTER) as bell,
            notifier.reporter_hints(self._conf, bell.wake),
        ):
            pause = 0.0
            while not ending.is_set():
                # Short enough for the end to be noticed soon: what tells of it cannot be selected on.
                bell.wait(min(pause, 0.5))
                pause = self.attempt()
        self._ended.set()
        counting.join()
        signing.join()
        jobs.release_duty(self._database, _DUTY, self._name)

    def _count(self) -> None:
        while not self._ended.wait(self._conf.queue.poll_interval):
            try:
                if time.monotonic() < self._held_until:
                    self.report_statistics()
            except _AWAY as error:
                LOG.warning("Octavia could not be told of statistics, trying again: %s", error)

    def _sign(self) -> None:
        """Say that this process lives; it does its duty while turns go on, which a call that hangs delays.

        Whoever waits for such a call keeps the duty.
        """
        registry = process_registry.ProcessRegistration(
            self._database, self._name, process_registry.ProcessKind.PROVIDER_AGENT
        )
        before = -1
        ended = False
        while not ended:
            turns = self._turns
            try:
                if self._telling:
                    jobs.acquire_duty(self._database, _DUTY, self._name, _DUTY_SECONDS)
                registry.heartbeat(working=turns != before)
            except AmphoraDriverError as error:
                LOG.warning("this process could not say that it lives: %s", error)
            before = turns
            ended = self._ended.wait(process_registry.HEARTBEAT_INTERVAL)
        try:
            registry.deregister()
        except AmphoraDriverError as error:
            LOG.warning("this process could not say that it ends: %s", error)

    def does_its_duty(self) -> bool:
        """Whether a turn was taken not long ago, by whomever the duty is; asked by whoever watches this process."""
        return time.monotonic() - self._turned_at < _IDLE

    def attempt(self) -> float:
        """A turn; returns after how many seconds to look again, whatever became of it."""
        try:
            return self.turn()
        except _AWAY as error:
            LOG.warning("Octavia could not be told, trying again: %s", error)
            if not isinstance(error, AmphoraDriverError):
                self._step_aside()
        return float(self._conf.queue.poll_interval)

    def _step_aside(self) -> None:
        """Leave the duty to a process beside another agent of Octavia's, which may take what this one's does not.

        One that has hung may take it after all when it goes on. What it says then is old; but if the duty stayed with
        it, nothing would be said at all, by however many hosts.
        """
        self._held_until = 0.0
        self._aside_until = time.monotonic() + _ASIDE * self._conf.queue.poll_interval
        with suppress(AmphoraDriverError):
            jobs.release_duty(self._database, _DUTY, self._name)

    def turn(self) -> float:
        """Do all that is due; returns after how many seconds to look again if nobody rings."""
        self._turns += 1
        self._turned_at = time.monotonic()
        if not self._on_duty():
            return float(self._conf.queue.poll_interval)
        waiting = self._pass_barriers()
        # Each call may take long: whoever has the duty by then speaks, and nobody else.
        while self._on_duty() and self._report_statuses():
            pass
        if self._on_duty():
            self._auditor.turn()
            self._resyncer.turn()
        return 0.05 if waiting else float(self._conf.queue.poll_interval)

    @property
    def library(self) -> driver_lib.DriverLibrary:
        """octavia_lib's client, made when the sockets are first needed."""
        if self._library is None:
            octavia = self._conf.octavia
            self._library = driver_lib.DriverLibrary(
                status_socket=octavia.status_socket, stats_socket=octavia.stats_socket, get_socket=octavia.get_socket
            )
        return self._library

    def _on_duty(self) -> bool:
        now = time.monotonic()
        if now < self._held_until:
            return True
        if now < self._aside_until:
            return False
        # It ends as much later as it is renewed earlier.
        kept = now < self._held_until + _DUTY_SECONDS / 2
        if not jobs.acquire_duty(self._database, _DUTY, self._name, _DUTY_SECONDS):
            self._held_until = 0.0
            return False
        if not kept:
            self._auditor.begin()
        self._held_until = now + _DUTY_SECONDS / 2
        return True

    def _speaks(self) -> bool:
        """Whether this process has the duty, asked by one of its other threads."""
        return time.monotonic() < self._held_until

    @contextmanager
    def _tells(self, what: str) -> Iterator[None]:
        """A call that changes something in Octavia; while it lasts the duty is kept."""
        self._telling = True
        try:
            with metrics.octavia_call(what):
                yield
        finally:
            self._telling = False

    # --- barriers ---------------------------------------------------------------------------------------------------

    def _pass_barriers(self) -> bool:
        """Wait for Octavia's transactions; True if one of them is still open."""
        rows = [
            row
            for row in self._database.read(sync_transactions.uncommitted)
            if self._reader.may_read(row.load_balancer_id)
        ]
        if not rows:
            return False
        operating = self._database.read(
            lambda connection: status_outbox.read_operating_statuses(connection, [row.load_balancer_id for row in rows])
        )
        barriers = {
            row.load_balancer_id: {
                "id": row.load_balancer_id,
                "operating_status": operating[row.load_balancer_id].value,
            }
            for row in rows
        }
        failpoints.reach(failpoints.Point.BARRIER_NEXT)
        if not self._on_duty():
            return False
        held = self._barrier(barriers)
        failpoints.reach(failpoints.Point.BARRIER_PASSED)
        waited = [row for row in rows if row.load_balancer_id not in held]
        passed = [(row.load_balancer_id, row.generation) for row in waited if not _asks(row)]
        if passed:
            self._database.write(lambda connection: sync_transactions.mark_committed(connection, passed))
        failpoints.reach(failpoints.Point.COMMITTED)
        self._auditor.changed(row.load_balancer_id for row in waited)
        known = [self._reader.read(row, self._auditor.verify) for row in waited if _asks(row)]
        return len(passed) + sum(known) < len(rows)

    def _barrier(self, barriers: dict[str, dict[str, str]]) -> set[str]:
        """Wait on the rows of these load balancers; returns those whose row could not be waited on."""
        try:
            with self._tells("barrier"):
                self.library.update_loadbalancer_status({"loadbalancers": list(barriers.values())})
        except octavia_errors.UpdateStatusError as error:
            if error.status_object_id is None or len(barriers) == 1:
                raise
            LOG.warning("Octavia refused a barrier (%s): waiting on the load balancers one by one", error.fault_string)
        else:
            return set()
        held = set()
        for load_balancer_id, barrier in barriers.items():
            if not self._on_duty():
                held.add(load_balancer_id)
                continue
            try:
                with self._tells("barrier"):
                    self.library.update_loadbalancer_status({"loadbalancers": [barrier]})
            except octavia_errors.UpdateStatusError as error:
                LOG.warning("no barrier for load balancer %s: %s", load_balancer_id, error.fault_string)
                held.add(load_balancer_id)
        return held

    # --- the outbox ---------------------------------------------------------------------------------------------------

    def _report_statuses(self) -> bool:
        """Send one call's worth of statuses; True if there may be more."""
        found = self._database.read(
            lambda connection: status_outbox.list_due_reports(connection, _MOST_ROWS, self._turn)
        )
        reports = _one_call([one for one in found if self._due(one)])
        if not reports:
            return False
        # A load balancer with more statuses than one call takes lets the others go first next time.
        self._turn = reports[-1].load_balancer_id
        # Octavia cannot tell an old status from a new one: a process that was stopped meanwhile reads them again.
        if not self._speaks():
            return True
        try:
            with self._tells("statuses"):
                self.library.update_loadbalancer_status(document(reports))
            accepted = list(reports)
        except octavia_errors.UpdateStatusError as error:
            if error.status_object_id is None:
                raise
            LOG.warning("Octavia refused a status (%s): sending them one by one", error.fault_string)
            accepted = [
                report for report in reports if self._due(report) and self._on_duty() and self._report_alone(report)
            ]
        failpoints.reach(failpoints.Point.REPORT_SENT)
        self._database.write(lambda connection: status_outbox.mark_reported(connection, accepted))
        failpoints.reach(failpoints.Point.REPORT_TAKEN)
        metrics.count_reports("taken", len(accepted))
        return True

    def _due(self, report: status_outbox.StatusReport) -> bool:
        until, _ = self._refused.get(report.object_id, (0.0, 0.0))
        if until > time.monotonic():
            return False
        if until and report.kind is Kind.LOAD_BALANCER:
            self._refused.pop(report.object_id)
        return True

    def _report_alone(self, report: status_outbox.StatusReport) -> bool:
        try:
            with self._tells("statuses"):
                self.library.update_loadbalancer_status(document([report]))
        except octavia_errors.UpdateStatusError as error:
            if error.status_object_id is None:
                raise
            ends = report.kind is Kind.LOAD_BALANCER and report.provisioning is Provisioning.DELETED
            if ends and self.library.get_loadbalancer(report.object_id) is None:
                # Nothing is there to be told about: deleted before, or never committed.
                return True
            pause = min(2 * self._refused.get(report.object_id, (0.0, 0.125))[1], 60.0)
            metrics.count_reports("refused")
            LOG.warning(
                "Octavia refused %s %s (%s): again in %.0f s", report.kind, report.object_id, error.fault_string, pause
            )
            self._refused[report.object_id] = (time.monotonic() + pause, pause)
            if pause <= _CHILD_FIRST:
                # The load balancer stays PENDING, and so closed to the next request, until its child is told.
                self._refused.setdefault(report.load_balancer_id, (time.monotonic() + pause, 0.125))
            return False
        self._refused.pop(report.object_id, None)
        return True

    def report_statistics(self) -> None:
        """Send the totals of listeners that changed since they were sent last."""
        totals = self._database.read(lambda connection: listener_stats.list_due_totals(connection, _MOST_ROWS))
        if not totals:
            return
        with metrics.octavia_call("statistics"):
            self.library.update_listener_statistics({"listeners": [one.to_octavia() for one in totals]})
        self._database.write(lambda connection: listener_stats.mark_totals_reported(connection, totals))


def document(reports: Sequence[status_outbox.StatusReport]) -> dict[str, list[dict[str, str]]]:
    """The status document of octavia_lib for these reports."""
    found: dict[str, list[dict[str, str]]] = {}
    for report in reports:
        entry = {"id": report.object_id}
        if report.provisioning is not None:
            entry["provisioning_status"] = report.provisioning.value
        if report.operating is not None and report.provisioning is not Provisioning.DELETED:
            entry["operating_status"] = report.operating.value
        found.setdefault(report.kind.value, []).append(entry)
    return found


def _asks(row: Any) -> bool:
    """Whether Octavia is asked something before it is told anything."""
    return not row.committed or row.read_back or row.batch


def _one_call(reports: Sequence[status_outbox.StatusReport]) -> list[status_outbox.StatusReport]:
    """The first reports that fit into one call."""
    chosen: list[status_outbox.StatusReport] = []
    deleted = 0
    for report in reports:
        deleted += report.provisioning is Provisioning.DELETED
        if deleted > _MOST_DELETED:
            break
        chosen.append(report)
    return chosen
