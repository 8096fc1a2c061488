# SPDX-License-Identifier: Apache-2.0
"""The health check and the metrics of a controller, over HTTP.

Invariant: a request changes nothing. The database is read at most once a second for any number of requests. A database
that does not answer removes the metrics of the groups, not those of the process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import sqlalchemy as sa
from oslo_config.cfg import ConfigOpts
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric

from amphora_cluster.database.tables import group_row, node_row
from amphora_cluster.metrics import METRICS
from amphora_cluster.model import NodeState
from amphora_driver.database import clock
from amphora_driver.database.engine import Database
from amphora_driver.errors import StoreError
from amphora_driver.telemetry.handlers import Response, TokenFile, refusal_response
from amphora_driver.telemetry.http_request import Request, RequestRefused, authorize
from amphora_driver.telemetry.http_server import StatusServer

LOG = logging.getLogger(__name__)
# Minimum seconds between two reads of the database.
_MAX_AGE = 1.0


class _WithoutCreationTimes:
    """The metrics of a process without the times at which prometheus_client created them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """Return the families of the registry."""
        for family in self._registry.collect():
            family.samples = [one for one in family.samples if not one.name.endswith("_created")]
            yield family


class GroupCollector:
    """Metrics of all groups of the database, the same on each controller."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._found: list[Metric] = []

    def collect(self) -> Iterator[Metric]:
        """Return the metrics of the last read, or of a new one; nothing if the database does not answer."""
        with self._lock:
            if time.monotonic() - self._read_at >= _MAX_AGE:
                try:
                    self._found = self._database.read(_read_metrics)
                except StoreError as error:
                    LOG.warning(
                        "the status page omits the metrics of all groups, because it cannot read the database: %s",
                        error,
                    )
                    self._found = []
                self._read_at = time.monotonic()
            yield from self._found


def _read_metrics(connection: sa.Connection) -> list[Metric]:
    now = clock.now(connection)
    totals = connection.execute(
        sa.select(
            sa.func.count(),
            sa.func.coalesce(sa.func.sum(sa.case((group_row.c.error.is_not(None), 1), else_=0)), 0),
            sa.func.coalesce(sa.func.max(sa.case((group_row.c.owner.is_(None), now - group_row.c.due_at))), 0.0),
        )
    ).one()
    states = Counter(
        {str(state): int(number) for state, number in connection.execute(
            sa.select(node_row.c.state, sa.func.count()).group_by(node_row.c.state)
        )}
    )  # fmt: skip
    nodes = GaugeMetricFamily("amphora_cluster_nodes", "Servers by state.", labels=["state"])
    for one in NodeState:
        nodes.add_metric([one.value], states[one.value])
    late = "Seconds since the longest waiting group became due; 0 if none waits."
    return [
        GaugeMetricFamily("amphora_cluster_groups", "Recorded groups.", value=int(totals[0])),
        GaugeMetricFamily("amphora_cluster_failing_groups", "Groups whose last pass failed.", value=int(totals[1])),
        GaugeMetricFamily("amphora_cluster_overdue_seconds", late, value=max(0.0, float(totals[2]))),
        nodes,
    ]


class StatusPage:
    """The HTTP server of a controller, as a context manager; nothing without a port.

    Args:
        conf: the options.
        database: with the groups.
        is_working: the result of the health check.
    """

    def __init__(self, conf: ConfigOpts, database: Database, is_working: Callable[[], bool]) -> None:
        self._tokens = TokenFile(conf.amp_status_page.token_file)
        self._is_working = is_working
        self._families = CollectorRegistry()
        self._families.register(_WithoutCreationTimes(METRICS.registry))
        self._families.register(GroupCollector(database))
        port, options = conf.amp_cluster.status_port, conf.amp_status_page
        self.server = StatusServer(options.bind_address, port, self, options.certificate) if port else None

    def handle(self, request: Request, peer: str) -> Response:
        """Answer /healthz, which needs no authorization, and /metrics."""
        try:
            if request.path == "/healthz":
                working = self._is_working()
                return Response(status=200 if working else 503, body=b"ok\n" if working else b"not working\n")
            authorize(request, peer, self._tokens.read_token())
        except RequestRefused as refusal:
            return refusal_response(refusal)
        if request.path != "/metrics":
            return refusal_response(RequestRefused(404, "There is no such page."))
        return Response(content_type=CONTENT_TYPE_LATEST, body=generate_latest(self._families))

    def __enter__(self) -> StatusPage:
        if self.server is not None:
            self.server.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.server is not None:
            self.server.stop()
