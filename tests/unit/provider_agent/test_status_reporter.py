# SPDX-License-Identifier: Apache-2.0
"""The status reporter: reports to Octavia, their order, and failures of Octavia."""

import threading
import time

import pytest
import sqlalchemy as sa
from octavia_lib.api.drivers import exceptions as octavia_errors
from octavia_sockets import OctaviaSockets

from amphora_driver.database.tables import amphora, duty, job, request
from amphora_driver.health import statistics
from amphora_driver.model.enums import Kind, ListenerProtocol
from amphora_driver.model.loadbalancer import Listener, LoadBalancer, Profile, Vip
from amphora_driver.provider_agent import status_reporter as module
from amphora_driver.provider_agent.status_reporter import Reporter
from amphora_driver.store import desired_objects, process_registry, status_outbox
from amphora_driver.store.requests import RequestRecorder

VIP = Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1")
TREE = LoadBalancer(id="lb", project_id="demo", vip=VIP)
LISTENER = Listener(id="li", loadbalancer_id="lb", protocol=ListenerProtocol.HTTP, protocol_port=80)
READ_BACK = {
    "loadbalancer_id": "lb",
    "project_id": "demo",
    "admin_state_up": True,
    "vip_address": "198.51.100.10",
    "vip_subnet_id": "s1",
    "vip_network_id": "n1",
    "vip_port_id": "p1",
    "pools": [],
    "availability_zone": None,
    "listeners": [
        {
            "listener_id": "li",
            "loadbalancer_id": "lb",
            "protocol": "HTTP",
            "protocol_port": 80,
            "l7policies": [
                {
                    "l7policy_id": "po",
                    "listener_id": "li",
                    "action": "REJECT",
                    "position": 1,
                    "admin_state_up": True,
                    "rules": [
                        {
                            "l7rule_id": "ru",
                            "l7policy_id": "po",
                            "type": "PATH",
                            "compare_type": "EQUAL_TO",
                            "value": "/",
                        }
                    ],
                }
            ],
        }
    ],
}


@pytest.fixture
def octavia(tmp_path):
    with OctaviaSockets(tmp_path) as sockets:
        sockets.trees["lb"] = READ_BACK
        yield sockets


@pytest.fixture
def recorder(database):
    return RequestRecorder(database, lambda node: None)


@pytest.fixture
def reporter(conf, database, octavia):
    return Reporter(conf, database)


def serve(database, generation):
    def write(connection):
        connection.execute(job.update().values(applied=generation))
        status_outbox.confirm_generation(connection, "lb", generation, {})

    database.write(write)


def row(database):
    return database.read(lambda c: c.execute(sa.select(job)).one())


BARRIER = {"loadbalancers": [{"id": "lb", "operating_status": "OFFLINE"}]}
ACTIVE = {"loadbalancers": [{"id": "lb", "provisioning_status": "ACTIVE"}]}


def test_a_barrier_precedes_all_other_reports(recorder, database, reporter, octavia):
    recorder.create_load_balancer(TREE, read_back=False)
    serve(database, 1)
    reporter.run_once()
    assert octavia.statuses == [BARRIER, ACTIVE]
    reporter.run_once()
    assert len(octavia.statuses) == 2, "one report"


def test_a_load_balancer_not_committed_by_octavia_is_not_reported(recorder, database, reporter, octavia):
    del octavia.trees["lb"]
    recorder.create_load_balancer(TREE, read_back=False)
    serve(database, 1)
    assert reporter.run_once() < 0.5, "the next query is soon"
    assert octavia.statuses == [BARRIER]
    octavia.trees["lb"] = READ_BACK
    reporter._reader.retries.clear()
    reporter.run_once()
    assert octavia.statuses[-1] == ACTIVE


def test_an_uncommitted_load_balancer_is_removed(recorder, database, reporter, octavia):
    del octavia.trees["lb"]
    recorder.create_load_balancer(TREE, read_back=False)
    # The accepting host may have a wrong clock.
    database.write(lambda c: c.execute(request.update().values(accepted_at=0.0)))
    reporter.run_once()
    assert row(database).op == "apply"
    reporter._reader._unknown["lb"] -= 1000
    reporter._reader.retries.clear()
    reporter.run_once()
    assert (row(database).op, row(database).dirty) == ("delete", True)
    serve(database, row(database).generation)
    octavia.refuse = lambda document: ("loadbalancers", "lb")
    reporter.run_once()
    assert database.read(lambda c: c.execute(sa.select(job)).all()) == [], "no row is left"


def test_a_refusal_for_an_unknown_load_balancer_ends_its_reports(recorder, database, reporter, octavia):
    recorder.create_load_balancer(TREE, read_back=False)
    reporter.run_once()
    serve(database, 1)
    del octavia.trees["lb"]
    asked = []
    octavia.refuse = lambda document: asked.append(document) or ("loadbalancers", "lb")
    reporter._report_statuses()
    assert not reporter._report_statuses(), "the retry time after the refusal has not passed"
    assert asked == [ACTIVE, ACTIVE], "once with all due reports, and once alone"


def test_a_fully_populated_load_balancer_is_read_back(recorder, database, reporter):
    recorder.create_load_balancer(
        LoadBalancer(id="lb", project_id="demo", vip=VIP, listeners=(LISTENER,)), read_back=True
    )
    reporter.run_once()
    tree = database.read(lambda c: desired_objects.load_tree(c, "lb"))
    assert tree.listeners[0].l7policies[0].rules[0].value == "/"
    assert (row(database).read_back, row(database).dirty) == (False, True)
    serve(database, 1)
    found = database.read(lambda c: status_outbox.list_due_reports(c, 100))
    assert [one.kind for one in found][-1] is Kind.LOAD_BALANCER
    assert {one.object_id for one in found} == {"lb", "li", "po", "ru"}


def test_the_profile_survives_the_read_back(recorder, database, reporter, octavia):
    chosen = {
        "profile": Profile(compute="netns", network="local", timeout_tunnel=60000),
        "flavor": {"timeout_tunnel": 60000},
        "availability_zone": {"compute_zone": "z"},
    }
    # Octavia returns the zone by name, and the flavor in its current state.
    octavia.trees["lb"] = {**READ_BACK, "availability_zone": "zone-1", "flavor": {"timeout_tunnel": 5}}
    recorder.create_load_balancer(
        LoadBalancer(id="lb", project_id="demo", vip=VIP, listeners=(LISTENER,), **chosen), read_back=True
    )
    reporter.run_once()
    tree = database.read(lambda c: desired_objects.load_tree(c, "lb"))
    assert not row(database).read_back
    assert {name: getattr(tree, name) for name in chosen} == chosen


def test_an_unreadable_load_balancer_blocks_no_other(recorder, database, reporter, octavia):
    other = LoadBalancer(id="lb2", project_id="demo", vip=VIP)
    recorder.create_load_balancer(TREE, read_back=True)
    recorder.create_load_balancer(other, read_back=False)
    octavia.trees["lb"] = {**READ_BACK, "listeners": [{"listener_id": "li", "protocol": "CARRIER PIGEON"}]}
    octavia.trees["lb2"] = {**READ_BACK, "loadbalancer_id": "lb2"}

    def write(connection):
        connection.execute(job.update().where(job.c.load_balancer_id == "lb2").values(applied=1))
        status_outbox.confirm_generation(connection, "lb2", 1, {})

    database.write(write)
    reporter.run_once()
    assert octavia.statuses[-1] == {"loadbalancers": [{"id": "lb2", "provisioning_status": "ACTIVE"}]}
    octavia.trees["lb"] = READ_BACK
    reporter._reader.retries.clear()
    reporter.run_once()
    assert database.read(lambda c: desired_objects.load_tree(c, "lb")).listeners[0].l7policies


def test_a_refused_status_blocks_no_other(recorder, database, reporter, octavia):
    recorder.create_load_balancer(TREE, read_back=False)
    recorder.create_object(Kind.LISTENER, LISTENER)
    serve(database, 2)
    octavia.refuse = lambda document: ("listeners", "li") if "listeners" in document else None
    reporter.run_once()
    assert octavia.statuses == [BARRIER], "the load balancer stays PENDING while a report of a child is due"
    give_up(reporter)
    reporter.run_once()
    assert octavia.statuses == [BARRIER, ACTIVE]
    octavia.refuse = lambda document: None
    reporter._refused.clear()
    reporter.run_once()
    assert octavia.statuses[-1] == {"listeners": [{"id": "li", "provisioning_status": "ACTIVE"}]}


def test_a_temporary_refusal_is_retried_soon(recorder, database, reporter, octavia):
    recorder.create_load_balancer(TREE, read_back=False)
    recorder.create_object(Kind.LISTENER, LISTENER)
    serve(database, 2)
    octavia.refuse = lambda document: ("listeners", "li") if "listeners" in document else None
    reporter.run_once()
    octavia.refuse = lambda document: None
    deadline = time.monotonic() + 5
    while len(octavia.statuses) < 2:
        assert time.monotonic() < deadline
        reporter.run_once()
    assert octavia.statuses[1:] == [{"listeners": [{"id": "li", "provisioning_status": "ACTIVE"}], **ACTIVE}]


def give_up(reporter):
    """Act as after repeated refusals of the child."""
    reporter._refused = {"li": (time.monotonic() + 60, 60.0)}


def test_no_report_is_lost_while_octavia_is_unavailable(recorder, database, reporter, octavia):
    recorder.create_load_balancer(TREE, read_back=False)
    reporter.run_once()
    octavia.stop()
    serve(database, 1)
    with pytest.raises(octavia_errors.UpdateStatusError, match="No such file"):
        reporter.run_once()
    octavia.start()
    reporter.run_once()
    assert octavia.statuses[-1] == ACTIVE


def test_only_one_reporter_sends_reports(recorder, database, conf, reporter, octavia):
    recorder.create_load_balancer(TREE, read_back=False)
    reporter.run_once()
    other = Reporter(conf, database)
    serve(database, 1)
    other.run_once()
    assert octavia.statuses == [BARRIER]


def test_a_former_reporter_sends_no_report(recorder, database, conf, reporter, octavia, monkeypatch):
    monkeypatch.setattr(module, "_MAX_ROWS", 1)
    recorder.create_load_balancer(TREE, read_back=False)
    recorder.create_object(Kind.LISTENER, LISTENER)
    reporter.run_once()
    serve(database, 2)
    octavia.statuses.clear()

    class Slow:
        """octavia_lib's client; during its call another reporter takes the duty."""

        def update_loadbalancer_status(self, said):
            library.update_loadbalancer_status(said)
            reporter._held_until = 0.0
            database.write(lambda c: c.execute(duty.update().values(owner="another", leased_until=time.time() + 90)))

    library, reporter._library = reporter.library, Slow()
    reporter.run_once()
    assert octavia.statuses == [{"listeners": [{"id": "li", "provisioning_status": "ACTIVE"}]}]


def test_a_reporter_suspended_after_its_query_sends_no_old_statuses(recorder, database, reporter, octavia, monkeypatch):
    recorder.create_load_balancer(TREE, read_back=False)
    reporter.run_once()
    serve(database, 1)
    octavia.statuses.clear()
    read = status_outbox.list_due_reports

    def read_and_stop(connection, *arguments):
        found = read(connection, *arguments)
        # Meanwhile another process has the duty and has sent newer statuses.
        connection.execute(duty.update().values(owner="another", leased_until=time.time() + 90))
        reporter._held_until = 0.0
        return found

    monkeypatch.setattr(status_outbox, "list_due_reports", read_and_stop)
    monkeypatch.setattr(database, "read", database.write)
    reporter.run_once()
    assert octavia.statuses == []


def test_the_duty_is_kept_during_a_report(recorder, database, conf, reporter, octavia, monkeypatch):
    """Octavia may take half a minute: an early successor's newer report would arrive first."""
    monkeypatch.setattr(process_registry, "HEARTBEAT_INTERVAL", 0.05)
    recorder.create_load_balancer(TREE, read_back=False)
    reporter.run_once()
    serve(database, 1)
    heard, answered, over = threading.Event(), threading.Event(), threading.Event()

    class Slow:
        def update_loadbalancer_status(self, said):
            heard.set()
            assert answered.wait(60)
            library.update_loadbalancer_status(said)
            over.set()

    library, reporter._library = reporter.library, Slow()
    until = lambda: database.read(lambda c: c.execute(sa.select(duty.c.leased_until)).scalar())  # noqa: E731 - asked twice
    thread = threading.Thread(target=reporter.run, args=(over.is_set,))
    thread.start()
    try:
        assert heard.wait(60)
        before, deadline = until(), time.monotonic() + 60
        while until() < before + 0.5:
            assert time.monotonic() < deadline, "the duty is not kept for ever"
            time.sleep(0.01)
        assert not Reporter(conf, database)._acquire_duty()
    finally:
        answered.set()
        thread.join(60)
    assert octavia.statuses[-1] == ACTIVE
    assert Reporter(conf, database)._acquire_duty(), "a clean shutdown releases the duty"


def test_an_unexpected_error_does_not_end_the_updates_of_the_registry(reporter, monkeypatch, caplog):
    """The thread of the registry also keeps the duty during a long report."""
    monkeypatch.setattr(process_registry, "HEARTBEAT_INTERVAL", 0.01)
    heartbeat, calls, over = process_registry.ProcessRegistration.heartbeat, [], threading.Event()

    def fail_once(self, *, working):
        calls.append(working)
        if len(calls) == 1:
            raise RuntimeError("a fault of ours")
        heartbeat(self, working=working)
        over.set()

    monkeypatch.setattr(process_registry.ProcessRegistration, "heartbeat", fail_once)
    thread = threading.Thread(target=reporter.run, args=(over.is_set,))
    thread.start()
    try:
        assert over.wait(30), "the thread has ended"
    finally:
        over.set()
        thread.join(60)
    assert "could not update its row in the process registry because of an unexpected error" in caplog.text


def test_a_reporter_without_octavia_releases_its_duty(recorder, database, conf, reporter, octavia):
    """The driver agent of its host has ended or hangs; those of other hosts run."""
    recorder.create_load_balancer(TREE, read_back=False)
    reporter.try_run_once()
    other = Reporter(conf, database)
    octavia.stop()
    serve(database, 1)
    reporter.try_run_once()
    octavia.start()
    reporter.try_run_once()
    assert octavia.statuses == [BARRIER], "the reporter leaves time for other reporters"
    other.try_run_once()
    assert octavia.statuses == [BARRIER, ACTIVE]


def test_a_single_reporter_continues_itself(recorder, database, conf, reporter, octavia):
    conf.set_override("poll_interval", 0.05, "amp_queue")
    recorder.create_load_balancer(TREE, read_back=False)
    reporter.try_run_once()
    octavia.stop()
    serve(database, 1)
    reporter.try_run_once()
    octavia.start()
    deadline = time.monotonic() + 60
    while octavia.statuses != [BARRIER, ACTIVE]:
        assert time.monotonic() < deadline, "the reporter has not taken the duty again"
        time.sleep(reporter.try_run_once())


def test_a_lost_duty_ends_a_round(recorder, database, reporter, octavia, monkeypatch):
    recorder.create_load_balancer(TREE, read_back=False)
    turns = iter([True, False, False, False])
    monkeypatch.setattr(reporter, "_acquire_duty", lambda: next(turns))
    reporter.run_once()
    assert (octavia.statuses, row(database).committed) == ([], 0)


def test_statistics_are_totals_over_all_former_and_current_amphorae(recorder, database, reporter, octavia):
    recorder.create_load_balancer(TREE, read_back=False)

    def numbers(amphora_id, total, active):
        return statistics.Row(
            listener_id="li",
            amphora_id=amphora_id,
            load_balancer_id="lb",
            active_connections=active,
            bytes_in=total,
            bytes_out=2 * total,
            request_errors=0,
            total_connections=total,
        )

    def write(connection):
        connection.execute(
            amphora.insert().values(
                id="new",
                load_balancer_id="lb",
                role="STANDALONE",
                state="ready",
                confirmed=1,
                heartbeat_key=b"",
                created_at=0.0,
            )
        )
        statistics.write_rows(connection, [numbers("gone", 40, 9), numbers("new", 2, 1)])

    database.write(write)
    reporter.run_once()
    reporter.report_statistics()
    reporter.report_statistics()
    assert octavia.statistics == [
        {
            "listeners": [
                {
                    "id": "li",
                    "active_connections": 1,
                    "bytes_in": 42,
                    "bytes_out": 84,
                    "request_errors": 0,
                    "total_connections": 42,
                }
            ]
        }
    ]
