# SPDX-License-Identifier: Apache-2.0
"""The registry of control plane processes: heartbeats, draining, and duties."""

import socket
import time

import pytest
import sqlalchemy as sa

from amphora_driver.database.tables_fleet import process
from amphora_driver.queue.jobs import acquire_duty
from amphora_driver.store import process_registry
from amphora_driver.store.process_registry import ProcessKind, ProcessRegistration

HOST = socket.gethostname()


def rows(database, kind=None):
    return {one.name: one for one in database.read(lambda c: process_registry.list_processes(c, kind))}


def test_a_process_records_its_heartbeats(any_database):
    one = ProcessRegistration(any_database, "one", ProcessKind.CONTROLLER)
    ProcessRegistration(any_database, "two", ProcessKind.HEALTH_MANAGER).heartbeat()
    assert one.heartbeat(jobs=3) is False
    assert one.heartbeat(jobs=2, working=False) is False
    row = rows(any_database, ProcessKind.CONTROLLER)["one"]
    assert (row.jobs, row.beat, row.host, row.draining) == (2, 1, HOST, False)
    one.deregister()
    assert set(rows(any_database)) == {"two"}


def test_only_controllers_drain(database):
    one, two = (
        ProcessRegistration(database, "one", ProcessKind.CONTROLLER),
        ProcessRegistration(database, "two", ProcessKind.HEALTH_MANAGER),
    )
    one.heartbeat(), two.heartbeat()
    assert database.write(lambda c: process_registry.set_process_draining(c, "one", draining=True))
    assert not database.write(lambda c: process_registry.set_process_draining(c, "two", draining=True))
    assert (one.heartbeat(), two.heartbeat()) == (True, False)
    database.write(lambda c: process_registry.set_process_draining(c, "one", draining=False))
    assert one.heartbeat() is False


def test_a_draining_host_drains_controllers_started_later(any_database):
    one = ProcessRegistration(any_database, "one", ProcessKind.CONTROLLER)
    one.heartbeat()

    def drain(draining, host=HOST):
        return any_database.write(lambda c: process_registry.set_host_draining(c, host, "admin", draining=draining))

    assert drain(draining=True)
    assert not drain(draining=True)
    assert one.heartbeat() is True
    one.deregister()
    later = ProcessRegistration(any_database, "later", ProcessKind.CONTROLLER)
    assert later.heartbeat() is True
    assert set(any_database.read(process_registry.list_drained_hosts)) == {HOST}
    assert drain(draining=False)
    assert later.heartbeat() is False
    assert drain(draining=True, host="elsewhere")
    assert later.heartbeat() is False


def test_the_duties_of_each_owner(any_database):
    for name in ("b", "a"):
        acquire_duty(any_database, name, "one", 60)
    acquire_duty(any_database, "over", "two", -1)
    assert any_database.read(process_registry.list_duties) == {"one": ["a", "b"]}


@pytest.mark.parametrize("way", ["forgotten", "buried"])
def test_dead_processes_are_removed(database, way):
    for name in ("dead", "alive"):
        ProcessRegistration(database, name, ProcessKind.CONTROLLER).heartbeat()
    if way == "forgotten":
        database.write(lambda c: c.execute(sa.update(process).where(process.c.name == "dead").values(seen_at=1.0)))
        database.write(lambda c: process_registry.purge_silent_processes(c, time.time()))
    else:
        acquire_duty(database, "a duty", "dead", 60)
        database.write(lambda c: process_registry.remove_dead_process(c, "dead"))
        assert acquire_duty(database, "a duty", "alive", 60), "the duty is free before its lease expires"
    assert set(rows(database)) == {"alive"}


def test_a_process_without_a_row_keeps_draining(database):
    one = ProcessRegistration(database, "one", ProcessKind.CONTROLLER)
    one.heartbeat()
    database.write(lambda c: process_registry.set_process_draining(c, "one", draining=True))
    assert one.heartbeat() is True
    database.write(lambda c: process_registry.remove_dead_process(c, "one"))
    assert one.heartbeat() is True
    assert rows(database)["one"].draining
