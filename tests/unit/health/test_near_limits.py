# SPDX-License-Identifier: Apache-2.0
"""Amphorae near a limit: marks with hysteresis, and writes for changes only."""

import time

import msgspec
import pytest
import sqlalchemy as sa
from test_status_writer import HealthManager

from amphora_driver.database.tables import amphora
from amphora_driver.health.amphora_reports import AmphoraReports, LastReport
from amphora_driver.health.heartbeat_codec import Heartbeat
from amphora_driver.health.near_limits import NearLimits
from amphora_driver.health.status import Report
from amphora_driver.health.status_writer import StatusWriter

INTERVAL, LIMIT = 3.0, 85


class Amphora:
    """One amphora with its recorded mark; a heartbeat each interval."""

    def __init__(self):
        self.limits = NearLimits(INTERVAL, LIMIT)
        self.now = 100.0
        self.mark = ""
        self.writes = 0

    def send(self, *, times=1, **usage):
        for _ in range(times):
            self.now += INTERVAL
            last = {"am": LastReport(self.now, self.now, 1, (1, 1), usage=usage, read_at=self.now)}
            changed = self.limits.find_changed(last, {"am": self.mark} if self.mark else {})
            if changed:
                self.writes += 1
                self.mark = changed["am"] or ""
        return self.mark


def test_a_lasting_usage_above_the_limit_sets_the_mark():
    one = Amphora()
    assert one.send(times=10, connections=85) == ""
    assert one.send(connections=85) == "connections"
    assert one.send(times=20, connections=99, cpu=84) == "connections"
    assert one.writes == 1


def test_a_burst_sets_no_mark():
    one = Amphora()
    for _ in range(5):
        one.send(times=9, cpu=100)
        one.send(cpu=20)
    assert (one.mark, one.writes) == ("", 0)


def test_a_usage_around_the_limit_keeps_the_mark():
    one = Amphora()
    one.send(times=11, memory=90)
    for used in (84, 86, 76, 90, 75) * 10:
        one.send(memory=used)
    assert (one.mark, one.writes) == ("memory", 1)
    one.send(times=10, memory=74)
    assert one.mark == "memory"
    assert one.send(memory=74) == ""
    assert one.writes == 2


def test_each_resource_has_its_own_mark():
    one = Amphora()
    one.send(times=5, conntrack=95)
    one.send(times=6, conntrack=95, cpu=95)
    assert one.mark == "conntrack"
    assert one.send(times=5, conntrack=95, cpu=95) == "cpu,conntrack"
    assert one.send(times=11, cpu=95) == "cpu", "a resource that is not measured any more is not near its limit"


def test_a_mark_that_has_just_changed_needs_ten_intervals_to_change_again():
    one = Amphora()
    one.send(times=11, cpu=90)
    for used in (70, 90) * 20:
        one.send(cpu=used)
    assert (one.mark, one.writes) == ("cpu", 1)


def test_a_single_heartbeat_without_a_measurement_ends_no_count():
    one = Amphora()
    one.send(times=9, connections=95)
    one.send()
    assert one.send(connections=95) == "connections"
    assert one.send(times=10) == "connections"
    assert one.send() == ""


def test_a_silence_is_no_usage_above_the_limit():
    one = Amphora()
    one.send(cpu=95)
    one.now += 20 * INTERVAL
    assert one.send(times=10, cpu=95) == ""
    assert one.send(cpu=95) == "cpu"


def test_heartbeats_that_are_not_read_during_overload_show_no_lasting_usage():
    limits, reports = NearLimits(INTERVAL, LIMIT), AmphoraReports()
    assert reports.accept(Heartbeat("am", 1, 1, Report(1, usage={"cpu": 95})), 100.0)
    assert limits.find_changed(reports.take_updated(), {}) == {}
    for order in range(2, 30):
        assert reports.accept_time("am", (1, order), 100.0 + INTERVAL * order)
        assert limits.find_changed(reports.take_updated(), {}) == {}, "the usage is that of 100.0"
    for order in range(30, 41):
        assert reports.accept(Heartbeat("am", 1, order, Report(1, usage={"cpu": 95})), 100.0 + INTERVAL * order)
        assert limits.find_changed(reports.take_updated(), {}) == ({"am": "cpu"} if order == 40 else {})


def test_unknown_resources_are_ignored():
    assert Amphora().send(times=20, anything=100) == ""


def test_a_restarted_health_manager_keeps_the_mark():
    one = Amphora()
    one.send(times=11, cpu=95)
    one.limits = NearLimits(INTERVAL, LIMIT)
    assert one.send(times=30, cpu=80) == "cpu"
    assert one.send(times=11, cpu=10) == ""
    one.limits.retain(set())


@pytest.mark.parametrize(
    ("document", "accepted"),
    [
        (b'{"usage":{"cpu":0,"memory":100}}', True),
        (b"{}", True),
        (b'{"usage":{"cpu":101}}', False),
        (b'{"usage":{"cpu":-1}}', False),
        (b'{"usage":{"cpu":"much"}}', False),
        (b'{"usage":{"' + b"x" * 65 + b'":1}}', False),
        (b'{"usage":{' + b",".join(b'"r%d":1' % number for number in range(17)) + b"}}", False),
    ],
)
def test_the_usage_in_a_heartbeat_is_limited(document, accepted):
    try:
        msgspec.json.decode(document, type=Report)
    except msgspec.ValidationError:
        assert not accepted
    else:
        assert accepted


def test_the_mark_is_written_once(database):
    manager = HealthManager(database)
    manager.load_balancer()
    # With an interval of 0 s, a mark changes with the first heartbeat that contradicts it.
    manager.writer = StatusWriter(manager.trying, manager.reports, interval=0.0, near_limit=LIMIT)

    done = []

    def send(used):
        manager.sequence += 1
        report = Report(1, {}, {}, "am1", usage={"cpu": used})
        assert manager.reports.accept(Heartbeat("am1", 7, manager.sequence, report), time.monotonic())
        manager.flush()
        done.append(tuple(manager.trying.done))
        return manager.database.read(lambda c: c.execute(sa.select(amphora.c.near_limit)).scalar_one())

    assert send(90) == "cpu"
    done.clear()
    assert [send(used) for used in (95, 80, 99)] == ["cpu"] * 3
    assert done == [("read",)] * 3
    assert send(10) is None
