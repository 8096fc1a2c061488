# SPDX-License-Identifier: Apache-2.0
"""From a ledger to a real database: what is written, once, and what is tried again."""

import time

import pytest
import sqlalchemy as sa

from amphora_driver.database.tables import (
    amphora,
    amphora_heartbeat,
    desired_object,
    job,
    listener_statistics,
    object_status,
)
from amphora_driver.errors import StoreError
from amphora_driver.health import status_writer
from amphora_driver.health.amphora_reports import AmphoraReports
from amphora_driver.health.heartbeat_codec import Heartbeat
from amphora_driver.health.status import LastDrift, ListenerReport, PoolReport, Report
from amphora_driver.health.status_writer import StatusWriter
from amphora_driver.model.amphora import AmphoraState
from amphora_driver.model.enums import Kind, ListenerProtocol, PoolProtocol
from amphora_driver.model.loadbalancer import Listener, LoadBalancer, Member, Pool, Vip
from amphora_driver.store import amphorae, desired_objects, status_outbox
from amphora_driver.store.requests import RequestRecorder

VIP = Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1")


def tree(name="1"):
    lb, li, po = f"lb{name}", f"li{name}", f"po{name}"
    members = (Member(id=f"me{name}", pool_id=po, address="192.0.2.1", protocol_port=80),)
    return LoadBalancer(
        id=lb,
        project_id="demo",
        vip=VIP,
        listeners=(
            Listener(id=li, loadbalancer_id=lb, protocol=ListenerProtocol.HTTP, protocol_port=80, default_pool_id=po),
        ),
        pools=(Pool(id=po, loadbalancer_id=lb, protocol=PoolProtocol.HTTP, members=members),),
    )


class Trying:
    """A database that fails as often as asked, and counts its transactions."""

    def __init__(self, database):
        self.database = database
        self.failing = {"read": 0, "write": 0}
        self.done = []

    def read(self, work):
        return self._run("read", work)

    def write(self, work):
        return self._run("write", work)

    def _run(self, how, work):
        if self.failing[how]:
            self.failing[how] -= 1
            raise StoreError(f"{how} the database", "it is away")
        self.done.append(how)
        return getattr(self.database, how)(work)


class House:
    """One health manager, load balancers with one amphora each ("am1" serves "lb1"), and what they say."""

    def __init__(self, database):
        self.database = database
        self.intents = RequestRecorder(database, lambda node: None)
        self.sequence = 0
        self.start()

    def start(self):
        self.trying = Trying(self.database)
        self.ledger = AmphoraReports()
        self.books = StatusWriter(self.trying, self.ledger)

    def load_balancer(self, name="1"):
        self.intents.create_load_balancer(tree(name), read_back=False)
        self.amphora(f"am{name}", f"lb{name}")

    def amphora(self, amphora_id, load_balancer_id):
        self.database.write(lambda c: amphorae.insert_amphora(c, amphora_id, load_balancer_id, "standalone", b"key"))

    def say(self, amphora_id="am1", name="1", *, word="UP", count=5, generation=1, drift=(), drifted=None, **more):
        self.sequence += 1
        pools = {f"po{name}:li{name}": PoolReport("UP", {f"me{name}": word, **more})}
        listeners = {f"li{name}": ListenerReport("OPEN", 1, count, count, 0, count)}
        report = Report(generation, listeners, pools, amphora_id, drift=drift, drifted=drifted)
        assert self.ledger.accept(Heartbeat(amphora_id, 7, self.sequence, report), time.monotonic())

    def flush(self, **more):
        self.trying.done.clear()
        return self.books.flush(**more)

    def operating(self):
        rows = self.database.read(
            lambda c: c.execute(sa.select(object_status.c.object_id, object_status.c.operating)).all()
        )
        return {row.object_id: row.operating for row in rows if row.operating}

    def rows(self, table):
        return self.database.read(lambda c: c.execute(sa.select(table)).all())


@pytest.fixture
def house(database):
    made = House(database)
    made.load_balancer()
    return made


@pytest.fixture
def now(monkeypatch):
    """Nothing is put off: last-seen is written and what is gone dropped at every flush."""
    monkeypatch.setattr(status_writer, "_HEARTBEAT_WRITE_INTERVAL", 0.0)
    monkeypatch.setattr(status_writer, "_CLEANUP_INTERVAL", 0.0)


ALL_WELL = {"lb1": "ONLINE", "li1": "ONLINE", "po1": "ONLINE", "me1": "ONLINE"}


def test_statuses_and_statistics_are_written_once(house):
    house.say()
    assert house.flush()
    assert house.trying.done == ["read", "write"]
    assert house.operating() == ALL_WELL
    counters = house.rows(listener_statistics)
    assert [(one.listener_id, one.amphora_id, one.bytes_in, one.version) for one in counters] == [("li1", "am1", 5, 1)]
    versions = {row.object_id: row.version for row in house.rows(object_status)}
    house.say()
    assert not house.flush()
    assert house.trying.done == ["read"]
    assert {row.object_id: row.version for row in house.rows(object_status)} == versions
    assert house.rows(listener_statistics) == counters


def test_nothing_heard_costs_nothing(house):
    house.say()
    house.flush(last=True)
    assert not house.flush()
    assert house.trying.done == []


def test_only_what_changed_is_written(house):
    house.say()
    house.flush()
    house.say(word="DOWN")
    assert house.flush()
    assert house.operating() == {"lb1": "ERROR", "li1": "ONLINE", "po1": "ERROR", "me1": "ERROR"}
    assert {row.object_id: row.version for row in house.rows(object_status)} == {"lb1": 2, "li1": 1, "po1": 2, "me1": 2}
    house.say(word="DOWN", count=9)
    assert house.flush()
    assert [one.bytes_in for one in house.rows(listener_statistics)] == [9]


def test_all_load_balancers_are_one_reading_and_one_writing_transaction(house):
    for name in ("2", "3"):
        house.load_balancer(name)
    for name in ("1", "2", "3"):
        house.say(f"am{name}", name)
    house.flush()
    assert house.trying.done == ["read", "write"]
    assert len(house.operating()) == 12


@pytest.mark.parametrize("how", ["read", "write"])
def test_failed_write_is_retried_without_heartbeats(house, how):
    house.say()
    house.trying.failing[how] = 2
    for _ in range(2):
        with pytest.raises(StoreError):
            house.flush()
    assert house.operating() == {}
    assert house.flush()
    assert house.operating() == ALL_WELL
    assert [one.bytes_in for one in house.rows(listener_statistics)] == [5]
    assert [one.amphora_id for one in house.rows(amphora_heartbeat)] == ["am1"]
    assert not house.flush()


def test_after_an_outage_the_newest_word_is_written(house):
    house.say()
    house.trying.failing["write"] = 1
    with pytest.raises(StoreError):
        house.flush()
    house.say(word="DOWN", count=6)
    assert house.flush()
    assert house.operating()["me1"] == "ERROR"
    assert [one.bytes_in for one in house.rows(listener_statistics)] == [6]


def test_the_word_of_a_retiring_amphora_does_not_count(house):
    house.amphora("am-new", "lb1")
    house.database.write(lambda c: amphorae.update_amphora(c, "am1", state=AmphoraState.RETIRING))
    house.say("am1", word="DOWN", count=99)
    house.say("am-new", word="UP")
    house.flush()
    assert house.operating() == ALL_WELL
    assert {one.amphora_id for one in house.rows(amphora_heartbeat)} == {"am1", "am-new"}, "heard it was"
    counted = {one.amphora_id: one.bytes_in for one in house.rows(listener_statistics)}
    assert counted == {"am1": 99, "am-new": 5}, "but what clients sent through it they have sent"


def test_an_amphora_cannot_speak_for_anothers_load_balancer(house):
    house.load_balancer("2")
    house.say("am2", "1", word="DOWN")
    house.flush()
    assert house.operating().keys() <= {"lb2"}
    assert house.rows(listener_statistics) == []


def test_an_unknown_amphora_is_forgotten(house):
    house.say("stranger")
    assert not house.flush(last=True)
    assert house.ledger._states == {}
    assert house.rows(amphora_heartbeat) == []
    assert not house.flush()
    assert house.trying.done == [], "and not asked for again"


def test_deleted_objects_get_no_status(house):
    house.say()
    house.flush()
    house.intents.delete_object(Kind.MEMBER, "me1")
    house.database.write(lambda c: status_outbox.confirm_generation(c, "lb1", 2, {}))
    house.say(word="DOWN", generation=1)
    house.flush()
    assert house.operating()["me1"] == "ONLINE", "nothing is said after DELETED"
    house.say(word="DOWN", generation=2)
    house.flush()
    assert house.operating()["me1"] == "ONLINE"
    house.database.write(lambda c: c.execute(desired_object.delete().where(desired_object.c.id == "me1")))
    house.database.write(lambda c: c.execute(object_status.delete().where(object_status.c.object_id == "me1")))
    house.say(word="UP", generation=2)
    house.flush()
    assert "me1" not in house.operating()


def test_a_deleted_load_balancer_gets_no_status(house):
    house.intents.delete_load_balancer("lb1")
    house.say(generation=2)
    assert not house.flush()
    assert house.operating() == {}


def test_a_new_generation_brings_new_objects(house):
    house.say()
    house.flush()
    house.intents.create_object(Kind.MEMBER, Member(id="me-new", pool_id="po1", address="192.0.2.2", protocol_port=80))
    house.say(**{"me-new": "UP"})
    assert not house.flush(), "not served yet"
    house.say(generation=2, **{"me-new": "DOWN"})
    assert house.flush()
    assert house.operating()["me-new"] == "ERROR"
    assert house.operating()["po1"] == "DEGRADED"


def test_a_tree_that_arrived_incomplete_is_read_again_when_it_is_served(house):
    house.say(generation=None)
    house.flush()
    more = Listener(id="li-more", loadbalancer_id="lb1", protocol=ListenerProtocol.HTTP, protocol_port=81)

    def read_back(connection):
        desired_objects.insert_objects(connection, "lb1", 1, [more])
        status_outbox.expect_confirmation(connection, "lb1", 1, [(Kind.LISTENER, "li-more")])

    house.database.write(read_back)
    house.say(generation=1)
    house.sequence += 1
    said = Report(1, {"li-more": ListenerReport("OPEN", 1, 2, 3, 0, 4)}, {}, "am1")
    assert house.ledger.accept(Heartbeat("am1", 7, house.sequence, said), time.monotonic())
    house.flush()
    assert house.operating()["li-more"] == "ONLINE"
    assert {one.listener_id for one in house.rows(listener_statistics)} == {"li1", "li-more"}


def test_an_impossible_generation_does_not_keep_later_ones_from_being_seen(house):
    house.say(generation=2**63 - 1)
    house.flush()
    house.intents.create_object(Kind.MEMBER, Member(id="me-new", pool_id="po1", address="192.0.2.2", protocol_port=80))
    house.say(generation=2, **{"me-new": "UP"})
    house.flush()
    assert house.operating()["me-new"] == "ONLINE"


@pytest.mark.parametrize("word", ["DOWN " + "x" * 100_000, "DOWN \x00\U0001f600\n", "DOWN " + "\U0001f600" * 300])
def test_strange_words_fit_every_database(house, word):
    house.say(word=word)
    assert house.flush()
    reason = next(row.reason for row in house.rows(object_status) if row.object_id == "me1")
    assert reason.startswith("DOWN")
    assert len(reason) <= 255
    assert reason.isascii()
    assert reason.isprintable()


def test_memory_of_what_is_gone_is_dropped(house, now):
    house.load_balancer("2")
    house.say("am1", "1")
    house.say("am2", "2")
    house.flush()
    assert house.books._states.keys() == {"lb1", "lb2"}
    assert house.books._states["lb2"].rows.keys() == {("li2", "am2")}
    house.ledger.load_orders({"long gone": (1, 1)})

    def gone(connection):
        amphorae.delete_amphora(connection, "am2")
        connection.execute(job.delete().where(job.c.load_balancer_id == "lb2"))

    house.database.write(gone)
    house.flush()
    assert house.books._states.keys() == {"lb1"}
    assert house.ledger.known_ids() == {"am1"}
    assert [one.amphora_id for one in house.rows(amphora_heartbeat)] == ["am1"]


def test_counters_of_a_deleted_listener_are_dropped(house):
    house.say()
    house.flush()
    assert house.books._states["lb1"].rows.keys() == {("li1", "am1")}
    house.intents.delete_object(Kind.LISTENER, "li1")
    house.say(generation=2)
    house.flush()
    assert house.books._states["lb1"].rows == {}


def test_counters_of_a_replaced_amphora_are_dropped(house, now):
    house.amphora("am-new", "lb1")
    house.say("am1")
    house.say("am-new")
    house.flush()
    account = house.books._states["lb1"]
    assert account.rows.keys() == {("li1", "am1"), ("li1", "am-new")}
    house.database.write(lambda c: amphorae.delete_amphora(c, "am1"))
    house.flush()
    assert account.rows.keys() == {("li1", "am-new")}


def test_tidying_that_fails_is_tried_again(house, now):
    house.say()
    house.flush()
    house.trying.failing["read"] = 1
    with pytest.raises(StoreError):
        house.flush()
    house.flush()
    assert house.books._states.keys() == {"lb1"}


def test_last_seen_is_written_once_a_second_with_the_place_of_the_heartbeat(house):
    house.say()
    house.flush()
    assert [(one.amphora_id, one.generation, one.epoch, one.sequence) for one in house.rows(amphora_heartbeat)] == [
        ("am1", 1, 7, 1)
    ]
    house.say()
    assert not house.flush()
    assert [one.sequence for one in house.rows(amphora_heartbeat)] == [1]
    house.books._heartbeats_written_at -= 2
    assert not house.flush()
    assert house.trying.done == ["write"]
    assert [one.sequence for one in house.rows(amphora_heartbeat)] == [2], "though it was not heard again"


def test_the_last_flush_puts_nothing_off(house):
    house.say()
    house.flush()
    house.say()
    house.flush(last=True)
    assert [one.sequence for one in house.rows(amphora_heartbeat)] == [2]


def test_an_old_heartbeat_is_refused_after_a_restart(house):
    house.say()
    house.say()
    house.flush()
    house.start()
    house.ledger.load_orders(house.database.read(amphorae.last_heartbeats))
    report = Report(1, {}, {"po1:li1": PoolReport("DOWN", {"me1": "DOWN"})}, "am1")
    for sequence in (1, 2):
        assert not house.ledger.accept(Heartbeat("am1", 7, sequence, report), time.monotonic())
    assert not house.ledger.accept(Heartbeat("am1", 6, 99, report), time.monotonic())
    assert not house.flush()
    assert house.operating() == ALL_WELL
    house.say()


def test_newer_rows_of_another_health_manager_stay(house, now):
    other = House.__new__(House)
    other.database, other.intents, other.sequence = house.database, house.intents, 40
    other.start()
    other.say(count=50)
    assert other.flush()
    house.say(count=5)
    house.flush()
    assert [(one.epoch, one.sequence) for one in house.rows(amphora_heartbeat)] == [(7, 41)]
    assert [one.bytes_in for one in house.rows(listener_statistics)] == [50]
    house.sequence = 50
    house.say(count=51)
    house.flush()
    assert [one.sequence for one in house.rows(amphora_heartbeat)] == [51]
    assert len(house.rows(amphora)) == 1


def test_an_amphora_that_lost_what_it_served_is_given_it_again(house, database):
    rung = []
    house.books = StatusWriter(house.trying, house.ledger, interval=0.0, on_due=lambda: rung.append(True))
    database.write(lambda c: amphorae.update_amphora(c, "am1", confirmed=1, state=AmphoraState.READY))
    database.write(lambda c: c.execute(job.update().values(dirty=False, applied=1)))
    database.write(lambda c: status_outbox.confirm_generation(c, "lb1", 1, {}))
    house.say()
    house.flush()
    settled = {row.object_id: row.settled for row in house.rows(object_status)}
    house.say(generation=0)
    house.flush()
    assert not rung, "it may have been sent before the confirmation"
    house.say(generation=0)
    house.flush()
    assert rung == [True]
    (row,) = house.rows(amphora)
    assert (row.confirmed, row.state) == (0, "ready")
    assert [row.dirty for row in house.rows(job)] == [True]
    assert {row.object_id: row.settled for row in house.rows(object_status)} == settled, "Octavia hears nothing of it"
    for _ in range(3):
        house.say(generation=0)
        house.flush()
    assert rung == [True], "said once"


def test_a_newer_confirmation_stays(house, database):
    database.write(lambda c: amphorae.update_amphora(c, "am1", confirmed=2, state=AmphoraState.READY))
    assert not database.write(lambda c: amphorae.lower_confirmed(c, "am1", 1, 0))
    assert [row.confirmed for row in house.rows(amphora)] == [2]
    database.write(lambda c: amphorae.update_amphora(c, "am1", state=AmphoraState.RETIRING))
    assert not database.write(lambda c: amphorae.lower_confirmed(c, "am1", 2, 0))


FOUND = LastDrift(at=1000000000.0, sentences=("eth1 is down",), repaired=False)


def test_drift_report_is_recorded_once_across_restarts(house, database, caplog):
    def listens():
        house.start()
        house.books = StatusWriter(house.trying, house.ledger, interval=0.0)

    def noted():
        (row,) = house.rows(amphora)
        return row.drifts, row.drift

    database.write(lambda c: amphorae.update_amphora(c, "am1", confirmed=1, state=AmphoraState.READY))
    listens()
    house.say(drift=("link",), drifted=FOUND)
    house.flush()
    found = "2001-09-09 01:46:40 UTC, its agent could not repair: eth1 is down"
    assert noted() == (False, found)
    assert caplog.text.count("reports drift") == 1
    house.say(drift=("link",), drifted=FOUND)
    house.flush()
    pushed = "2001-09-09 01:46:40 UTC, its agent could not repair: link"
    assert noted() == (True, pushed)
    database.write(lambda c: amphorae.update_amphora(c, "am1", confirmed=1, drifts=False))
    listens()
    for expected in (False, True, True):
        house.say(drift=("link",), drifted=FOUND)
        house.flush()
        assert noted() == (expected, pushed)
        database.write(lambda c: amphorae.update_amphora(c, "am1", confirmed=1))
    house.say(drifted=FOUND)
    house.flush()
    assert noted() == (False, pushed), "it is history"
    assert caplog.text.count("reports drift") == 1, "the row knew"
    house.say(drifted=FOUND)
    house.flush()
    database.write(lambda c: amphorae.update_amphora(c, "am1", drifts=True))
    for _ in range(3):
        house.say(drifted=FOUND)
        house.flush()
    assert noted() == (True, pushed), "a controller has found that"
