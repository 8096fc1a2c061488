# SPDX-License-Identifier: Apache-2.0
"""Counters that all worker processes of the API share, and their page /metrics.

Invariant: a counter never decreases while the API runs, also if a worker process is killed at any point: the kernel
releases its lock. While a stopped worker keeps the lock, the others add their counts later. The page
has the same authorization as the status pages of the other processes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from flask import Request
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from amphora_cluster.api.shared_memory import SharedMemory
from amphora_driver.secret import Secret
from amphora_driver.telemetry import http_request

# Reasons of refused authentications: an invalid token, a pause after failures, or a repeated signature.
INVALID, LIMITED, REPLAYED = "invalid", "limited", "replayed"
_REASONS = (INVALID, LIMITED, REPLAYED)
# Python writes a number of the native format in one step, so other processes read it without the lock.
_NUMBER = struct.Struct("@Q")


class SharedCounters:
    """Counters in memory that forked processes share."""

    def __init__(self) -> None:
        self._memory = SharedMemory(_NUMBER.size * len(_REASONS))
        # Counts of this process that it has not added to the shared memory yet.
        self._waiting = [0] * len(_REASONS)

    def count(self, reason: str) -> None:
        """Count a refused authentication."""
        with self._memory.locked() as memory:
            self._waiting[_REASONS.index(reason)] += 1
            if not self._memory.is_shared(memory):
                return
            for place, more in enumerate(self._waiting):
                (number,) = _NUMBER.unpack_from(memory, _NUMBER.size * place)
                _NUMBER.pack_into(memory, _NUMBER.size * place, number + more)
                self._waiting[place] = 0

    def collect(self) -> Iterator[Metric]:
        """Return the metrics, for prometheus_client."""
        text = "Requests without a valid authentication."
        family = CounterMetricFamily("amphora_cluster_refused_authentications", text, labels=["reason"])
        numbers = [number for (number,) in _NUMBER.iter_unpack(self._memory.peek())]
        for reason, number in zip(_REASONS, numbers, strict=True):
            family.add_metric([reason], number)
        yield family


def metrics_page(counters: SharedCounters, request: Request, token: Secret | None) -> bytes:
    """Return the metrics of the API.

    Args:
        counters: of all worker processes.
        request: the request for the page.
        token: of the status pages; None if they answer requests of their own host only.

    Raises:
        RequestRefused: the request is not authorized.
    """
    head = http_request.Request(
        method=request.method,
        path=request.path,
        query="",
        headers={name.lower(): value for name, value in request.headers.items()},
        version=str(request.environ.get("SERVER_PROTOCOL", "")),
    )
    http_request.authorize(head, request.remote_addr or "", token)
    registry = CollectorRegistry()
    registry.register(counters)
    return generate_latest(registry)
