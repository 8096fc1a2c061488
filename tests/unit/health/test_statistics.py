# SPDX-License-Identifier: Apache-2.0
"""Listener statistics never decrease, belong to the right load balancer, and survive two writers."""

from __future__ import annotations

import threading

import migrated
import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql

from amphora_driver.database.engine import Database
from amphora_driver.database.tables import listener_statistics
from amphora_driver.health import statistics
from amphora_driver.health.status import ListenerReport, Report

LISTENERS = ("listener-1", "listener-2")


def said(*, active=1, bytes_in=10, bytes_out=20, errors=0, total=5):
    return ListenerReport("OPEN", active, bytes_in, bytes_out, errors, total)


def row(listener="listener-1", amphora="amphora-1", **values):
    [made] = statistics.changed_rows({amphora: Report(1, {listener: said(**values)})}, "lb", LISTENERS, {})
    return made


@pytest.fixture
def database(tmp_path):
    url = f"sqlite:///{tmp_path}/db.sqlite"
    migrated.write(url)
    made = Database(url)
    yield made
    made.dispose()


def stored(database):
    rows = database.read(lambda connection: connection.execute(sa.select(listener_statistics)).mappings().all())
    return {(one["listener_id"], one["amphora_id"]): dict(one) for one in rows}


# --- which rows --------------------------------------------------------------------------------------------


def test_only_changes_are_written():
    flushed = {}
    reports = {"amphora-1": Report(1, {"listener-1": said(), "listener-2": said(bytes_in=7)})}
    rows = statistics.changed_rows(reports, "lb", LISTENERS, flushed)
    assert [(one.key, one.bytes_in, one.load_balancer_id) for one in rows] == [
        (("listener-1", "amphora-1"), 10, "lb"),
        (("listener-2", "amphora-1"), 7, "lb"),
    ]
    statistics.record_written(flushed, rows)
    assert statistics.changed_rows(reports, "lb", LISTENERS, flushed) == []
    reports["amphora-1"].listeners["listener-2"] = said(bytes_in=8)
    assert [one.bytes_in for one in statistics.changed_rows(reports, "lb", LISTENERS, flushed)] == [8]


def test_counters_do_not_fall():
    flushed = {}
    statistics.record_written(flushed, [row(active=9, bytes_in=100, bytes_out=100)])
    reports = {"amphora-1": Report(1, {"listener-1": said(active=2, bytes_in=50, bytes_out=101)})}
    rows = statistics.changed_rows(reports, "lb", LISTENERS, flushed)
    assert [(one.active_connections, one.bytes_in, one.bytes_out) for one in rows] == [(2, 100, 101)]


def test_an_amphora_reports_only_its_own_listeners():
    everything = Report(1, {listener: said() for listener in (*LISTENERS, "listener-3", "made up")})
    assert [one.key for one in statistics.changed_rows({"amphora-1": everything}, "lb", LISTENERS, {})] == [
        ("listener-1", "amphora-1"),
        ("listener-2", "amphora-1"),
    ]
    assert [one.key for one in statistics.changed_rows({"amphora-3": everything}, "other", ["listener-3"], {})] == [
        ("listener-3", "amphora-3")
    ]


@pytest.mark.parametrize("values", [{"bytes_in": -1}, {"active": 2**63}, {"total": 2**200}, {"errors": 2**59}])
def test_impossible_numbers_do_not_spoil_the_batch(values):
    reports = {"amphora-1": Report(1, {"listener-1": said(**values), "listener-2": said()})}
    assert [one.listener_id for one in statistics.changed_rows(reports, "lb", LISTENERS, {})] == ["listener-2"]


# --- the table ---------------------------------------------------------------------------------------------


def test_insert_then_update(database):
    database.write(lambda connection: statistics.write_rows(connection, [row()]))
    assert stored(database)["listener-1", "amphora-1"] == {
        "listener_id": "listener-1",
        "amphora_id": "amphora-1",
        "load_balancer_id": "lb",
        "active_connections": 1,
        "bytes_in": 10,
        "bytes_out": 20,
        "request_errors": 0,
        "total_connections": 5,
        "version": 1,
        "reported": 0,
        "unreported": True,
    }
    rows = [row(active=0, bytes_in=11), row("listener-2")]
    database.write(lambda connection: statistics.write_rows(connection, rows))
    changed = stored(database)["listener-1", "amphora-1"]
    assert (changed["active_connections"], changed["bytes_in"], changed["version"]) == (0, 11, 2)
    assert stored(database)["listener-2", "amphora-1"]["version"] == 1


def test_the_same_batch_twice_changes_nothing(database):
    for _ in range(3):
        database.write(lambda connection: statistics.write_rows(connection, [row()]))
    assert stored(database)["listener-1", "amphora-1"]["version"] == 1


def test_counters_in_the_table_do_not_fall(database):
    database.write(lambda connection: statistics.write_rows(connection, [row(bytes_in=100, total=100)]))
    lower = [row(active=7, bytes_in=50, total=101)]
    database.write(lambda connection: statistics.write_rows(connection, lower))
    kept = stored(database)["listener-1", "amphora-1"]
    assert (kept["active_connections"], kept["bytes_in"], kept["total_connections"]) == (7, 100, 101)


def test_each_amphora_has_its_own_rows(database):
    rows = [row(), row(amphora="amphora-2", bytes_in=99)]
    database.write(lambda connection: statistics.write_rows(connection, rows))
    assert [one["bytes_in"] for one in stored(database).values()] == [10, 99]


def test_a_large_batch(database):
    template = row()
    rows = [
        statistics.Row(
            **{
                **{name: getattr(template, name) for name in template.__struct_fields__},
                "listener_id": f"listener-{number:05}",
            }
        )
        for number in range(1700)
    ]
    database.write(lambda connection: statistics.write_rows(connection, rows))
    database.write(lambda connection: statistics.write_rows(connection, rows[::-1]))
    assert len(stored(database)) == 1700
    database.write(lambda connection: statistics.write_rows(connection, []))


def test_a_row_inserted_by_another_writer_in_between(database):
    # Databases without SQLite's single writer allow a row of another writer here.
    database.write(lambda connection: statistics.write_rows(connection, [row(bytes_in=100)]))
    rows = [row(bytes_in=50, total=7), row("listener-2")]
    database.write(lambda connection: statistics._insert(connection, rows))
    table = stored(database)
    assert table["listener-1", "amphora-1"]["bytes_in"] == 100
    assert table["listener-1", "amphora-1"]["total_connections"] == 7
    assert table["listener-2", "amphora-1"]["bytes_in"] == 10


def test_two_writers(database):
    def write(first):
        for number in range(first, 60, 2):
            rows = [row(bytes_in=number), row("listener-2", bytes_in=number)]
            database.write(lambda connection, rows=rows: statistics.write_rows(connection, rows))

    threads = [threading.Thread(target=write, args=(first,)) for first in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {one["bytes_in"] for one in stored(database).values()} == {59}


@pytest.mark.parametrize("dialect", [mysql.dialect(), postgresql.dialect()])
def test_the_statement_does_not_depend_on_assignment_order(dialect):
    # MySQL assigns from left to right: no assigned expression may read a column that was assigned before.
    text = str(statistics._UPDATE.compile(dialect=dialect)).replace("`", "")
    for name in statistics._COUNTERS:
        assert f"{name}=CASE WHEN (listener_statistics.{name} <" in text
    assert "version=(listener_statistics.version + " in text
