# SPDX-License-Identifier: Apache-2.0
"""Heartbeat and statistics rows without an owner: only these are deleted, without locks on other rows."""

import pytest
import sqlalchemy as sa

from amphora_driver.database.engine import Database
from amphora_driver.database.tables import amphora_heartbeat, listener_statistics
from amphora_driver.model.loadbalancer import LoadBalancer, Vip
from amphora_driver.store import amphorae, orphans
from amphora_driver.store.amphorae import LastHeartbeat
from amphora_driver.store.requests import RequestRecorder

VIP = Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1")
OWNED = [f"amphora{number:03}" for number in range(200)]


def record(database):
    """Record amphorae of a load balancer, and rows of an amphora and a load balancer that do not exist any more."""
    recorder = RequestRecorder(database, lambda node: None)
    recorder.create_load_balancer(LoadBalancer(id="lb", project_id="demo", vip=VIP), read_back=False)

    def write(connection):
        for one in OWNED:
            amphorae.insert_amphora(connection, one, "lb", "SINGLE", b"key")
        rows = [
            {"amphora_id": one, "seen_at": 1.0, "generation": 1, "epoch": 1, "sequence": 1}
            for one in (*OWNED, "deleted")
        ]
        connection.execute(amphora_heartbeat.insert(), rows)
        counted = [
            {"listener_id": "li", "amphora_id": OWNED[0], "load_balancer_id": "lb"},
            {"listener_id": "former", "amphora_id": "deleted", "load_balancer_id": "gone"},
            # The totals of a listener include deleted amphorae.
            {"listener_id": "li", "amphora_id": "deleted", "load_balancer_id": "lb"},
        ]
        connection.execute(listener_statistics.insert(), counted)

    database.write(write)


def delete_stale_rows(database):
    stale = database.read(orphans.find_stale_rows)
    assert (list(stale.amphora_ids), list(stale.load_balancer_ids)) == (["deleted"], ["gone"])
    return database.write(lambda connection: orphans.delete_stale_rows(connection, stale))


def test_rows_without_an_owner_are_deleted(any_database):
    record(any_database)
    assert delete_stale_rows(any_database) == 2
    left = any_database.read(lambda c: c.execute(sa.select(amphora_heartbeat.c.amphora_id)).scalars().all())
    assert sorted(left) == OWNED
    counted = any_database.read(lambda c: c.execute(sa.select(listener_statistics.c.load_balancer_id)).scalars().all())
    assert counted == ["lb", "lb"]
    stale = any_database.read(orphans.find_stale_rows)
    assert not stale.amphora_ids
    assert not stale.load_balancer_ids


@pytest.mark.parametrize("any_database", ["mariadb"], indirect=True)
def test_the_deletion_waits_for_no_row_with_an_owner(any_database):
    """A health manager writes the times of all amphorae in one transaction every second."""
    record(any_database)
    other = Database(any_database.url)
    heard = [LastHeartbeat(amphora_id=one, seen_at=2.0, generation=1, epoch=1, sequence=2) for one in OWNED]
    with other.engine.connect() as writing, writing.begin():
        amphorae.record_heartbeats(writing, heard)
        # A wait for one of these rows would end with an error of the server.
        assert delete_stale_rows(any_database) == 2
    other.dispose()
    assert any_database.read(lambda c: c.scalar(sa.select(sa.func.count()).select_from(amphora_heartbeat))) == 200
