# SPDX-License-Identifier: Apache-2.0
"""Rows of adoptions on each supported database: the order, the steps, and their effect on jobs and reports."""

import pytest

from amphora_driver.adoption import records as adoptions
from amphora_driver.adoption.records import Step
from amphora_driver.database import clock
from amphora_driver.database.tables import URGENT, job, object_status
from amphora_driver.database.tables_fleet import process
from amphora_driver.errors import Conflict, UnknownObject
from amphora_driver.model.enums import Kind, ListenerProtocol, Operating
from amphora_driver.model.loadbalancer import Listener, LoadBalancer, Vip
from amphora_driver.store import amphorae, status_outbox
from amphora_driver.store.process_registry import ProcessKind, ProcessRegistration
from amphora_driver.store.status_outbox import Observation

LB, LISTENER = "lb", "listener"
TREE = LoadBalancer(
    id=LB,
    project_id="demo",
    vip=Vip(address="198.51.100.10", subnet_id="s", network_id="n", port_id="p"),
    listeners=(Listener(id=LISTENER, loadbalancer_id=LB, protocol=ListenerProtocol.HTTP, protocol_port=80),),
)


def ask(database, *names):
    more = {"max_in_progress": 1, "remove_after": 60.0, "asked_by": "admin"}
    database.write(lambda c: adoptions.request_adoptions(c, names, **more))


def get(database, name=LB):
    return database.read(lambda c: adoptions.get_adoption(c, name))


def move(database, found, step, **values):
    return database.write(lambda c: adoptions.move(c, found, step, **values))


def recorded(database):
    """A load balancer in adoption, with its rows."""
    ask(database, LB)
    assert move(database, get(database), Step.PREPARE)
    database.write(lambda c: adoptions.record_load_balancer(c, TREE, {}))


def row(database):
    return database.read(lambda c: amphorae.load_with_work(c, LB))[0]


def test_requests_keep_their_order(any_database):
    ask(any_database, "c", "a", "b")
    ask(any_database, "0")
    found = any_database.read(lambda c: adoptions.list_adoptions(c, only_open=True))
    assert [one.load_balancer_id for one in found] == ["c", "a", "b", "0"]
    with pytest.raises(Conflict, match="its adoption is in progress"):
        ask(any_database, "a")


def test_a_step_is_recorded_once(any_database):
    ask(any_database, LB)
    found = get(any_database)
    assert move(any_database, found, Step.LOCK)
    assert not move(any_database, found, Step.LOCK)
    again = get(any_database)
    assert (again.step, again.ended_at) == (Step.LOCK, None)
    assert move(any_database, again, Step.REFUSED, reason="no")
    ended = get(any_database)
    assert (ended.reason, ended.ended_at is None) == ("no", False)
    assert any_database.read(lambda c: adoptions.list_adoptions(c, only_open=True)) == []
    # An ended adoption is replaced.
    ask(any_database, LB)
    assert get(any_database).step is Step.WAITING


def test_a_recorded_load_balancer_is_not_adopted(any_database):
    recorded(any_database)
    assert move(any_database, get(any_database), Step.DONE)
    with pytest.raises(Conflict, match="this provider has recorded it already"):
        ask(any_database, LB)


def test_only_waiting_adoptions_pause(any_database):
    ask(any_database, "a", "b")
    assert move(any_database, get(any_database, "a"), Step.LOCK)
    for paused, number in ((True, 1), (True, 0), (False, 1)):
        assert any_database.write(lambda c, paused=paused: adoptions.set_paused(c, paused=paused)) == number


@pytest.mark.parametrize("step", [Step.LOCK, Step.TAKE, Step.COMMIT, Step.KEEP])
def test_a_revert_is_recorded(any_database, step):
    ask(any_database, LB)
    assert move(any_database, get(any_database), step)
    any_database.write(lambda c: adoptions.request_revert(c, LB))
    found = get(any_database)
    assert (found.step, found.revert) == (step, True)


def test_a_step_that_does_not_know_of_a_revert_is_not_recorded(any_database):
    ask(any_database, LB)
    assert move(any_database, get(any_database), Step.KEEP)
    found = get(any_database)
    any_database.write(lambda c: adoptions.request_revert(c, LB))
    assert not move(any_database, found, Step.REMOVE)
    assert move(any_database, get(any_database), Step.RELOCK)


@pytest.mark.parametrize("step", [Step.REMOVE, Step.RESTORE, Step.DONE])
def test_a_late_revert_is_refused(any_database, step):
    ask(any_database, LB)
    assert move(any_database, get(any_database), step)
    with pytest.raises(Conflict, match=f"its step is {step.value}"):
        any_database.write(lambda c: adoptions.request_revert(c, LB))
    with pytest.raises(UnknownObject):
        any_database.write(lambda c: adoptions.request_revert(c, "other"))


@pytest.mark.parametrize(
    ("revision", "kind", "age", "is_unfit"),
    [
        (None, "controller", 1.0, True),
        ("0005", "controller", 1.0, True),
        ("0006", "controller", 1.0, False),
        ("0007", "controller", 1.0, False),
        ("0005", "controller", 60.0, False),
        ("0005", "health-manager", 1.0, False),
    ],
)
def test_running_controllers_that_do_not_know_adoptions_are_found(any_database, revision, kind, age, is_unfit):
    row = {"name": "host:1", "kind": kind, "host": "host", "schema_revision": revision, "started_at": 0.0}
    any_database.write(lambda c: c.execute(process.insert().values(**row, seen_at=clock.now(c) - age)))
    assert any_database.read(adoptions.list_unfit_controllers) == (["host:1"] if is_unfit else [])


def test_a_controller_of_this_version_knows_adoptions(any_database):
    ProcessRegistration(any_database, "host:1", ProcessKind.CONTROLLER).heartbeat()
    assert any_database.read(adoptions.list_unfit_controllers) == []


def test_the_vips_are_held_until_the_former_amphorae_are_cut(any_database):
    recorded(any_database)
    assert (row(any_database).vips_held, row(any_database).takes_vips) == (True, False)
    any_database.write(lambda c: adoptions.lift_hold(c, LB))
    found = row(any_database)
    assert (found.vips_held, found.takes_vips, found.generation, found.due_at) == (False, True, 2, URGENT)
    assert any_database.read(lambda c: c.execute(job.select()).one().committed) == 2
    assert move(any_database, get(any_database), Step.KEEP, reporting=True)
    assert (row(any_database).vips_held, row(any_database).takes_vips) == (False, False)


def test_octavia_hears_nothing_before_the_report_and_everything_after_it(any_database):
    recorded(any_database)
    seen = Observation(object_id=LB, kind=Kind.LOAD_BALANCER, operating=Operating.ONLINE)

    def due():
        return {one.object_id for one in any_database.read(lambda c: status_outbox.list_due_reports(c, 10))}

    any_database.write(lambda c: status_outbox.expect_confirmation(c, LB, 1, [(Kind.LOAD_BALANCER, LB)]))
    any_database.write(lambda c: status_outbox.confirm_generation(c, LB, 1, {}))
    assert due() == set()
    assert move(any_database, get(any_database), Step.KEEP, reporting=True)
    any_database.write(lambda c: adoptions.begin_reports(c, LB, TREE))
    assert any_database.read(lambda c: adoptions.read_progress(c, LB)).pending
    any_database.write(lambda c: status_outbox.confirm_generation(c, LB, 2, {}))
    any_database.write(lambda c: status_outbox.write_observations(c, LB, [seen]))
    assert due() == {LB, LISTENER}
    # Confirmed objects still count until Octavia has the reports.
    assert any_database.read(lambda c: adoptions.read_progress(c, LB)).pending
    reports = any_database.read(lambda c: status_outbox.list_due_reports(c, 10))
    any_database.write(lambda c: status_outbox.mark_reported(c, reports))
    assert not any_database.read(lambda c: adoptions.read_progress(c, LB)).pending
    any_database.write(lambda c: status_outbox.expect_confirmation(c, LB, 3, [(Kind.LOAD_BALANCER, LB)]))
    any_database.write(lambda c: status_outbox.confirm_generation(c, LB, 3, {}))
    assert due() == {LB}
    assert move(any_database, get(any_database), Step.RESTORE, reporting=False)
    assert due() == set()


def test_nothing_is_left_after_the_way_back(any_database):
    recorded(any_database)
    any_database.write(lambda c: adoptions.begin_reports(c, LB, TREE))
    any_database.write(lambda c: adoptions.discard(c, LB))
    assert any_database.read(lambda c: c.execute(object_status.select()).all()) == []
    assert any_database.read(lambda c: c.execute(job.select()).one().op) == "delete"
    any_database.write(lambda c: adoptions.forget(c, LB))
    assert not any_database.read(lambda c: adoptions.read_progress(c, LB)).recorded
