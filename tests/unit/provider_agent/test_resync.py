# SPDX-License-Identifier: Apache-2.0
"""A resync after a loss or difference in Octavia: its tree is read and all statuses are reported again."""

import threading

import msgspec
import pytest
import sqlalchemy as sa
from octavia_lib.api.drivers import exceptions as octavia_errors
from octavia_sockets import OctaviaSockets

from amphora_driver.database.tables import job, object_status
from amphora_driver.errors import ConfigurationError, ModelError
from amphora_driver.model import from_octavia
from amphora_driver.model.enums import Algorithm, Kind, ListenerProtocol, Operating, PoolProtocol
from amphora_driver.model.loadbalancer import Listener, LoadBalancer, Member, Pool, Vip
from amphora_driver.provider_agent.status_reporter import Reporter
from amphora_driver.store import desired_objects, resyncs, status_outbox
from amphora_driver.store.requests import RequestRecorder

VIP = Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1")
LISTENER = Listener(
    id="li", loadbalancer_id="lb", protocol=ListenerProtocol.HTTP, protocol_port=80, default_pool_id="po"
)
MEMBER = Member(id="me", pool_id="po", address="192.0.2.1", protocol_port=80, weight=1)
POOL = Pool(
    id="po", loadbalancer_id="lb", protocol=PoolProtocol.HTTP, lb_algorithm=Algorithm.ROUND_ROBIN, members=(MEMBER,)
)
TREE = LoadBalancer(id="lb", project_id="demo", vip=VIP, listeners=(LISTENER,), pools=(POOL,))
KEPT_MEMBER = {"member_id": "me", "pool_id": "po", "address": "192.0.2.1", "protocol_port": 80, "weight": 1}


def kept(*members):
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
        "name": "web",
        "vip_address": "198.51.100.10",
        "vip_subnet_id": "s1",
        "vip_network_id": "n1",
        "vip_port_id": "p1",
        "pools": [pool],
        "listeners": [listener],
    }


@pytest.fixture
def more_options():
    # The audit does not compare changes in these tests.
    return "audit_after = 3600"


@pytest.fixture
def octavia(tmp_path):
    with OctaviaSockets(tmp_path) as sockets:
        sockets.trees["lb"] = kept(KEPT_MEMBER)
        yield sockets


@pytest.fixture
def recorder(database):
    recorder = RequestRecorder(database, lambda node: None)
    recorder.create_load_balancer(msgspec.structs.replace(TREE, name="web"), read_back=False)
    return recorder


@pytest.fixture
def reporter(conf, database, octavia, recorder):
    """A reporter; all objects are served and reported to Octavia."""
    reporter = Reporter(conf, database)
    reporter.run_once()
    serve(database)
    seen = [
        status_outbox.Observation(object_id=one, kind=kind, operating=Operating.ONLINE)
        for one, kind in (("lb", Kind.LOAD_BALANCER), ("me", Kind.MEMBER))
    ]
    database.write(lambda c: status_outbox.write_observations(c, "lb", seen))
    reporter.run_once()
    octavia.statuses.clear()
    octavia.asked.clear()
    return reporter


def row(database):
    return database.read(lambda c: c.execute(sa.select(job)).one())


def serve(database, generation=None):
    def write(connection):
        now = row(database).generation if generation is None else generation
        connection.execute(job.update().values(applied=now, dirty=False))
        status_outbox.confirm_generation(connection, "lb", now, {})

    database.write(write)


def ask(database, *ids, **more):
    database.write(lambda c: resyncs.request_resyncs(c, ids or ("lb",), database.now(), "me@here", **more))


def outcome(database, load_balancer_id="lb"):
    (found,) = database.read(lambda c: resyncs.list_resyncs(c, [load_balancer_id]))
    return found.outcome, found.detail


def said(octavia):
    """Return the received reports by call: id, provisioning status, operating status."""
    return [
        [
            (one["id"], one.get("provisioning_status"), one.get("operating_status"))
            for rows in document.values()
            for one in rows
        ]
        for document in octavia.statuses
    ]


def members(database):
    return {one.id for one in database.read(lambda c: desired_objects.load_tree(c, "lb")).pools[0].members}


def test_all_statuses_are_reported_while_changes_are_blocked(database, reporter, octavia):
    ask(database)
    reporter.run_once()
    reporter.run_once()
    locked, *others = said(octavia)
    assert locked == [("lb", "PENDING_UPDATE", None)], "changes are blocked first"
    (everything,) = others
    assert sorted(everything) == [
        ("lb", "ACTIVE", "ONLINE"),
        ("li", "ACTIVE", None),
        ("me", "ACTIVE", "ONLINE"),
        ("po", "ACTIVE", None),
    ]
    assert list(octavia.statuses[-1])[-1] == "loadbalancers", "changes are allowed again last"
    assert outcome(database) == ("done", None)
    assert row(database).generation == 1, "a resync causes no push"
    octavia.statuses.clear()
    reporter.run_once()
    assert octavia.statuses == [], "one resync"


def test_objects_of_octavia_are_recorded_and_active_once_served(database, reporter, octavia):
    octavia.trees["lb"] = kept({**KEPT_MEMBER, "weight": 7}, {**KEPT_MEMBER, "member_id": "back", "address": "::1"})
    ask(database)
    reporter.run_once()
    reporter.run_once()
    assert members(database) == {"me", "back"}
    found = {one[0]: one[1] for one in said(octavia)[-1]}
    assert found == {"li": "ACTIVE", "po": "ACTIVE", "lb": None, "me": None}, "these two get operating statuses only"
    assert outcome(database) == ("done", "member back exists only in Octavia; member me differs in weight")
    assert (row(database).generation, row(database).dirty) == (2, True)
    serve(database)
    reporter.run_once()
    assert {one[0]: one[1] for one in said(octavia)[-1]} == {"lb": "ACTIVE", "me": "ACTIVE", "back": "ACTIVE"}


def test_an_unconfirmed_object_waits_for_its_confirmation(database, reporter, octavia):
    """The status row was lost or edited by hand, so the confirmation is unknown."""
    database.write(
        lambda c: c.execute(object_status.update().where(object_status.c.object_id == "me").values(provisioning=None))
    )
    ask(database)
    reporter.run_once()
    reporter.run_once()
    found = {one[0]: one[1] for one in said(octavia)[-1]}
    assert found == {"li": "ACTIVE", "po": "ACTIVE", "lb": None, "me": None}
    assert (row(database).generation, row(database).committed, row(database).dirty) == (2, 2, True)
    serve(database)
    reporter.run_once()
    assert {one[0]: one[1] for one in said(octavia)[-1]} == {"lb": "ACTIVE", "me": "ACTIVE"}


def test_objects_that_octavia_lost_are_removed(database, reporter, octavia):
    octavia.trees["lb"] = kept()
    ask(database)
    reporter.run_once()
    reporter.run_once()
    assert members(database) == set()
    assert all(one[0] != "me" for call in said(octavia) for one in call), (
        "Octavia refuses reports about removed objects"
    )
    assert outcome(database) == ("done", "member me is missing in Octavia")


def test_a_load_balancer_in_change_is_resynced_later(database, reporter, octavia, recorder):
    octavia.trees["lb"] = kept({**KEPT_MEMBER, "weight": 7})
    recorder.update_object(Kind.MEMBER, "me", {"weight": 7})
    ask(database)
    reporter.run_once()
    assert all(one[1] is None for call in said(octavia) for one in call), (
        "only barriers while the load balancer is PENDING"
    )
    assert outcome(database)[0] is None
    assert "waits until all requests of its users" in outcome(database)[1]
    serve(database)
    reporter.run_once()
    octavia.statuses.clear()
    reporter._resyncer._not_before.clear()
    reporter.run_once()
    reporter.run_once()
    assert outcome(database) == ("done", None)
    assert said(octavia)[0][0] == ("lb", "PENDING_UPDATE", None)
    assert ("me", "ACTIVE", "ONLINE") in said(octavia)[-1]


@pytest.mark.parametrize("differs", [False, True])
def test_a_request_before_the_lock_is_not_reported_as_finished(database, reporter, octavia, recorder, differs):
    """Octavia's transaction is open while the resync sets PENDING: the call waits for it, and the rows contain it."""

    class Late:
        def __init__(self, library):
            self.library = library
            self.once = True

        def __getattr__(self, name):
            return getattr(self.library, name)

        def update_loadbalancer_status(self, document):
            if self.once and document["loadbalancers"][0].get("provisioning_status") == "PENDING_UPDATE":
                self.once = False
                recorder.update_object(Kind.MEMBER, "me", {"weight": 7})
                octavia.trees["lb"] = kept({**KEPT_MEMBER, "weight": 7})
            return self.library.update_loadbalancer_status(document)

    if differs:
        octavia.trees["lb"] = kept({**KEPT_MEMBER, "weight": 3})
    reporter._library = Late(reporter.library)
    ask(database)
    reporter.run_once()
    reporter.run_once()
    assert [one for call in said(octavia) for one in call if one[1] not in (None, "PENDING_UPDATE")] == []
    assert outcome(database)[0] is None
    assert row(database).generation == 2, "the generation of the user's request"
    serve(database)
    reporter._resyncer._not_before.clear()
    for _ in range(3):
        reporter.run_once()
    assert outcome(database) == ("done", None)
    assert ("lb", "ACTIVE", "ONLINE") in said(octavia)[-1]


def test_a_crash_after_the_lock_leaves_no_lock(conf, database, reporter, octavia):
    class Died(BaseException):
        pass

    class Dying:
        def __init__(self, library):
            self.library = library
            self.reads = 0

        def __getattr__(self, name):
            return getattr(self.library, name)

        def get_loadbalancer(self, one):
            self.reads += 1
            if self.reads == 2:
                raise Died
            return self.library.get_loadbalancer(one)

    reporter._library = Dying(reporter.library)
    ask(database)
    with pytest.raises(Died):
        reporter.run_once()
    assert said(octavia) == [[("lb", "PENDING_UPDATE", None)]]
    # The successor has the same name, and so the duty.
    another = Reporter(conf, database, reporter._name)
    another.run_once()
    another.run_once()
    assert ("lb", "ACTIVE", "ONLINE") in said(octavia)[-1]


def test_missing_secrets_do_not_block_the_report(database, reporter, octavia):
    class Silent:
        def __init__(self, library):
            self.library = library

        def __getattr__(self, name):
            return getattr(self.library, name)

        def get_loadbalancer(self, _):
            raise octavia_errors.DriverAgentTimeout(fault_string="no answer in 30 s")

    reporter._library = Silent(reporter.library)
    ask(database)
    reporter.run_once()
    reporter.run_once()
    assert ("lb", "ACTIVE", "ONLINE") in said(octavia)[-1]
    assert outcome(database)[0] == "unread"
    assert "every secret" in outcome(database)[1]


@pytest.mark.parametrize("reads", [1, 2])
@pytest.mark.parametrize("trouble", ["model", "sealing", "unforeseen"])
def test_invalid_objects_do_not_block_the_report(database, reporter, octavia, monkeypatch, reads, trouble):
    """Either of two reads may be the first with an invalid object; users must not wait for ever."""
    octavia.trees["lb"] = kept({**KEPT_MEMBER, "weight": 7})
    error = {
        "model": ModelError("express it", "it has no meaning"),
        "sealing": ConfigurationError("use the keys", "the file has no meaning"),
        "unforeseen": KeyError("no meaning"),
    }[trouble]
    left = [reads]

    def fails(real):
        def maybe(*arguments):
            left[0] -= 1
            if left[0] <= 0:
                raise error
            return real(*arguments)

        return maybe

    if trouble == "sealing":
        monkeypatch.setattr(reporter._resyncer._reader, "seal_secrets", fails(reporter._resyncer._reader.seal_secrets))
    else:
        monkeypatch.setattr(from_octavia, "load_balancer", fails(from_octavia.load_balancer))
    ask(database)
    reporter._resyncer.run_due()
    assert outcome(database)[0] == "unread"
    assert "no meaning" in outcome(database)[1]
    reporter.run_once()
    assert ("lb", "ACTIVE", "ONLINE") in said(octavia)[-1]
    assert row(database).generation == 1, "no object of an invalid tree is recorded"


def test_a_load_balancer_unknown_to_octavia_stays_unless_deletion_is_requested(database, reporter, octavia):
    del octavia.trees["lb"]
    ask(database)
    reporter.run_once()
    assert outcome(database)[0] == "unknown"
    assert row(database).op == "apply"
    ask(database, remove_unknown=True)
    reporter.run_once()
    assert outcome(database)[0] == "removed"
    assert (row(database).op, row(database).dirty) == ("delete", True)
    ask(database)
    reporter.run_once()
    assert outcome(database)[0] == "going"


def test_an_unrecorded_load_balancer_is_reported(database, reporter, octavia):
    octavia.trees["other"] = {**kept(KEPT_MEMBER), "loadbalancer_id": "other"}
    ask(database, "other", "nobody")
    reporter.run_once()
    assert outcome(database, "other")[0] == "unrecorded"
    assert "name web, VIP 198.51.100.10" in outcome(database, "other")[1]
    assert outcome(database, "nobody")[0] == "nowhere"
    assert said(octavia) == [], "no lock stays without an owner"
    ask(database, "other", remove_unknown=True)
    reporter.run_once()
    assert outcome(database, "other")[0] == "removed"
    (gone,) = said(octavia)
    assert {one[:2] for one in gone} == {(one, "DELETED") for one in ("me", "po", "li", "other")}
    assert next(reversed(octavia.statuses[0])) == "loadbalancers"


def test_an_uncommitted_load_balancer_is_resynced_later(database, reporter, octavia):
    database.write(lambda c: c.execute(job.update().values(committed=0)))
    reporter._resyncer.run_due()
    ask(database)
    reporter._resyncer.run_due()
    assert outcome(database) == (None, "waits until Octavia has committed its creation")


def test_a_resync_is_retried_while_octavia_is_unavailable(database, reporter, octavia):
    octavia.stop()
    ask(database)
    reporter._resyncer.run_due()
    found = outcome(database)
    assert found[0] is None
    assert "next attempt in 15 s" in found[1]
    octavia.start()
    reporter._resyncer._not_before.clear()
    reporter._resyncer.run_due()
    assert outcome(database) == ("done", None)


def test_resyncs_run_one_after_the_other(conf, database, reporter, octavia):
    """While a load balancer is read, no other process starts the next resync."""
    begun = []

    class WorkerThreads:
        def submit(self, work, *arguments):
            begun.append(threading.Thread(target=work, args=arguments))

    reporter._resyncer._executor = WorkerThreads()
    ask(database)
    reporter.run_once()
    reporter.run_once()
    assert len(begun) == 1
    begun[0].start()
    begun[0].join()
    assert outcome(database)[0] == "done"


def test_a_reporter_without_the_duty_starts_no_resync(database, reporter, octavia):
    ask(database)
    reporter._held_until = 0.0
    reporter._resyncer.run_due()
    assert (said(octavia), outcome(database)[0]) == ([], None)
