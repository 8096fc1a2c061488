# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of a controller of cluster membership.

Invariant: counting never fails or waits. Labels have values of fixed short lists: no ids and no foreign text.
docs/reference/metrics.md explains every name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.process_collector import ProcessCollector

from amphora_cluster.model import NodeState, RequestKind, StepKind
from amphora_driver.metrics import OURS

OUTCOMES = ("done", "busy", "failed", "lost")
RESULTS = ("success", "failure", "refused")
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_REQUEST_SECONDS = (0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 900)


class Pass:
    """One running pass; it counts as failed until it sets `outcome` to another one of `OUTCOMES`."""

    def __init__(self) -> None:
        self.outcome = "failed"


class ClusterMetrics:
    """All metrics of one process, in a registry without the metrics that libraries register globally."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        # The database module counts its transactions in these metrics of the driver, so this registry also includes
        # them.
        self.registry.register(OURS.database_seconds)
        self.registry.register(OURS.database_failures)
        self.passes = self._counter("passes", "Passes over groups that ended.", "outcome", OUTCOMES)
        self.pass_seconds = Histogram(
            "amphora_cluster_pass_seconds", "Duration of passes.", buckets=_SECONDS, registry=self.registry
        )
        kinds = tuple(kind.value for kind in StepKind)
        self.steps = self._counter("steps", "Steps that Octavia accepted or that had no difference.", "kind", kinds)
        self.refused = self._counter("refused_steps", "Steps that Octavia refused.", "kind", kinds)
        states = tuple(state.value for state in NodeState)
        self.moves = self._counter("node_changes", "Changes of the state of a server.", "state", states)
        self.requests = self._counter("requests", "Requests that ended.", "result", RESULTS)
        self.request_seconds = Histogram(
            "amphora_cluster_request_seconds",
            "Time from the record of a request to its end.",
            ["kind"],
            buckets=_REQUEST_SECONDS,
            registry=self.registry,
        )
        for kind in RequestKind:
            self.request_seconds.labels(kind.value)

    def _counter(self, name: str, text: str, label: str, values: tuple[str, ...]) -> Counter:
        made = Counter(f"amphora_cluster_{name}", text, [label], registry=self.registry)
        # Each series exists from the start with the value 0. Otherwise, Prometheus's rate() would miss the first event.
        for value in values:
            made.labels(value)
        return made

    @contextmanager
    def measure_pass(self) -> Iterator[Pass]:
        """Measure a pass."""
        one = Pass()
        with self.pass_seconds.time():
            try:
                yield one
            finally:
                self.passes.labels(one.outcome).inc()

    def count_request(self, kind: RequestKind, result: str, seconds: float) -> None:
        """Count a request that ended; `result` is one of `RESULTS`."""
        self.requests.labels(result).inc()
        self.request_seconds.labels(kind.value).observe(max(0.0, seconds))


METRICS = ClusterMetrics()
