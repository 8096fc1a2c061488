# SPDX-License-Identifier: Apache-2.0
"""The status reporter makes a notification due in the transaction that records Octavia's acceptance."""

import pytest
import sqlalchemy as sa
from octavia_sockets import OctaviaSockets

from amphora_driver.database.tables import job, object_status
from amphora_driver.model.enums import Kind, ListenerProtocol
from amphora_driver.model.loadbalancer import Listener, LoadBalancer, Vip
from amphora_driver.notifications import outbox
from amphora_driver.provider_agent.status_reporter import Reporter
from amphora_driver.store import status_outbox
from amphora_driver.store.requests import RequestRecorder

VIP = Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1")
TREE = LoadBalancer(id="lb", project_id="demo", vip=VIP)
LISTENER = Listener(id="li", loadbalancer_id="lb", protocol=ListenerProtocol.HTTP, protocol_port=80)
READ_BACK = {
    "loadbalancer_id": "lb", "project_id": "demo", "admin_state_up": True, "vip_address": "198.51.100.10",
    "vip_subnet_id": "s1", "vip_network_id": "n1", "vip_port_id": "p1", "pools": [], "listeners": [],
    "availability_zone": None,
}  # fmt: skip


@pytest.fixture
def more_options():
    return "[amp_notifications]\nenabled = true"


@pytest.fixture
def octavia(tmp_path):
    with OctaviaSockets(tmp_path) as sockets:
        sockets.trees["lb"] = READ_BACK
        yield sockets


@pytest.fixture
def recorder(database):
    made = RequestRecorder(database, lambda node: None, announce=outbox.announce)
    made.create_load_balancer(TREE, read_back=False)
    return made


@pytest.fixture
def reporter(conf, database, octavia, monkeypatch):
    made = Reporter(conf, database)
    monkeypatch.setattr(made._auditor, "run_due", lambda: None)  # the tree of the fake Octavia never changes
    return made


def serve(database, generation):
    def write(connection):
        connection.execute(job.update().values(applied=generation))
        status_outbox.confirm_generation(connection, "lb", generation, {})

    database.write(write)


def due(database):
    return [one.event.value for one in database.read(lambda connection: outbox.list_due(connection, 100))]


def test_each_notification_follows_octavias_acceptance(recorder, database, reporter, octavia):
    reporter.run_once()
    assert due(database) == [], "the load balancer is not served"
    serve(database, 1)
    assert due(database) == [], "Octavia has not accepted ACTIVE"
    octavia.refuse = lambda document: ("loadbalancers", "lb") if "provisioning_status" in str(document) else None
    reporter.run_once()
    assert due(database) == [], "Octavia refuses ACTIVE"
    octavia.refuse = lambda document: None
    reporter._refused.clear()
    reporter.run_once()
    assert due(database) == ["create"]
    recorder.create_object(Kind.LISTENER, LISTENER)
    serve(database, 2)
    reporter.run_once()
    assert due(database) == ["create"], "a change of a child has no notification"
    recorder.delete_load_balancer("lb")
    serve(database, 3)
    reporter.run_once()
    assert due(database) == ["create", "delete"]
    remaining = database.read(lambda c: c.execute(sa.select(sa.func.count()).select_from(job)).scalar_one())
    assert remaining == 0, "the notification of a deletion outlives the load balancer"


def test_an_error_has_no_notification_until_the_load_balancer_recovers(recorder, database, reporter, octavia):
    database.write(lambda connection: status_outbox.fail_generation(connection, "lb", 1, "no host"))
    reporter.run_once()
    assert octavia.statuses[-1] == {"loadbalancers": [{"id": "lb", "provisioning_status": "ERROR"}]}
    assert due(database) == []
    serve(database, 1)
    reporter.run_once()
    assert due(database) == ["create"]


def test_a_crash_after_octavias_acceptance_loses_no_notification(recorder, database, reporter, conf, monkeypatch):
    serve(database, 1)
    with monkeypatch.context() as crash:
        crash.setattr(status_outbox, "mark_reported", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            reporter.run_once()
    assert due(database) == [], "the transaction is rolled back as a whole"
    another = Reporter(conf, database, reporter._name)
    another.run_once()
    assert due(database) == ["create"]
    version = sa.select(object_status.c.version - object_status.c.reported)
    assert database.read(lambda c: c.execute(version).scalar_one()) == 0


def test_without_notifications_the_reporter_executes_no_statement_about_them(recorder, database, reporter, conf):
    conf.set_override("enabled", False, "amp_notifications")
    serve(database, 1)
    statements = []
    sa.event.listen(database.engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    reporter.run_once()
    assert any("object_status" in one for one in statements)
    assert not [one for one in statements if "notification" in one]
    assert due(database) == []
