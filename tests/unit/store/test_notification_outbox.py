# SPDX-License-Identifier: Apache-2.0
"""The outbox of notifications on each database: rows that wait, become due, and are dropped."""

import json

import pytest
import sqlalchemy as sa

from amphora_driver.database.tables import job, notification
from amphora_driver.model.enums import Kind, ListenerProtocol
from amphora_driver.model.loadbalancer import Listener, LoadBalancer, Vip
from amphora_driver.notifications import outbox
from amphora_driver.notifications.outbox import Event
from amphora_driver.store.requests import RequestRecorder

VIP = Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1")
LISTENER = Listener(id="li", loadbalancer_id="lb", protocol=ListenerProtocol.HTTP, protocol_port=80)


def create(database, *names):
    made = RequestRecorder(database, lambda node: None, announce=outbox.announce)
    for one in names:
        made.create_load_balancer(LoadBalancer(id=one, project_id="demo", vip=VIP, name=one), read_back=False)
    return made


@pytest.fixture
def recorder(any_database):
    return create(any_database, "lb", "other")


def release(database, **served):
    database.write(lambda connection: outbox.release(connection, served))


def due(database):
    """Event, load balancer and name in each due notification, in the order of sending."""
    found = database.read(lambda connection: outbox.list_due(connection, 100))
    contents = [(one.event, json.loads(one.payload)) for one in found]
    return [(event, payload["loadbalancer_id"], payload["name"]) for event, payload in contents]


def number(database):
    return database.read(lambda c: c.execute(sa.select(sa.func.count()).select_from(notification)).scalar_one())


def test_a_notification_waits_for_its_generation(recorder, any_database):
    recorder.update_object(Kind.LOAD_BALANCER, "lb", {"name": "new"})
    assert due(any_database) == []
    release(any_database, lb=0)
    assert due(any_database) == []
    release(any_database, lb=1)
    assert due(any_database) == [(Event.CREATE, "lb", "new")]
    release(any_database, lb=2, other=1)
    assert due(any_database) == [
        (Event.CREATE, "lb", "new"),
        (Event.CREATE, "other", "other"),
        (Event.UPDATE, "lb", "new"),
    ]
    before = any_database.read(lambda connection: outbox.list_due(connection, 100))
    release(any_database, lb=2, other=1)
    assert any_database.read(lambda connection: outbox.list_due(connection, 100)) == before, "released once"
    any_database.write(lambda connection: outbox.delete(connection, [one.id for one in before]))
    assert number(any_database) == 0


def test_only_requests_about_the_load_balancer_itself_have_notifications(recorder, any_database):
    recorder.create_object(Kind.LISTENER, LISTENER)
    recorder.update_object(Kind.LISTENER, "li", {"name": "x"})
    recorder.delete_object(Kind.LISTENER, "li")
    recorder.fail_over("lb")
    assert number(any_database) == 2, "of the two creations"


def test_a_deletion_drops_the_notifications_of_requests_that_were_never_served(recorder, any_database):
    recorder.delete_load_balancer("lb")
    recorder.delete_load_balancer("lb")  # the first deletion ended in ERROR
    any_database.write(lambda connection: outbox.release_deleted(connection, ["lb"]))
    assert due(any_database) == [(Event.DELETE, "lb", "lb")]
    assert number(any_database) == 2, "the other load balancer waits"


def test_a_deletion_proves_that_octavia_has_accepted_earlier_results(recorder, any_database):
    """The provider agent died between Octavia's acceptance of ACTIVE and its own transaction."""
    any_database.write(lambda c: c.execute(job.update().where(job.c.load_balancer_id == "lb").values(applied=1)))
    recorder.delete_load_balancer("lb")
    any_database.write(lambda connection: outbox.release_deleted(connection, ["lb"]))
    assert due(any_database) == [(Event.CREATE, "lb", "lb"), (Event.DELETE, "lb", "lb")]


def test_old_notifications_are_dropped_and_waiting_ones_are_not(recorder, any_database):
    release(any_database, lb=1)
    assert any_database.write(lambda connection: outbox.delete_old(connection, 60.0)) == 0
    any_database.write(lambda c: c.execute(notification.update().values(ready_at=notification.c.ready_at - 61.0)))
    assert any_database.write(lambda connection: outbox.delete_old(connection, 60.0)) == 1
    assert number(any_database) == 1


def test_notifications_of_forgotten_load_balancers_are_dropped(recorder, any_database):
    release(any_database, lb=1)
    any_database.write(lambda c: c.execute(job.delete()))
    any_database.write(outbox.delete_ownerless)
    assert due(any_database) == [(Event.CREATE, "lb", "lb")], "due ones are sent"
    assert number(any_database) == 1


def test_the_oldest_of_too_many_waiting_notifications_are_dropped(recorder, any_database):
    release(any_database, lb=1)
    for name in ("a", "b", "c"):
        recorder.update_object(Kind.LOAD_BALANCER, "other", {"name": name})
    assert number(any_database) == 5, "one is due, four wait"

    def drop(keep, limit):
        return any_database.write(lambda connection: outbox.delete_excess(connection, keep, limit))

    assert drop(4, 10) == 0
    assert drop(1, 2) == 2
    assert drop(1, 2) == 1
    assert drop(1, 2) == 0
    release(any_database, other=4)
    assert [event for event, _, _ in due(any_database)] == [Event.CREATE, Event.UPDATE]
    left = any_database.read(lambda c: c.execute(sa.select(notification.c.generation)).scalars().all())
    assert sorted(left) == [1, 4], "the due one and the newest waiting one are left"


def becoming_due(database, work):
    """Call `work` with a connection; the notification of `lb` becomes due before the first deletion."""
    # SQLite has one writer at a time, so there the same transaction makes the notification due.
    alone = database.engine.dialect.name == "sqlite"

    def drop(connection):
        def become_due(*event):
            if event[2].startswith("DELETE"):
                outbox.release(connection, {"lb": 1}) if alone else release(database, lb=1)

        sa.event.listen(connection, "before_cursor_execute", become_due)
        return work(connection)

    return database.write(drop)


def test_a_notification_that_becomes_due_before_the_deletion_is_kept(recorder, any_database):
    recorder.update_object(Kind.LOAD_BALANCER, "other", {"name": "new"})
    dropped = becoming_due(any_database, lambda connection: outbox.delete_excess(connection, 1, 10))
    assert dropped == 1, "the creation of the other load balancer"
    assert due(any_database) == [(Event.CREATE, "lb", "lb")]
    assert number(any_database) == 2


def test_a_notification_that_becomes_due_before_the_purge_is_kept(recorder, any_database):
    """Another process may report a load balancer that it read before the load balancer was forgotten."""
    any_database.write(lambda c: c.execute(job.delete()))
    becoming_due(any_database, outbox.delete_ownerless)
    assert due(any_database) == [(Event.CREATE, "lb", "lb")]
    assert number(any_database) == 1


def test_a_load_balancer_without_a_row_has_no_payload(database):
    create(database, "lb")
    database.write(lambda c: c.execute(sa.text("DELETE FROM desired_object")))
    release(database, lb=1)
    assert due(database) == []


def test_a_refused_request_has_no_notification(database):
    recorder = create(database, "lb")
    with pytest.raises(ZeroDivisionError):
        RequestRecorder(database, lambda node: 1 / 0, announce=outbox.announce).update_object(
            Kind.LOAD_BALANCER, "lb", {"name": "new"}
        )
    assert number(database) == 1
    recorder.update_object(Kind.LOAD_BALANCER, "lb", {"name": "new"})
    assert number(database) == 2


def test_no_row_is_written_while_notifications_are_off(database):
    off = RequestRecorder(database, lambda node: None)
    off.create_load_balancer(LoadBalancer(id="lb", project_id="demo", vip=VIP), read_back=False)
    off.update_object(Kind.LOAD_BALANCER, "lb", {"name": "new"})
    off.delete_load_balancer("lb")
    assert number(database) == 0
