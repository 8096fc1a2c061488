# SPDX-License-Identifier: Apache-2.0
"""Connections of silent and deleted amphorae are removed from the sums."""

import sqlalchemy as sa

from amphora_driver.database.tables import amphora_heartbeat, listener_statistics
from amphora_driver.health import statistics
from amphora_driver.health.stale_connections import StaleConnections

EXPIRY = 15.0
# Seconds of the database clock at the start of a test.
CLOCK = 1000.0


def counted(database, **connections):
    rows = [
        statistics.Row(
            listener_id="l",
            amphora_id=one,
            load_balancer_id="lb",
            active_connections=number,
            bytes_in=7,
            bytes_out=8,
            request_errors=9,
            total_connections=10,
        )
        for one, number in connections.items()
    ]
    database.write(lambda c: statistics.write_rows(c, rows))


def heard(database, name, sequence, seen_at=1.0):
    def write(connection):
        connection.execute(amphora_heartbeat.delete().where(amphora_heartbeat.c.amphora_id == name))
        row = {"amphora_id": name, "seen_at": seen_at, "epoch": 1, "sequence": sequence}
        connection.execute(amphora_heartbeat.insert().values(**row))

    database.write(write)


def remove_stale(leftovers, database, now, *speaking):
    assert leftovers.is_due(now)
    found = database.read(lambda c: leftovers.find_rows(c, CLOCK + now, set(speaking)))
    database.write(lambda c: statistics.write_rows(c, found))
    leftovers.record_scan(now)
    return {row.amphora_id for row in found}


def active(database):
    query = sa.select(listener_statistics.c.amphora_id, listener_statistics.c.active_connections)
    return dict(database.read(lambda c: c.execute(query).tuples().all()))


def test_a_silent_amphora_has_no_connections(database):
    """A restarted health manager does not know what it wrote before."""
    counted(database, dead=5, lives=6, gone=7)
    heard(database, "dead", 1)
    heard(database, "lives", 1)
    leftovers = StaleConnections(EXPIRY)
    assert not leftovers.is_due(0.0), "no heartbeat was possible yet"
    assert remove_stale(leftovers, database, 15.0, "lives") == set()
    assert not leftovers.is_due(29.0)
    assert remove_stale(leftovers, database, 30.0, "lives") == {"dead", "gone"}
    assert active(database) == {"dead": 0, "lives": 6, "gone": 0}
    assert not leftovers.is_due(89.0)
    assert remove_stale(leftovers, database, 90.0, "lives") == set()
    row = database.read(
        lambda c: c.execute(sa.select(listener_statistics).where(listener_statistics.c.active_connections == 0)).first()
    )
    assert (row.bytes_in, row.bytes_out, row.request_errors, row.total_connections) == (7, 8, 9, 10), "the totals stay"


def test_heartbeats_at_another_health_manager_keep_the_connections(database):
    counted(database, theirs=5)
    heard(database, "theirs", 1)
    leftovers = StaleConnections(EXPIRY)
    leftovers.is_due(0.0)
    remove_stale(leftovers, database, 15.0)
    heard(database, "theirs", 2)
    assert remove_stale(leftovers, database, 30.0) == set()
    assert active(database) == {"theirs": 5}
    assert remove_stale(leftovers, database, 90.0) == {"theirs"}, (
        "the other health manager receives no heartbeats either"
    )


def test_a_short_silence_keeps_the_connections(database):
    counted(database, one=5)
    heard(database, "one", 1)
    leftovers = StaleConnections(EXPIRY)
    leftovers.is_due(0.0)
    remove_stale(leftovers, database, 15.0)
    assert remove_stale(leftovers, database, 30.0, "one") == set()
    assert remove_stale(leftovers, database, 90.0) == set(), "the silence is counted from its start again"


def test_the_scan_reads_no_amphora_with_a_recent_heartbeat(database):
    counted(database, recent=5, old=6, future=7, gone=8)
    heard(database, "recent", 1, seen_at=CLOCK + EXPIRY - 1)
    heard(database, "old", 1, seen_at=CLOCK + 1)
    heard(database, "future", 1, seen_at=CLOCK + 1000)
    read = []
    leftovers = StaleConnections(EXPIRY)

    class Heard(set):
        def __contains__(self, amphora_id):
            read.append(amphora_id)
            return False

    database.read(lambda c: leftovers.find_rows(c, CLOCK + EXPIRY, Heard()))
    assert set(read) == {"old", "future", "gone"}
