# SPDX-License-Identifier: Apache-2.0
"""The generated column `unreported`: polls read due rows only, and older processes keep it exact during an upgrade."""

from functools import partial

import pytest
import sqlalchemy as sa
from older_process import older_process
from read_effort import effort

from amphora_driver.database.engine import Database
from amphora_driver.database.tables import job, listener_statistics, object_status
from amphora_driver.database.tables_fleet import metadata
from amphora_driver.health import statistics
from amphora_driver.model.enums import Kind, Operating
from amphora_driver.store import listener_stats, status_outbox
from amphora_driver.telemetry import fleet_queries

TABLES = (object_status, listener_statistics)
DUE = 20


def fill(database, number):
    """Insert load balancers, each with ten objects and two rows of statistics; nothing is due."""
    ids = [f"{one * 2654435761 % 2**32:08x}" for one in range(number)]
    version = {"version": 3, "reported": 3}
    objects = [
        {"object_id": f"{one}-{n}", "kind": "loadbalancers" if n == 5 else "members", "load_balancer_id": one}
        for one in ids
        for n in range(10)
    ]
    counters = [
        {"listener_id": one, "amphora_id": f"{one}-{n}", "load_balancer_id": one} for one in ids for n in range(2)
    ]

    def write(connection):
        row = {"op": "apply", "generation": 1, "committed": 1, "applied": 1, "dirty": False}
        connection.execute(job.insert(), [{"load_balancer_id": one, **row} for one in ids])
        status = {"provisioning": "ACTIVE", "operating": "ONLINE", "settled": 1, **version}
        connection.execute(object_status.insert(), [{**one, **status} for one in objects])
        connection.execute(listener_statistics.insert(), [{**one, **version} for one in counters])

    database.write(write)
    return ids


def make_due(database, ids):
    """Change all rows of these load balancers."""

    def write(connection):
        for table in TABLES:
            some = table.update().where(table.c.load_balancer_id.in_(ids))
            connection.execute(some.values(version=table.c.version + 1))

    database.write(write)
    if database.engine.dialect.name == "postgresql":
        # PostgreSQL does the same from time to time by itself.
        with database.engine.begin() as connection:
            connection.exec_driver_sql("ANALYZE")


def empty_tables(database):
    database.write(lambda c: [c.execute(table.delete()) for table in reversed(metadata.sorted_tables)])


def poll(connection):
    """Read what the provider agent reads once a second, and the status page."""
    status_outbox.list_due_reports(connection, 300, "8")
    listener_stats.list_due_totals(connection, 300, "8")
    connection.execute(fleet_queries._OUTBOX).one()


def test_a_poll_reads_as_much_in_a_fleet_of_any_size(any_database):
    efforts = {}
    for number in (100, 1000):
        ids = fill(any_database, number)
        make_due(any_database, ids[:2])
        efforts[number] = effort(any_database, poll, TABLES, "unreported")
        empty_tables(any_database)
    assert efforts[1000] < 1.5 * efforts[100]
    if any_database.engine.dialect.name != "sqlite":
        assert efforts[1000] < 300, "24 rows are due, and the poll reads each one several times"


def test_a_call_with_statistics_reads_as_much_for_any_number_of_due_listeners(any_database):
    """The provider agent makes calls until nothing is due, so that the whole work must not be their product."""
    ids = fill(any_database, 1000)
    efforts = []
    for due in (ids[:100], ids):
        make_due(any_database, due)
        after = sorted(due)[len(due) // 2]
        call = partial(listener_stats.list_due_totals, limit=DUE, after=after)
        efforts.append(effort(any_database, call, TABLES, "unreported"))
    assert efforts[1] < 1.5 * efforts[0]
    if any_database.engine.dialect.name != "sqlite":
        assert efforts[1] < 20 * DUE


@pytest.mark.parametrize("parts", [None, "0123456789abcdef", "07f"], ids=["all", "each", "some"])
def test_due_listeners_take_turns_by_their_ids(any_database, parts):
    ids = fill(any_database, 60)
    due = sorted(ids)[::3]
    make_due(any_database, due)
    uncommitted = due.pop(4)
    any_database.write(
        lambda c: c.execute(job.update().where(job.c.load_balancer_id == uncommitted).values(committed=0))
    )
    mine = [one for one in due if parts is None or one[0] in parts]
    assert mine
    for after in ("", *due, due[3] + "x", "~"):
        expected = [*(one for one in mine if one > after), *(one for one in mine if one <= after)]
        for limit in (1, 3, len(mine), len(mine) + 1):
            found = any_database.read(partial(listener_stats.list_due_totals, limit=limit, after=after, parts=parts))
            assert [(one.listener_id, one.version) for one in found] == [(one, 8) for one in expected[:limit]]


def write_as_before(database, ids, number):
    """Write new rows, changes and reports, as a process of the version with revision 0006 does."""
    write, of = database.write, ids[number % len(ids)]
    new = [(Kind.MEMBER, f"new-{number}")]
    write(lambda c: status_outbox.expect_confirmation(c, of, 1, new, new))
    operating = (Operating.ERROR, Operating.ONLINE)[number // len(ids) % 2]
    seen = [status_outbox.Observation(object_id=f"{of}-1", kind=Kind.MEMBER, operating=operating)]
    write(lambda c: status_outbox.write_observations(c, of, seen))
    write(lambda c: status_outbox.confirm_generation(c, of, 1, {}))
    rows = [
        statistics.Row(
            listener_id=one, amphora_id=f"{of}-0", load_balancer_id=of, active_connections=number,
            bytes_in=number, bytes_out=0, request_errors=0, total_connections=number,
        )
        for one in (of, f"new-{number}")
    ]  # fmt: skip
    write(lambda c: statistics.write_rows(c, rows))
    if number % 3 == 0:
        status = status_outbox.StatusReport(
            object_id=f"new-{number}", kind=Kind.MEMBER, load_balancer_id=of,
            provisioning=None, operating=None, version=1,
        )  # fmt: skip
        write(lambda c: status_outbox.mark_reported(c, [status]))
        counters = dict.fromkeys(statistics._VALUES, 0)
        total = listener_stats.ListenerTotals(listener_id=f"new-{number}", version=1, **counters)
        write(lambda c: listener_stats.mark_totals_reported(c, [total]))


@pytest.mark.parametrize("kind", ["sqlite", "mariadb", "postgresql"])
def test_an_older_process_writes_during_the_upgrade_and_after_it(empty, tmp_path):
    with older_process(empty, tmp_path / "migrations", "0006") as older:
        ids = fill(older.database, 100)
        older.run(lambda number: write_as_before(older.database, ids, number))
    assert any("INTO object_status" in one for one in older.statements)
    assert not any("unreported" in one for one in older.statements), "the older version does not know the column"
    newer = Database(empty)
    try:
        check_due_rows(newer)
    finally:
        newer.dispose()


def check_due_rows(database):
    """Compare the column with the versions, and both queries with the column."""
    for table in TABLES:
        rows = database.read(lambda c, table=table: c.execute(sa.select(table)).all())
        assert {bool(one.unreported) for one in rows} == {True, False}
        assert all(bool(one.unreported) == (one.version > one.reported) for one in rows)
        due = {one[0] for one in rows if one.version > one.reported}
        query = {object_status: status_outbox.list_due_reports, listener_statistics: listener_stats.list_due_totals}
        found = database.read(partial(query[table], limit=10_000))
        assert {getattr(one, table.primary_key.columns[0].name) for one in found} == due
