# SPDX-License-Identifier: Apache-2.0
"""Updates of many rows by one statement, on each database."""

import msgspec
import pytest
import sqlalchemy as sa

from amphora_driver.database import bulk_update
from amphora_driver.database.tables import amphora_heartbeat
from amphora_driver.errors import ContentRefused
from amphora_driver.store import amphorae
from amphora_driver.store.amphorae import LastHeartbeat

LARGEST = 2**63 - 1


def heard(amphora_id, sequence, **more):
    known = {"seen_at": 1795291234.123456, "generation": 3, "epoch": 1_900_000_000_000_000_000, "sequence": sequence}
    return LastHeartbeat(**{**known, **more}, amphora_id=amphora_id)


def record(database, *heartbeats, recorded=frozenset()):
    database.write(lambda c: amphorae.record_heartbeats(c, heartbeats, recorded))


def rows(database):
    found = database.read(lambda c: c.execute(sa.select(amphora_heartbeat)).mappings().all())
    return {one["amphora_id"]: dict(one) for one in found}


@pytest.fixture
def database(any_database):
    for one in ("a", "b", "c", "d", "e"):
        any_database.write(lambda c, one=one: amphorae.insert_amphora(c, one, "lb", "standalone", b"key"))
    record(any_database, *(heard(one, 1) for one in "abcde"))
    return any_database


@pytest.fixture
def statements(database):
    """The UPDATE statements that were sent since, each with the number of its executions."""
    sent = []

    def note(_connection, _cursor, statement, parameters, _context, executemany):
        if statement.startswith(("UPDATE", "WITH")):
            sent.append(len(parameters) if executemany else 1)

    sa.event.listen(database.engine, "before_cursor_execute", note)
    yield sent
    sa.event.remove(database.engine, "before_cursor_execute", note)


def test_a_server_gets_one_statement_for_all_rows(database, statements):
    record(database, *(heard(one, 2) for one in "edcba"))
    assert {one["sequence"] for one in rows(database).values()} == {2}
    assert statements == [5 if database.engine.dialect.name == "sqlite" else 1]


def test_each_value_arrives_unchanged(database):
    news = [
        heard("a", LARGEST, generation=LARGEST, epoch=LARGEST, holds_vip=True, agent_version="1.0 ~!\"'\\%:x"),
        heard("b", 2, holds_vip=False, agent_version=""),
        heard("c", 2, seen_at=0.1, generation=0),
    ]
    record(database, *news)
    found = rows(database)
    for one in news:
        assert found[one.amphora_id] == msgspec.structs.asdict(one)


def test_rows_that_do_not_meet_the_condition_stay(database):
    record(database, heard("a", 0), heard("b", 1), heard("c", 9, epoch=5), heard("d", 2), recorded=frozenset("abcde"))
    assert {one: row["sequence"] for one, row in rows(database).items()} == {"a": 1, "b": 1, "c": 1, "d": 2, "e": 1}


def test_many_rows_need_several_statements(database, statements, monkeypatch):
    monkeypatch.setattr(bulk_update, "_CHUNK", 2)
    record(database, *(heard(one, 2) for one in "abcde"))
    assert {one["sequence"] for one in rows(database).values()} == {2}
    assert statements == [5] if database.engine.dialect.name == "sqlite" else [1, 1, 1]


def test_a_server_without_json_tables_gets_one_statement_for_each_row(database, monkeypatch):
    monkeypatch.setattr(bulk_update, "_MARIADB_VERSION", (999,))
    record(database, *(heard(one, 2) for one in "abc"), heard("d", 1))
    assert {one: row["sequence"] for one, row in rows(database).items()} == {"a": 2, "b": 2, "c": 2, "d": 1, "e": 1}


def test_a_deleted_amphora_gets_no_row(database):
    database.write(lambda c: amphorae.delete_amphora(c, "a"))
    record(database, heard("a", 2), heard("b", 2))
    record(database, heard("a", 3), heard("b", 3), recorded=frozenset("ab"))
    assert {one: row["sequence"] for one, row in rows(database).items()} == {"b": 3, "c": 1, "d": 1, "e": 1}


def test_a_value_that_the_column_cannot_hold_is_an_error(database):
    if database.engine.dialect.name == "mysql":
        pytest.skip("MariaDB reads the largest number that the column can hold; the callers check numbers")
    with pytest.raises((ContentRefused, OverflowError)):
        record(database, heard("a", 2), heard("b", 2, epoch=2**63))
    assert {row["sequence"] for row in rows(database).values()} == {1}
