# SPDX-License-Identifier: Apache-2.0
"""Transactions lock rows of several objects in the order of the ids, also if the rows lie in another order on disk.

PostgreSQL detects a deadlock after one second only, and then repeats one of the transactions.
"""

import threading
import time
from types import SimpleNamespace

import pytest
import sqlalchemy as sa

from amphora_driver.database.engine import Database
from amphora_driver.database.tables import job, object_status
from amphora_driver.database.tables_fleet import metadata
from amphora_driver.model.enums import Kind, Operating, Provisioning
from amphora_driver.provider_agent import sync_transactions
from amphora_driver.store import status_outbox
from amphora_driver.store.generations import Op

LB, FIRST, LAST = "lb", "a", "z"
_WAITS = {
    "mysql": (
        "SELECT variable_value FROM information_schema.global_status "
        "WHERE variable_name = 'Innodb_row_lock_current_waits'"
    ),
    "postgresql": "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'",
}


def report(object_id, version):
    return status_outbox.StatusReport(
        object_id=object_id, kind=Kind.MEMBER, load_balancer_id=LB, provisioning=Provisioning.ACTIVE,
        operating=Operating.ONLINE, version=version,
    )  # fmt: skip


# The versions increase against the order of the ids.
REPORTS = [report(LAST, 2), report(FIRST, 3)]
COMMITTED = [SimpleNamespace(load_balancer_id=one, generation=2) for one in (LAST, FIRST)]
WRITES = {
    "a request": (
        object_status,
        lambda c: status_outbox.expect_confirmation(c, LB, 2, [(Kind.MEMBER, FIRST), (Kind.MEMBER, LAST)]),
    ),
    "a confirmation": (object_status, lambda c: status_outbox.confirm_generation(c, LB, 1, {})),
    "a confirmation without an object": (
        object_status,
        lambda c: status_outbox.confirm_generation(c, LB, 1, {LAST: "no address"}),
    ),
    "a failure": (object_status, lambda c: status_outbox.fail_generation(c, LB, 1, "no amphora")),
    "a report": (object_status, lambda c: status_outbox.mark_reported(c, REPORTS)),
    "the end of Octavia's transactions": (job, lambda c: sync_transactions.mark_committed(c, COMMITTED)),
}


@pytest.fixture(params=["mariadb", "postgresql"])
def database(request):
    found = Database(request.getfixturevalue(f"{request.param}_url"), answer_timeout=30.0)
    found.write(insert_against_the_order)
    yield found
    found.write(lambda c: [c.execute(table.delete()) for table in reversed(metadata.sorted_tables)])
    found.dispose()


def insert_against_the_order(connection):
    """Insert the row with the last id first: a scan of the table finds it first."""
    for one in (LAST, FIRST):
        status = {"kind": Kind.MEMBER.value, "load_balancer_id": LB, "pending": 1, "version": 3, "since": 0.0}
        connection.execute(object_status.insert().values(object_id=one, **status))
        connection.execute(job.insert().values(load_balancer_id=one, op=Op.APPLY, generation=2))


def own_id(table):
    return table.c.load_balancer_id if table is job else table.c.object_id


@pytest.mark.parametrize(("table", "write"), WRITES.values(), ids=WRITES.keys())
def test_a_transaction_that_waits_for_the_first_row_has_not_locked_the_last_one(database, table, write):
    lock = sa.select(own_id(table)).where(own_id(table) == sa.bindparam("of")).with_for_update()
    at_once = sa.select(own_id(table)).where(own_id(table) == LAST).with_for_update(nowait=True)
    writing = threading.Thread(target=lambda: database.write(write))
    with database.engine.connect() as holder, holder.begin():
        holder.execute(lock, {"of": FIRST})
        writing.start()
        await_lock_wait(database, writing)
        with database.engine.connect() as other, other.begin():
            assert other.execute(at_once).scalar() == LAST
    writing.join(30)
    assert not writing.is_alive()


def await_lock_wait(database, writing):
    end = time.monotonic() + 30
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        query = _WAITS[connection.dialect.name]
        while not int(connection.exec_driver_sql(query).scalar_one()):
            assert writing.is_alive()
            assert time.monotonic() < end, "no transaction waits for the lock"
