# SPDX-License-Identifier: Apache-2.0
"""The usage of an amphora's limited resources in its heartbeats."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from amphora_agent.stats import usage
from amphora_agent.stats.haproxy_stats import WorkerLoad, parse
from amphora_agent.stats.usage import UsageMeter, cpu_times, memory_percent, percent

LIMITS = "Limit                 Soft Limit     Hard Limit     Units\nMax open files        40      80     files\n"
MEMORY = "MemTotal:       1000 kB\nMemFree:          10 kB\nMemAvailable:    400 kB\n"
ANSWER = """Pid: 17
CurrConns: {connections}
Maxconn: 1000

# pxname,svname,scur,slim,status,
limited,FRONTEND,9,10,OPEN,
half,FRONTEND,5,10,OPEN,
unlimited,FRONTEND,990,1000,OPEN,
amphora:metrics,FRONTEND,10,10,OPEN,
none,FRONTEND,3,,OPEN,

"""


class Inner:
    """A namespace whose thread runs a function when the test says so."""

    def __init__(self):
        self.started = []

    def start(self, function):
        self.started.append((function, Future()))
        return self.started[-1][1]


class Machine:
    """The files of /proc, with HAProxy's worker 17."""

    def __init__(self, folder):
        self.folder = folder
        self.now = 50.0
        self.load = WorkerLoad(17, 410, 1000, None)
        self.inner = Inner()
        (folder / "17/fd").mkdir(parents=True)
        (folder / "17/limits").write_text(LIMITS)
        (folder / "meminfo").write_text(MEMORY)
        self.open_files(4)
        self.work(0, 0)

    def open_files(self, number):
        for one in (self.folder / "17/fd").iterdir():
            one.unlink()
        for one in range(number):
            (self.folder / f"17/fd/{one}").touch()

    def work(self, busy, idle):
        (self.folder / "stat").write_text(f"cpu  {busy} 0 0 {idle} 0 0 0 0 7 7\ncpu0 0 0 0 0\n")

    def meter(self, **more):
        made = {"shares_machine": False, "proc": self.folder, "clock": lambda: self.now, **more}
        return UsageMeter(lambda: self.load, self.inner, **made)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    # A folder of tmpfs has another size than one of /proc, so the entries are counted, as on Linux before 6.2.
    real = usage.Path.stat
    monkeypatch.setattr(
        usage.Path, "stat", lambda path, **more: SimpleNamespace(st_size=0) if path.name == "fd" else real(path, **more)
    )
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("used", "limit", "expected"), [(0, 10, 0), (9, 10, 90), (11, 10, 100), (-1, 10, 0), (5, 0, None), (1, 3, 33)]
)
def test_a_percentage_is_from_0_to_100(used, limit, expected):
    assert percent(used, limit) == expected


def test_cpu_times_and_memory_are_parsed():
    assert cpu_times("cpu  10 1 5 70 4 0 3 7 2 2\ncpu0 9 9\n") == (26, 100)
    assert memory_percent(MEMORY) == 60


def test_a_sample_has_the_connections_of_the_worker():
    load = parse(ANSWER.format(connections=410)).load
    assert load == WorkerLoad(17, 410, 1000, 90), "listeners without a limit of their own do not count"


def test_all_resources_are_measured(machine):
    meter = machine.meter()
    assert meter.measure() == {"connections": 41, "file_descriptors": 10, "memory": 60}
    machine.now += 3
    machine.work(30, 70)
    machine.load = WorkerLoad(17, 900, 1000, 95)
    machine.inner.started[0][1].set_result(77)
    expected = {"connections": 90, "listener_connections": 95, "file_descriptors": 10, "cpu": 30, "memory": 60}
    assert meter.measure() == {**expected, "conntrack": 77}
    assert len(machine.inner.started) == 2


def test_a_measurement_is_used_for_two_seconds(machine):
    meter = machine.meter()
    before = meter.measure()
    machine.load = WorkerLoad(17, 1000, 1000, None)
    machine.now += 1.9
    assert meter.measure() == before
    machine.now += 0.2
    assert meter.measure()["connections"] == 100


def test_file_descriptors_are_counted_seldom_and_for_each_worker(machine):
    meter = machine.meter()
    meter.measure()
    machine.open_files(40)
    machine.now += 3
    assert meter.measure()["file_descriptors"] == 10
    machine.now += 15
    assert meter.measure()["file_descriptors"] == 100
    machine.load = WorkerLoad(18, 1, 1000, None)
    machine.now += 3
    assert "file_descriptors" not in meter.measure(), "the files of worker 18 cannot be read"


def test_a_busy_namespace_delays_no_heartbeat(machine):
    meter = machine.meter()
    for _ in range(3):
        assert "conntrack" not in meter.measure()
        machine.now += 3
    assert len(machine.inner.started) == 1, "one function at a time"
    machine.inner.started[0][1].set_exception(OSError())
    assert "conntrack" not in meter.measure()
    assert len(machine.inner.started) == 2


def test_an_old_result_of_a_blocked_namespace_is_not_sent(machine):
    meter = machine.meter()
    meter.measure()
    machine.inner.started[0][1].set_result(90)
    machine.now += 3
    assert meter.measure()["conntrack"] == 90
    machine.now += 12
    assert meter.measure()["conntrack"] == 90
    machine.now += 3
    assert "conntrack" not in meter.measure()


def test_a_closed_namespace_is_no_error(machine):
    def refuse(_):
        raise RuntimeError

    machine.inner.start = refuse
    assert "conntrack" not in machine.meter().measure()


def test_an_amphora_in_a_namespace_has_no_cpu_and_memory(machine):
    assert machine.meter(shares_machine=True).measure().keys() == {"connections", "file_descriptors"}


def test_without_an_answer_of_haproxy_its_resources_are_absent(machine):
    machine.load = None
    (machine.folder / "meminfo").unlink()
    assert machine.meter().measure() == {}


def test_tracked_connections_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(usage, "_CONNTRACK", tmp_path)
    assert usage._measure_conntrack() is None
    (tmp_path / "nf_conntrack_count").write_text("30\n")
    (tmp_path / "nf_conntrack_max").write_text("40\n")
    assert usage._measure_conntrack() == 75
