# SPDX-License-Identifier: Apache-2.0
"""Pre-emption of a running job, with a real database."""

import migrated
import pytest

from amphora_driver.database.engine import Database
from amphora_driver.database.tables import URGENT, job
from amphora_driver.errors import DeadlinePassed, LeaseLost, Superseded
from amphora_driver.model.enums import Kind, ListenerProtocol
from amphora_driver.model.loadbalancer import Listener, LoadBalancer, Vip
from amphora_driver.queue.jobs import Jobs
from amphora_driver.reconcile.job import Job, find_preempted_jobs
from amphora_driver.store.requests import RequestRecorder

LB = "lb"
TREE = LoadBalancer(
    id=LB, project_id="demo", vip=Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1")
)


@pytest.fixture
def database(tmp_path):
    url = f"sqlite:///{tmp_path}/driver.sqlite"
    migrated.write(url)
    database = Database(url)
    RequestRecorder(database, lambda node: None).create_load_balancer(TREE, read_back=False)
    yield database
    database.dispose()


@pytest.fixture
def recorder(database):
    return RequestRecorder(database, lambda node: None)


@pytest.fixture
def running(database):
    lease = Jobs(database, "me", 60.0).claim()
    running = Job(lease, database, 60.0)
    running.record_observation(1, "apply")
    return running


@pytest.fixture(params=["ensure_may_act", "load_amphorae"])
def check(request, running):
    """Each check before an external effect in turn."""
    return getattr(running, request.param)


def reason(database, running):
    return database.read(lambda c: find_preempted_jobs(c, [running])).get(running)


def change(recorder):
    listener = Listener(id="listener", loadbalancer_id=LB, protocol=ListenerProtocol.HTTP, protocol_port=80)
    recorder.create_object(Kind.LISTENER, listener)


def test_the_read_for_a_plan_is_the_check_for_one_step(database, running, monkeypatch):
    database.read(running.read_state)
    assert (running.take_check(), running.take_check()) == (True, False)
    database.read(running.read_state)
    monkeypatch.setattr("amphora_driver.reconcile.job._CHECK_VALID_SECONDS", 0.0)
    assert not running.take_check()


@pytest.mark.parametrize("change", [{"owner": "another", "epoch": 9}, {"due_at": URGENT}])
def test_the_read_for_a_plan_is_no_check_without_the_lease_or_with_an_urgent_event(database, running, change):
    database.write(lambda c: c.execute(job.update().values(**change)))
    database.read(running.read_state)
    assert not running.take_check()


def test_another_thread_preempts_a_job_after_the_read_for_a_plan(database, running):
    database.read(running.read_state)
    running.preempt("the process ends", grace=30.0)
    with pytest.raises(Superseded, match="the process ends"):
        running.take_check()


def test_a_change_does_not_preempt_a_change(database, recorder, running, check):
    check()
    change(recorder)
    check()
    assert reason(database, running) is None


@pytest.mark.parametrize(("call", "words"), [("delete_load_balancer", "deletion"), ("fail_over", "fail-over")])
def test_a_more_urgent_request_preempts_a_change(database, recorder, running, check, call, words):
    getattr(recorder, call)(LB)
    assert words in reason(database, running)
    with pytest.raises(Superseded, match=words):
        check()
    assert running.is_preempted


def test_a_deletion_preempts_a_failover_and_a_change_does_not(recorder, running, check):
    recorder.fail_over(LB)
    running.record_observation(2, "apply")
    change(recorder)
    check()
    recorder.delete_load_balancer(LB)
    with pytest.raises(Superseded, match="deletion"):
        check()


def test_no_request_preempts_a_deletion(recorder, running):
    recorder.delete_load_balancer(LB)
    running.record_observation(2, "delete")
    running.ensure_may_act()


def test_a_preempted_job_ends_before_its_next_effect(running, check):
    running.preempt("the process ends", grace=30.0)
    assert not running.deadline.passed(), "a running request to an agent may finish"
    with pytest.raises(Superseded, match="the process ends"):
        check()


def test_an_expired_job_starts_no_step(database, running):
    late = Job(running.lease, database, 0.0)
    with pytest.raises(DeadlinePassed):
        late.ensure_may_act()


def test_a_job_without_its_lease_ends(database, running, check):
    database.write(lambda c: c.execute(job.update().values(owner="another", epoch=9)))
    assert "taken" in reason(database, running)
    with pytest.raises(LeaseLost):
        check()
