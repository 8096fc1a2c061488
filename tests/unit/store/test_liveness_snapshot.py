# SPDX-License-Identifier: Apache-2.0
"""The input of the failure detector: few rows and no repeated reads in a fleet without changes."""

import uuid

import pytest
import sqlalchemy as sa

from amphora_driver.database.tables import amphora, amphora_heartbeat, job
from amphora_driver.errors import StoreError
from amphora_driver.store import amphorae, silent_amphorae

NUMBER = 300


def fill(connection, amphora_ids, load_balancer_id="lb", op="apply"):
    work = {"load_balancer_id": load_balancer_id, "op": op, "generation": 1, "dirty": False}
    connection.execute(job.insert().values(**work))
    common = {"load_balancer_id": load_balancer_id, "role": "STANDALONE", "state": "ready", "heartbeat_key": b""}
    rows = [{**common, "id": one, "created_at": 1.0, "ready_at": 2.0} for one in amphora_ids]
    connection.execute(amphora.insert(), rows)
    seen = {"seen_at": 5.5, "generation": 1}
    places = [(one, 2**62 + place, place) for place, one in enumerate(amphora_ids)]
    heard = [{**seen, "amphora_id": one, "epoch": epoch, "sequence": sequence} for one, epoch, sequence in places]
    connection.execute(amphora_heartbeat.insert(), heard)
    return {one: (epoch, sequence) for one, epoch, sequence in places}


@pytest.fixture
def database(any_database):
    return any_database


def read(database, known=None):
    return database.read(lambda connection: silent_amphorae.load_liveness_snapshot(connection, known))


def test_all_heartbeats_are_read(database):
    ids = [str(uuid.uuid4()) for _ in range(NUMBER)]
    expected = database.write(lambda connection: fill(connection, ids))
    database.write(
        lambda c: c.execute(amphora_heartbeat.delete().where(amphora_heartbeat.c.amphora_id == ids[0])).rowcount
    )
    found = read(database)
    assert found.orders == {**expected, ids[0]: None}
    assert found.watched.ready == set(ids)
    assert database.read(lambda c: silent_amphorae.read_last_heard(c, ids[:2])) == {ids[0]: 2.0, ids[1]: 5.5}


def change_nothing(connection):
    connection.execute(amphora_heartbeat.update().values(sequence=amphora_heartbeat.c.sequence + 1))


def delete_load_balancer(connection):
    connection.execute(job.update().where(job.c.load_balancer_id == "lb").values(op="delete"))


def adopt_a_spare(connection):
    connection.execute(amphora.update().where(amphora.c.id == "spare").values(load_balancer_id="lb"))


def retire(connection):
    connection.execute(amphora.update().where(amphora.c.id == "second").values(state="retiring"))


def replace(connection):
    connection.execute(amphora.delete().where(amphora.c.id == "second"))
    row = {"id": "third", "load_balancer_id": "lb", "role": "STANDALONE", "state": "ready", "heartbeat_key": b""}
    connection.execute(amphora.insert().values(**row, created_at=3.0, ready_at=4.0))


def remove(connection):
    amphorae.delete_amphora(connection, "second")


def become_ready_after_the_clock_was_set_back(connection):
    connection.execute(amphora.update().where(amphora.c.id == "booting").values(state="ready", ready_at=1.0))


@pytest.mark.parametrize(
    ("change", "watched"),
    [
        (delete_load_balancer, set()),
        (adopt_a_spare, {"first", "second", "spare"}),
        (retire, {"first", "second"}),
        (replace, {"first", "third"}),
        (remove, {"first"}),
        (become_ready_after_the_clock_was_set_back, {"first", "second", "booting"}),
    ],
)
def test_amphorae_are_read_again_after_a_change_only(database, change, watched):
    database.write(lambda connection: fill(connection, ["first", "second"]))
    database.write(lambda connection: fill(connection, ["spare"], load_balancer_id="pool", op="spares"))
    database.write(lambda connection: amphorae.insert_amphora(connection, "booting", "lb", "STANDALONE", b""))
    before = read(database).watched
    database.write(change_nothing)
    again = read(database, before)
    assert again.watched is before
    assert again.orders["second"] == (2**62 + 1, 2)
    database.write(change)
    after = read(database, before).watched
    assert after is not before
    assert set(after.by_id) == watched
    assert after.ready == watched - ({"second"} if change is retire else set())


def test_a_fleet_has_few_rows(database):
    """The number of rows that a round reads is bounded, for any number of amphorae."""
    ids = [str(uuid.uuid4()) for _ in range(3 * NUMBER)]
    database.write(lambda connection: fill(connection, ids))
    known = read(database).watched
    fetched = []

    class Counted:
        """A connection that counts the rows of each result."""

        def __init__(self, connection):
            self._connection = connection
            self.dialect = connection.dialect

        def execute(self, *arguments):
            frozen = self._connection.execute(*arguments).freeze()
            fetched.append(len(frozen().all()))
            return frozen()

    found = database.read(lambda c: silent_amphorae.load_liveness_snapshot(Counted(c), known))
    assert len(found.orders) == 3 * NUMBER
    assert sum(fetched) <= 10, fetched


def test_a_shortened_text_is_an_error(mariadb_url):
    engine = sa.create_engine(mariadb_url)
    try:
        with engine.connect() as connection:
            fill(connection, [f"aa{number:034}" for number in range(50)])
            connection.exec_driver_sql("SET SESSION group_concat_max_len = 1024")
            with pytest.raises(StoreError, match="max_allowed_packet"):
                silent_amphorae.load_heartbeat_orders(connection)
            connection.exec_driver_sql("SET SESSION group_concat_max_len = 1048576")
            assert len(silent_amphorae.load_heartbeat_orders(connection)) == 50
            connection.rollback()
    finally:
        engine.dispose()
