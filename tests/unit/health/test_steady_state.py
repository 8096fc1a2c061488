# SPDX-License-Identifier: Apache-2.0
"""A fleet without changes: reads and writes of the database do not depend on the number of heartbeats."""

import time

import pytest
import sqlalchemy as sa
from test_status_writer import ALL_WELL, HealthManager

from amphora_driver import metrics
from amphora_driver.database.tables import amphora_heartbeat, listener_statistics
from amphora_driver.errors import StoreError
from amphora_driver.health import status_writer
from amphora_driver.health.amphora_reports import AmphoraReports
from amphora_driver.health.heartbeat_codec import Heartbeat
from amphora_driver.health.status import ListenerReport, Report
from amphora_driver.health.status_writer import StatusWriter
from amphora_driver.model.amphora import AmphoraState
from amphora_driver.store import amphorae, listener_stats, status_outbox

HOUR = 3600.0


class Fleet(HealthManager):
    """Confirmed load balancers; the statistics are written once an hour, and at the end."""

    interval = HOUR

    def start(self):
        super().start()
        self.writer = StatusWriter(self.trying, self.reports, statistics_interval=self.interval)

    def load_balancer(self, name="1"):
        super().load_balancer(name)
        ready = {"confirmed": 1, "state": AmphoraState.READY}
        self.database.write(lambda c: amphorae.update_amphora(c, f"am{name}", **ready))
        self.database.write(lambda c: status_outbox.confirm_generation(c, f"lb{name}", 1, {}))

    def let_statistics_be_due(self):
        self.writer._statistics_due = [(0.0, one) for _, one in self.writer._statistics_due]

    def counted(self):
        return {one.listener_id: one.bytes_in for one in self.rows(listener_statistics)}

    def total(self, listener_id):
        return sum(one.bytes_in for one in self.rows(listener_statistics) if one.listener_id == listener_id)

    def delete_amphora(self, amphora_id):
        self.database.write(lambda c: amphorae.delete_amphora(c, amphora_id))


@pytest.fixture
def fleet(database):
    made = Fleet(database)
    for name in "123":
        made.load_balancer(name)
    for name in "123":
        made.say(f"am{name}", name)
    made.flush()
    made.writer._times._written_at = time.monotonic()
    return made


def test_a_repeated_report_causes_no_transaction(fleet):
    for count in range(6, 20):
        for name in "123":
            fleet.say(f"am{name}", name, count=count)
        assert not fleet.flush()
        assert fleet.trying.done == []


def test_a_changed_report_reads_its_load_balancer_only(fleet, monkeypatch):
    read, load = [], amphorae.load_serving_states
    monkeypatch.setattr(amphorae, "load_serving_states", lambda c, ids: read.extend(ids) or load(c, ids))
    fleet.say("am1")
    fleet.say("am2", "2", word="DOWN")
    fleet.say("am3", "3")
    assert fleet.flush()
    assert read == ["am2"]
    assert fleet.operating()["me2"] == "ERROR"
    assert fleet.operating()["me1"] == "ONLINE"


def test_the_times_of_all_heartbeats_are_one_write(fleet):
    for name in "123":
        fleet.say(f"am{name}", name)
    fleet.writer._times._written_at -= 2
    fleet.flush()
    assert fleet.trying.done == ["write"]
    assert sorted(one.sequence for one in fleet.rows(amphora_heartbeat)) == [4, 5, 6]


def test_statistics_have_their_own_interval_and_lose_no_count(fleet):
    for count in (6, 7, 8):
        fleet.say(count=count)
        fleet.flush()
    assert fleet.counted()["li1"] == 5
    fleet.let_statistics_be_due()
    assert fleet.flush()
    assert fleet.counted() == {"li1": 8, "li2": 5, "li3": 5}
    assert not fleet.flush()


def test_the_last_flush_writes_all_counters(fleet):
    fleet.say(count=9)
    fleet.flush()
    fleet.flush(last=True)
    assert fleet.counted()["li1"] == 9


def test_a_crash_between_two_writes_loses_and_doubles_no_count(fleet):
    fleet.say(count=9)
    fleet.flush()
    assert fleet.counted()["li1"] == 5
    fleet.start()
    fleet.reports.load_orders(fleet.database.read(amphorae.last_heartbeats))
    fleet.say(count=11)
    fleet.flush(last=True)
    assert fleet.counted()["li1"] == 11


def test_an_older_process_that_writes_later_changes_no_count(fleet):
    fleet.say(count=9)
    older = fleet.writer
    fleet.start()
    fleet.reports.load_orders(fleet.database.read(amphorae.last_heartbeats))
    fleet.say(count=11)
    fleet.flush(last=True)
    older.flush(last=True)
    assert fleet.counted()["li1"] == 11
    assert [one.sequence for one in fleet.rows(amphora_heartbeat) if one.amphora_id == "am1"] == [fleet.sequence]


def test_the_last_counters_of_an_amphora_that_becomes_silent_are_written(fleet, monkeypatch):
    fleet.say(count=9)
    fleet.flush()
    monkeypatch.setattr(fleet.reports, "expiry", -1.0)
    fleet.let_statistics_be_due()
    fleet.flush()
    (row,) = (one for one in fleet.rows(listener_statistics) if one.listener_id == "li1")
    assert (row.bytes_in, row.active_connections) == (9, 0)


def test_the_last_counters_of_a_listener_that_is_no_longer_served_are_written(fleet):
    fleet.say(count=9)
    fleet.sequence += 1
    fleet.reports.accept(Heartbeat("am1", 7, fleet.sequence, Report(1, {}, {}, "am1")), time.monotonic())
    fleet.flush()
    fleet.flush(last=True)
    assert fleet.counted()["li1"] == 9


def test_the_last_counters_of_an_amphora_that_sends_after_its_deletion_are_written(fleet):
    fleet.say(count=9)
    fleet.flush()
    fleet.delete_amphora("am1")
    fleet.say(count=10, word="DOWN")
    fleet.flush()
    assert "am1" not in fleet.reports.known_ids()
    fleet.flush(last=True)
    assert fleet.total("li1") == 10


@pytest.mark.parametrize("flushes", [1, 3])
def test_the_last_counters_of_an_amphora_that_the_cleanup_forgets_are_written(fleet, monkeypatch, flushes):
    monkeypatch.setattr(status_writer, "_CLEANUP_INTERVAL", 0.0)
    fleet.say(count=9)
    fleet.delete_amphora("am1")
    for _ in range(flushes):
        fleet.flush()
    assert "am1" not in fleet.reports.known_ids()
    assert fleet.total("li1") == 5
    fleet.flush(last=True)
    assert fleet.total("li1") == 9
    assert fleet.writer._states.keys() == {"lb2", "lb3"}


def test_the_cleanup_reads_the_ids_of_the_fleet_once(fleet, monkeypatch):
    """The cost of a cleanup does not grow with the square of the number of load balancers."""
    read = amphorae.load_balancer_ids
    iterated = []

    class Ids(dict):
        def __iter__(self):
            iterated.append(True)
            return super().__iter__()

    monkeypatch.setattr(amphorae, "load_balancer_ids", lambda connection: Ids(read(connection)))
    monkeypatch.setattr(status_writer, "_CLEANUP_INTERVAL", 0.0)
    fleet.flush()
    assert len(fleet.writer._states) == 3
    assert len(iterated) == 1


def test_the_last_counters_of_a_replaced_amphora_are_written(fleet):
    fleet.amphora("am-new", "lb1")
    fleet.say(count=9)
    fleet.say("am-new", "1", count=0)
    fleet.flush()
    fleet.say(count=10)
    fleet.flush()
    fleet.delete_amphora("am1")
    fleet.say("am-new", "1", word="DOWN", count=3)
    fleet.flush()
    fleet.flush(last=True)
    assert fleet.total("li1") == 13


def test_a_failed_write_of_statistics_is_repeated(fleet):
    fleet.say(count=9)
    fleet.let_statistics_be_due()
    fleet.trying.failing["write"] = 1
    with pytest.raises(StoreError):
        fleet.flush(last=True)
    fleet.say(count=10)
    fleet.flush()
    assert fleet.counted()["li1"] == 10


def test_a_change_by_another_process_is_found_at_the_next_refresh(fleet):
    fleet.database.write(
        lambda c: c.execute(sa.text("UPDATE object_status SET operating = 'ERROR' WHERE object_id = 'lb1'"))
    )
    fleet.say()
    fleet.flush()
    assert fleet.operating()["lb1"] == "ERROR"
    fleet.writer._states["lb1"].valid_until = 0.0
    fleet.say()
    assert fleet.flush()
    assert fleet.operating()["lb1"] == ALL_WELL["lb1"]


def test_a_heartbeat_after_a_silence_corrects_the_status_at_once(fleet):
    fleet.database.write(
        lambda c: c.execute(sa.text("UPDATE object_status SET operating = 'ERROR' WHERE object_id = 'lb1'"))
    )
    state = fleet.reports._states["am1"]
    silence = {"monotonic": state.last.monotonic - 6.0}
    state.last = type(state.last)(
        **{name: getattr(state.last, name) for name in state.last.__struct_fields__} | silence
    )
    fleet.say()
    assert fleet.flush()
    assert fleet.operating()["lb1"] == "ONLINE"


def test_values_that_expire_before_they_are_written_are_read_again(database, monkeypatch, caplog):
    late = Fleet(database)
    late.load_balancer()
    monkeypatch.setattr(late.reports, "expiry", -1.0)
    late.say()
    late.flush()
    assert late.operating() == {}
    assert "silent" not in caplog.text
    monkeypatch.setattr(late.reports, "expiry", 15.0)
    late.say()
    assert late.flush()
    assert late.operating() == ALL_WELL


def test_with_too_much_work_times_come_first_and_statistics_last(fleet, monkeypatch):
    monkeypatch.setattr(status_writer, "_FLUSH_SECONDS", -1.0)
    monkeypatch.setattr(status_writer, "_PART", 1)
    for name in "123":
        fleet.say(f"am{name}", name, word="DOWN", count=9)
    fleet.writer._times._written_at = 0.0
    order = []
    for _ in range(3):
        fleet.flush()
        fleet.let_statistics_be_due()
        found = fleet.operating()
        order.append((sum(found[f"me{name}"] == "ERROR" for name in "123"), sorted(set(fleet.counted().values()))))
        assert {one.sequence for one in fleet.rows(amphora_heartbeat)} == {4, 5, 6}
    assert order == [(1, [5]), (2, [5]), (3, [5])]
    fleet.flush()
    assert fleet.counted()["li1"] == 5, "the flush is late before it begins"
    monkeypatch.setattr(status_writer, "_FLUSH_SECONDS", HOUR)
    fleet.flush()
    assert set(fleet.counted().values()) == {9}


def test_only_postponed_statuses_count_as_postponed(fleet, monkeypatch):
    counted = []
    monkeypatch.setattr(metrics, "count_postponed", lambda what, number: counted.append((what, number)))
    monkeypatch.setattr(status_writer, "_FLUSH_SECONDS", -1.0)
    monkeypatch.setattr(status_writer, "_PART", 1)
    fleet.say("am1", "1", word="DOWN")
    fleet.say("am2", "2", word="DOWN")
    fleet.say("am3", "3", count=6)
    for _ in range(2):
        fleet.flush()
    assert [number for what, number in counted if what == "statuses"] == [1]
    assert [fleet.operating()[one] for one in ("me1", "me2", "me3")] == ["ERROR", "ERROR", "ONLINE"]


def test_a_restored_database_gets_rows_again(fleet, monkeypatch):
    fleet.database.write(lambda c: c.execute(listener_statistics.delete()))
    fleet.database.write(lambda c: c.execute(amphora_heartbeat.delete()))
    monkeypatch.setattr(status_writer, "_CLEANUP_INTERVAL", 0.0)
    fleet.flush()
    for name in "123":
        fleet.say(f"am{name}", name, count=6)
    fleet.flush(last=True)
    assert set(fleet.counted().values()) == {6}
    assert len(fleet.rows(amphora_heartbeat)) == 3


def test_octavia_receives_exact_totals(fleet):
    for count in range(6, 30):
        fleet.say(count=count)
        fleet.say("am2", "2", count=2 * count)
        if count % 5 == 0:
            fleet.let_statistics_be_due()
        fleet.flush()
    fleet.flush(last=True)
    fleet.database.write(lambda c: c.execute(sa.text("UPDATE job SET committed = 1")))
    totals = {
        one.listener_id: one.bytes_in for one in fleet.database.read(lambda c: listener_stats.list_due_totals(c, 9))
    }
    assert totals == {"li1": 29, "li2": 58, "li3": 5}


def test_counters_of_invented_listeners_use_little_memory():
    reports = AmphoraReports()
    for number in range(50):
        listeners = {f"{number}-{other}": ListenerReport("OPEN", 1, 1) for other in range(1000)}
        reports.accept(Heartbeat("am1", 1, number, Report(1, listeners)), 0.0)
    assert len(reports.take_counters(["am1"])["am1"]) < 10_000
