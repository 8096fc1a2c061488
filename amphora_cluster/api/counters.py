# SPDX-License-Identifier: Apache-2.0
"""Counters that all worker processes of the API share, and their page /metrics.

Invariant: a counter never decreases while the API runs, also if a worker process is killed at any point: the kernel
releases its lock. The page has the same authorization as the status pages of the other processes.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from flask import Request
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from amphora_driver.secret import Secret
from amphora_driver.telemetry import http_request

# Reasons of refused authentications: no valid token, a pause after failures, a repeated signature.
INVALID, LIMITED, REPLAYED = "invalid", "limited", "replayed"
_REASONS = (INVALID, LIMITED, REPLAYED)
_NUMBER = struct.Struct("=Q")


class SharedCounters:
    """Counters in memory that forked processes share."""

    def __init__(self) -> None:
        size = _NUMBER.size * len(_REASONS)
        self._file = os.memfd_create("amphora-cluster-api")
        os.ftruncate(self._file, size)
        self._memory = mmap.mmap(self._file, size)
        self._threads = threading.Lock()

    def count(self, reason: str) -> None:
        """Count a refused authentication."""
        offset = _NUMBER.size * _REASONS.index(reason)
        with self._locked():
            (number,) = _NUMBER.unpack_from(self._memory, offset)
            _NUMBER.pack_into(self._memory, offset, number + 1)

    def collect(self) -> Iterator[Metric]:
        """Return the metrics, for prometheus_client."""
        text = "Requests without a valid authentication."
        family = CounterMetricFamily("amphora_cluster_refused_authentications", text, labels=["reason"])
        with self._locked():
            numbers = [number for (number,) in _NUMBER.iter_unpack(self._memory[:])]
        for reason, number in zip(_REASONS, numbers, strict=True):
            family.add_metric([reason], number)
        yield family

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # The lock of the file excludes other processes only, so the threads of this process need another lock.
        with self._threads:
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)


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
