# SPDX-License-Identifier: Apache-2.0
"""Many rows as few JSON texts: the values arrive unchanged, and a shortened text is an error."""

import uuid

import msgspec
import pytest
import sqlalchemy as sa

from amphora_driver.database.joined_rows import join_rows, read_rows
from amphora_driver.database.tables import amphora
from amphora_driver.errors import StoreError

TEXTS = [None, "", "plain", 'quotes " and \\ and ], [', "line\nbreak\ttab\r\x01\x1f", "é ß 漢 🦊", "[1,2],[3]", "null"]


class Row(msgspec.Struct, frozen=True, array_like=True):
    """Columns of an amphora."""

    id: str
    reason: str | None
    drifts: bool | int | None
    confirmed: int
    created_at: float
    booted_at: float | None
    certificate_authority: int | None


def query(limit=None):
    columns = (amphora.c[name] for name in Row.__struct_fields__)
    return join_rows(amphora, amphora.c.id, *columns, limit=limit)


def fill(connection, number, texts=("x",)):
    common = {"load_balancer_id": "lb", "role": "STANDALONE", "state": "ready", "heartbeat_key": b""}
    rows = [
        {
            **common,
            "id": str(uuid.uuid5(uuid.NAMESPACE_OID, str(place))),
            "reason": texts[place % len(texts)],
            "drifts": (None, True, False)[place % 3],
            "confirmed": 2**53 - place,
            "created_at": 1_764_290_000.123456 + place,
            "booted_at": (None, 0.0, -1.5, 1e300)[place % 4],
            "certificate_authority": None if place % 2 else place,
        }
        for place in range(number)
    ]
    connection.execute(amphora.insert(), rows)
    return rows


def test_values_arrive_unchanged(any_database):
    expected = any_database.write(lambda connection: fill(connection, 600, TEXTS))
    found = any_database.read(lambda connection: read_rows(connection, query(), Row))
    told = {
        row.id: (row.reason, row.confirmed, row.created_at, row.booted_at, row.certificate_authority) for row in found
    }
    names = ("reason", "confirmed", "created_at", "booted_at", "certificate_authority")
    assert told == {row["id"]: tuple(row[name] for name in names) for row in expected}
    flags = {row.id: None if row.drifts is None else bool(row.drifts) for row in found}
    assert flags == {row["id"]: row["drifts"] for row in expected}


def test_the_number_of_fetched_rows_is_limited(any_database):
    any_database.write(lambda connection: fill(connection, 900))
    fetched = any_database.read(lambda connection: connection.execute(query()).all())
    assert sum(row.number for row in fetched) == 900
    assert len(fetched) <= 256


@pytest.mark.parametrize("limit", [1, 17, 599, 600, 10_000])
def test_a_limit_keeps_the_smallest_ids(any_database, limit):
    expected = sorted(row["id"] for row in any_database.write(lambda connection: fill(connection, 600)))
    found = any_database.read(lambda connection: read_rows(connection, query(limit), Row))
    assert sorted(row.id for row in found) == expected[:limit]


def test_an_empty_table_has_no_rows(any_database):
    assert any_database.read(lambda connection: read_rows(connection, query(5), Row)) == []


def test_a_shortened_text_is_an_error(mariadb_url):
    engine = sa.create_engine(mariadb_url)
    try:
        with engine.connect() as connection:
            fill(connection, 600, ["a long reason " * 50])
            connection.exec_driver_sql("SET SESSION group_concat_max_len = 1024")
            with pytest.raises(StoreError, match="max_allowed_packet"):
                read_rows(connection, query(), Row)
            connection.exec_driver_sql("SET SESSION group_concat_max_len = 1048576")
            assert len(read_rows(connection, query(), Row)) == 600
            connection.rollback()
    finally:
        engine.dispose()
