# SPDX-License-Identifier: Apache-2.0
"""The fleet on a Galera cluster: addresses of the balancer, sums over the nodes, figures of a lost node."""

import importlib
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import sqlalchemy as sa
from bench_harness import importable

MODULES = ("changes", "galera_cluster", "node_outage", "processes", "report")


@pytest.fixture(scope="module")
def fleet():
    with importable():
        yield SimpleNamespace(**{name: importlib.import_module(f"simulated_fleet.{name}") for name in MODULES})


def servers(text):
    """Return the names of the preferred servers and of the backups of each address."""
    found = {}
    for line in text.splitlines():
        words = line.split()
        if words[0] in {"listen", "backend"}:
            found[words[1]] = ([], [])
            name = words[1]
        elif words[0] == "server":
            found[name]["backup" in words].append(words[1])
    return found


@pytest.fixture
def balancer(fleet, tmp_path):
    (tmp_path / "is-synced").write_text(fleet.galera_cluster.check_program(tmp_path))
    return fleet.galera_cluster.balancer_configuration(tmp_path, [tmp_path / f"socket{one}" for one in range(3)])


def test_each_host_prefers_its_node_and_octavia_has_one_node_at_a_time(balancer):
    found = servers(balancer)
    assert found.pop("nodes") == (["node0", "node1", "node2"], [])
    assert found == {
        "host-0": (["node0"], ["node1", "node2"]),
        "host-1": (["node1"], ["node0", "node2"]),
        "host-2": (["node2"], ["node0", "node1"]),
        "host-octavia": (["node0"], ["node1", "node2"]),
    }
    octavia = balancer.partition("listen host-octavia")[2]
    assert octavia.count("shutdown-backup-sessions") == balancer.count("shutdown-backup-sessions") == 1


@pytest.mark.skipif(not shutil.which("haproxy"), reason="needs haproxy")
def test_haproxy_accepts_the_addresses(balancer, tmp_path):
    (tmp_path / "is-synced").chmod(0o755)
    (tmp_path / "haproxy.cfg").write_text(balancer)
    made = subprocess.run(
        ["haproxy", "-c", "-f", tmp_path / "haproxy.cfg"], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr


def test_controllers_are_spread_over_the_hosts(fleet):
    assert [fleet.galera_cluster.host_of(f"controller{one}") for one in range(4)] == [0, 1, 2, 0]
    assert fleet.galera_cluster.host_of("reporter") == 2


def test_counters_of_several_nodes_are_added(fleet, tmp_path):
    urls = [f"sqlite:///{tmp_path}/{one}" for one in range(2)]
    for number, url in enumerate(urls):
        engine = sa.create_engine(url)
        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE counted (name TEXT, value INTEGER)")
            connection.exec_driver_sql(f"INSERT INTO counted VALUES ('health', {1 + number}), ('node{number}', 5)")
        engine.dispose()
    counters = fleet.processes.DatabaseCounters(*urls)
    assert counters._sums("SELECT name, value FROM counted") == {"health": 3.0, "node0": 5.0, "node1": 5.0}
    counters.dispose()


def test_a_server_that_does_not_answer_with_counters_has_none(fleet, tmp_path):
    url = f"sqlite:///{tmp_path}/none"
    found = fleet.galera_cluster.WriteSetCounters([url, url]).read()
    assert found == {"refused": 0.0, "aborted": 0.0, "write_sets": 0.0, "paused": 0.0}


def lines(lost_at):
    done = [{"kind": "create", "call": 0.01, "number": 1, "at": lost_at + at} for at in (-4.0, -0.5, 6.0, 6.5, 40.0)]
    failed = [{"number": 2, "error": f"{name}: lost", "at": lost_at + at} for name, at in (("A", 1.0), ("A", 2.0))]
    return [*reversed(done), *failed, {"number": 3, "error": "B: early", "at": lost_at - 1.0}]


def test_the_gap_begins_with_the_loss_and_early_failures_are_separate(fleet):
    found = fleet.node_outage.describe_lines(lines(1000.0), 1000.0)
    assert (found["changes"], found["failures"], found["early_failures"]) == (5, 3, 1)
    assert (found["gap"], found["last_failure"]) == (6.0, 2.0)
    assert found["kinds"] == {"A": 2, "B": 1}
    assert found["course"] == [(6, 2), (40, 1)]


def test_no_accepted_change_after_the_loss_has_no_gap(fleet):
    assert fleet.node_outage.describe_lines(lines(1000.0)[:1], 2000.0)["gap"] is None


@pytest.fixture
def outage(fleet):
    part = {
        **fleet.node_outage.describe_lines(lines(1000.0), 1000.0),
        "seconds": 60.0,
        "joined": 5.5,
        "load_average": 1.0,
        "unhealthy": {"health": 7.0},
        "retries": 20.0,
        "pending": 0,
        "failovers": 0,
        "silent": 0,
        "lost": 0,
        "not_served": 0,
        "delays": {},
        "change": {"delays": {"others served": fleet.changes.distribution([0.05])}},
    }
    return {"per_minute": 1000.0, "balancers": 9, "killed": part, "frozen": {**part, "gap": None, "unhealthy": {}}}


def test_the_page_has_a_table_of_the_lost_node_instead_of_an_outage(fleet, outage, tmp_path):
    fleet.report.write({"outage/galera/100": outage}, tmp_path)
    page = (tmp_path / "fleet-figures.md").read_text()
    assert "## Events, galera, 100 load balancers" in page
    assert "| loss of one node | killed | frozen |" in page
    assert "| longest time without an accepted change (s) | 6.0 | not in time |" in page
    assert "| processes not healthy; until (s after the loss) | health manager: 7 | none |" in page
    assert "| failed by error | 2 A, 1 B | 2 A, 1 B |" in page
    assert "seconds without the database" not in page
