# SPDX-License-Identifier: Apache-2.0
"""Measures the periodic work of the control plane and the lists of operators: processor time by size of the fleet.

    .sandbox/test-venv/bin/python benchmarks/periodic_work.py [--sizes 100,1000,10000]

All runs in this process, with the rows of a simulated fleet in SQLite, so that the time includes the database. It is
processor time, the least of three: other programs of the machine affect it little.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from simulated_fleet import backends, shape
from simulated_fleet.deployment import Deployment, Options

from amphora_driver import config
from amphora_driver.certificates import renewal
from amphora_driver.cli import queries
from amphora_driver.database.engine import Database
from amphora_driver.database.vault import Vault
from amphora_driver.failover.failure_rules import DetectionLimits, HeartbeatWatch
from amphora_driver.maintenance import drift_audit
from amphora_driver.plugins import Catalogue
from amphora_driver.provider_agent import sync_transactions
from amphora_driver.queue.jobs import Jobs
from amphora_driver.reconcile.desired_bundle import build_bundles
from amphora_driver.store import amphorae, config_drift, listener_stats, silent_amphorae, status_outbox
from amphora_driver.telemetry import alerts, fleet_metrics, fleet_queries, status_page
from amphora_driver.telemetry.snapshot_cache import View

_REPEATED, _CALL = 3, 300
_IDENTITY = status_page.ProcessIdentity(kind="controller", name="c", version="1", interval=10.0, silent_after=24.0)
Work = Callable[[], object]


def main() -> int:
    """Print a table with a column for each size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="100,1000,10000")
    sizes = list(map(int, parser.parse_args().sizes.split(",")))
    columns = [_measure(size) for size in sizes]
    head = " | ".join(f"{size:,}" for size in sizes)
    print(f"| milliseconds of processor time | {head} |\n|{'---|' * (1 + len(sizes))}")
    for name in columns[0]:
        print(f"| {name} | {' | '.join(f'{1000 * column[name]:.1f}' for column in columns)} |")
    return 0


def _measure(number: int) -> dict[str, float]:
    options = Options(database="sqlite", rows_only=True)
    with tempfile.TemporaryDirectory(prefix="adf-") as folder, Deployment(Path(folder), options).run(number) as one:
        os.environ[backends.VARIABLE] = str(one.folder / "control")
        conf = config.load([str(one.configuration)])
        database = Database(conf.amp_database.connection)
        try:
            return {name: _time(work) for name, work in _works(conf, database).items()}
        finally:
            database.dispose()


def _works(conf: object, database: Database) -> dict[str, Work]:
    catalogue, vault = Catalogue(conf, database), Vault.load(conf.amp_database.encryption_key_file)
    watch, jobs = HeartbeatWatch(DetectionLimits()), Jobs(database, "measurement", 15.0)
    first = shape.identifier("lb", 99)
    known = database.read(silent_amphorae.load_liveness_snapshot)
    fleet = fleet_queries.read_fleet(database)
    view = View(number=1, fleet=fleet, notices=alerts.find_notices(fleet, 10.0))
    now = database.now()

    def audit() -> None:
        recorded = database.read(lambda c: drift_audit.load_record(c, first, catalogue))
        build_bundles(recorded, conf, vault)

    def reads(work: Callable[..., object], *arguments: object) -> Work:
        return lambda: database.read(lambda connection: work(connection, *arguments))

    return {
        "failure detector: heartbeats (0.5 s)": reads(silent_amphorae.load_liveness_snapshot, known.watched),
        "failure detector: amphorae (30 s, and after a change)": reads(silent_amphorae.load_liveness_snapshot),
        "failure detector: rules (0.5 s)": lambda: watch.observe(
            known.orders, {"h": time.monotonic_ns()}, time.monotonic()
        ),
        "controller: search for a due job (1 s)": jobs.claim,
        "drift audit: due amphorae (5 s)": reads(config_drift.list_audit_candidates, now - 600, 300),
        "drift audit: one load balancer, without its agent": audit,
        "settings: amphorae (10 s)": reads(amphorae.list_reachable),
        "housekeeping: certificates (30 s)": lambda: renewal.load_fleet(database),
        "provider agent: due statuses (1 s)": reads(status_outbox.list_due_reports, _CALL),
        "provider agent: due statistics (1 s)": reads(listener_stats.list_due_totals, _CALL),
        "provider agent: uncommitted load balancers (1 s)": reads(sync_transactions.list_uncommitted),
        "status page: read": lambda: fleet_queries.read_fleet(database),
        "status page: page": lambda: status_page.render_page(view, _IDENTITY, ""),
        "status page: `status.json`": lambda: status_page.encode_status(view, _IDENTITY),
        "status page: metrics": lambda: fleet_metrics.encode_metrics("", None, view, "1", "controller"),
        "`loadbalancer list --limit 0`: read": reads(queries.list_load_balancers),
        "`amphora list`: read": reads(lambda c: c.execute(queries.amphora_query().where(queries.IS_NO_SPARE)).all()),
    }


def _time(work: Work) -> float:
    best = float("inf")
    for _ in range(_REPEATED):
        begun = time.process_time()
        work()
        best = min(best, time.process_time() - begun)
    return best


if __name__ == "__main__":
    sys.exit(main())
