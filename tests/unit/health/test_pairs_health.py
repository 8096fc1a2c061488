# SPDX-License-Identifier: Apache-2.0
"""Two amphorae, one word: the members of a pair are as the one with the VIPs sees them, and counters are of both."""

import time

import pytest
import sqlalchemy as sa

from amphora_driver.database.tables import amphora_heartbeat, job, object_status
from amphora_driver.health.amphora_reports import AmphoraReports
from amphora_driver.health.heartbeat_codec import Heartbeat
from amphora_driver.health.status import ListenerReport, PoolReport, Report
from amphora_driver.health.status_writer import StatusWriter
from amphora_driver.model.enums import ListenerProtocol, PoolProtocol
from amphora_driver.model.loadbalancer import Listener, LoadBalancer, Member, Pool, Vip
from amphora_driver.store import amphorae, listener_stats
from amphora_driver.store.requests import RequestRecorder

VIP = Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1")
MEMBER = Member(id="me", pool_id="po", address="192.0.2.1", protocol_port=80)
LISTENER = Listener(
    id="li", loadbalancer_id="lb", protocol=ListenerProtocol.HTTP, protocol_port=80, default_pool_id="po"
)
TREE = LoadBalancer(
    id="lb",
    project_id="demo",
    vip=VIP,
    listeners=(LISTENER,),
    pools=(Pool(id="po", loadbalancer_id="lb", protocol=PoolProtocol.HTTP, members=(MEMBER,)),),
)
EXPIRY = 15.0


def said(holds_vip, *, name="a", sequence=1):
    return Heartbeat(name, 1, sequence, Report(1, amphora_id=name, holds_vip=holds_vip))


class Talk:
    """The reports of amphorae, with the time of each."""

    def __init__(self):
        self.ledger = AmphoraReports(expiry=EXPIRY)
        self.sequence = 0

    def say(self, at, **holds):
        for name, holds_vip in holds.items():
            self.sequence += 1
            assert self.ledger.accept(said(holds_vip, name=name, sequence=self.sequence), at)

    def speaker(self, at):
        return self.ledger.authoritative_amphora(["a", "b"], at)


@pytest.fixture
def talk():
    return Talk()


def test_amphorae_that_have_no_vips_to_agree_on_all_count(talk):
    assert talk.speaker(0) is None
    talk.say(0, a=None, b=None)
    assert talk.speaker(0) is None


def test_status_follows_the_vip_holder(talk):
    for at in range(3):
        talk.say(at, a=False, b=True)
        assert talk.speaker(at) == "b"
        talk.say(at + 0.5, a=False)
        assert talk.speaker(at + 0.5) == "b"


def test_between_two_holders_the_last_one_goes_on_speaking(talk):
    talk.say(0, a=True, b=False)
    talk.say(1, a=False, b=False)
    assert talk.speaker(1) == "a"
    talk.say(2, a=False, b=True)
    assert talk.speaker(2) == "b"
    talk.say(3, a=False, b=False)
    assert talk.speaker(3) == "b"


def test_the_newer_vip_holder_has_precedence_over_a_dead_one(talk):
    talk.say(0, a=True, b=False)
    talk.say(4, b=True)
    assert talk.speaker(4) == "b"


def test_two_that_say_so_for_ever_do_not_take_turns(talk):
    talk.say(0, a=True, b=False)
    talk.say(1, b=True)
    speakers = set()
    for at in range(2, 9):
        talk.say(at, a=True, b=True)
        speakers.add(talk.speaker(at))
    assert speakers == {"b"}


def test_before_an_election_the_oldest_amphora_counts(talk):
    talk.say(0, b=False)
    assert talk.speaker(0) == "b"
    talk.say(1, a=False, b=False)
    assert talk.speaker(1) == "a"


def test_silent_amphora_has_no_statistics(talk):
    talk.say(0, a=True, b=False)
    talk.say(EXPIRY + 1, b=False)
    assert talk.speaker(EXPIRY + 1) == "b"


class House:
    """A pair of one load balancer and its health manager."""

    def __init__(self, database):
        self.database = database
        RequestRecorder(database, lambda node: None).create_load_balancer(TREE, read_back=False)
        for name, role in (("a", "MASTER"), ("b", "BACKUP")):
            database.write(lambda c, name=name, role=role: amphorae.insert_amphora(c, name, "lb", role, b"key"))
        database.write(lambda c: c.execute(job.update().values(committed=1)))
        self.sequence = 0
        self.ledger = AmphoraReports(expiry=EXPIRY)
        self.books = StatusWriter(database, self.ledger)

    def say(self, name, word, *, holds_vip, count=1, active=0, ago=0.0):
        self.sequence += 1
        listeners = {"li": ListenerReport("OPEN", active, count, count, 0, count)}
        report = Report(1, listeners, {"po:li": PoolReport("UP", {"me": word})}, name, holds_vip)
        assert self.ledger.accept(Heartbeat(name, 1, self.sequence, report), time.monotonic() - ago)

    def member(self):
        self.books.flush(last=True)
        query = sa.select(object_status.c.operating, object_status.c.version).where(object_status.c.object_id == "me")
        return self.database.read(lambda c: c.execute(query).one())


@pytest.fixture
def house(database):
    return House(database)


def test_two_views_of_a_member_do_not_flap(house):
    house.say("a", "UP", holds_vip=True)
    house.say("b", "DOWN", holds_vip=False)
    first = house.member()
    assert first.operating == "ONLINE", "clients are served"
    for _ in range(5):
        house.say("a", "UP", holds_vip=True)
        assert house.member() == first
        house.say("b", "DOWN", holds_vip=False)
        assert house.member() == first


def test_with_the_vips_the_view_changes_once(house):
    house.say("a", "UP", holds_vip=True)
    house.say("b", "DOWN", holds_vip=False)
    before = house.member()
    house.say("b", "DOWN", holds_vip=True)
    after = house.member()
    assert (after.operating, after.version) == ("ERROR", before.version + 1)
    house.say("a", "UP", holds_vip=False)
    assert house.member() == after


def test_a_member_the_standby_alone_cannot_reach_does_not_lower_anything(house):
    house.say("a", "UP", holds_vip=True)
    house.say("b", "DOWN", holds_vip=False)
    house.books.flush()
    rows = house.database.read(
        lambda c: c.execute(sa.select(object_status.c.object_id, object_status.c.operating)).all()
    )
    assert dict(rows) == dict.fromkeys(("lb", "li", "po", "me"), "ONLINE")


def test_counters_are_those_of_both_and_connections_those_of_the_living(house):
    house.say("a", "UP", holds_vip=True, count=100, active=7, ago=EXPIRY - 0.05)
    house.say("b", "UP", holds_vip=False, count=10, active=1)
    house.books.flush()
    (found,) = house.database.read(lambda c: listener_stats.list_due_totals(c, 10))
    assert (found.bytes_in, found.active_connections) == (110, 8)
    deadline = time.monotonic() + 10
    while found.active_connections != 2:
        assert time.monotonic() < deadline
        house.say("b", "UP", holds_vip=True, count=20, active=2)
        house.books.flush()
        (found,) = house.database.read(lambda c: listener_stats.list_due_totals(c, 10))
    assert (found.bytes_in, found.active_connections) == (120, 2), "what the dead one counted stays"


def test_a_partner_that_falls_silent_is_in_the_log_once(house, caplog):
    house.say("a", "UP", holds_vip=True, ago=EXPIRY + 1)
    for _ in range(3):
        house.say("b", "UP", holds_vip=True)
        house.books.flush()
    assert [one.getMessage() for one in caplog.records if "silent" in one.getMessage()] == [
        "amphora a of load balancer lb is silent, its partner sends heartbeats"
    ]


def test_vip_holder_is_recorded(house):
    house.say("a", "UP", holds_vip=True)
    house.say("b", "UP", holds_vip=False)
    house.books.flush(last=True)
    found = {one.id: one for one in house.database.read(lambda c: amphorae.load_amphorae(c, "lb"))}
    assert {name: one.holds_vip for name, one in found.items()} == {"a": True, "b": False}
    assert all(abs(one.heard_at - time.time()) < 60 for one in found.values())
    house.say("a", "UP", holds_vip=None)
    house.books.flush(last=True)
    rows = house.database.read(
        lambda c: c.execute(sa.select(amphora_heartbeat.c.amphora_id, amphora_heartbeat.c.holds_vip))
    )
    assert dict(rows.tuples().all()) == {"a": None, "b": False}
