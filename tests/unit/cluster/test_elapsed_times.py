# SPDX-License-Identifier: Apache-2.0
"""The elapsed time of drains and time-outs, while the database clock is set and controllers start."""

import math

import pytest

from amphora_cluster.controller.elapsed import ElapsedTimes, PurgeClock

NOW = 1_000_000.0
LONG = 10_000.0


class Process:
    """One controller, with the monotonic clock of its host and the database clock."""

    def __init__(self, uptime=0.0):
        self.steady, self.clock, self.jumped_at = 500.0, NOW, -math.inf
        self.times = ElapsedTimes(lambda: self.steady - self.jumped_at, lambda: self.steady)
        self.steady += uptime

    def wait(self, seconds):
        self.steady += seconds
        self.clock += seconds

    def set_clock(self, seconds):
        self.clock += seconds
        self.jumped_at = self.steady

    def elapsed(self, recorded, group="g"):
        return self.times.of_group(group, self.clock)("s", recorded)


@pytest.fixture
def process():
    return Process()


def test_the_begin_is_seen(process):
    assert process.elapsed(NOW) == 0
    process.wait(7)
    assert process.elapsed(NOW) == 7


@pytest.mark.parametrize("seconds", [1.9, 3600.0, -3600.0])
def test_a_clock_that_is_set_changes_nothing_for_a_process_that_saw_the_begin(process, seconds):
    process.elapsed(NOW)
    process.wait(7)
    process.set_clock(seconds)
    process.wait(1)
    assert process.elapsed(NOW) == 8


def test_a_process_that_watched_the_clock_relies_on_it():
    process = Process(uptime=LONG)
    assert process.elapsed(NOW - 30) == 28, "a jump of less than two seconds is not noticed"


def test_a_new_process_counts_from_the_first_sight(process):
    assert process.elapsed(NOW - 30) == 0
    process.wait(30)
    assert process.elapsed(NOW - 30) == 30


def test_no_process_relies_on_the_clock_soon_after_a_jump():
    """Another process may record times of the old clock for some time."""
    process = Process(uptime=LONG)
    process.set_clock(3600)
    process.wait(40)
    old = process.clock - 3600
    assert process.elapsed(old) == 0
    process.wait(40)
    assert process.elapsed(old) == 40


def test_another_begin_is_another_time(process):
    process.elapsed(NOW)
    process.wait(20)
    assert process.elapsed(NOW + 20) == 0
    assert process.elapsed(NOW) == 0, "a pass that did not ask for the time has forgotten it"


def test_groups_are_independent_and_forgotten(process):
    process.elapsed(NOW)
    process.wait(5)
    assert process.elapsed(NOW, "other") == 0
    process.wait(3595)
    assert process.elapsed(NOW, "other") == 3595
    assert set(process.times._seen) == {"other"}


class TestPurgeClock:
    def test_a_jump_forward_counts_later(self, process):
        clock = PurgeClock(lambda: process.clock, 900.0, lambda: process.steady)
        assert clock.now() == NOW
        process.set_clock(3600.0)
        for seconds in (60, 60, 700):
            process.wait(seconds)
            assert clock.now() == process.clock - 3600
        process.wait(80)
        assert clock.now() == process.clock

    def test_a_clock_that_is_set_back_counts_at_once(self, process):
        clock = PurgeClock(lambda: process.clock, 900.0, lambda: process.steady)
        clock.now()
        process.set_clock(-3600.0)
        assert clock.now() == process.clock
        process.set_clock(3600.0)
        process.wait(10)
        assert clock.now() == process.clock - 3600

    def test_a_slow_clock_falls_behind_by_its_drift_only(self, process):
        clock = PurgeClock(lambda: process.clock, 900.0, lambda: process.steady)
        for _ in range(100):
            process.wait(60)
            process.clock += 0.03
            assert process.clock - clock.now() <= 0.5
