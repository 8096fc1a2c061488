# SPDX-License-Identifier: Apache-2.0
"""The generated columns `job.exceptional` and `amphora.unready`: polls of a fleet in normal service read few rows."""

import itertools
from types import SimpleNamespace

import pytest
import sqlalchemy as sa
from older_process import older_process
from read_effort import effort

from amphora_driver.database.engine import Database
from amphora_driver.database.tables import amphora, job
from amphora_driver.provider_agent import sync_transactions
from amphora_driver.store import amphorae, generations, silent_amphorae
from amphora_driver.store.requests import Op

TABLES = (job, amphora)


def fill(database, number):
    """Insert pairs in normal service; return the ids of their load balancers."""
    ids = [f"{one * 2654435761 % 2**32:08x}" for one in range(number)]
    row = {"op": Op.APPLY, "generation": 3, "committed": 3, "applied": 3, "dirty": False}
    machine = {"role": "MASTER", "state": "ready", "confirmed": 3, "heartbeat_key": b"k", "created_at": 1.0}
    machines = [
        {"id": f"{one}-{n}", "load_balancer_id": one, "ready_at": 2.0 + n, **machine} for one in ids for n in range(2)
    ]

    def write(connection):
        connection.execute(job.insert(), [{"load_balancer_id": one, **row} for one in ids])
        connection.execute(amphora.insert(), machines)

    database.write(write)
    return ids


def make_exceptional(database, ids):
    """Give each load balancer one reason for a poll to read it; add a pool with a spare, and a booting amphora."""

    def write(connection):
        for one, values in zip(ids, ({"committed": 2}, {"read_back": True}, {"op": Op.DELETE}), strict=True):
            connection.execute(job.update().where(job.c.load_balancer_id == one).values(**values))
        connection.execute(job.insert().values(load_balancer_id="pool", op=Op.SPARES, generation=0))
        amphorae.insert_amphora(connection, "spare", "pool", "SPARE", b"k")
        amphorae.insert_amphora(connection, "booting", ids[0], "BACKUP", b"k")
        connection.execute(amphora.update().where(amphora.c.id == f"{ids[0]}-1").values(state="retiring"))

    database.write(write)
    if database.engine.dialect.name == "postgresql":
        # PostgreSQL does the same from time to time by itself.
        with database.engine.begin() as connection:
            connection.exec_driver_sql("ANALYZE")


def poll(connection):
    """Read what the provider agent and the failure detector read several times a second, except heartbeats."""
    assert len(sync_transactions.list_uncommitted(connection)) == 2
    found = [connection.execute(one).all() for one in silent_amphorae._FINGERPRINT]
    assert found[1:] == [
        [("booting", 2, None, pytest.approx(found[1][0][3])), ("retiring", 1, 3.0, 1.0)],
        [("delete", 1), ("spares", 1)],
        [("delete", 2), ("spares", 1)],
    ]


def test_a_poll_reads_as_much_in_a_fleet_of_any_size(any_database):
    efforts = {}
    for number in (100, 1000):
        make_exceptional(any_database, fill(any_database, number)[:3])
        efforts[number] = effort(any_database, poll, TABLES, "exceptional", "unready", "ready_at")
        any_database.write(lambda c: [c.execute(table.delete()) for table in TABLES])
    assert efforts[1000] < 1.5 * efforts[100]
    if any_database.engine.dialect.name != "sqlite":
        assert efforts[1000] < 80, "4 jobs and 3 amphorae are exceptional, and the poll reads each one several times"


def test_each_uncommitted_load_balancer_is_found(any_database):
    values = itertools.product((Op.APPLY, Op.DELETE, Op.SPARES), ((0, 0), (0, 1), (1, 1), (1, 2)), (False, True))
    rows = [
        {"op": op, "committed": committed, "generation": generation, "read_back": read_back}
        for op, (committed, generation), read_back in values
    ]
    names = [f"lb-{number}" for number in range(len(rows))]
    added = [{"load_balancer_id": name, **row} for name, row in zip(names, rows, strict=True)]
    any_database.write(lambda c: c.execute(job.insert(), added))
    found = {one.load_balancer_id for one in any_database.read(sync_transactions.list_uncommitted)}
    assert found == {
        one["load_balancer_id"] for one in added if one["committed"] < one["generation"] or one["read_back"]
    }
    assert 0 < len(found) < len(rows)


def write_as_before(database, ids, number):
    """Change jobs and amphorae, as a process of the version with revision 0007 does."""
    write, of, new = database.write, ids[number % len(ids)], f"new-{number}"
    row = SimpleNamespace(load_balancer_id=of, generation=number + 4)
    write(lambda c: generations.update_job(c, of, generation=row.generation))
    if number % 2:
        write(lambda c: sync_transactions.mark_committed(c, [row]))
        write(lambda c: sync_transactions.update_due_job(c, of, read_back=number % 3 == 0))
    if number % 5 == 0:
        write(lambda c: sync_transactions.update_due_job(c, of, op=Op.DELETE))
    write(lambda c: amphorae.insert_amphora(c, new, of, "BACKUP", b"k"))
    if number % 3:
        write(lambda c: c.execute(amphora.update().where(amphora.c.id == new).values(state="ready", ready_at=9.0)))
        write(lambda c: c.execute(amphora.update().where(amphora.c.id == f"{of}-0").values(state="retiring")))
        write(lambda c: amphorae.delete_amphora(c, f"{of}-1"))


@pytest.mark.parametrize("kind", ["sqlite", "mariadb", "postgresql"])
def test_an_older_process_writes_during_the_upgrade_and_after_it(empty, tmp_path):
    with older_process(empty, tmp_path / "migrations", "0007") as older:
        ids = fill(older.database, 100)
        older.run(lambda number: write_as_before(older.database, ids, number))
    assert any("INTO amphora" in one for one in older.statements)
    unknown = "exceptional", "unready"
    assert not any(name in one for one in older.statements for name in unknown), "the older version does not know them"
    newer = Database(empty)
    try:
        check_columns(newer)
    finally:
        newer.dispose()


def check_columns(database):
    """Compare the columns with their conditions, and the polls with the columns."""
    jobs, machines = (database.read(lambda c, table=table: c.execute(sa.select(table)).all()) for table in TABLES)
    uncommitted = {one.load_balancer_id for one in jobs if one.committed < one.generation or one.read_back}
    other = {one.load_balancer_id for one in jobs if one.op != Op.APPLY}
    unready = {one.id for one in machines if one.state != "ready"}
    assert {one.load_balancer_id for one in jobs if one.exceptional} == uncommitted | other != uncommitted
    assert {one.id for one in machines if one.unready} == unready
    assert {one.state for one in machines} == {"booting", "ready", "retiring"}
    assert {one.load_balancer_id for one in database.read(sync_transactions.list_uncommitted)} == uncommitted
    watched = database.read(silent_amphorae.load_liveness_snapshot).watched
    assert watched.ready == {one.id for one in machines if one.id not in unready and one.load_balancer_id not in other}
