# SPDX-License-Identifier: Apache-2.0
"""A jump of the database clock makes no row old and delays no process."""

import math
import time
from types import SimpleNamespace

import pytest
import sqlalchemy as sa

from amphora_driver.database import clock, engine
from amphora_driver.database.tables import duty, job
from amphora_driver.queue import jobs

HOUR = 3600.0
LONGEST = 120.0


@pytest.fixture
def database(any_database):
    return any_database


def add(database, load_balancer_id, **more):
    values = {"load_balancer_id": load_balancer_id, "op": "apply", "generation": 1, "dirty": True, "epoch": 4}
    database.write(lambda c: c.execute(job.insert().values(**{**values, **more})))


def rows(database):
    found = database.read(lambda c: c.execute(sa.select(job)).all())
    return {row.load_balancer_id: row for row in found}


def test_due_times_and_leases_of_a_fast_clock_are_shortened(database):
    now = database.now()
    add(database, "paused", due_at=now + HOUR)
    add(database, "leased", due_at=0.0, owner="dead", leased_until=now + HOUR)
    one = jobs.Jobs(database, "one", 15.0)
    assert one.claim() is None
    assert one.clamp_due_times(LONGEST) == 2
    assert one.claim().load_balancer_id == "paused"
    left = rows(database)["leased"]
    assert (left.owner, left.epoch) == ("dead", 4), "the owner keeps its lease"
    assert left.leased_until == pytest.approx(now + 15.0, abs=5.0)


def test_late_leases_are_kept(database):
    now = database.now()
    add(database, "paused", due_at=now + LONGEST - 5)
    add(database, "leased", due_at=0.0, owner="another", leased_until=now + 55)
    add(database, "settled", due_at=0.0, dirty=False)
    before = rows(database)
    assert jobs.Jobs(database, "one", 15.0).clamp_due_times(LONGEST) == 0
    assert rows(database) == before


def test_a_duty_held_by_a_fast_clock_is_free(database):
    def hold(owner):
        return jobs.acquire_duty(database, "x", owner, 10.0)

    assert hold("one")
    assert not hold("two")
    database.write(lambda c: c.execute(duty.update().values(leased_until=clock.now(c) + 90.0)))
    assert not hold("two"), "another process may have a longer lease time configured"
    database.write(lambda c: c.execute(duty.update().values(leased_until=clock.now(c) + HOUR)))
    assert hold("two")
    assert not hold("one")


class Times:
    """Fake values of the time module."""

    def __init__(self, monkeypatch):
        self.wall, self.steady, self.took = 2e9, 500.0, 0.0
        told = SimpleNamespace(time=lambda: self.wall, monotonic=self._monotonic)
        monkeypatch.setattr(engine, "time", told)
        monkeypatch.setattr(clock, "time", told)

    def _monotonic(self):
        self.steady += self.took
        self.wall += self.took
        return self.steady

    def go(self, seconds, ahead=0.0):
        self.steady += seconds
        self.wall += seconds + ahead


@pytest.fixture
def times(monkeypatch):
    return Times(monkeypatch)


@pytest.fixture
def local(tmp_path):
    return engine.Database(f"sqlite:///{tmp_path}/driver.sqlite")


@pytest.mark.parametrize("ahead", [HOUR, -HOUR, 3.0])
def test_after_a_clock_jump_the_seconds_since_it_are_counted(times, local, caplog, ahead):
    local.now()
    times.go(70.0)
    assert local.seconds_since_clock_jump() == math.inf
    times.go(1.0, ahead)
    assert local.seconds_since_clock_jump() == 0.0
    assert f"database clock jumped by {ahead:+.1f} s" in caplog.text
    times.go(40.0)
    assert local.seconds_since_clock_jump() == 40.0
    assert len(caplog.records) == 1


def test_a_slewed_clock_is_no_jump(times, local):
    for _ in range(100):
        times.go(30.0, 0.015)
        assert local.seconds_since_clock_jump() == math.inf


def test_a_suspended_process_sees_no_clock_jump(times, local):
    local.now()
    times.took = 50.0
    assert local.seconds_since_clock_jump() == math.inf


def test_the_clock_offset_of_a_server(monkeypatch, times):
    """The offset is queried every half minute and added to the local clock."""
    ahead = 1000.0
    database = engine.Database("postgresql+psycopg://user@nowhere/nothing")
    monkeypatch.setattr(database, "read", lambda _: (times.steady, times.steady + ahead, times.steady))
    assert database.now() == times.steady + 1000.0
    ahead += HOUR
    times.go(10.0)
    assert database.seconds_since_clock_jump() == math.inf, "the offset is not queried yet"
    times.go(25.0)
    assert database.now() == times.steady + 1000.0 + HOUR
    assert database.seconds_since_clock_jump() == 0.0
    times.go(100.0)
    assert database.seconds_since_clock_jump() == 100.0


def test_now_is_close_to_the_system_clock(local):
    assert local.now() == pytest.approx(time.time(), abs=1.0)


def test_a_slow_connection_does_not_make_the_clock_inexact(database):
    """The database of these tests is on this machine, so its clock is the one of this machine."""
    database.dispose()
    for one in database.engines:
        sa.event.listen(one, "do_connect", lambda *_given: time.sleep(0.3))
    assert database.now() == pytest.approx(time.time(), abs=0.1)
