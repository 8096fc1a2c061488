# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of one process.

Invariant: counting never fails or waits, and this module imports no other module of the project, so that every package
can use it. Labels have values of fixed short lists: no ids and no foreign text. Metrics of the fleet come from the
database (telemetry/fleet_metrics.py). docs/reference/metrics.md explains every name.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.context_managers import Timer
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector

# Upper limits of the histogram buckets in seconds, one tuple for each kind of duration.
_APPLY = (0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 10, 20, 30, 60, 120, 300, 900)
_STEP = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_DATABASE = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_FAILOVER = (1, 2, 3, 5, 8, 12, 20, 30, 60, 120, 300, 900, 3600)

HOWS = ("start", "unchanged", "runtime", "reload", "stop")
OUTCOMES = ("finished", "waiting", "preempted", "failed", "lost")
PUSH_ERRORS = ("AgentUnreachable", "AgentRefused", "AgentUntrusted")
CAUSES = ("silent", "mute", "never_spoke", "asked", "operator", "rotation", "resize")
ENDS = ("done", "gone", "superseded", "recovered")
CALLS = ("barrier", "statuses", "statistics")
REPORTS = ("accepted", "refused")
LOG_RESULTS = ("sent", "lost")
NOTIFICATION_RESULTS = ("sent", "failed", "dropped")
_TRANSACTIONS = ("read", "write")
_OTHER = "other"

POSTPONED = ("statistics", "statuses")


class HeartbeatCounts(NamedTuple):
    """The counters of a heartbeat receiver since its start.

    `refused` has the reasons as keys. `shortened` counts accepted heartbeats of which only the time was used, `lost`
    counts datagrams that the kernel could not store.
    """

    accepted: int
    refused: Mapping[str, int]
    shortened: int = 0
    lost: int = 0


class Job:
    """One running job; it counts as failed until it sets `outcome` to another one of `OUTCOMES`."""

    def __init__(self) -> None:
        self.outcome = "failed"


class _HeartbeatCollector:
    """Reads the counters of the receiver at each scrape."""

    def __init__(self) -> None:
        self.source: Callable[[], HeartbeatCounts] | None = None

    def collect(self) -> Iterator[Metric]:
        if self.source is None:
            return
        counts = HeartbeatCounts(*self.source())
        received = CounterMetricFamily("amphora_heartbeats_received", "Authentic heartbeats that were accepted.")
        received.add_metric([], counts.accepted)
        yield received
        family = CounterMetricFamily("amphora_heartbeats_refused", "Refused datagrams.", labels=["reason"])
        for reason, number in sorted(dict(counts.refused).items()):
            family.add_metric([reason or _OTHER], number)
        yield family
        text = "Accepted heartbeats of which only the time was used, because too many arrived."
        shortened = CounterMetricFamily("amphora_heartbeats_shortened", text)
        shortened.add_metric([], counts.shortened)
        yield shortened
        lost = CounterMetricFamily("amphora_heartbeats_lost", "Datagrams that did not fit into the receive buffer.")
        lost.add_metric([], counts.lost)
        yield lost


class ProcessMetrics:
    """All metrics of one process, in a registry without the metrics that libraries register globally."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.heartbeats = _HeartbeatCollector()
        self.registry.register(self.heartbeats)
        ProcessCollector(registry=self.registry)
        self.jobs = self._counter("amphora_jobs", "Jobs of this controller that ended.", outcome=OUTCOMES)
        self.job_seconds = self._histogram("amphora_job_seconds", "Duration of jobs.", _STEP)
        self.step_seconds = self._histogram("amphora_step_seconds", "Duration of steps.", _STEP, step=())
        self.step_failures = self._counter("amphora_step_failures", "Failed steps.", step=())
        text = "Time from the acceptance of a request to its confirmation by every amphora."
        self.apply_seconds = self._histogram("amphora_apply_seconds", text, _APPLY)
        self.pushes = self._counter("amphora_pushes", "Configurations that amphorae accepted.", how=HOWS)
        text = "Configurations that could not be pushed."
        self.push_failures = self._counter("amphora_push_failures", text, error=PUSH_ERRORS)
        text = "Duration of writing the reports of amphorae."
        self.flush_seconds = self._histogram("amphora_health_flush_seconds", text, _STEP)
        text = "Writes of one load balancer or amphora that the database refused; the log has the id."
        self.refusals = self._counter("amphora_health_refused", text)
        text = "Statuses of amphorae and statistics of load balancers that a write postponed because of overload."
        self.postponed = self._counter("amphora_health_postponed", text, what=POSTPONED)
        text = "Duration of calls to Octavia; of a barrier: the wait for its transactions."
        self.octavia_seconds = self._histogram("amphora_octavia_seconds", text, _STEP, call=CALLS)
        self.octavia_failures = self._counter("amphora_octavia_failures", "Failed calls to Octavia.", call=CALLS)
        self.reports = self._counter("amphora_reports", "Statuses reported to Octavia.", outcome=REPORTS)
        text = "Duration of transactions, including retries."
        self.database_seconds = self._histogram("amphora_database_seconds", text, _DATABASE, kind=_TRANSACTIONS)
        self.database_failures = self._counter("amphora_database_failures", "Failed transactions.", kind=_TRANSACTIONS)
        text = "Log lines that amphorae sent to targets or lost, as far as this controller has read the counters."
        self.log_lines = self._counter("amphora_log_lines", text, result=LOG_RESULTS)
        text = "Notifications that this controller sent, failed to send, or dropped because of their age."
        self.notifications = self._counter("amphora_notifications", text, result=NOTIFICATION_RESULTS)
        text = "Fail-overs that ended during the runtime of this process."
        self.failovers = self._counter("amphora_failovers", text, cause=CAUSES, outcome=ENDS)
        text = "Time from the last heartbeat, or from the request, until users are served again."
        self.failover_seconds = self._histogram("amphora_failover_seconds", text, _FAILOVER, cause=CAUSES)

    def _counter(self, name: str, text: str, **labels: tuple[str, ...]) -> Counter:
        made = Counter(name, text, list(labels), registry=self.registry)
        _create_series(made, labels)
        return made

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], **labels: tuple[str, ...]) -> Histogram:
        made = Histogram(name, text, list(labels), buckets=buckets, registry=self.registry)
        _create_series(made, labels)
        return made

    @contextmanager
    def job(self) -> Iterator[Job]:
        """Measure a job, from its start to the return of its lease."""
        one = Job()
        with self.job_seconds.time():
            try:
                yield one
            finally:
                self.jobs.labels(_known_label(one.outcome, OUTCOMES)).inc()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Measure one step of a plan, by its label (`reconcile.steps.step_label`)."""
        failures = self.step_failures.labels(name).count_exceptions(BaseException)
        with self.step_seconds.labels(name).time(), failures:
            yield

    def count_push(self, how: str) -> None:
        self.pushes.labels(_known_label(how, HOWS)).inc()

    def count_push_failure(self, error: Exception) -> None:
        self.push_failures.labels(_known_label(type(error).__name__, PUSH_ERRORS)).inc()

    def observe_apply(self, accepted_at: float | None, now: float) -> None:
        """Measure a confirmed request by its acceptance (seconds since 1970); None without a request."""
        if accepted_at is not None:
            self.apply_seconds.observe(max(0.0, now - accepted_at))

    @contextmanager
    def transaction(self, kind: str) -> Iterator[None]:
        """Measure a transaction; `kind` is read or write."""
        with self.database_seconds.labels(kind).time():
            try:
                yield
            except Exception as error:
                # The code compares the names of the error classes, because this module must not import the project's
                # error classes.
                if type(error).__name__ in {"StoreError", "SchemaMismatch"}:
                    self.database_failures.labels(kind).inc()
                raise

    def count_failover(self, cause: str, outcome: str, seconds: float | None) -> None:
        """Count an ended fail-over; `seconds` until users were served again, None if they were not."""
        self.failovers.labels(_known_label(cause, CAUSES), _known_label(outcome, ENDS)).inc()
        if seconds is not None:
            self.failover_seconds.labels(_known_label(cause, CAUSES)).observe(max(0.0, seconds))

    @contextmanager
    def octavia_call(self, call: str) -> Iterator[None]:
        """Measure a call to Octavia, one of `CALLS`. A refusal is a successful call."""
        name = _known_label(call, CALLS)
        with self.octavia_seconds.labels(name).time():
            try:
                yield
            except Exception as error:
                # octavia_lib raises one error class for a failed connection and for a refused status. Only a refusal
                # contains the id of an object.
                if getattr(error, "status_object_id", None) is None:
                    self.octavia_failures.labels(name).inc()
                raise

    def count_reports(self, outcome: str, number: int = 1) -> None:
        """Count statuses reported to Octavia; `outcome` is one of `REPORTS`."""
        self.reports.labels(_known_label(outcome, REPORTS)).inc(number)

    def flush(self) -> Timer:
        """Measure a write of reports."""
        return self.flush_seconds.time()

    def count_refused_rows(self) -> None:
        self.refusals.inc()

    def count_postponed(self, what: str, number: int) -> None:
        """Count postponed values; `what` is one of `POSTPONED`."""
        self.postponed.labels(_known_label(what, POSTPONED)).inc(number)

    def count_log_lines(self, result: str, number: int) -> None:
        """Count forwarded lines of amphorae; `result` is one of `LOG_RESULTS`."""
        self.log_lines.labels(_known_label(result, LOG_RESULTS)).inc(number)

    def count_notifications(self, result: str, number: int = 1) -> None:
        """Count notifications for other services; `result` is one of `NOTIFICATION_RESULTS`."""
        self.notifications.labels(_known_label(result, NOTIFICATION_RESULTS)).inc(number)

    def set_heartbeat_source(self, source: Callable[[], HeartbeatCounts] | None) -> None:
        self.heartbeats.source = source


def _create_series(family: Counter | Histogram, labels: Mapping[str, tuple[str, ...]]) -> None:
    """Create the series of all label values now, because rate() misses the first event of a new series."""
    if labels:
        for values in itertools.product(*labels.values()):
            family.labels(*values)


def _known_label(value: Any, known: tuple[str, ...]) -> str:
    """Return a label value; unknown values share one series."""
    text = str(getattr(value, "value", value))
    return text if text in known else _OTHER


OURS = ProcessMetrics()
job = OURS.job
step = OURS.step
count_push = OURS.count_push
count_push_failure = OURS.count_push_failure
observe_apply = OURS.observe_apply
transaction = OURS.transaction
count_failover = OURS.count_failover
flush = OURS.flush
count_refused_rows = OURS.count_refused_rows
count_postponed = OURS.count_postponed
octavia_call = OURS.octavia_call
count_reports = OURS.count_reports
count_log_lines = OURS.count_log_lines
count_notifications = OURS.count_notifications
set_heartbeat_source = OURS.set_heartbeat_source
