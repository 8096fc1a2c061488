# SPDX-License-Identifier: Apache-2.0
"""What this process counts of its own work.

Invariant: counting never fails, never waits, and imports nothing of ours, so that every room may do it. Labels take
values of a short list only: no id of a load balancer, no text of anybody's. What is a fact of the fleet is not counted
here but read from the rows (exposition.py); every name is explained in docs/metrics.md.
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

# Seconds. From what is instant to a user to what somebody should look at.
_APPLY = (0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 10, 20, 30, 60, 120, 300, 900)
_STEP = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_DATABASE = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_FAILOVER = (1, 2, 3, 5, 8, 12, 20, 30, 60, 120, 300, 900, 3600)

HOWS = ("start", "unchanged", "runtime", "reload", "stop")
OUTCOMES = ("finished", "waiting", "gave_way", "failed", "lost")
PUSH_ERRORS = ("AgentUnreachable", "AgentRefused", "AgentUntrusted")
CAUSES = ("silent", "mute", "never_spoke", "asked", "operator", "rotation", "drift", "machine")
ENDS = ("done", "gone", "superseded", "recovered")
# What Octavia is called for: to wait for its transactions, to be told of statuses, and of statistics.
CALLS = ("barrier", "statuses", "statistics")
REPORTS = ("taken", "refused")
_OTHER = "other"

# How many heartbeats were taken, and how many refused by reason.
Heartbeats = Callable[[], tuple[int, Mapping[str, int]]]


class Job:
    """One job that is being worked off.

    Attributes:
        outcome: one of `OUTCOMES`; what has not said how it ended has failed.
    """

    def __init__(self) -> None:
        self.outcome = "failed"


class _Heartbeats:
    """Reads counters that their owner keeps anyway: hearing costs nothing for being counted."""

    def __init__(self) -> None:
        self.source: Heartbeats | None = None

    def collect(self) -> Iterator[Metric]:
        if self.source is None:
            return
        taken, refused = self.source()
        received = CounterMetricFamily("amphora_heartbeats_received", "Genuine heartbeats taken in.")
        received.add_metric([], taken)
        yield received
        family = CounterMetricFamily("amphora_heartbeats_refused", "Datagrams that were refused.", labels=["reason"])
        for reason, number in sorted(dict(refused).items()):
            family.add_metric([reason or _OTHER], number)
        yield family


class Meters:
    """Every meter of one process, with a registry of its own: what libraries register globally is not mixed in."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.heartbeats = _Heartbeats()
        self.registry.register(self.heartbeats)
        ProcessCollector(registry=self.registry)
        self.jobs = self._counter("amphora_jobs", "Jobs of this controller that ended.", "outcome", OUTCOMES)
        self.job_seconds = self._histogram("amphora_job_seconds", "How long a job had a hand.", _STEP)
        self.step_seconds = Histogram(
            "amphora_step_seconds", "How long a step took.", ["step"], buckets=_STEP, registry=self.registry
        )
        self.step_failures = Counter(
            "amphora_step_failures", "Steps that did not succeed.", ["step"], registry=self.registry
        )
        self.apply_seconds = self._histogram(
            "amphora_apply_seconds", "From an accepted request to its confirmation by every amphora.", _APPLY
        )
        self.pushes = self._counter("amphora_pushes", "Configurations that amphorae took.", "how", HOWS)
        self.push_failures = self._counter(
            "amphora_push_failures", "Configurations that amphorae did not take.", "error", PUSH_ERRORS
        )
        self.flush_seconds = self._histogram(
            "amphora_health_flush_seconds", "How long it took to write down what was heard.", _STEP
        )
        self.refusals = Counter(
            "amphora_health_refused",
            "Rows of one load balancer or amphora that the database refused; the log has the id.",
            registry=self.registry,
        )
        self.octavia_seconds = Histogram(
            "amphora_octavia_seconds",
            "How long a call of Octavia's took; a barrier's is how long its transaction was waited for.",
            ["call"],
            buckets=_STEP,
            registry=self.registry,
        )
        self.octavia_failures = self._counter(
            "amphora_octavia_failures", "Calls that did not get through to Octavia.", "call", CALLS
        )
        self.reports = self._counter("amphora_reports", "Statuses Octavia was told.", "outcome", REPORTS)
        self.database_seconds = Histogram(
            "amphora_database_seconds",
            "How long a transaction took, with its repetitions.",
            ["kind"],
            buckets=_DATABASE,
            registry=self.registry,
        )
        self.database_failures = self._counter(
            "amphora_database_failures", "Transactions that did not happen.", "kind", ("read", "write")
        )
        self.failovers = Counter(
            "amphora_failovers",
            "Fail-overs that ended while this process looked.",
            ["cause", "outcome"],
            registry=self.registry,
        )
        self.failover_seconds = Histogram(
            "amphora_failover_seconds",
            "From the last sign of life, or the request, to users being served again.",
            ["cause"],
            buckets=_FAILOVER,
            registry=self.registry,
        )
        # A series that appears with its first event hides that event from rate().
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
        """A job, from its first look to the lease's return."""
        one, begun = Job(), time.monotonic()
        try:
            yield one
        finally:
            self.job_seconds.observe(time.monotonic() - begun)
            self.jobs.labels(_among(one.outcome, OUTCOMES)).inc()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """One step of a plan, by the name of its class."""
        begun = time.monotonic()
        try:
            yield
        except BaseException:
            self.step_failures.labels(name).inc()
            raise
        finally:
            self.step_seconds.labels(name).observe(time.monotonic() - begun)

    def pushed(self, how: str) -> None:
        """An amphora took a configuration; `how` as its agent says."""
        self.pushes.labels(_among(how, HOWS)).inc()

    def push_failed(self, error: Exception) -> None:
        """An amphora took none."""
        self.push_failures.labels(_among(type(error).__name__, PUSH_ERRORS)).inc()

    def confirmed(self, accepted_at: float | None, now: float) -> None:
        """Every amphora serves what was accepted then (seconds since 1970); None where nobody waits for it."""
        if accepted_at is not None:
            self.apply_seconds.observe(max(0.0, now - accepted_at))

    # --- everybody --------------------------------------------------------------------------------------------------

    @contextmanager
    def transaction(self, kind: str) -> Iterator[None]:
        """A transaction; kind is read or write."""
        begun = time.monotonic()
        try:
            yield
        except Exception as error:
            # By its name, since nothing of ours is imported here. What callers raise themselves is no trouble of the
            # store's.
            if type(error).__name__ in {"StoreError", "SchemaMismatch"}:
                self.database_failures.labels(kind).inc()
            raise
        finally:
            self.database_seconds.labels(kind).observe(time.monotonic() - begun)

    def failover_ended(self, cause: str, outcome: str, seconds: float | None) -> None:
        """One has ended; seconds until users were served again, where they were."""
        self.failovers.labels(_among(cause, CAUSES), _among(outcome, ENDS)).inc()
        if seconds is not None:
            self.failover_seconds.labels(_among(cause, CAUSES)).observe(max(0.0, seconds))

    # --- a provider agent -------------------------------------------------------------------------------------------

    @contextmanager
    def octavia(self, call: str) -> Iterator[None]:
        """A call of Octavia's; one of `CALLS`. Who is refused was heard: that is no failure of the call."""
        begun, name = time.monotonic(), _among(call, CALLS)
        try:
            yield
        except Exception as error:
            # octavia_lib raises the same error for "not reached" and for "refused"; only the latter names an object.
            if getattr(error, "status_object_id", None) is None:
                self.octavia_failures.labels(name).inc()
            raise
        finally:
            self.octavia_seconds.labels(name).observe(time.monotonic() - begun)

    def reported(self, outcome: str, number: int = 1) -> None:
        """So many statuses were taken by Octavia, or refused: one of `REPORTS`."""
        self.reports.labels(_among(outcome, REPORTS)).inc(number)

    # --- a health manager -------------------------------------------------------------------------------------------

    @contextmanager
    def flush(self) -> Iterator[None]:
        """What was heard is written down."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.flush_seconds.observe(time.monotonic() - begun)

    def refused(self) -> None:
        """The rows of one load balancer or amphora could not be written."""
        self.refusals.inc()

    def heartbeats_from(self, source: Heartbeats | None) -> None:
        """Who counts heartbeats; None: nobody any more."""
        self.heartbeats.source = source


def _among(value: Any, known: tuple[str, ...]) -> str:
    """What comes from outside must not make a new series."""
    text = str(getattr(value, "value", value))
    return text if text in known else _OTHER


# Those of this process.
OURS = Meters()
job = OURS.job
step = OURS.step
pushed = OURS.pushed
push_failed = OURS.push_failed
confirmed = OURS.confirmed
transaction = OURS.transaction
failover_ended = OURS.failover_ended
flush = OURS.flush
refused = OURS.refused
octavia = OURS.octavia
reported = OURS.reported
heartbeats_from = OURS.heartbeats_from
