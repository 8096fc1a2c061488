# SPDX-License-Identifier: Apache-2.0
"""The release of a lease after waits, pre-emption and failures, and requests that make a job due earlier."""

import time

import migrated
import msgspec
import pytest
import sqlalchemy as sa

from amphora_driver.database.engine import Database
from amphora_driver.database.tables import job
from amphora_driver.errors import LeaseLost
from amphora_driver.model.loadbalancer import LoadBalancer, Vip
from amphora_driver.queue.jobs import Jobs, guard_lease
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
    RequestRecorder(database, lambda node: None).create_load_balancer(TREE, read_back=True)
    yield database
    database.dispose()


@pytest.fixture
def jobs(database):
    return Jobs(database, "me", 60.0)


def row(database):
    return database.read(lambda c: c.execute(sa.select(job)).one())


def test_a_waiting_job_is_due_later_without_an_attempt(database, jobs):
    database.write(lambda c: c.execute(job.update().values(attempts=3, error="before")))
    before = time.time()
    jobs.defer(jobs.claim(), 1, 30.0)
    found = row(database)
    assert (found.owner, found.dirty, found.attempts, found.error) == (None, True, 3, "before")
    assert before + 29 < found.due_at < time.time() + 31
    assert jobs.claim() is None


def test_a_due_job_is_claimed(database, jobs):
    jobs.defer(jobs.claim(), 1, 30.0)
    jobs.make_due(["another"])
    assert jobs.claim() is None
    jobs.make_due([LB])
    assert jobs.claim() is not None


def test_a_request_during_the_job_makes_it_due(database, jobs):
    lease = jobs.claim()
    RequestRecorder(database, lambda node: None).delete_load_balancer(LB)
    jobs.defer(lease, 1, 30.0)
    assert jobs.claim() is not None


def test_a_read_back_during_the_job_makes_it_due(database, jobs):
    lease = jobs.claim()
    database.write(lambda c: c.execute(job.update().values(read_back=False)))
    jobs.defer(lease, 1, 30.0, readable=False)
    assert jobs.claim() is not None


def test_a_preempted_job_is_due_at_once(database, jobs):
    database.write(lambda c: c.execute(job.update().values(attempts=3)))
    jobs.yield_lease(jobs.claim())
    lease = jobs.claim()
    assert lease.attempts == 3


def test_a_failure_does_not_delay_a_request_made_during_the_job(database, jobs):
    lease = jobs.claim()
    jobs.retry_later(lease, 30.0, "no", 1)
    assert (row(database).attempts, jobs.claim()) == (1, None)
    jobs.make_due([LB])
    lease = jobs.claim()
    RequestRecorder(database, lambda node: None).delete_load_balancer(LB)
    jobs.retry_later(lease, 30.0, "no", 1)
    assert row(database).attempts == 0, "no controller has tried the deletion"
    assert jobs.claim() is not None


def test_failed_jobs_yield_to_new_ones(database, jobs):
    jobs.retry_later(jobs.claim(), 0.0, "no")
    assert jobs.claim(fresh=True) is None
    assert jobs.claim() is not None


def test_the_leases_of_a_dead_process_are_free(database, jobs):
    lease = Jobs(database, "dead", 60.0).claim()
    assert jobs.release_leases("dead") == 1
    assert jobs.claim().epoch == lease.epoch + 1
    with pytest.raises(LeaseLost):
        Jobs(database, "dead", 60.0).yield_lease(lease)


def test_a_crash_loop_runs_after_other_jobs(database, jobs):
    Jobs(database, "dead", 60.0).claim()
    another = msgspec.structs.replace(TREE, id="another")
    RequestRecorder(database, lambda node: None).create_load_balancer(another, read_back=True)
    assert jobs.release_leases("dead") == 1
    assert [jobs.claim(fresh=True).load_balancer_id for _ in range(2)] == ["another", LB]


def test_jobs_that_crash_controllers_leave_time_for_others(database, jobs):
    for died in range(3):
        jobs.make_due([LB])
        Jobs(database, "dead", 60.0).claim()
        before = database.now()
        jobs.release_leases("dead")
        assert before + 0.5 * died <= row(database).due_at <= database.now() + 0.5 * died


def crashes(database):
    return row(database).crashes


def test_crashes_are_counted_however_they_are_detected(database, jobs):
    Jobs(database, "dead", 60.0).claim()
    jobs.release_leases("dead")
    assert crashes(database) == 1
    late = Jobs(database, "late", 0.0).claim()
    assert late.crashes == 1
    lease = jobs.claim()
    assert (lease.crashes, crashes(database)) == (2, 2), "the dead process has lost its lease"


@pytest.mark.parametrize(
    "lives",
    [
        lambda j, one, _: j.complete(one, 1),
        lambda j, one, _: j.defer(one, 1, 0.0),
        lambda j, one, _: j.yield_lease(one),
        lambda j, one, _: j.retry_later(one, 0.0, "no"),
        lambda j, one, database: database.write(lambda c: guard_lease(c, one)),
        lambda j, one, database: database.write(lambda c: guard_lease(c, one, applied=1)),
    ],
    ids=["finished", "waits", "preempted", "failed", "marked", "applied"],
)
def test_a_surviving_job_is_no_crash(database, jobs, lives):
    database.write(lambda c: c.execute(job.update().values(crashes=3)))
    lives(jobs, jobs.claim(), database)
    assert crashes(database) == 0


def test_a_clean_end_counts_no_attempt(database, jobs):
    jobs.claim()
    assert jobs.release_leases() == 1
    assert (row(database).attempts, crashes(database)) == (0, 0)


@pytest.mark.parametrize("give_back", [lambda j, one: j.defer(one, 1, 1.0), lambda j, one: j.yield_lease(one)])
def test_a_former_owner_releases_nothing(database, jobs, give_back):
    lease = jobs.claim()
    database.write(lambda c: c.execute(job.update().values(owner="another", epoch=9)))
    with pytest.raises(LeaseLost):
        give_back(jobs, lease)
    assert row(database).owner == "another"
