# SPDX-License-Identifier: Apache-2.0
"""Transactions of several processes on one database."""

import multiprocessing

import pymysql
import pytest
import sqlalchemy as sa

from amphora_driver.database.engine import Database
from amphora_driver.database.tables import duty
from amphora_driver.errors import StoreError


def _count_up(database, times):
    def work(connection):
        seen = connection.execute(sa.select(duty.c.epoch)).scalar_one()
        connection.execute(duty.update().values(epoch=seen + 1))

    for _ in range(times):
        database.write(work)


def test_no_update_of_several_processes_is_lost(database):
    database.write(lambda c: c.execute(duty.insert().values(name="x", owner="", epoch=0, leased_until=0.0)))
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_count_up, args=(database, 50)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert database.read(lambda c: c.execute(sa.select(duty.c.epoch)).scalar_one()) == 200


def test_a_failed_transaction_leaves_no_change_and_no_lock(database):
    def half(connection):
        connection.execute(duty.insert().values(name="x", owner="", epoch=0, leased_until=0.0))
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        database.write(half)
    assert database.read(lambda c: c.execute(sa.select(duty)).all()) == []
    database.write(lambda c: c.execute(duty.insert().values(name="x", owner="", epoch=0, leased_until=0.0)))


def test_a_reader_does_not_wait_for_a_writer(database):
    with database.engine.begin() as writing:
        writing.execute(duty.insert().values(name="x", owner="", epoch=0, leased_until=0.0))
        assert database.read(lambda c: c.execute(sa.select(duty)).all()) == []
    assert len(database.read(lambda c: c.execute(sa.select(duty)).all())) == 1


def test_a_database_error_names_the_statement(database):
    with pytest.raises(StoreError, match="write to the database"):
        database.write(lambda c: c.exec_driver_sql("INSERT INTO nowhere VALUES (1)"))


def test_an_open_transaction_is_rolled_back_on_return(mariadb_url, monkeypatch):
    """A transaction that has ended is not rolled back again."""
    undone = []
    rollback = pymysql.connections.Connection.rollback
    monkeypatch.setattr(pymysql.connections.Connection, "rollback", lambda self: (undone.append(self), rollback(self)))
    database = Database(mariadb_url)
    row = {"name": "open", "owner": "me", "epoch": 1, "leased_until": 0.0}
    database.write(lambda connection: connection.execute(duty.insert().values(**row)))
    undone.clear()  # the connection pool tests the first connection
    database.write(lambda connection: connection.execute(duty.update().values(epoch=1)))
    assert undone == []
    raw = database.engine.raw_connection()
    raw.cursor().execute("UPDATE duty SET epoch = 2 WHERE name = 'open'")
    raw.close()
    assert len(undone) == 1
    mine = sa.select(duty.c.epoch).where(duty.c.name == "open").with_for_update(nowait=True)
    assert database.write(lambda connection: connection.execute(mine).scalar()) == 1
    database.write(lambda connection: connection.execute(duty.delete().where(duty.c.name == "open")))
    database.dispose()


def test_a_read_sends_only_its_statements(mariadb_url, monkeypatch):
    """MariaDB gets no COMMIT and no ROLLBACK, unless the reading function begins a transaction."""
    sent = []
    execute = pymysql.connections.Connection._execute_command
    monkeypatch.setattr(
        pymysql.connections.Connection,
        "_execute_command",
        lambda self, command, text: (sent.append(text), execute(self, command, text)),
    )
    database = Database(mariadb_url)
    select = sa.text("SELECT 1")
    database.read(lambda connection: connection.execute(select).all())
    for work, expected in (
        (lambda connection: [connection.execute(select).all() for _ in range(2)], [b"SELECT 1", b"SELECT 1"]),
        (lambda connection: connection.exec_driver_sql("START TRANSACTION"), [b"START TRANSACTION", "ROLLBACK"]),
    ):
        sent.clear()
        database.read(work)
        assert sent == expected
    sent.clear()
    with pytest.raises(StoreError, match="nothing"):
        database.read(lambda connection: connection.exec_driver_sql("SELECT nothing"))
    assert sent == [b"SELECT nothing"]
    database.dispose()


def test_a_read_sees_each_commit(mariadb_url):
    """As in a transaction with READ COMMITTED, each statement of a read has a snapshot of its own."""
    database = Database(mariadb_url)
    row = {"name": "seen", "owner": "me", "epoch": 1, "leased_until": 0.0}
    database.write(lambda connection: connection.execute(duty.insert().values(**row)))

    def read(connection):
        select = sa.select(duty.c.epoch).where(duty.c.name == "seen")
        first = connection.execute(select).scalar_one()
        database.write(lambda other: other.execute(duty.update().where(duty.c.name == "seen").values(epoch=2)))
        return first, connection.execute(select).scalar_one()

    assert database.read(read) == (1, 2)
    database.write(lambda connection: connection.execute(duty.delete().where(duty.c.name == "seen")))
    database.dispose()
