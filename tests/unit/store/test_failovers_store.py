# SPDX-License-Identifier: Apache-2.0
"""Old fail-overs are removed with their events, and other rows stay."""

import sqlalchemy as sa

from amphora_driver.database.tables_fleet import failover, failover_event
from amphora_driver.store import failovers
from amphora_driver.store.failovers import Event, FailoverOutcome


def add(connection, number, ended):
    row = {"load_balancer_id": "lb", "amphora_id": f"am{number}", "cause": "silent", "begun_at": 1.0}
    connection.execute(failover.insert().values(**row))
    failovers.record_event(connection, "lb", Event.BOOTED, 2.0, f"am{number}")
    if ended is not None:
        failovers.finish_failovers(connection, "lb", FailoverOutcome.DONE, ended, f"am{number}")


def test_old_failovers_are_removed_in_chunks_with_their_events(any_database):
    for number, ended in enumerate((10.0, 20.0, 30.0, 200.0, None)):
        any_database.write(lambda c, number=number, ended=ended: add(c, number, ended))

    def purge():
        return any_database.write(lambda c: failovers.purge_old_failovers(c, 100.0, limit=2))

    assert (purge(), purge(), purge()) == (True, False, False)
    left = any_database.read(lambda c: c.execute(sa.select(failover.c.id, failover.c.amphora_id)).all())
    assert {row.amphora_id for row in left} == {"am3", "am4"}
    events = any_database.read(lambda c: c.execute(sa.select(failover_event.c.failover_id).distinct()).scalars().all())
    assert set(events) == {row.id for row in left}
