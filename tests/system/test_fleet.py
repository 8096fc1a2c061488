# SPDX-License-Identifier: Apache-2.0
"""A thousand simulated amphorae at rest: ratios and growth of the real control plane on MariaDB.

The fleet is that of `benchmarks/fleet.py`: agents with mutual TLS and signed heartbeats, in one process. The test
compares it with a fleet of a tenth of the size, which runs at the same time. It asserts no times.
"""

import importlib
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import bench_harness
import pytest
import sqlalchemy as sa

from amphora_driver.database.tables import amphora, amphora_heartbeat, object_status
from amphora_driver.database.tables_fleet import failover, silent_amphora

pytestmark = [
    pytest.mark.extended,
    pytest.mark.quiet,
    pytest.mark.skipif(
        os.geteuid() != 0 or not (shutil.which("mariadbd") or shutil.which("mariadbd", path="/usr/sbin")),
        reason="needs root and mariadbd",
    ),
]
# 530 load balancers have 1,007 amphorae. `AMPHORA_FLEET` sets another number.
LARGE = int(os.environ.get("AMPHORA_FLEET", "530"))
SMALL = LARGE // 10
SECONDS = 12.0


@contextmanager
def fleet(folder, number):
    """Run a fleet with this number of load balancers."""
    with bench_harness.importable():
        module = importlib.import_module("simulated_fleet.deployment")
        folder.mkdir()
        with module.Deployment(folder, module.Options(interval=4.0)).run(number) as deployment:
            deployment.start_all()
            yield deployment


def rows(deployment, query):
    database = deployment.open_database()
    try:
        return database.read(lambda connection: connection.execute(query).all())
    finally:
        database.dispose()


def count(deployment, table, *conditions):
    return rows(deployment, sa.select(sa.func.count()).select_from(table).where(*conditions))[0][0]


def measured(deployment, number):
    """Return the load of a settled fleet, after checks that nothing has happened in it."""
    at_rest = importlib.import_module("simulated_fleet.at_rest")
    before = rows(deployment, sa.select(sa.func.sum(amphora_heartbeat.c.sequence)))[0][0]
    found = at_rest.measure_processes(deployment, SECONDS)
    after = rows(deployment, sa.select(sa.func.sum(amphora_heartbeat.c.sequence)))[0][0]
    assert at_rest.find_warnings(deployment, at_rest.ERROR) == {}
    assert (count(deployment, failover), count(deployment, silent_amphora)) == (0, 0)
    assert count(deployment, amphora, amphora.c.state != "ready") == 0
    assert count(deployment, amphora, amphora.c.drifts) == 0
    unreported = object_status.c.version > object_status.c.reported
    assert count(deployment, object_status, unreported) == 0, "a status has changed without a cause"
    # Each amphora has sent at least two heartbeats meanwhile, and the last ones are recorded.
    assert after - before >= 2 * deployment.amphorae, (before, after)
    assert found["agents"].get("GET /v2/bundle", 0) > 0, "no agent was asked over mutual TLS"
    assert found["memory"]["database"] > 0
    # The controller verifies a renewed certificate by a handshake without a request.
    assert found["agents"].get("broken", 0) <= found["agents"].get("PUT /v2/certificate", 0)
    listed = at_rest.run_command(deployment, "loadbalancer", "list", "--limit", "0", "-f", "value", "-c", "ID")
    assert listed["lines"] == number
    return deployment.amphorae, found


@pytest.mark.lasts(900)
def test_statements_and_memory_do_not_follow_the_number_of_amphorae(tmp_path):
    with fleet(tmp_path / "s", SMALL) as one, fleet(tmp_path / "l", LARGE) as other:
        importlib.import_module("simulated_fleet.at_rest").settle(other)
        with ThreadPoolExecutor(2) as threads:
            (few, small), (many, large) = threads.map(measured, (one, other), (SMALL, LARGE))
    assert 9 < many / few < 11

    def growth(what, name):
        return large[what][name] / small[what][name]

    for name in ("controller", "reporter"):
        assert growth("statements", name) < 3, (small["statements"], large["statements"])
    # A poll reads open changes, due statuses and due statistics by an index. A load balancer has twelve statuses.
    assert large["rows"]["reporter"] < LARGE / 2, (small["rows"], large["rows"])
    for name in ("controller0", "health", "reporter"):
        assert growth("memory", name) < 2, (small["memory"], large["memory"])
    # The work for one amphora becomes less in a larger fleet, because each process has a fixed part.
    for name in ("controller0", "health", "reporter"):
        assert growth("cpu", name) < many / few, (small["cpu"], large["cpu"])
