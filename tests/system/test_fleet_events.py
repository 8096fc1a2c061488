# SPDX-License-Identifier: Apache-2.0
"""Changes and events in a simulated fleet, with three controllers on MariaDB and the real octavia-driver-agent.

The scenarios are those of `benchmarks/fleet.py`, shorter and smaller. The tests assert numbers and ratios. They share
one fleet, in the order of this file.
"""

import importlib
import os
import shutil
from types import SimpleNamespace

import bench_harness
import pytest

pytestmark = [
    pytest.mark.extended,
    pytest.mark.quiet,
    pytest.mark.skipif(
        os.geteuid() != 0 or not (shutil.which("mariadbd") or shutil.which("mariadbd", path="/usr/sbin")),
        reason="needs root and mariadbd",
    ),
]
ALL = pytest.mark.skipif(os.environ.get("AMPHORA_FLEET") != "all", reason="AMPHORA_FLEET=all runs this")
# 200 load balancers have 380 amphorae. The large one has 2,000 members instead of 10,000.
NUMBER, MEMBERS = 200, 2000
SECONDS = 15.0
MODULES = ("at_rest", "changes", "deployment", "events")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """A fleet, and the modules of the benchmark."""
    with bench_harness.importable():
        modules = {name: importlib.import_module(f"simulated_fleet.{name}") for name in MODULES}
        module = modules.pop("deployment")
        made = module.Deployment(tmp_path_factory.mktemp("f"), module.Options(interval=2.0, controllers=3))
        with made.run(NUMBER, {modules["changes"].LARGE: MEMBERS}):
            made.start_all(controllers=1)
            # The first test begins with changes that are not measured. Meanwhile the fleet settles.
            yield SimpleNamespace(deployment=made, **modules)


@pytest.mark.lasts(600)
def test_a_large_load_balancer_delays_no_other_one(fleet):
    found = fleet.changes.measure(fleet.deployment, SECONDS, per_minute=400, balancers=100)
    assert found["controllers"] == 3
    assert found["members"] >= MEMBERS
    for name in ("alone", "beside"):
        part = found[name]
        assert (part["failures"], part["not_served"], part["settled"]) == (0, 0, True), part["failed"]
        assert part["delays"]["others served"]["number"] >= 0.9 * SECONDS * 400 / 60
        # Every change is one job: the queue never holds most of them.
        assert part["samples"]["largest"]["due"] < part["changes"] / 2, part["samples"]["largest"]
        waits = {user: seconds for user, seconds in part["samples"]["lock_waits"].items() if user != "root"}
        assert all(seconds < 1.0 for seconds in waits.values()), waits
    assert found["beside"]["delays"]["large served"]["number"] > 0
    alone, beside = (found[name]["delays"]["others served"] for name in ("alone", "beside"))
    assert beside["p50"] < 4 * alone["p50"], found
    assert found["errors"] == {}


@ALL
@pytest.mark.lasts(300)
def test_renewals_are_spread(fleet):
    due, seconds = NUMBER * 3 // 4, 35.0
    found = fleet.events.renew_certificates(fleet.deployment, seconds, due)
    # Housekeeping makes at most 100 load balancers due in 30 s, also if more are due. They have two amphorae at most.
    spread = found["spread"]
    most = max(sum(spread[begin : begin + 25]) for begin in range(len(spread)))
    assert 0 < most <= 2 * 100 < found["due"], spread


@ALL
@pytest.mark.lasts(300)
def test_a_rotation_replaces_a_limited_number_at_once(fleet):
    found = fleet.events.rotate(fleet.deployment, 30.0, at_once=10)
    assert 0 < found["samples"]["largest"]["rotating"] <= 10
    assert found["balancers"] > 0
    assert (found["failed"], found["not_ready"]) == (0, 0)
    assert found["settled"] is not None


@pytest.mark.lasts(600)
def test_each_lost_amphora_is_replaced_and_no_other_one(fleet):
    found = fleet.events.lose_amphorae(fleet.deployment, 30, 240.0)
    assert found["lost"] == found["failovers"] == 30
    assert (found["wrong"], found["unserved"], found["left"]) == (0, 0, 0)
    assert found["samples"]["largest"]["open failovers"] <= 5, "[amp_failover] most_at_once"


@pytest.mark.lasts(600)
def test_an_outage_of_the_database_causes_no_work(fleet):
    rest = fleet.at_rest.measure_processes(fleet.deployment, SECONDS)
    # An amphora is silent after seven seconds without a heartbeat.
    found = fleet.events.stop_database(fleet.deployment, SECONDS, watched=10.0)
    assert (found["failovers"], found["silent"], found["lost"]) == (0, 0, 0)
    for name, used in found["cpu"].items():
        # A process in a busy loop would use a whole processor. Attempts to connect use a small part of one.
        assert used < 2 * rest["cpu"][name] + 0.3, (name, used, rest["cpu"])
    for name, (before, after) in found["memory"].items():
        assert after < 1.25 * before, (name, found["memory"])
    assert found["change"]["failed"] == []
    assert (found["change"]["requests"], found["change"]["not_served"]) == (1, 0)
