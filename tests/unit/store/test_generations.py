# SPDX-License-Identifier: Apache-2.0
"""Generations without a request: no object waits for them, and Octavia gets no report."""

import pytest
import sqlalchemy as sa

from amphora_driver.database.tables import job, object_status
from amphora_driver.model.loadbalancer import LoadBalancer, Vip
from amphora_driver.model.secret_refs import Purpose, SecretName, ticket_secret_name
from amphora_driver.store import generations, sealed_secrets, status_outbox
from amphora_driver.store.requests import RequestRecorder
from amphora_driver.store.sealed_secrets import SealedSecret

VIP = Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1")


@pytest.fixture
def database(any_database):
    """Each database, because MariaDB evaluates assignments from other columns differently."""
    return any_database


@pytest.fixture
def recorder(database):
    return RequestRecorder(database, lambda node: None)


def made(database, recorder, name="lb", **columns):
    """Record a load balancer that is served and fully reported to Octavia."""
    recorder.create_load_balancer(LoadBalancer(id=name, project_id="demo", vip=VIP), read_back=False)
    values = {"committed": 1, "applied": 1, "dirty": False, **columns}

    def write(connection):
        status_outbox.confirm_generation(connection, name, 1, {})
        connection.execute(object_status.update().values(reported=object_status.c.version))
        connection.execute(job.update().where(job.c.load_balancer_id == name).values(**values))

    database.write(write)


def row(database, name="lb"):
    return database.read(lambda c: c.execute(sa.select(job).where(job.c.load_balancer_id == name)).one())


@pytest.mark.parametrize(("committed", "after"), [(1, 2), (0, 0)])
def test_a_committed_generation_stays_committed(database, recorder, committed, after):
    made(database, recorder, committed=committed)
    database.write(lambda c: generations.bump_generation(c, "lb", 1))
    assert (row(database).generation, row(database).committed) == (2, after)


def test_a_concurrent_generation_is_not_assigned_twice(database, recorder):
    made(database, recorder)
    for _ in range(2):
        database.write(lambda c: generations.bump_generation(c, "lb", 1))
    assert row(database).generation == 2


def test_a_generation_without_a_request_sends_no_report(database, recorder):
    made(database, recorder)
    database.write(lambda c: generations.bump_generation(c, "lb", 1))
    database.write(lambda c: status_outbox.confirm_generation(c, "lb", 2, {}))
    assert database.read(lambda c: status_outbox.list_due_reports(c, 10)) == []


def rotate(database, now=1000.0, limit=10, following=b"following"):
    due = database.read(lambda c: generations.list_due_tickets(c, now, limit))
    pairs = [(one, following) for one in due]
    return database.write(lambda c: generations.rotate_tickets(c, pairs, now, 100.0))


def keep(database, content=b"first", name="lb"):
    """Store the sealed state of the ticket keys beside another secret of the same object."""
    given = {
        ticket_secret_name(name): SealedSecret(content=content),
        SecretName(name, Purpose.CA, ""): SealedSecret(content=b"other"),
    }
    database.write(lambda c: sealed_secrets.replace_secrets(c, name, given))


def kept(database, name="lb"):
    found = database.read(lambda c: sealed_secrets.load_secrets(c, name))
    assert found[SecretName(name, Purpose.CA, "")].content == b"other"
    return found[ticket_secret_name(name)].content


def test_due_ticket_keys_move_on(database, recorder):
    made(database, recorder)
    keep(database)
    assert rotate(database) == 0, "the load balancer uses no ticket keys"
    database.write(lambda c: generations.start_ticket_rotation(c, "lb", 1000.0))
    assert rotate(database, now=999.0) == 0
    assert kept(database) == b"first"
    assert rotate(database) == 1
    after = row(database)
    assert (after.tickets, after.tickets_due) == (2, 1100.0)
    assert (after.generation, after.committed, after.applied, after.dirty) == (2, 2, 1, True)
    assert kept(database) == b"following"
    assert rotate(database, now=5000.0) == 0, "the current keys are not served yet"


@pytest.mark.parametrize(
    "meanwhile", [{"tickets": 2}, {"tickets_due": 2000.0}, {"dirty": True}, {"owner": "me:1"}, {"generation": 2}]
)
def test_a_concurrently_used_ticket_state_is_not_overwritten(database, recorder, meanwhile):
    """Another process rotates the keys, or a push makes new ones, between the read and the write of the state."""
    made(database, recorder, tickets=1, tickets_due=1.0)
    keep(database)
    (one,) = database.read(lambda c: generations.list_due_tickets(c, 1000.0, 10))
    assert (one.load_balancer_id, one.number, one.sealed) == ("lb", 1, b"first")
    database.write(lambda c: c.execute(job.update().values(**meanwhile)))
    before = row(database)
    assert database.write(lambda c: generations.rotate_tickets(c, [(one, b"late")], 1000.0, 100.0)) == 0
    assert (row(database), kept(database)) == (before, b"first")


@pytest.mark.parametrize("content", [None, b"lost"])
def test_without_a_next_state_the_load_balancer_is_pushed(database, recorder, content):
    made(database, recorder, tickets=1, tickets_due=1.0)
    keep(database, content)
    assert rotate(database, following=None) == 1
    assert (kept(database), row(database).dirty, row(database).generation) == (content, True, 2)


@pytest.mark.parametrize("busy", [{"dirty": True}, {"owner": "me:1"}, {"op": "delete"}, {"generation": 2}])
def test_a_load_balancer_in_progress_keeps_its_ticket_keys(database, recorder, busy):
    made(database, recorder, tickets=1, tickets_due=1.0, **busy)
    assert rotate(database) == 0


def test_the_number_of_ticket_rotations_is_limited(database, recorder):
    for number in range(3):
        made(database, recorder, f"lb{number}", tickets=1, tickets_due=float(number))
    assert rotate(database, limit=2) == 2
    assert [row(database, f"lb{number}").tickets for number in range(3)] == [2, 2, 1]
