# SPDX-License-Identifier: Apache-2.0
"""Status and statistics of a pair: statuses are those of the VIP holder, counters are the sum of both amphorae."""

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


class PairReports:
    """The reports of two amphorae, with the time of each."""

    def __init__(self):
        self.reports = AmphoraReports(expiry=EXPIRY)
        self.sequence = 0

    def say(self, at, **holds):
        for name, holds_vip in holds.items():
            self.sequence += 1
            assert self.reports.accept(said(holds_vip, name=name, sequence=self.sequence), at)

    def shorten(self, at, *names):
        """Let heartbeats arrive of which only the time is read."""
        for name in names:
            self.sequence += 1
            assert self.reports.accept_time(name, (1, self.sequence), at)

    def speaker(self, at):
        return self.reports.authoritative_amphora(["a", "b"], at)


@pytest.fixture
def talk():
    return PairReports()


def test_without_vips_the_reports_of_all_amphorae_count(talk):
    assert talk.speaker(0) is None
    talk.say(0, a=None, b=None)
    assert talk.speaker(0) is None


def test_status_follows_the_vip_holder(talk):
    for at in range(3):
        talk.say(at, a=False, b=True)
        assert talk.speaker(at) == "b"
        talk.say(at + 0.5, a=False)
        assert talk.speaker(at + 0.5) == "b"


def test_between_two_holders_the_last_holders_report_counts(talk):
    talk.say(0, a=True, b=False)
    talk.say(1, a=False, b=False)
    assert talk.speaker(1) == "a"
    talk.say(2, a=False, b=True)
    assert talk.speaker(2) == "b"
    talk.say(3, a=False, b=False)
    assert talk.speaker(3) == "b"


def test_the_newer_vip_holder_has_precedence_over_a_dead_holder(talk):
    talk.say(0, a=True, b=False)
    talk.say(4, b=True)
    assert talk.speaker(4) == "b"


def test_two_permanent_holders_do_not_alternate(talk):
    talk.say(0, a=True, b=False)
    talk.say(1, b=True)
    speakers = set()
    for at in range(2, 9):
        talk.say(at, a=True, b=True)
        speakers.add(talk.speaker(at))
    assert speakers == {"b"}


def test_a_claim_that_was_not_read_again_during_overload_expires(talk):
    talk.say(5, a=False, b=True)
    talk.say(10, a=True)
    for at in range(11, 27):
        talk.shorten(at, "a", "b")
        assert talk.speaker(at) == "a"
    # The VIPs have moved back meanwhile.
    talk.say(27, b=True)
    talk.shorten(27, "a")
    assert talk.speaker(27) == "b"
    talk.say(28, a=True)
    assert talk.speaker(28) == "a", "both hold the VIPs, and the later claim counts"


def test_the_last_holder_counts_while_overload_hides_the_present_one(talk):
    talk.say(0, a=True, b=False)
    for at in range(1, 21):
        talk.shorten(at, "a")
        talk.say(at, b=False)
        assert talk.speaker(at) == "a"


def test_before_an_election_the_oldest_amphora_counts(talk):
    talk.say(0, b=False)
    assert talk.speaker(0) == "b"
    talk.say(1, a=False, b=False)
    assert talk.speaker(1) == "a"


def test_silent_amphora_has_no_statistics(talk):
    talk.say(0, a=True, b=False)
    talk.say(EXPIRY + 1, b=False)
    assert talk.speaker(EXPIRY + 1) == "b"


class RecordedPair:
    """A pair of one load balancer and its health manager."""

    def __init__(self, database):
        self.database = database
        RequestRecorder(database, lambda node: None).create_load_balancer(TREE, read_back=False)
        for name, role in (("a", "MASTER"), ("b", "BACKUP")):
            database.write(lambda c, name=name, role=role: amphorae.insert_amphora(c, name, "lb", role, b"key"))
        database.write(lambda c: c.execute(job.update().values(committed=1)))
        self.sequence = 0
        self.reports = AmphoraReports(expiry=EXPIRY)
        self.writer = StatusWriter(database, self.reports)

    def say(self, name, word, *, holds_vip, count=1, active=0, ago=0.0):
        self.sequence += 1
        listeners = {"li": ListenerReport("OPEN", active, count, count, 0, count)}
        report = Report(1, listeners, {"po:li": PoolReport("UP", {"me": word})}, name, holds_vip)
        assert self.reports.accept(Heartbeat(name, 1, self.sequence, report), time.monotonic() - ago)

    def member(self):
        self.writer.flush(last=True)
        query = sa.select(object_status.c.operating, object_status.c.version).where(object_status.c.object_id == "me")
        return self.database.read(lambda c: c.execute(query).one())


@pytest.fixture
def pair(database):
    return RecordedPair(database)


def test_different_member_states_of_a_pair_do_not_flap(pair):
    pair.say("a", "UP", holds_vip=True)
    pair.say("b", "DOWN", holds_vip=False)
    first = pair.member()
    assert first.operating == "ONLINE", "the holder reaches the member"
    for _ in range(5):
        pair.say("a", "UP", holds_vip=True)
        assert pair.member() == first
        pair.say("b", "DOWN", holds_vip=False)
        assert pair.member() == first


def test_a_vip_hand_over_changes_the_member_status_once(pair):
    pair.say("a", "UP", holds_vip=True)
    pair.say("b", "DOWN", holds_vip=False)
    before = pair.member()
    pair.say("b", "DOWN", holds_vip=True)
    after = pair.member()
    assert (after.operating, after.version) == ("ERROR", before.version + 1)
    pair.say("a", "UP", holds_vip=False)
    assert pair.member() == after


def test_a_member_unreachable_from_the_standby_only_lowers_no_status(pair):
    pair.say("a", "UP", holds_vip=True)
    pair.say("b", "DOWN", holds_vip=False)
    pair.writer.flush()
    rows = pair.database.read(
        lambda c: c.execute(sa.select(object_status.c.object_id, object_status.c.operating)).all()
    )
    assert dict(rows) == dict.fromkeys(("lb", "li", "po", "me"), "ONLINE")


def test_counters_include_both_amphorae_and_connections_only_the_live_one(pair):
    pair.say("a", "UP", holds_vip=True, count=100, active=7, ago=EXPIRY - 0.05)
    pair.say("b", "UP", holds_vip=False, count=10, active=1)
    pair.writer.flush()
    (found,) = pair.database.read(lambda c: listener_stats.list_due_totals(c, 10))
    assert (found.bytes_in, found.active_connections) == (110, 8)
    deadline = time.monotonic() + 10
    while found.active_connections != 2:
        assert time.monotonic() < deadline
        pair.say("b", "UP", holds_vip=True, count=20, active=2)
        pair.writer.flush()
        (found,) = pair.database.read(lambda c: listener_stats.list_due_totals(c, 10))
    assert (found.bytes_in, found.active_connections) == (120, 2), "the counters of the silent amphora stay"


def test_a_silent_partner_is_logged_once(pair, caplog):
    pair.say("a", "UP", holds_vip=True, ago=EXPIRY + 1)
    for _ in range(3):
        pair.say("b", "UP", holds_vip=True)
        pair.writer.flush()
    silence = "amphora a of load balancer lb is silent, so only its partner amphora determines the statuses"
    assert [one.getMessage() for one in caplog.records if "silent" in one.getMessage()] == [silence]


def test_the_vip_holder_is_recorded(pair):
    pair.say("a", "UP", holds_vip=True)
    pair.say("b", "UP", holds_vip=False)
    pair.writer.flush(last=True)
    found = {one.id: one for one in pair.database.read(lambda c: amphorae.load_amphorae(c, "lb"))}
    assert {name: one.holds_vip for name, one in found.items()} == {"a": True, "b": False}
    assert all(abs(one.heard_at - time.time()) < 60 for one in found.values())
    pair.say("a", "UP", holds_vip=None)
    pair.writer.flush(last=True)
    rows = pair.database.read(
        lambda c: c.execute(sa.select(amphora_heartbeat.c.amphora_id, amphora_heartbeat.c.holds_vip))
    )
    assert dict(rows.tuples().all()) == {"a": None, "b": False}


def test_a_heartbeat_of_which_only_the_time_is_read_confirms_no_vip_holder(pair):
    """During overload, the recorded time is new. The controller must not take an old value for a new one."""
    pair.say("a", "UP", holds_vip=True)
    pair.say("b", "UP", holds_vip=False)
    pair.writer.flush(last=True)
    before = {one.id: one for one in pair.database.read(lambda c: amphorae.load_amphorae(c, "lb"))}
    pair.sequence += 1
    assert pair.reports.accept_time("a", (1, pair.sequence), time.monotonic())
    pair.writer.flush(last=True)
    found = {one.id: one for one in pair.database.read(lambda c: amphorae.load_amphorae(c, "lb"))}
    assert found["a"].heard_at > before["a"].heard_at
    assert {name: one.holds_vip for name, one in found.items()} == {"a": None, "b": False}
    pair.say("a", "UP", holds_vip=True)
    pair.writer.flush(last=True)
    assert pair.database.read(lambda c: amphorae.load_amphorae(c, "lb"))[0].holds_vip
