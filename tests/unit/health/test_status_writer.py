# SPDX-License-Identifier: Apache-2.0
"""The status writer: from reports in memory to rows in a database, written once, and retried after errors."""

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
from amphora_driver.health import status_writer, write_batch
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


class FailingDatabase:
    """A database that fails a given number of times, and counts its transactions."""

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


class HealthManager:
    """A health manager, load balancers with one amphora each ("am1" serves "lb1"), and their reports."""

    def __init__(self, database):
        self.database = database
        self.recorder = RequestRecorder(database, lambda node: None)
        self.sequence = 0
        self.start()

    def start(self):
        self.trying = FailingDatabase(self.database)
        self.reports = AmphoraReports()
        self.writer = StatusWriter(self.trying, self.reports)

    def load_balancer(self, name="1"):
        self.recorder.create_load_balancer(tree(name), read_back=False)
        self.amphora(f"am{name}", f"lb{name}")

    def amphora(self, amphora_id, load_balancer_id):
        self.database.write(lambda c: amphorae.insert_amphora(c, amphora_id, load_balancer_id, "standalone", b"key"))

    def say(self, amphora_id="am1", name="1", *, word="UP", count=5, generation=1, drift=(), drifted=None, **more):
        self.sequence += 1
        pools = {f"po{name}:li{name}": PoolReport("UP", {f"me{name}": word, **more})}
        listeners = {f"li{name}": ListenerReport("OPEN", 1, count, count, 0, count)}
        report = Report(generation, listeners, pools, amphora_id, drift=drift, drifted=drifted)
        assert self.reports.accept(Heartbeat(amphora_id, 7, self.sequence, report), time.monotonic())

    def flush(self, **more):
        self.trying.done.clear()
        return self.writer.flush(**more)

    def operating(self):
        rows = self.database.read(
            lambda c: c.execute(sa.select(object_status.c.object_id, object_status.c.operating)).all()
        )
        return {row.object_id: row.operating for row in rows if row.operating}

    def rows(self, table):
        return self.database.read(lambda c: c.execute(sa.select(table)).all())


@pytest.fixture
def manager(database):
    made = HealthManager(database)
    made.load_balancer()
    return made


@pytest.fixture
def now(monkeypatch):
    """Write last-seen times and drop removed objects at every flush."""
    monkeypatch.setattr(write_batch, "_HEARTBEAT_WRITE_INTERVAL", 0.0)
    monkeypatch.setattr(status_writer, "_CLEANUP_INTERVAL", 0.0)


ALL_WELL = {"lb1": "ONLINE", "li1": "ONLINE", "po1": "ONLINE", "me1": "ONLINE"}


def test_statuses_and_statistics_are_written_once(manager):
    manager.say()
    assert manager.flush()
    assert manager.trying.done == ["read", "write"]
    assert manager.operating() == ALL_WELL
    counters = manager.rows(listener_statistics)
    assert [(one.listener_id, one.amphora_id, one.bytes_in, one.version) for one in counters] == [("li1", "am1", 5, 1)]
    versions = {row.object_id: row.version for row in manager.rows(object_status)}
    manager.say()
    assert not manager.flush()
    assert manager.trying.done == ["read"]
    assert {row.object_id: row.version for row in manager.rows(object_status)} == versions
    assert manager.rows(listener_statistics) == counters


def test_without_heartbeats_no_transaction_is_needed(manager):
    manager.say()
    manager.flush(last=True)
    assert not manager.flush()
    assert manager.trying.done == []


def test_only_changes_are_written(manager):
    manager.say()
    manager.flush()
    manager.say(word="DOWN")
    assert manager.flush()
    assert manager.operating() == {"lb1": "ERROR", "li1": "ONLINE", "po1": "ERROR", "me1": "ERROR"}
    assert {row.object_id: row.version for row in manager.rows(object_status)} == {
        "lb1": 2,
        "li1": 1,
        "po1": 2,
        "me1": 2,
    }
    manager.say(word="DOWN", count=9)
    assert manager.flush()
    assert [one.bytes_in for one in manager.rows(listener_statistics)] == [9]


def test_all_load_balancers_need_one_read_and_one_write_transaction(manager):
    for name in ("2", "3"):
        manager.load_balancer(name)
    for name in ("1", "2", "3"):
        manager.say(f"am{name}", name)
    manager.flush()
    assert manager.trying.done == ["read", "write"]
    assert len(manager.operating()) == 12


@pytest.mark.parametrize("how", ["read", "write"])
def test_a_failed_write_is_retried_without_heartbeats(manager, how):
    manager.say()
    manager.trying.failing[how] = 2
    for _ in range(2):
        with pytest.raises(StoreError):
            manager.flush()
    assert manager.operating() == {}
    assert manager.flush()
    assert manager.operating() == ALL_WELL
    assert [one.bytes_in for one in manager.rows(listener_statistics)] == [5]
    assert [one.amphora_id for one in manager.rows(amphora_heartbeat)] == ["am1"]
    assert not manager.flush()


def test_after_an_outage_the_newest_status_is_written(manager):
    manager.say()
    manager.trying.failing["write"] = 1
    with pytest.raises(StoreError):
        manager.flush()
    manager.say(word="DOWN", count=6)
    assert manager.flush()
    assert manager.operating()["me1"] == "ERROR"
    assert [one.bytes_in for one in manager.rows(listener_statistics)] == [6]


def test_the_statuses_of_a_retiring_amphora_do_not_count(manager):
    manager.amphora("am-new", "lb1")
    manager.database.write(lambda c: amphorae.update_amphora(c, "am1", state=AmphoraState.RETIRING))
    manager.say("am1", word="DOWN", count=99)
    manager.say("am-new", word="UP")
    manager.flush()
    assert manager.operating() == ALL_WELL
    assert {one.amphora_id for one in manager.rows(amphora_heartbeat)} == {"am1", "am-new"}, (
        "the heartbeat of the retiring amphora is recorded"
    )
    counted = {one.amphora_id: one.bytes_in for one in manager.rows(listener_statistics)}
    assert counted == {"am1": 99, "am-new": 5}, "the counters of the retiring amphora still count"


def test_an_amphora_cannot_report_for_another_load_balancer(manager):
    manager.load_balancer("2")
    manager.say("am2", "1", word="DOWN")
    manager.flush()
    assert manager.operating().keys() <= {"lb2"}
    assert manager.rows(listener_statistics) == []


def test_an_unknown_amphora_is_forgotten(manager):
    manager.say("stranger")
    assert not manager.flush(last=True)
    assert manager.reports._states == {}
    assert manager.rows(amphora_heartbeat) == []
    assert not manager.flush()
    assert manager.trying.done == [], "no second query for the unknown amphora"


def test_deleted_objects_get_no_status(manager):
    manager.say()
    manager.flush()
    manager.recorder.delete_object(Kind.MEMBER, "me1")
    manager.database.write(lambda c: status_outbox.confirm_generation(c, "lb1", 2, {}))
    manager.say(word="DOWN", generation=1)
    manager.flush()
    assert manager.operating()["me1"] == "ONLINE", "no status after DELETED"
    manager.say(word="DOWN", generation=2)
    manager.flush()
    assert manager.operating()["me1"] == "ONLINE"
    manager.database.write(lambda c: c.execute(desired_object.delete().where(desired_object.c.id == "me1")))
    manager.database.write(lambda c: c.execute(object_status.delete().where(object_status.c.object_id == "me1")))
    manager.say(word="UP", generation=2)
    manager.flush()
    assert "me1" not in manager.operating()


def test_a_deleted_load_balancer_gets_no_status(manager):
    manager.recorder.delete_load_balancer("lb1")
    manager.say(generation=2)
    assert not manager.flush()
    assert manager.operating() == {}


def test_a_new_generation_adds_new_objects(manager):
    manager.say()
    manager.flush()
    manager.recorder.create_object(
        Kind.MEMBER, Member(id="me-new", pool_id="po1", address="192.0.2.2", protocol_port=80)
    )
    manager.say(**{"me-new": "UP"})
    assert not manager.flush(), "the new object is not served yet"
    manager.say(generation=2, **{"me-new": "DOWN"})
    assert manager.flush()
    assert manager.operating()["me-new"] == "ERROR"
    assert manager.operating()["po1"] == "DEGRADED"


def test_an_incomplete_tree_is_read_again_when_it_is_served(manager):
    manager.say(generation=None)
    manager.flush()
    more = Listener(id="li-more", loadbalancer_id="lb1", protocol=ListenerProtocol.HTTP, protocol_port=81)

    def read_back(connection):
        desired_objects.insert_objects(connection, "lb1", 1, [more])
        status_outbox.expect_confirmation(connection, "lb1", 1, [(Kind.LISTENER, "li-more")])

    manager.database.write(read_back)
    manager.say(generation=1)
    manager.sequence += 1
    said = Report(1, {"li-more": ListenerReport("OPEN", 1, 2, 3, 0, 4)}, {}, "am1")
    assert manager.reports.accept(Heartbeat("am1", 7, manager.sequence, said), time.monotonic())
    manager.flush()
    assert manager.operating()["li-more"] == "ONLINE"
    assert {one.listener_id for one in manager.rows(listener_statistics)} == {"li1", "li-more"}


def test_an_implausible_generation_does_not_hide_later_ones(manager):
    manager.say(generation=2**63 - 1)
    manager.flush()
    manager.recorder.create_object(
        Kind.MEMBER, Member(id="me-new", pool_id="po1", address="192.0.2.2", protocol_port=80)
    )
    manager.say(generation=2, **{"me-new": "UP"})
    manager.flush()
    assert manager.operating()["me-new"] == "ONLINE"


@pytest.mark.parametrize("word", ["DOWN " + "x" * 100_000, "DOWN \x00\U0001f600\n", "DOWN " + "\U0001f600" * 300])
def test_unknown_states_fit_every_database(manager, word):
    manager.say(word=word)
    assert manager.flush()
    reason = next(row.reason for row in manager.rows(object_status) if row.object_id == "me1")
    assert reason.startswith("DOWN")
    assert len(reason) <= 255
    assert reason.isascii()
    assert reason.isprintable()


def test_memory_of_deleted_objects_is_dropped(manager, now):
    manager.load_balancer("2")
    manager.say("am1", "1")
    manager.say("am2", "2")
    manager.flush()
    assert manager.writer._states.keys() == {"lb1", "lb2"}
    assert manager.writer._states["lb2"].rows.keys() == {("li2", "am2")}
    manager.reports.load_orders({"long gone": (1, 1)})

    def gone(connection):
        amphorae.delete_amphora(connection, "am2")
        connection.execute(job.delete().where(job.c.load_balancer_id == "lb2"))

    manager.database.write(gone)
    manager.flush()
    assert manager.writer._states.keys() == {"lb1"}
    assert manager.reports.known_ids() == {"am1"}
    assert [one.amphora_id for one in manager.rows(amphora_heartbeat)] == ["am1"]


def test_counters_of_a_deleted_listener_are_dropped(manager):
    manager.say()
    manager.flush()
    assert manager.writer._states["lb1"].rows.keys() == {("li1", "am1")}
    manager.recorder.delete_object(Kind.LISTENER, "li1")
    manager.say(generation=2)
    manager.flush()
    assert manager.writer._states["lb1"].rows == {}


def test_counters_of_a_replaced_amphora_are_dropped(manager, now):
    manager.amphora("am-new", "lb1")
    manager.say("am1")
    manager.say("am-new")
    manager.flush()
    account = manager.writer._states["lb1"]
    assert account.rows.keys() == {("li1", "am1"), ("li1", "am-new")}
    manager.database.write(lambda c: amphorae.delete_amphora(c, "am1"))
    manager.flush()
    assert account.rows.keys() == {("li1", "am-new")}


def test_a_failed_cleanup_is_retried(manager, now):
    manager.say()
    manager.flush()
    manager.trying.failing["read"] = 1
    with pytest.raises(StoreError):
        manager.flush()
    manager.flush()
    assert manager.writer._states.keys() == {"lb1"}


def test_last_seen_is_written_once_a_second_with_epoch_and_sequence(manager):
    manager.say()
    manager.flush()
    assert [(one.amphora_id, one.generation, one.epoch, one.sequence) for one in manager.rows(amphora_heartbeat)] == [
        ("am1", 1, 7, 1)
    ]
    manager.say()
    assert not manager.flush()
    assert [one.sequence for one in manager.rows(amphora_heartbeat)] == [1]
    manager.writer._times._written_at -= 2
    assert not manager.flush()
    assert manager.trying.done == ["write"]
    assert [one.sequence for one in manager.rows(amphora_heartbeat)] == [2], "no further heartbeat was received"


def test_the_last_flush_writes_everything(manager):
    manager.say()
    manager.flush()
    manager.say()
    manager.flush(last=True)
    assert [one.sequence for one in manager.rows(amphora_heartbeat)] == [2]


def test_an_old_heartbeat_is_refused_after_a_restart(manager):
    manager.say()
    manager.say()
    manager.flush()
    manager.start()
    manager.reports.load_orders(manager.database.read(amphorae.last_heartbeats))
    report = Report(1, {}, {"po1:li1": PoolReport("DOWN", {"me1": "DOWN"})}, "am1")
    for sequence in (1, 2):
        assert not manager.reports.accept(Heartbeat("am1", 7, sequence, report), time.monotonic())
    assert not manager.reports.accept(Heartbeat("am1", 6, 99, report), time.monotonic())
    assert not manager.flush()
    assert manager.operating() == ALL_WELL
    manager.say()


def test_newer_rows_of_another_health_manager_stay(manager, now):
    other = HealthManager.__new__(HealthManager)
    other.database, other.recorder, other.sequence = manager.database, manager.recorder, 40
    other.start()
    other.say(count=50)
    assert other.flush()
    manager.say(count=5)
    manager.flush()
    assert [(one.epoch, one.sequence) for one in manager.rows(amphora_heartbeat)] == [(7, 41)]
    assert [one.bytes_in for one in manager.rows(listener_statistics)] == [50]
    manager.sequence = 50
    manager.say(count=51)
    manager.flush()
    assert [one.sequence for one in manager.rows(amphora_heartbeat)] == [51]
    assert len(manager.rows(amphora)) == 1


def test_an_amphora_without_its_configuration_gets_it_again(manager, database):
    rung = []
    manager.writer = StatusWriter(manager.trying, manager.reports, interval=0.0, on_due=lambda: rung.append(True))
    database.write(lambda c: amphorae.update_amphora(c, "am1", confirmed=1, state=AmphoraState.READY))
    database.write(lambda c: c.execute(job.update().values(dirty=False, applied=1)))
    database.write(lambda c: status_outbox.confirm_generation(c, "lb1", 1, {}))
    manager.say()
    manager.flush()
    settled = {row.object_id: row.settled for row in manager.rows(object_status)}
    manager.say(generation=0)
    manager.flush()
    assert not rung, "the heartbeat may be older than the confirmation"
    manager.say(generation=0)
    manager.flush()
    assert rung == [True]
    (row,) = manager.rows(amphora)
    assert (row.confirmed, row.state) == (0, "ready")
    assert [row.dirty for row in manager.rows(job)] == [True]
    assert {row.object_id: row.settled for row in manager.rows(object_status)} == settled, "Octavia gets no report"
    for _ in range(3):
        manager.say(generation=0)
        manager.flush()
    assert rung == [True], "one hint"


def test_a_newer_confirmation_stays(manager, database):
    database.write(lambda c: amphorae.update_amphora(c, "am1", confirmed=2, state=AmphoraState.READY))
    assert not database.write(lambda c: amphorae.lower_confirmed(c, "am1", 1, 0))
    assert [row.confirmed for row in manager.rows(amphora)] == [2]
    database.write(lambda c: amphorae.update_amphora(c, "am1", state=AmphoraState.RETIRING))
    assert not database.write(lambda c: amphorae.lower_confirmed(c, "am1", 2, 0))


FOUND = LastDrift(at=1000000000.0, sentences=("eth1 is down",), repaired=False)


def test_drift_report_is_recorded_once_across_restarts(manager, database, caplog):
    def listens():
        manager.start()
        manager.writer = StatusWriter(manager.trying, manager.reports, interval=0.0)

    def noted():
        (row,) = manager.rows(amphora)
        return row.drifts, row.drift

    database.write(lambda c: amphorae.update_amphora(c, "am1", confirmed=1, state=AmphoraState.READY))
    listens()
    manager.say(drift=("link",), drifted=FOUND)
    manager.flush()
    found = "2001-09-09 01:46:40 UTC, its agent could not repair: eth1 is down"
    assert noted() == (False, found)
    assert caplog.text.count("reports configuration drift") == 1
    manager.say(drift=("link",), drifted=FOUND)
    manager.flush()
    pushed = "2001-09-09 01:46:40 UTC, its agent could not repair: link"
    assert noted() == (True, pushed)
    database.write(lambda c: amphorae.update_amphora(c, "am1", confirmed=1, drifts=False))
    listens()
    for expected in (False, True, True):
        manager.say(drift=("link",), drifted=FOUND)
        manager.flush()
        assert noted() == (expected, pushed)
        database.write(lambda c: amphorae.update_amphora(c, "am1", confirmed=1))
    manager.say(drifted=FOUND)
    manager.flush()
    assert noted() == (False, pushed), "the drift has ended"
    assert caplog.text.count("reports configuration drift") == 1, "the notice is read from the row"
    manager.say(drifted=FOUND)
    manager.flush()
    database.write(lambda c: amphorae.update_amphora(c, "am1", drifts=True))
    for _ in range(3):
        manager.say(drifted=FOUND)
        manager.flush()
    assert noted() == (True, pushed), "a mark of the controller stays"
