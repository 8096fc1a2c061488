# SPDX-License-Identifier: Apache-2.0
"""Leases: one owner at a time; a former owner cannot write."""

import threading
import time
from contextlib import suppress

import pytest
import sqlalchemy as sa

from amphora_driver.database.tables import URGENT, amphora, job
from amphora_driver.errors import LeaseLost
from amphora_driver.model.amphora import AmphoraState
from amphora_driver.queue import jobs
from amphora_driver.store import amphorae, failovers


@pytest.fixture
def database(any_database):
    return any_database


def add(database, load_balancer_id="lb", **more):
    values = {"load_balancer_id": load_balancer_id, "op": "apply", "generation": 1, "due_at": 0.0, "epoch": 0}
    database.write(lambda c: c.execute(job.insert().values(**{**values, **more})))


def row(database):
    return database.read(lambda c: c.execute(sa.select(job)).one())


def test_two_controllers_never_own_the_same_load_balancer(database):
    add(database)
    one, two = jobs.Jobs(database, "one", 30), jobs.Jobs(database, "two", 30)
    lease = one.claim()
    assert (lease.load_balancer_id, lease.epoch) == ("lb", 1)
    assert two.claim() is None
    assert one.claim() is None
    one.complete(lease, 1)
    assert two.claim() is not None, "a desired generation that is not applied is due again"


def collide(database, monkeypatch, between=lambda: None):
    """Let each transaction fail once at its end, as after a conflict of two Galera nodes, and then be repeated."""
    write = database.write

    class Collision(Exception):
        pass

    def repeated(work):
        def fail(connection):
            work(connection)
            raise Collision

        with suppress(Collision):
            write(fail)
        between()
        return write(work)

    monkeypatch.setattr(database, "write", repeated)


def test_a_claim_that_collided_takes_one_of_the_oldest_due_jobs(database, monkeypatch):
    for number in range(40):
        add(database, f"lb{number:02}", due_at=float(number))
    chosen_from = []
    monkeypatch.setattr(jobs.random, "choice", lambda ids: chosen_from.extend(ids) or ids[-1])
    collide(database, monkeypatch)
    lease = jobs.Jobs(database, "one", 30).claim()
    assert chosen_from == [f"lb{number:02}" for number in range(16)], "the controllers still take old jobs first"
    assert (lease.load_balancer_id, lease.epoch) == ("lb15", 1)
    owned = database.read(lambda c: c.execute(sa.select(job.c.load_balancer_id).where(job.c.owner == "one")).all())
    assert [tuple(one) for one in owned] == [("lb15",)]


def test_a_claim_that_collided_finds_nothing_if_the_other_controller_has_the_only_job(database, monkeypatch):
    add(database)
    other = jobs.Jobs(database, "other", 30)
    write = database.write

    def take():
        with monkeypatch.context() as patch:
            patch.setattr(database, "write", write)
            assert other.claim() is not None

    collide(database, monkeypatch, between=take)
    assert jobs.Jobs(database, "one", 30).claim() is None
    assert row(database).owner == "other"


def test_a_claim_of_a_hint_that_collided_takes_no_other_job(database, monkeypatch):
    add(database, "lb0")
    add(database, "lb1", due_at=1.0)
    collide(database, monkeypatch)
    assert jobs.Jobs(database, "one", 30).claim("lb1").load_balancer_id == "lb1"


def test_an_expired_lease_is_taken_over_and_its_former_owner_writes_nothing(database):
    add(database)
    one, two = jobs.Jobs(database, "one", 0.05), jobs.Jobs(database, "two", 30)
    old = one.claim()
    database.write(lambda c: c.execute(job.update().values(leased_until=time.time() - 1)))
    new = two.claim()
    assert new.epoch == old.epoch + 1
    for late in (
        lambda: one.complete(old, 1),
        lambda: one.retry_later(old, 1, "late"),
        lambda: database.write(lambda c: jobs.guard_lease(c, old)),
        lambda: database.read(lambda c: jobs.check_lease(c, old)),
    ):
        with pytest.raises(LeaseLost):
            late()
    assert (row(database).owner, row(database).epoch) == ("two", new.epoch)


def test_a_request_accepted_during_a_job_makes_it_due_again(database):
    add(database)
    one = jobs.Jobs(database, "one", 30)
    lease = one.claim()
    database.write(lambda c: c.execute(job.update().values(generation=2, applied=1)))
    one.complete(lease, 1)
    assert one.claim() is not None
    lease = jobs.Lease(load_balancer_id="lb", owner="one", epoch=row(database).epoch, attempts=0)
    database.write(lambda c: c.execute(job.update().values(applied=2)))
    one.complete(lease, 2)
    assert one.claim() is None


@pytest.mark.parametrize("end", ["finish", "finish for now", "wait", "postpone"])
def test_urgent_mark_survives_the_end_of_a_job(database, end):
    """Each database, because some evaluate assignments from left to right."""
    add(database, applied=1, attempts=3, due_at=URGENT)
    one = jobs.Jobs(database, "one", 30)
    lease = one.claim()
    assert row(database).due_at == 0.0, "the claim removes the urgent mark"
    assert not database.read(lambda c: jobs.check_lease(c, lease))[2]
    now = database.now()
    why = failovers.FailoverTrigger(cause=failovers.Cause.SILENT, reason="silent")
    values = {"id": "a1", "load_balancer_id": "lb", "role": "STANDALONE", "state": "ready", "heartbeat_key": b""}
    database.write(lambda c: c.execute(amphora.insert().values(**values, confirmed=1, created_at=0.0)))
    assert database.write(lambda c: failovers.open_failovers(c, "lb", None, why, now)) == 1
    assert database.read(lambda c: jobs.check_lease(c, lease))[2]
    {
        "finish": lambda: one.complete(lease, 1),
        "finish for now": lambda: one.complete(lease, 1, now + 100),
        "wait": lambda: one.defer(lease, 1, 100),
        "postpone": lambda: one.retry_later(lease, 100, "it failed", 1),
    }[end]()
    found = row(database)
    assert (found.dirty, found.owner, found.due_at, found.attempts) == (True, None, 0.0, 0)
    assert one.claim() is not None


def test_a_read_back_that_ends_during_a_job_makes_it_due(database):
    add(database, read_back=True)
    one = jobs.Jobs(database, "one", 30)
    one.complete(one.claim(), 1)
    assert one.claim() is None, "the provider agent reads the tree first"
    database.write(lambda c: c.execute(job.update().values(read_back=True, dirty=True)))
    lease = one.claim()
    database.write(lambda c: c.execute(job.update().values(read_back=False, dirty=True)))
    one.complete(lease, 1)
    assert one.claim() is not None, "the tree came during the job"


def test_a_lost_configuration_during_a_job_makes_it_due(database):
    add(database, applied=1)
    one = jobs.Jobs(database, "one", 30)
    lease = one.claim()
    database.write(lambda c: amphorae.insert_amphora(c, "am", "lb", "STANDALONE", b"key"))
    database.write(lambda c: amphorae.update_amphora(c, "am", confirmed=1, state=AmphoraState.READY))
    assert database.write(lambda c: amphorae.lower_confirmed(c, "am", 1, 0))
    one.complete(lease, 1)
    again = one.claim()
    assert again is not None
    database.write(lambda c: amphorae.update_amphora(c, "am", confirmed=1))
    one.complete(again, 1)
    assert one.claim() is None


def test_a_job_is_due_again_at_the_given_time(database):
    add(database, applied=1)
    one = jobs.Jobs(database, "one", 30)
    later = time.time() + 60
    one.complete(one.claim(), 1, later)
    assert one.claim() is None
    assert one.next_due() == later
    database.write(lambda c: c.execute(job.update().values(due_at=time.time() - 1)))
    one.complete(one.claim(), 1)
    assert one.claim() is None, "the due time counts once"


def test_user_requests_do_not_wait_for_a_back_off(database):
    add(database, applied=1)
    one = jobs.Jobs(database, "one", 30)
    lease = one.claim()
    database.write(lambda c: c.execute(job.update().values(generation=2)))
    one.complete(lease, 1, time.time() + 60)
    assert one.claim() is not None


def test_only_leases_of_running_jobs_are_renewed(database):
    add(database)
    add(database, "forgotten")
    one = jobs.Jobs(database, "one", 30)
    one.claim(), one.claim()
    database.write(lambda c: c.execute(job.update().values(leased_until=1.0)))
    one.renew_leases({"lb"})
    two = jobs.Jobs(database, "two", 30)
    assert two.claim().load_balancer_id == "forgotten", "a lease that was not released expires"
    assert two.claim() is None


def test_a_lost_configuration_at_the_end_of_a_job_makes_it_due(database):
    """`take_back` has locked both rows and is about to commit while the controller releases the lease."""
    add(database, applied=1)
    database.write(lambda c: amphorae.insert_amphora(c, "a", "lb", "STANDALONE", b"key"))
    database.write(lambda c: c.execute(amphora.update().values(state="ready", confirmed=1)))
    one = jobs.Jobs(database, "one", 30)
    lease = one.claim()
    ending = threading.Thread(target=one.complete, args=(lease, 1))

    def take_back(connection):
        amphorae.lower_confirmed(connection, "a", 1, 0)
        ending.start()
        # The release waits for this commit; 0.5 s suffice to start it on a busy machine.
        ending.join(0.5)
        assert ending.is_alive()

    database.write(take_back)
    ending.join(10)
    assert not ending.is_alive()
    assert (row(database).owner, bool(row(database).dirty)) == (None, True)
    assert one.claim() is not None


def test_a_locked_row_does_not_end_other_leases(database):
    if database.engine.dialect.name == "sqlite":
        pytest.skip("it locks no rows")
    add(database, "held")
    add(database, "free")
    one = jobs.Jobs(database, "one", 30)
    one.claim(), one.claim()
    database.write(lambda c: c.execute(job.update().values(leased_until=1.0)))

    def hold(connection):
        connection.execute(job.update().where(job.c.load_balancer_id == "held").values(error="busy"))
        one.renew_leases({"held", "free"})

    database.write(hold)
    two = jobs.Jobs(database, "two", 30)
    assert two.claim().load_balancer_id == "held", "the renewal skipped the locked row"
    assert two.claim() is None, "the other lease is renewed"
    database.write(lambda c: c.execute(job.update().values(owner="one", leased_until=1.0)))
    one.renew_leases({"held", "free"})
    assert two.claim() is None, "the next renewal includes the row"


def test_a_failed_job_waits_for_its_retry_time(database):
    add(database)
    one = jobs.Jobs(database, "one", 30)
    one.retry_later(one.claim(), 60, "no answer")
    assert one.claim() is None
    assert (row(database).attempts, row(database).error) == (1, "no answer")
    assert one.next_due() == pytest.approx(time.time() + 60, abs=5)


def test_a_duty_has_one_holder_and_moves_when_it_is_released(database):
    assert jobs.acquire_duty(database, "reporter", "one", 30)
    assert not jobs.acquire_duty(database, "reporter", "two", 30)
    assert jobs.acquire_duty(database, "reporter", "one", 30)
    jobs.release_duty(database, "reporter", "one")
    assert jobs.acquire_duty(database, "reporter", "two", 30)
    assert not jobs.acquire_duty(database, "reporter", "one", 30)
