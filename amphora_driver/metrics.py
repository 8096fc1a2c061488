# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of one process.

Invariant: counting never fails or waits, and this module imports no other module of the project, so that every package
can use it. Labels have values of fixed short lists: no ids and no foreign text. Metrics of the fleet come from the
database (telemetry/fleet_metrics.py). docs/reference/metrics.md explains every name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector

# Buckets in seconds, from unnoticeable to clearly wrong.
_APPLY = (0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 10, 20, 30, 60, 120, 300, 900)
_STEP = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_DATABASE = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_FAILOVER = (1, 2, 3, 5, 8, 12, 20, 30, 60, 120, 300, 900, 3600)

HOWS = ("start", "unchanged", "runtime", "reload", "stop")
OUTCOMES = ("finished", "waiting", "gave_way", "failed", "lost")
PUSH_ERRORS = ("AgentUnreachable", "AgentRefused", "AgentUntrusted")
CAUSES = ("silent", "mute", "never_spoke", "asked", "operator", "rotation")
ENDS = ("done", "gone", "superseded", "recovered")
# Durations of calls to Octavia: the wait for the end of its transaction, status reports, statistics.
CALLS = ("barrier", "statuses", "statistics")
REPORTS = ("taken", "refused")
_OTHER = "other"

# Returns the number of accepted heartbeats, and of refused ones by reason.
HeartbeatCounts = Callable[[], tuple[int, Mapping[str, int]]]


class Job:
    """One running job.

    Attributes:
        outcome: one of `OUTCOMES`; failed until the job sets it.
    """

    def __init__(self) -> None:
        self.outcome = "failed"


class _HeartbeatCollector:
    """Reads the counters of the receiver at each scrape."""

    def __init__(self) -> None:
        self.source: HeartbeatCounts | None = None

    def collect(self) -> Iterator[Metric]:
        if self.source is None:
            return
        taken, refused = self.source()
        received = CounterMetricFamily("amphora_heartbeats_received", "Authentic heartbeats that were accepted.")
        received.add_metric([], taken)
        yield received
        family = CounterMetricFamily("amphora_heartbeats_refused", "Refused datagrams.", labels=["reason"])
        for reason, number in sorted(dict(refused).items()):
            family.add_metric([reason or _OTHER], number)
        yield family


class ProcessMetrics:
    """All metrics of one process, in a registry without the metrics that libraries register globally."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.heartbeats = _HeartbeatCollector()
        self.registry.register(self.heartbeats)
        ProcessCollector(registry=self.registry)
        self.jobs = self._counter("amphora_jobs", "Jobs of this controller that ended.", "outcome", OUTCOMES)
        self.job_seconds = self._histogram("amphora_job_seconds", "Duration of jobs.", _STEP)
        self.step_seconds = Histogram(
            "amphora_step_seconds", "Duration of steps.", ["step"], buckets=_STEP, registry=self.registry
        )
        self.step_failures = Counter("amphora_step_failures", "Failed steps.", ["step"], registry=self.registry)
        self.apply_seconds = self._histogram(
            "amphora_apply_seconds",
            "Time from the acceptance of a request to its confirmation by every amphora.",
            _APPLY,
        )
        self.pushes = self._counter("amphora_pushes", "Configurations that amphorae accepted.", "how", HOWS)
        self.push_failures = self._counter(
            "amphora_push_failures", "Configurations that could not be pushed.", "error", PUSH_ERRORS
        )
        self.flush_seconds = self._histogram(
            "amphora_health_flush_seconds", "Duration of writing the reports of amphorae.", _STEP
        )
        self.refusals = Counter(
            "amphora_health_refused",
            "Writes of one load balancer or amphora that the database refused; the log has the id.",
            registry=self.registry,
        )
        self.octavia_seconds = Histogram(
            "amphora_octavia_seconds",
            "Duration of calls to Octavia; of a barrier: the wait for its transactions.",
            ["call"],
            buckets=_STEP,
            registry=self.registry,
        )
        self.octavia_failures = self._counter("amphora_octavia_failures", "Failed calls to Octavia.", "call", CALLS)
        self.reports = self._counter("amphora_reports", "Statuses reported to Octavia.", "outcome", REPORTS)
        self.database_seconds = Histogram(
            "amphora_database_seconds",
            "Duration of transactions, including retries.",
            ["kind"],
            buckets=_DATABASE,
            registry=self.registry,
        )
        self.database_failures = self._counter(
            "amphora_database_failures", "Failed transactions.", "kind", ("read", "write")
        )
        self.failovers = Counter(
            "amphora_failovers",
            "Fail-overs that ended during the runtime of this process.",
            ["cause", "outcome"],
            registry=self.registry,
        )
        self.failover_seconds = Histogram(
            "amphora_failover_seconds",
            "Time from the last heartbeat, or from the request, until users are served again.",
            ["cause"],
            buckets=_FAILOVER,
            registry=self.registry,
        )
        # Create all series now: rate() misses the first event of a new series.
        for cause in CAUSES:
            self.failover_seconds.labels(cause)
            for end in ENDS:
                self.failovers.labels(cause, end)
        for kind in ("read", "write"):
            self.database_seconds.labels(kind)
        for call in CALLS:
            self.octavia_seconds.labels(call)

    def _counter(self, name: str, text: str, label: str, values: tuple[str, ...]) -> Counter:
        made = Counter(name, text, [label], registry=self.registry)
        for value in values:
            made.labels(value)
        return made

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self.registry)

    # --- a controller -----------------------------------------------------------------------------------------------

    @contextmanager
    def job(self) -> Iterator[Job]:
        """Measure a job, from its start to the return of its lease."""
        one, begun = Job(), time.monotonic()
        try:
            yield one
        finally:
            self.job_seconds.observe(time.monotonic() - begun)
            self.jobs.labels(_known_label(one.outcome, OUTCOMES)).inc()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Measure one step of a plan, by its label (`reconcile.steps.step_label`)."""
        begun = time.monotonic()
        try:
            yield
        except BaseException:
            self.step_failures.labels(name).inc()
            raise
        finally:
            self.step_seconds.labels(name).observe(time.monotonic() - begun)

    def count_push(self, how: str) -> None:
        """Count an accepted configuration; `how` is one of `HOWS`."""
        self.pushes.labels(_known_label(how, HOWS)).inc()

    def count_push_failure(self, error: Exception) -> None:
        """Count a failed push."""
        self.push_failures.labels(_known_label(type(error).__name__, PUSH_ERRORS)).inc()

    def observe_apply(self, accepted_at: float | None, now: float) -> None:
        """Measure a confirmed request by its acceptance (seconds since 1970); None without a request."""
        if accepted_at is not None:
            self.apply_seconds.observe(max(0.0, now - accepted_at))

    # --- every process ----------------------------------------------------------------------------------------------

    @contextmanager
    def transaction(self, kind: str) -> Iterator[None]:
        """Measure a transaction; `kind` is read or write."""
        begun = time.monotonic()
        try:
            yield
        except Exception as error:
            # By name, because this module imports nothing of the project. Errors of the callers do not count.
            if type(error).__name__ in {"StoreError", "SchemaMismatch"}:
                self.database_failures.labels(kind).inc()
            raise
        finally:
            self.database_seconds.labels(kind).observe(time.monotonic() - begun)

    def count_failover(self, cause: str, outcome: str, seconds: float | None) -> None:
        """Count an ended fail-over; `seconds` until users were served again, None if they were not."""
        self.failovers.labels(_known_label(cause, CAUSES), _known_label(outcome, ENDS)).inc()
        if seconds is not None:
            self.failover_seconds.labels(_known_label(cause, CAUSES)).observe(max(0.0, seconds))

    # --- a provider agent -------------------------------------------------------------------------------------------

    @contextmanager
    def octavia_call(self, call: str) -> Iterator[None]:
        """Measure a call to Octavia, one of `CALLS`. A refusal is a successful call."""
        begun, name = time.monotonic(), _known_label(call, CALLS)
        try:
            yield
        except Exception as error:
            # octavia_lib raises one error for connection failures and refusals; only a refusal names an object.
            if getattr(error, "status_object_id", None) is None:
                self.octavia_failures.labels(name).inc()
            raise
        finally:
            self.octavia_seconds.labels(name).observe(time.monotonic() - begun)

    def count_reports(self, outcome: str, number: int = 1) -> None:
        """Count statuses reported to Octavia; `outcome` is one of `REPORTS`."""
        self.reports.labels(_known_label(outcome, REPORTS)).inc(number)

    # --- a health manager -------------------------------------------------------------------------------------------

    @contextmanager
    def flush(self) -> Iterator[None]:
        """Measure a write of reports."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.flush_seconds.observe(time.monotonic() - begun)

    def count_refused_rows(self) -> None:
        """Count a refused write of one load balancer or amphora."""
        self.refusals.inc()

    def set_heartbeat_source(self, source: HeartbeatCounts | None) -> None:
        """Set the source of the heartbeat counters; None for none."""
        self.heartbeats.source = source


def _known_label(value: Any, known: tuple[str, ...]) -> str:
    """Return a label value; unknown values share one series."""
    text = str(getattr(value, "value", value))
    return text if text in known else _OTHER


# The metrics of this process.
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
octavia_call = OURS.octavia_call
count_reports = OURS.count_reports
set_heartbeat_source = OURS.set_heartbeat_source
