# SPDX-License-Identifier: Apache-2.0
"""The audit of Octavia: if Octavia rolls a request back, its objects become the desired state again."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import sqlalchemy as sa
from octavia_sockets import OctaviaSockets

from amphora_driver.database.tables import desired_object, duty, job, object_status, request
from amphora_driver.model.enums import Algorithm, Kind, ListenerProtocol, PoolProtocol
from amphora_driver.model.loadbalancer import Listener, LoadBalancer, Member, Pool, Vip
from amphora_driver.provider_agent import sync_transactions
from amphora_driver.provider_agent.status_reporter import Reporter
from amphora_driver.store import desired_objects, status_outbox
from amphora_driver.store.requests import RequestRecorder

VIP = Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1")
LISTENER = Listener(
    id="li", loadbalancer_id="lb", protocol=ListenerProtocol.HTTP, protocol_port=80, default_pool_id="po"
)
MEMBER = Member(id="me", pool_id="po", address="192.0.2.1", protocol_port=80, weight=1)
POOL = Pool(
    id="po",
    loadbalancer_id="lb",
    protocol=PoolProtocol.HTTP,
    lb_algorithm=Algorithm.ROUND_ROBIN,
    members=(MEMBER,),
)
TREE = LoadBalancer(id="lb", project_id="demo", vip=VIP, listeners=(LISTENER,), pools=(POOL,))
KEPT_MEMBER = {"member_id": "me", "pool_id": "po", "address": "192.0.2.1", "protocol_port": 80, "weight": 1}


def kept(*members, name=""):
    pool = {
        "pool_id": "po",
        "loadbalancer_id": "lb",
        "protocol": "HTTP",
        "lb_algorithm": "ROUND_ROBIN",
        "members": list(members),
    }
    listener = {
        "listener_id": "li",
        "loadbalancer_id": "lb",
        "protocol": "HTTP",
        "protocol_port": 80,
        "default_pool_id": "po",
        "l7policies": [],
    }
    return {
        "loadbalancer_id": "lb",
        "project_id": "demo",
        "name": name,
        "vip_address": "198.51.100.10",
        "vip_subnet_id": "s1",
        "vip_network_id": "n1",
        "vip_port_id": "p1",
        "pools": [pool],
        "listeners": [listener],
    }


@pytest.fixture
def octavia(tmp_path):
    with OctaviaSockets(tmp_path) as sockets:
        sockets.trees["lb"] = kept(KEPT_MEMBER)
        yield sockets


@pytest.fixture
def more_options():
    return "audit_after = 0\naudit_interval = 0"


@pytest.fixture
def recorder(database):
    recorder = RequestRecorder(database, lambda node: None)
    recorder.create_load_balancer(TREE, read_back=False)
    return recorder


@pytest.fixture
def reporter(conf, database, octavia, recorder):
    reporter = Reporter(conf, database)
    reporter.run_once()
    reporter.run_once()
    return reporter


def row(database):
    return database.read(lambda c: c.execute(sa.select(job)).one())


def members(database):
    tree = database.read(lambda c: desired_objects.load_tree(c, "lb"))
    return {one.id: one.weight for one in tree.pools[0].members}


def serve(database):
    def write(connection):
        generation = row(database).generation
        connection.execute(job.update().values(applied=generation, dirty=False))
        status_outbox.confirm_generation(connection, "lb", generation, {})

    database.write(write)


def test_a_recorded_request_needs_no_correction(database, reporter):
    assert (row(database).generation, row(database).committed) == (1, 1)


def test_a_member_that_octavia_rolled_back_is_removed(recorder, database, reporter, octavia):
    recorder.create_object(Kind.MEMBER, msgspec.structs.replace(MEMBER, id="ghost", address="192.0.2.2"))
    serve(database)
    reporter.run_once()
    assert members(database) == {"me": 1}
    assert (row(database).generation, row(database).committed, row(database).dirty) == (3, 3, True)
    assert "ghost" not in database.read(lambda c: c.execute(sa.select(object_status.c.object_id)).scalars().all())
    reporter.run_once()
    assert row(database).generation == 3, "one correction"


def test_a_change_that_octavia_rolled_back_is_reverted(recorder, database, reporter, octavia):
    recorder.update_object(Kind.MEMBER, "me", {"weight": 7})
    serve(database)
    reporter.run_once()
    assert members(database) == {"me": 1}


def test_a_change_that_octavia_committed_stays(recorder, database, reporter, octavia):
    octavia.trees["lb"] = kept({**KEPT_MEMBER, "weight": 7})
    recorder.update_object(Kind.MEMBER, "me", {"weight": 7})
    serve(database)
    reporter.run_once()
    assert (members(database), row(database).generation) == ({"me": 7}, 2)


def test_an_object_in_deletion_causes_no_correction(recorder, database, reporter, octavia):
    """Octavia returns the object until its DELETED report, without a mark of the deletion."""
    recorder.delete_object(Kind.MEMBER, "me")
    reporter.run_once()
    assert (members(database), row(database).generation) == ({}, 2)


def batch(recorder, *members):
    made = [
        msgspec.structs.replace(MEMBER, id=one, address=f"192.0.2.{number}") for number, one in enumerate(members, 7)
    ]
    recorder.set_members("po", [(one.id, lambda one=one: one, {}) for one in made])


def test_a_member_batch_that_octavia_rolled_back_deletes_no_member(recorder, database, reporter, octavia):
    batch(recorder, "new")
    serve(database)
    octavia.statuses.clear()
    reporter.run_once()
    assert members(database) == {"me": 1, "new": 1}
    assert "DELETED" not in str(octavia.statuses), "a DELETED report would remove the member from Octavia"
    assert row(database).dirty
    serve(database)
    reporter.run_once()
    reporter.run_once()
    assert "DELETED" not in str(octavia.statuses)
    assert (row(database).committed, members(database)) == (row(database).generation, {"me": 1})


def test_a_member_batch_that_octavia_committed_is_applied(recorder, database, reporter, octavia):
    new = {**KEPT_MEMBER, "member_id": "new", "address": "192.0.2.7"}
    # Octavia's tree after the removal of the first member.
    octavia.trees["lb"], octavia.trees["new"] = kept(new), new
    batch(recorder, "new")
    serve(database)
    reporter.run_once()
    reporter.run_once()
    assert (members(database), row(database).generation) == ({"new": 1}, 2)
    assert {"id": "me", "provisioning_status": "DELETED"} in octavia.statuses[-1]["members"]


def test_a_request_during_the_query_is_not_lost(recorder, database, reporter, octavia):
    recorder.update_object(Kind.MEMBER, "me", {"weight": 7})
    serve(database)
    asked = reporter.library.get_loadbalancer

    class Meanwhile:
        def __getattr__(self, name):
            return getattr(reporter.library, name)

        def get_loadbalancer(self, one):
            found = asked(one)
            recorder.update_object(Kind.MEMBER, "me", {"weight": 9})
            return found

    library = Meanwhile()
    reporter._auditor._library = lambda: library
    reporter.run_once()
    assert (members(database), row(database).generation) == ({"me": 9}, 3)


def test_changes_before_the_reporters_start_are_compared(conf, recorder, database, reporter, octavia):
    recorder.update_object(Kind.MEMBER, "me", {"weight": 7})
    serve(database)
    database.write(lambda c: c.execute(job.update().values(committed=2)))
    database.write(lambda c: c.execute(sa.text("DELETE FROM duty")))
    another = Reporter(conf, database)
    another.run_once()
    another.run_once()
    assert members(database) == {"me": 1}


# --- objects in deletion -----------------------------------------------------------------------------------------


def pools(database):
    tree = database.read(lambda c: desired_objects.load_tree(c, "lb"))
    return [one.id for one in tree.pools], [one.default_pool_id for one in tree.listeners]


def test_a_pool_in_deletion_causes_no_correction(recorder, database, reporter, octavia):
    """Octavia keeps the listener's reference until the pool's DELETED report."""
    recorder.delete_object(Kind.POOL, "po")
    for _ in range(3):
        reporter.run_once()
    assert (pools(database), row(database).generation) == (([], [None]), 2)
    # A later audit still compares the load balancer.
    serve(database)
    octavia.trees["lb"] = {**kept(name="x"), "pools": [], "listeners": [{**kept()["listeners"][0]}]}
    octavia.trees["lb"]["listeners"][0]["default_pool_id"] = None
    reporter.run_once()
    assert (pools(database), row(database).generation) == (([], [None]), 3), "the audit restores the name"


def test_a_failed_object_in_deletion_causes_no_correction(recorder, database, reporter):
    recorder.delete_object(Kind.POOL, "po")
    reporter.run_once()
    database.write(lambda c: status_outbox.fail_generation(c, "lb", 2, "no"))
    reporter.run_once()
    reporter.run_once()
    assert row(database).generation == 2


def test_an_unservable_object_is_compared(recorder, database, reporter):
    """The failing value may be the one that Octavia rolled back."""
    recorder.update_object(Kind.MEMBER, "me", {"weight": 7})
    reporter.run_once()
    database.write(lambda c: status_outbox.fail_generation(c, "lb", 2, "no"))
    reporter.run_once()
    assert members(database) == {"me": 1}


def refuse_deletion_reports(recorder, database, reporter, octavia):
    """Delete a pool whose DELETED report Octavia refuses, while the load balancer is served without it."""
    recorder.delete_object(Kind.POOL, "po")
    serve(database)
    for one in ("po", "me"):
        reporter._refused[one] = (float("inf"), 60.0)


def test_a_pool_with_a_refused_deletion_report_is_no_difference(recorder, database, reporter, octavia):
    refuse_deletion_reports(recorder, database, reporter, octavia)
    octavia.asked.clear()
    reporter.run_once()
    assert "loadbalancers" in [one["object"] for one in octavia.asked], "the audit compared the load balancer"
    assert (pools(database), row(database).generation) == (([], [None]), 2)


def test_a_deletion_during_the_query_is_not_reverted(recorder, database, reporter, octavia):
    refuse_deletion_reports(recorder, database, reporter, octavia)
    octavia.trees["lb"] = kept(KEPT_MEMBER, name="x")
    asked = reporter.library.get_loadbalancer

    class Meanwhile:
        def get_loadbalancer(self, one):
            found = asked(one)
            due = database.read(lambda c: status_outbox.list_due_reports(c, 10))
            database.write(lambda c: status_outbox.mark_reported(c, due))
            return found

    library = Meanwhile()
    reporter._auditor._library = lambda: library
    reporter.run_once()
    assert database.read(lambda c: c.execute(sa.select(desired_object).where(desired_object.c.removed)).all()) == []
    assert (pools(database), row(database).generation) == (([], [None]), 3), (
        "the audit restores the name and not the pool"
    )


# --- several batches at once -------------------------------------------------------------------------------------


def shown(one, number):
    return {**KEPT_MEMBER, "member_id": one, "address": f"192.0.2.{number}"}


def reported_members(octavia):
    return [one for document in octavia.statuses for one in document.get("members", ())]


def test_a_batch_is_judged_by_its_own_members(recorder, database, reporter, octavia):
    batch(recorder, "one")
    batch(recorder, "two")
    # Octavia committed the first batch and not the second: "one" exists, "me" is in deletion.
    octavia.trees["one"] = shown("one", 7)
    octavia.trees["lb"] = kept(KEPT_MEMBER, shown("one", 7))
    serve(database)
    reporter.run_once()
    assert set(members(database)) == {"one", "two"}
    serve(database)
    reporter.run_once()
    reporter.run_once()
    assert {"id": "me", "provisioning_status": "DELETED"} in reported_members(octavia)
    assert {"id": "one", "provisioning_status": "DELETED"} not in reported_members(octavia)


def test_an_earlier_lost_batch_is_found_behind_a_committed_one(recorder, database, reporter, octavia):
    batch(recorder, "one")
    batch(recorder, "two")
    octavia.trees["two"] = shown("two", 7)
    octavia.trees["lb"] = kept(KEPT_MEMBER, shown("two", 7))
    serve(database)
    reporter.run_once()
    assert set(members(database)) == {"me", "two"}
    assert {"id": "me", "provisioning_status": "DELETED"} not in reported_members(octavia)


def test_a_later_change_confirms_the_batch(recorder, database, reporter, octavia):
    batch(recorder, "new")
    recorder.update_object(Kind.MEMBER, "new", {"weight": 9})
    # Octavia lost the update and committed the batch.
    octavia.trees["new"] = shown("new", 7)
    octavia.trees["lb"] = kept(shown("new", 7))
    serve(database)
    reporter.run_once()
    reporter.run_once()
    assert {"id": "me", "provisioning_status": "DELETED"} in reported_members(octavia)
    assert members(database) == {"new": 1}


def test_a_batch_that_changes_members_is_judged_by_the_change(recorder, database, reporter, octavia):
    recorder.create_object(Kind.MEMBER, msgspec.structs.replace(MEMBER, id="other", address="192.0.2.9"))
    octavia.trees["lb"] = kept(KEPT_MEMBER, shown("other", 9))
    serve(database)
    reporter.run_once()
    octavia.trees["other"] = shown("other", 9)
    recorder.set_members("po", [("other", lambda: None, {"weight": 5})])
    (found,) = database.read(lambda c: sync_transactions.list_member_batches(c, row(database)))
    assert (found.sample.id, found.created, found.removed) == ("other", False, ["me"])
    reporter.run_once()
    assert set(members(database)) == {"me", "other"}


def test_a_lost_batch_does_not_block_the_deletion_of_its_load_balancer(recorder, database, reporter, octavia):
    batch(recorder, "new")
    recorder.delete_load_balancer("lb")
    reporter.run_once()
    assert row(database).committed == row(database).generation


# --- duty and worker threads ---------------------------------------------------------------------------------------


def test_a_returning_duty_owner_rereads_changes(recorder, database, reporter, octavia):
    database.write(lambda c: c.execute(duty.update().values(owner="another", leased_until=time.time() + 90)))
    reporter._held_until = 0.0
    reporter.run_once()
    # The other owner passes the barrier, and is killed before its comparison.
    recorder.update_object(Kind.MEMBER, "me", {"weight": 7})
    serve(database)
    database.write(lambda c: c.execute(job.update().values(committed=2)))
    database.write(lambda c: c.execute(duty.update().values(leased_until=0.0)))
    reporter.run_once()
    assert members(database) == {"me": 1}


def test_objects_in_progress_are_always_compared(recorder, database, reporter):
    recorder.update_object(Kind.MEMBER, "me", {"weight": 7})
    database.write(lambda c: c.execute(request.update().values(accepted_at=0.0)))
    assert database.read(lambda c: sync_transactions.list_recently_changed(c, 1.0)) == ["lb"]
    serve(database)
    assert database.read(lambda c: sync_transactions.list_recently_changed(c, 1.0)) == []


def test_a_comparison_blocks_no_request(conf, recorder, database, octavia):
    asked, answer = threading.Semaphore(0), threading.Event()
    with ThreadPoolExecutor(4) as auditing:
        reporter = Reporter(conf, database, auditors=auditing)
        reporter.run_once()
        library = reporter.library

        class Slow:
            def get_loadbalancer(self, one):
                asked.release()
                assert answer.wait(30)
                return library.get_loadbalancer(one)

        slow = Slow()
        reporter._auditor._library = lambda: slow
        serve(database)
        try:
            reporter.run_once()
            while not asked.acquire(timeout=0.1):
                reporter.run_once()
            recorder.update_object(Kind.MEMBER, "me", {"weight": 7})
            serve(database)
            octavia.statuses.clear()
            reporter.run_once()
            assert row(database).committed == 2
            assert "ACTIVE" in str(octavia.statuses)
            assert not asked.acquire(timeout=0.1), "one comparison at a time"
        finally:
            answer.set()


def test_an_object_without_an_answer_is_retried_later(database, reporter):
    class Away:
        asked = 0

        def get_loadbalancer(self, one):
            self.asked += 1
            raise OSError(one)

    away = Away()
    reporter._auditor._library = lambda: away
    serve(database)
    for _ in range(4):
        reporter.run_once()
    assert away.asked == 1
    reporter._auditor._due["lb"] = 0.0
    reporter.run_once()
    assert away.asked == 2
    assert reporter._auditor._backoffs["lb"] == 30.0
