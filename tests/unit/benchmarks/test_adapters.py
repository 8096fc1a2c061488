# SPDX-License-Identifier: Apache-2.0
"""Every part of the benchmark's adapter that needs no root, once, at the smallest size and with the real components.

`tests/dataplane/test_benchmark_adapters.py` drives the other parts.
"""

from __future__ import annotations

import ast
import inspect
import re
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
from importlib import metadata
from pathlib import Path

import pytest
import sqlalchemy as sa
from bench_harness import BENCHMARKS, CONNECTIONS, adapters, heartbeat, imported_anew, spec

from amphora_driver import config, driver
from amphora_driver.certificates.ca import Authority, create_authority
from amphora_driver.database import tables
from amphora_driver.health import write_batch
from amphora_driver.model.enums import Kind
from amphora_driver.store import desired_objects

FLOWS = (
    "member_create",
    "member_create",
    "lb_create_single",
    "lb_create_active_standby",
    "lb_failover_single",
    "lb_failover_active_standby",
    "amp_failover_active_standby",
)
CALLS = ("member_create", "listener_create", "listener_create_tls", "loadbalancer_create", "pool_create")
PROGRAMS = (
    "agent_footprint", "apply_latency", "cluster_polling", "controller_jobs", "dataplane", "failover", "fleet",
    "heartbeat_stages", "heartbeats", "latency", "periodic_work", "status_calls",
)  # fmt: skip


@pytest.fixture(scope="module")
def adapter():
    with adapters() as module:
        yield module


@pytest.fixture
def place():
    # HAProxy takes paths of sockets up to 97 bytes only; those of `tmp_path` are longer.
    with tempfile.TemporaryDirectory(prefix="bu-") as folder:
        yield Path(folder)


@pytest.fixture
def made(adapter, place):
    return adapter.Haproxy(str(place))


@pytest.fixture
def stored(made, place):
    """An adapter with one load balancer in its database."""
    made.db_setup(f"sqlite:///{place}/bench.sqlite")
    made.db_add([spec()])
    yield made
    made.database.dispose()


@pytest.fixture
def hearing(stored, monkeypatch):
    # `hb_setup` changes the interval.
    monkeypatch.setattr(write_batch, "_HEARTBEAT_WRITE_INTERVAL", write_batch._HEARTBEAT_WRITE_INTERVAL)
    stored.hb_setup("insecure-bench-key")
    return stored


# --- render ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pem():
    authority = Authority(*create_authority("bench"))
    return authority.issue_server("bench.example", 1).bundle().reveal()


@pytest.mark.parametrize("name", ["Haproxy", "Remembering", "OneChanged"])
@pytest.mark.parametrize("tls", [False, True], ids=["HTTP", "TLS and a policy"])
def test_haproxy_accepts_what_is_rendered(adapter, place, pem, name, tls):
    whole = spec(tls=tls, policy=tls)
    made = getattr(adapter, name)(str(place))
    made.render_setup(whole)
    texts = [made.render() for _ in range(3)]
    files = made.render_files()
    assert bool(files) == tls
    for named, content in files.items():
        Path(named).parent.mkdir(parents=True, exist_ok=True)
        Path(named).write_bytes(pem if content == "@pem" else content.encode())
    for number, text in enumerate(texts):
        file = place / f"{number}.cfg"
        file.write_text(text)
        checked = subprocess.run(["haproxy", "-c", "-f", file], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stderr
        parts = (*whole["listeners"], *whole["pools"], *whole["pools"][0]["members"])
        assert [one["id"] for one in parts if one["id"] not in text] == []
        assert ("http://www.example.com/u1" in text) == tls
    first, *others = texts
    changed = {_differences(first, other) for other in others}
    assert changed == ({1} if name == "OneChanged" else {0})


def _differences(one, other):
    return sum(left != right for left, right in zip(one.splitlines(), other.splitlines(), strict=True))


# --- the database ---------------------------------------------------------------------------------------------


def test_the_graph_is_the_load_balancer_that_was_added(stored):
    from adapter_tree import tree  # noqa: PLC0415 (a module of the benchmarks)

    stored.sql_count(True)
    work, machines, loaded = stored.graph_load(spec()["id"])
    counted = stored.sql_count(False)
    assert loaded == tree(spec())
    assert (work.applied, [one.id for one in machines]) == (work.generation, [spec()["amphorae"][0]["id"]])
    assert counted["statements"] >= 3
    assert counted["commits"] == 1


# --- heartbeats -----------------------------------------------------------------------------------------------


def test_heartbeats_are_written_down(hearing):
    whole = spec()
    healthy, sick = (one["id"] for one in whole["pools"][0]["members"])
    first = hearing.hb_encode(heartbeat(whole))
    hearing.hb_decode(first)
    hearing.hb_apply(first)
    hearing.hb_flush()
    told = hearing.hb_check(whole["id"])
    assert (told["lb"], set(told["members"].values())) == ("ONLINE", {"ONLINE"})
    hearing.hb_apply_batch([first])  # the harness applies its first batch twice
    hearing.hb_apply_batch([hearing.hb_encode(heartbeat(whole, number, down=[sick])) for number in (1, 2)])
    hearing.hb_flush()
    told = hearing.hb_check(whole["id"])
    assert (told["lb"], told["members"]) == ("DEGRADED", {healthy: "ONLINE", sick: "ERROR"})
    assert told["stats_total_connections"] == 4 * CONNECTIONS
    assert 0.0 <= told["amp_age_s"] < 60.0


def test_heartbeats_over_udp_are_written_down(hearing):
    before = set(threading.enumerate())
    hearing.udp_start(0, 1)
    try:
        datagram = hearing.hb_encode(heartbeat(spec()))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            for _ in range(2):  # the harness sends the same ones in every run
                sender.sendto(datagram, ("127.0.0.1", hearing._receiver.port))
                hearing.udp_drain(1)
    finally:
        hearing._receiver.stop()
        for thread in set(threading.enumerate()) - before:
            thread.join()
    told = hearing.hb_check(spec()["id"])
    assert (hearing._receiver.accepted, told["lb"]) == (2, "ONLINE")
    assert told["stats_total_connections"] > CONNECTIONS


# --- jobs of the controller -----------------------------------------------------------------------------------


def test_every_flow_ends_active_and_confirmed(made, place):
    made.db_setup(f"sqlite:///{place}/bench.sqlite")
    made.db_add([spec("f")])
    made.flow_setup()
    try:
        for number, name in enumerate(FLOWS):
            made.flow_prepare(name, spec("f"), number)
            assert made.flow_check(name, number) is not True, f"{name} has nothing to do"
            made.flow_run(name, number)
            assert made.flow_check(name, number) is True, name
    finally:
        made.database.dispose()


# --- calls of Octavia -----------------------------------------------------------------------------------------


@pytest.fixture
def provider(stored, monkeypatch):
    monkeypatch.setenv(config.FILE_VARIABLE, "")  # provider_setup changes it
    _forget_configuration()
    stored.provider_setup(spec())
    yield stored
    driver._shared().database.dispose()
    _forget_configuration()


def _forget_configuration():
    config.shared.cache_clear()
    driver._shared.cache_clear()


def test_every_call_is_recorded(provider):
    before = _recorded(provider)
    for call in CALLS:
        provider.provider_call(call)
    after = _recorded(provider)
    assert {kind: after[kind] - before[kind] for kind in after} == {
        Kind.LOAD_BALANCER: 1,
        Kind.LISTENER: 2,
        Kind.POOL: 1,
        Kind.MEMBER: 1,
    }
    with pytest.raises(NotImplementedError):
        provider.provider_call("member_to_dict")


def _recorded(provider):
    """The number of objects of each kind in all load balancers."""

    def read(connection):
        ids = connection.execute(sa.select(tables.job.c.load_balancer_id)).scalars().all()
        nodes = [
            node for one in ids for node in desired_objects.iter_subtree(desired_objects.load_tree(connection, one))
        ]
        kinds = [desired_objects.kind_of(node) for node in nodes]
        return {one: kinds.count(one) for one in (Kind.LOAD_BALANCER, Kind.LISTENER, Kind.POOL, Kind.MEMBER)}

    return provider.database.read(read)


# --- what is imported and installed ---------------------------------------------------------------------------


def test_imported_names_exist(made):
    statements = made.imports()
    assert set(statements) == {"provider-driver", "worker", "health-manager", "agent"}
    for statement in statements.values():
        exec(statement, {})


def test_required_packages_are_installed(made):
    closures = made.closures()
    assert set(closures) == {"agent image", "control plane"}
    for names in closures.values():
        assert len({metadata.distribution(name).name for name in names}) > 3


# --- all of it ------------------------------------------------------------------------------------------------


def test_every_module_is_a_part_of_the_adapter(adapter):
    assert {file.stem for file in BENCHMARKS.glob("adapter*.py")} <= set(sys.modules)


def test_run_names_classes_that_exist(adapter):
    named = re.findall(r"ours:adapter:(\w+)", (BENCHMARKS / "run").read_text(encoding="utf-8"))
    assert set(named) == {"Haproxy", "Remembering", "OneChanged"}
    assert [name for name in named if not hasattr(adapter, name)] == []


def test_every_method_is_driven(adapter):
    """A new method needs a test in one of the two files."""
    public = {
        name
        for made in (adapter.Haproxy, adapter.Remembering, adapter.OneChanged)
        for name, method in inspect.getmembers(made, inspect.isfunction)
        if not name.startswith("_") and Path(inspect.getfile(method)).parent == BENCHMARKS
    }
    files = (Path(__file__), Path(__file__).parents[2] / "dataplane" / "test_benchmark_adapters.py")
    used = {
        node.attr
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
    }
    assert len(public) > 20
    assert public - used == set()


def test_no_program_is_forgotten():
    drivers = {file.stem for file in BENCHMARKS.glob("adapter*.py")} | {"side_by_side"}
    assert {file.stem for file in BENCHMARKS.glob("*.py")} == {*PROGRAMS} | drivers


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_finds_what_it_imports(name, monkeypatch, capsys):
    program = BENCHMARKS / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(program), "--help"])
    with imported_anew(), pytest.raises(SystemExit) as ended:
        runpy.run_path(str(program), run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {name}.py")
