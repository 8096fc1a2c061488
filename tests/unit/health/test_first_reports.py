# SPDX-License-Identifier: Apache-2.0
"""The first heartbeats that a new health manager process receives, with a real database."""

import time

import pytest
from test_status_writer import HealthManager

from amphora_driver.health.heartbeat_codec import Heartbeat
from amphora_driver.health.status import ListenerReport, PoolReport, Report
from amphora_driver.model.enums import Kind
from amphora_driver.model.loadbalancer import Member

DEGRADED = {"lb1": "DEGRADED", "li1": "ONLINE", "po1": "DEGRADED", "me1": "ONLINE", "me2": "ERROR"}


@pytest.fixture
def manager(database):
    made = HealthManager(database)
    made.load_balancer()
    return made


def send_difference(manager, full):
    """Send a difference about the listener and one member."""
    manager.sequence += 1
    pools = {"po1:li1": PoolReport("UP", {"me1": "UP"})}
    report = Report(2, {"li1": ListenerReport("OPEN", 1, 6, 6, 0, 6)}, pools, "am1", full=full)
    assert manager.reports.accept(Heartbeat("am1", 7, manager.sequence, report), time.monotonic())


def test_a_new_process_writes_no_status_before_the_first_complete_report(manager):
    manager.recorder.create_object(Kind.MEMBER, Member(id="me2", pool_id="po1", address="192.0.2.2", protocol_port=80))
    manager.say(me2="DOWN", generation=2)
    complete = manager.sequence
    manager.flush()
    assert manager.operating() == DEGRADED
    manager.start()
    send_difference(manager, complete)
    manager.flush()
    assert manager.operating() == DEGRADED
    manager.say(me2="DOWN", generation=2)
    manager.flush()
    assert manager.operating() == DEGRADED
    manager.say(me2="UP", generation=2)
    manager.flush()
    assert set(manager.operating().values()) == {"ONLINE"}
