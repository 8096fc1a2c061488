# SPDX-License-Identifier: Apache-2.0
"""The outbox: reports that are due, held back, or never sent."""

import msgspec
import pytest
import sqlalchemy as sa

from amphora_driver.database.tables import job, object_status, vip_claim
from amphora_driver.model.enums import Kind, ListenerProtocol, Operating, Provisioning
from amphora_driver.model.loadbalancer import Listener, LoadBalancer, Vip
from amphora_driver.store import desired_objects, status_outbox, vip_claims
from amphora_driver.store.requests import RequestRecorder

VIP = Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1")
TREE = LoadBalancer(id="lb", project_id="demo", vip=VIP)
LISTENER = Listener(id="li", loadbalancer_id="lb", protocol=ListenerProtocol.HTTP, protocol_port=80)


@pytest.fixture
def recorder(database):
    recorder = RequestRecorder(database, lambda node: None)
    recorder.create_load_balancer(TREE, read_back=False)
    return recorder


def commit(database):
    """Mark Octavia's transactions as ended."""
    database.write(lambda c: c.execute(job.update().values(committed=job.c.generation)))


def serve(database, generation, failed=None):
    def write(connection):
        connection.execute(job.update().values(applied=generation))
        status_outbox.confirm_generation(connection, "lb", generation, failed or {})

    database.write(write)


def due(database):
    return database.read(lambda c: status_outbox.list_due_reports(c, 100))


def said(database):
    return [(one.object_id, one.provisioning, one.operating) for one in due(database)]


def test_no_report_is_sent_before_octavia_has_committed(recorder, database):
    serve(database, 1)
    assert due(database) == []
    commit(database)
    assert said(database) == [("lb", Provisioning.ACTIVE, None)]


def test_no_object_is_active_before_its_confirmation(recorder, database):
    commit(database)
    assert due(database) == []
    recorder.create_object(Kind.LISTENER, LISTENER)
    serve(database, 1)
    commit(database)
    assert due(database) == [], "the load balancer waits for generation 2"
    serve(database, 2)
    assert said(database) == [("li", Provisioning.ACTIVE, None), ("lb", Provisioning.ACTIVE, None)]


def test_load_balancers_take_turns(recorder, database):
    """A load balancer with more reports than one call holds is not first again."""
    recorder.create_load_balancer(msgspec.structs.replace(TREE, id="other"), read_back=False)
    recorder.create_object(Kind.LISTENER, LISTENER)
    serve(database, 2)
    database.write(lambda c: status_outbox.confirm_generation(c, "other", 2, {}))
    commit(database)

    def order(after):
        return [one.object_id for one in database.read(lambda c: status_outbox.list_due_reports(c, 100, after))]

    assert order("") == ["li", "lb", "other"]
    assert order("lb") == ["other", "li", "lb"]
    assert order("other") == ["li", "lb", "other"]


def test_only_the_reported_version_is_marked(recorder, database):
    commit(database)
    serve(database, 1)
    first = due(database)
    database.write(
        lambda c: status_outbox.write_observations(
            c, "lb", [status_outbox.Observation(object_id="lb", kind=Kind.LOAD_BALANCER, operating=Operating.ONLINE)]
        )
    )
    database.write(lambda c: status_outbox.mark_reported(c, first))
    # A second ACTIVE could overtake the PENDING of a request made in between.
    assert said(database) == [("lb", None, Operating.ONLINE)]
    database.write(lambda c: status_outbox.mark_reported(c, due_now(c)))
    assert due(database) == []


def due_now(connection):
    return status_outbox.list_due_reports(connection, 100)


def test_an_unchanged_status_causes_no_report(recorder, database):
    seen = [status_outbox.Observation(object_id="lb", kind=Kind.LOAD_BALANCER, operating=Operating.ONLINE)]
    assert database.write(lambda c: status_outbox.write_observations(c, "lb", seen)) == 1
    assert database.write(lambda c: status_outbox.write_observations(c, "lb", seen)) == 0


def test_only_differing_statuses_of_this_load_balancer_are_written(recorder, database):
    ids = [f"li{number}" for number in range(1200)]

    def write(connection):
        status_outbox.expect_confirmation(connection, "lb", 2, [(Kind.LISTENER, one) for one in ids])
        status_outbox.expect_confirmation(connection, "other", 2, [(Kind.LISTENER, "theirs")])

    database.write(write)
    seen = [
        status_outbox.Observation(object_id=one, kind=Kind.LISTENER, operating=Operating.ONLINE, reason=f"why {one}")
        for one in [*ids, "theirs", "nothing recorded"]
    ]
    assert database.write(lambda c: status_outbox.write_observations(c, "lb", seen[:700])) == 700
    assert database.write(lambda c: status_outbox.write_observations(c, "lb", seen)) == 500
    rows = {row.object_id: row for row in database.read(lambda c: c.execute(sa.select(object_status)).all())}
    assert {(rows[one].operating, rows[one].reason, rows[one].version) for one in ids} == {
        ("ONLINE", f"why {one}", 1) for one in ids
    }
    assert rows["theirs"].operating is None


def test_no_statement_depends_on_the_order_of_assignments(recorder, database):
    # MySQL and MariaDB evaluate assignments from left to right, with the assigned values.
    seen = []
    sa.event.listen(database.engine, "before_cursor_execute", lambda *args: seen.append(args[2]))
    serve(database, 1)
    settling = [one for one in seen if one.startswith("UPDATE object_status") and "settled=" in one]
    assert settling
    assert all(one.index("settled=") < one.index(" version=") for one in settling)


def test_a_failed_object_is_in_error_until_it_is_repaired(recorder, database):
    recorder.create_object(Kind.LISTENER, LISTENER)
    commit(database)
    serve(database, 2, {"li": "no such thing"})
    assert said(database) == [("li", Provisioning.ERROR, None), ("lb", Provisioning.ACTIVE, None)]
    database.write(lambda c: status_outbox.mark_reported(c, due_now(c)))
    serve(database, 2, {"li": "no such thing"})
    assert due(database) == [], "one report"
    serve(database, 2)
    assert said(database) == [("li", Provisioning.ACTIVE, None)]


def observation(operating, object_id="li", kind=Kind.LISTENER):
    return status_outbox.Observation(object_id=object_id, kind=kind, operating=operating)


def confirmed(database, generation, certain=(), first=()):
    database.write(lambda c: status_outbox.confirm_generation(c, "lb", generation, {}, certain, first))


def test_a_confirmation_reports_its_statuses(recorder, database):
    recorder.create_object(Kind.LISTENER, LISTENER)
    commit(database)
    lb = observation(Operating.ONLINE, "lb", Kind.LOAD_BALANCER)
    confirmed(database, 2, [observation(Operating.ONLINE), observation(Operating.ONLINE, "unknown")], [lb])
    first = due(database)
    assert [(one.object_id, one.provisioning, one.operating) for one in first] == [
        ("li", Provisioning.ACTIVE, Operating.ONLINE),
        ("lb", Provisioning.ACTIVE, Operating.ONLINE),
    ]
    database.write(lambda c: status_outbox.mark_reported(c, first))
    confirmed(database, 2, [observation(Operating.ONLINE)], [lb])
    assert due(database) == [], "one report"


@pytest.mark.parametrize(
    ("before", "after"),
    [(None, "ONLINE"), ("OFFLINE", "ONLINE"), ("ONLINE", "ONLINE"), ("DEGRADED", "DEGRADED"), ("ERROR", "ERROR")],
)
def test_an_initial_status_does_not_replace_a_measured_one(recorder, database, before, after):
    recorder.create_object(Kind.LISTENER, LISTENER)
    if before:
        database.write(lambda c: status_outbox.write_observations(c, "lb", [observation(Operating(before))]))
    confirmed(database, 2, first=[observation(Operating.ONLINE)])
    rows = database.read(lambda c: c.execute(sa.select(object_status.c.object_id, object_status.c.operating)).all())
    assert dict(map(tuple, rows))["li"] == after


def test_newer_measurements_stay(recorder, database):
    """The status changes between the read and the write of a confirmation."""
    recorder.create_object(Kind.LISTENER, LISTENER)

    def meanwhile(connection, _cursor, text, *_more):
        if text.startswith("UPDATE object_status") and "reason=" in text and "settled" not in text and not done:
            done.append(text)
            connection.execute(
                object_status.update().where(object_status.c.object_id == "li").values(operating="ERROR")
            )

    done = []
    sa.event.listen(database.engine, "before_cursor_execute", meanwhile)
    confirmed(database, 2, first=[observation(Operating.ONLINE)])
    assert done
    now = database.read(
        lambda c: c.execute(sa.select(object_status.c.operating).where(object_status.c.object_id == "li")).scalar()
    )
    assert now == "ERROR"


def test_deleted_objects_have_no_status(recorder, database):
    recorder.create_object(Kind.LISTENER, LISTENER)
    serve(database, 2)
    commit(database)
    database.write(lambda c: status_outbox.mark_reported(c, due_now(c)))
    recorder.delete_object(Kind.LISTENER, "li")
    commit(database)
    confirmed(database, 3, [observation(Operating.ONLINE)])
    assert said(database) == [("li", Provisioning.DELETED, None), ("lb", Provisioning.ACTIVE, None)]


def test_a_confirmation_of_an_older_generation_settles_no_newer_object(recorder, database):
    """A failed object is deleted by its user before the job of the generation before ends."""
    recorder.create_object(Kind.LISTENER, LISTENER)
    commit(database)
    serve(database, 2, {"li": "no such thing"})
    database.write(lambda c: status_outbox.mark_reported(c, due_now(c)))
    recorder.delete_object(Kind.LISTENER, "li")
    serve(database, 2)
    serve(database, 2, {"li": "no such thing"})
    commit(database)
    assert due(database) == [], "the object waits for generation 3"
    serve(database, 3)
    assert said(database) == [("li", Provisioning.DELETED, None), ("lb", Provisioning.ACTIVE, None)]


def test_a_new_failure_is_reported_without_a_pending_request(recorder, database):
    recorder.create_object(Kind.LISTENER, LISTENER)
    commit(database)
    serve(database, 2)
    database.write(lambda c: status_outbox.mark_reported(c, due_now(c)))
    serve(database, 2, {"li": "no such thing"})
    assert said(database) == [("li", Provisioning.ERROR, None)]
    assert database.read(
        lambda c: c.execute(sa.select(object_status.c.reason).where(object_status.c.object_id == "li")).scalar()
    )


def test_reports_of_many_objects_need_few_statements(recorder, database):
    seen = []
    ids = [f"li{number:04}" for number in range(600)]
    database.write(lambda c: status_outbox.expect_confirmation(c, "lb", 1, [(Kind.LISTENER, one) for one in ids]))
    serve(database, 1)
    commit(database)
    found = database.read(lambda c: status_outbox.list_due_reports(c, 10_000))
    assert len(found) == 601
    sa.event.listen(database.engine, "before_cursor_execute", lambda *args: seen.append(args[2]))
    database.write(lambda c: status_outbox.mark_reported(c, found))
    assert len([one for one in seen if one.startswith("UPDATE")]) == 1
    assert due(database) == []


def test_a_deleted_object_is_reported_once_and_removed(recorder, database):
    recorder.create_object(Kind.LISTENER, LISTENER)
    recorder.delete_object(Kind.LISTENER, "li")
    commit(database)
    serve(database, 3)
    assert said(database) == [("li", Provisioning.DELETED, None), ("lb", Provisioning.ACTIVE, None)]
    late = [status_outbox.Observation(object_id="li", kind=Kind.LISTENER, operating=Operating.ONLINE)]
    assert database.write(lambda c: status_outbox.write_observations(c, "lb", late)) == 0, "no report follows DELETED"
    database.write(lambda c: status_outbox.mark_reported(c, due_now(c)))
    assert due(database) == []
    assert database.read(lambda c: c.execute(sa.select(sa.func.count()).select_from(object_status)).scalar()) == 1


def test_an_error_report_is_corrected_after_a_later_success(recorder, database):
    commit(database)
    database.write(lambda c: status_outbox.fail_generation(c, "lb", 1, "no amphora"))
    assert said(database) == [("lb", Provisioning.ERROR, None)]
    database.write(lambda c: status_outbox.mark_reported(c, due_now(c)))
    serve(database, 1)
    assert said(database) == [("lb", Provisioning.ACTIVE, None)]


def test_a_deleted_load_balancer_leaves_no_row(recorder, database):
    recorder.create_object(Kind.LISTENER, LISTENER)
    recorder.delete_load_balancer("lb")
    commit(database)
    serve(database, 3)
    assert [one.kind for one in due(database)] == [Kind.LISTENER, Kind.LOAD_BALANCER], "children are reported first"
    database.write(lambda c: status_outbox.mark_reported(c, due_now(c)))
    for table in (object_status, job, desired_objects.desired_object):
        assert database.read(lambda c, table=table: c.execute(sa.select(table)).all()) == []


def rows(database):
    """The load balancers with a `job` row, and those with a claim."""
    columns = job.c.load_balancer_id, vip_claim.c.load_balancer_id
    return [set(database.read(lambda c, column=column: c.execute(sa.select(column)).scalars())) for column in columns]


class Crash(BaseException):
    """Simulates the end of the process before the commit."""


def test_a_claim_ends_with_its_load_balancer_in_one_transaction(recorder, database):
    for one in ("lb", "not yet created"):
        database.write(lambda c, one=one: vip_claims.record_claim(c, one, "local"))
    recorder.delete_load_balancer("lb")
    commit(database)
    serve(database, 2)
    assert rows(database) == [{"lb"}, {"lb", "not yet created"}], "the claim stays until Octavia has the status DELETED"

    def crash(connection):
        status_outbox.mark_reported(connection, due_now(connection))
        raise Crash

    with pytest.raises(Crash):
        database.write(crash)
    assert rows(database) == [{"lb"}, {"lb", "not yet created"}]
    database.write(lambda c: status_outbox.mark_reported(c, due_now(c)))
    assert rows(database) == [set(), {"not yet created"}]
