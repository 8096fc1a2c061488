# SPDX-License-Identifier: Apache-2.0
"""Rows of image rotations: one at a time, selected amphorae, and the effect of pause, resume and abort."""

import threading
import time

import msgspec
import pytest
import sqlalchemy as sa

from amphora_driver.database.tables import amphora, job
from amphora_driver.errors import Conflict, UnknownObject
from amphora_driver.model.loadbalancer import LoadBalancer, Profile, Vip
from amphora_driver.store import desired_objects, rotations
from amphora_driver.store.rotations import ItemState, RotationState, Selection
from amphora_driver.store.spare_pools import SparePoolSpec

EVERYTHING = Selection(everything=True)


def load_balancer(connection, name, *machines, op="apply", **more):
    """Insert a load balancer with amphorae: (id, state, image, age) each."""
    values = {"generation": 1, "committed": 1, "applied": 1, "dirty": False, "topology": "SINGLE", **more}
    connection.execute(job.insert().values(load_balancer_id=name, op=op, **values))
    for one, state, image, age in machines:
        connection.execute(
            amphora.insert().values(
                id=one,
                load_balancer_id=name,
                role="STANDALONE",
                state=state,
                confirmed=1,
                heartbeat_key=b"",
                created_at=time.time() - age,
                image=image,
            )
        )


def fleet(connection):
    load_balancer(connection, "b", ("b1", "ready", "old", 1000))
    load_balancer(connection, "a", ("a1", "ready", "old", 100), ("a2", "ready", "new", 10), project_id="mine")
    load_balancer(connection, "c", ("c1", "ready", None, 2000), topology="ACTIVE_STANDBY")
    load_balancer(connection, "d", ("d1", "retiring", "old", 2000))
    load_balancer(connection, "e", ("e1", "ready", "old", 2000), op="delete")


def asked(database, selection=EVERYTHING, most=1):
    return database.write(lambda c: rotations.request_rotation(c, selection, most, "admin@host"))


def items(database, rotation_id):
    return {one.load_balancer_id: one for one in database.read(lambda c: rotations.list_items(c, rotation_id))}


def states(database, rotation_id):
    return {name: one.state for name, one in items(database, rotation_id).items()}


@pytest.mark.parametrize(
    ("selection", "found"),
    [
        (EVERYTHING, {"a": ("a1", "a2"), "b": ("b1",), "c": ("c1",)}),
        (Selection(image="new"), {"a": ("a1",), "b": ("b1",), "c": ("c1",)}),
        (Selection(older_than=500.0), {"b": ("b1",), "c": ("c1",)}),
        (Selection(everything=True, load_balancers=("c", "a")), {"c": ("c1",), "a": ("a1", "a2")}),
        (Selection(image="new", project="mine"), {"a": ("a1",)}),
        (Selection(image="new", topology="ACTIVE_STANDBY"), {"c": ("c1",)}),
        (Selection(everything=True, load_balancers=("e",)), {}),
    ],
)
def test_the_selected_amphorae(any_database, selection, found):
    any_database.write(fleet)
    chosen = any_database.read(lambda c: rotations.select_amphorae(c, selection, time.time()))
    assert chosen == found
    assert list(chosen) == list(found), "the selection is in this order"


def test_the_compute_flavor_is_read_from_the_profile(any_database):
    def fill(connection):
        for name, flavor in (("small", "1"), ("large", "8"), ("usual", None)):
            vip = Vip(address="198.51.100.5", subnet_id="s", network_id="n", port_id="p")
            tree = LoadBalancer(id=name, project_id="p", vip=vip, profile=Profile(compute_flavor=flavor))
            desired_objects.insert_objects(connection, name, 1, list(desired_objects.iter_subtree(tree)))
            load_balancer(connection, name, (f"{name}-1", "ready", "old", 10))

    any_database.write(fill)
    chosen = Selection(everything=True, compute_flavor="8")
    assert any_database.read(lambda c: rotations.select_amphorae(c, chosen, time.time())) == {"large": ("large-1",)}


def test_a_rotation_is_recorded_with_its_amphorae(any_database):
    any_database.write(fleet)
    made = asked(any_database, Selection(image="new"), 2)
    assert (made.state, made.max_unavailable, made.asked_by) == (RotationState.RUNNING, 2, "admin@host")
    assert made.wanted == Selection(image="new")
    assert {name: (one.place, one.amphorae) for name, one in items(any_database, made.id).items()} == {
        "a": (1, ("a1",)),
        "b": (2, ("b1",)),
        "c": (3, ("c1",)),
    }
    assert any_database.read(rotations.get_active_rotation) == made
    assert any_database.read(lambda c: rotations.count_items(c, made.id)) == {"waiting": 3}


def test_a_second_rotation_is_refused(database):
    with pytest.raises(Conflict, match="the selection contains no amphora to replace"):
        asked(database)
    database.write(fleet)
    made = asked(database)
    with pytest.raises(Conflict, match=f"rotation {made.id} is not finished; only one can be open"):
        asked(database)
    with pytest.raises(UnknownObject, match="nothing is recorded under this id"):
        database.read(
            lambda c: rotations.select_amphorae(c, Selection(everything=True, load_balancers=("x",)), time.time())
        )
    assert len(database.read(lambda c: rotations.list_newest_rotations(c, 9))) == 1


def test_one_of_two_simultaneous_requests_is_refused(any_database):
    any_database.write(fleet)
    outcomes = []

    def go():
        try:
            outcomes.append(asked(any_database).state)
        except Exception as error:  # noqa: BLE001 - any refusal counts
            outcomes.append(type(error))

    threads = [threading.Thread(target=go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count(RotationState.RUNNING) == 1
    assert len(any_database.read(lambda c: rotations.list_newest_rotations(c, 9))) == 1


def begun(database, rotation_id, name):
    one = items(database, rotation_id)[name]
    database.write(lambda c: rotations.begin_item(c, rotation_id, one, "ONLINE"))


def finished(database, rotation_id, name, state, reason=None):
    one = items(database, rotation_id)[name]
    database.write(lambda c: rotations.finish_item(c, rotation_id, one, state, reason))


def test_a_rotation_is_paused_and_resumed(any_database):
    any_database.write(fleet)
    made = asked(any_database)
    begun(any_database, made.id, "a")
    any_database.write(lambda c: rotations.pause_rotation(c, made.id, "admin paused it"))
    with pytest.raises(Conflict, match="it is paused"):
        any_database.write(lambda c: rotations.pause_rotation(c, made.id, "again"))
    paused = any_database.read(lambda c: rotations.get_rotation(c, made.id))
    assert (paused.state, paused.reason) == (RotationState.PAUSED, "admin paused it")
    finished(any_database, made.id, "a", ItemState.FAILED, "no machine")
    any_database.write(lambda c: rotations.resume_rotation(c, made.id))
    resumed = any_database.read(lambda c: rotations.get_rotation(c, made.id))
    assert (resumed.state, resumed.reason) == (RotationState.RUNNING, None)
    assert states(any_database, made.id)["a"] is ItemState.RUNNING, "the observation restarts"
    with pytest.raises(Conflict, match="it is running"):
        any_database.write(lambda c: rotations.resume_rotation(c, made.id))


def test_a_rotation_resumes_without_its_failed_load_balancers(database):
    database.write(fleet)
    made = asked(database)
    begun(database, made.id, "a")
    finished(database, made.id, "a", ItemState.FAILED, "no machine")
    database.write(lambda c: rotations.pause_rotation(c, made.id, "a failed"))
    database.write(lambda c: rotations.resume_rotation(c, made.id, leave_failed=True))
    left = items(database, made.id)["a"]
    assert (left.state, left.reason) == (ItemState.SKIPPED, "skipped after a failure: no machine")


def test_a_failed_rotation_can_be_repeated(database):
    database.write(fleet)
    made = asked(database, Selection(image="new"))
    begun(database, made.id, "b")
    finished(database, made.id, "b", ItemState.FAILED, "booted from old")
    database.write(lambda c: rotations.pause_rotation(c, made.id, "b failed"))
    database.write(lambda c: c.execute(amphora.update().where(amphora.c.id == "b1").values(id="b2")))
    database.write(lambda c: rotations.resume_rotation(c, made.id))
    again = items(database, made.id)["b"]
    assert (again.state, again.amphorae, again.begun_at) == (ItemState.WAITING, ("b1", "b2"), None)


def test_an_aborted_rotation_ends_when_started_replacements_have_ended(any_database):
    any_database.write(fleet)
    made = asked(any_database)
    begun(any_database, made.id, "b")
    any_database.write(lambda c: rotations.abort_rotation(c, made.id))
    assert states(any_database, made.id) == {
        "a": ItemState.SKIPPED,
        "b": ItemState.RUNNING,
        "c": ItemState.SKIPPED,
    }
    with pytest.raises(Conflict, match="is aborted and finishes the load balancers in progress"):
        asked(any_database)
    finished(any_database, made.id, "b", ItemState.DONE)
    any_database.write(lambda c: rotations.finish_rotation(c, made.id, RotationState.ABORTED))
    with pytest.raises(Conflict, match="it is aborted"):
        any_database.write(lambda c: rotations.abort_rotation(c, made.id))
    any_database.write(lambda c: c.execute(amphora.delete().where(amphora.c.id == "b1")))
    rest = asked(any_database, Selection(left_of=made.id))
    assert set(items(any_database, rest.id)) == {"a", "c"}


def test_a_rotation_aborted_before_its_first_replacement_ends_at_once(database):
    database.write(fleet)
    made = asked(database)
    database.write(lambda c: rotations.abort_rotation(c, made.id))
    assert database.read(rotations.get_active_rotation) is None
    assert database.read(lambda c: rotations.get_rotation(c, made.id)).ended_at is not None


def test_old_spares_are_retired(database):
    spec = SparePoolSpec(number=2)

    def fill(connection):
        fleet(connection)
        load_balancer(
            connection,
            spec.id,
            ("s1", "ready", "old", 1000),
            ("s2", "ready", "new", 1),
            op="spares",
            spares=msgspec.json.encode(spec).decode(),
        )

    database.write(fill)
    made = asked(database, Selection(older_than=500.0))
    found = sa.select(amphora.c.id, amphora.c.state).where(amphora.c.load_balancer_id == spec.id)
    assert dict(database.read(lambda c: c.execute(found).tuples().all())) == {"s1": "retiring", "s2": "ready"}
    assert spec.id not in items(database, made.id)


def test_the_estimate_of_the_remaining_time():
    def item(state, begun_at=None, ended_at=None):
        return rotations.RotationItem(
            load_balancer_id="x", place=1, state=state, amphorae=(), begun_at=begun_at, ended_at=ended_at
        )

    done = [item(ItemState.DONE, 10.0, 30.0), item(ItemState.DONE, 10.0, 50.0)]
    left = [item(ItemState.WAITING), item(ItemState.RUNNING, 60.0), item(ItemState.WAITING), item(ItemState.SKIPPED)]
    assert rotations.estimate_remaining_seconds([*done, *left], 1) == 90.0
    assert rotations.estimate_remaining_seconds([*done, *left], 3) == 30.0
    assert rotations.estimate_remaining_seconds(left, 1) is None


def test_old_rotations_are_removed(database):
    database.write(fleet)
    old = asked(database)
    database.write(lambda c: rotations.abort_rotation(c, old.id))
    new = asked(database)
    database.write(lambda c: rotations.purge_old_rotations(c, time.time() + 60))
    assert [one.id for one in database.read(lambda c: rotations.list_newest_rotations(c, 9))] == [new.id]
    assert items(database, old.id) == {}


def test_an_evacuation_selects_the_located_amphorae_and_retires_located_spares(database):
    spec = SparePoolSpec(number=2)

    def fill(connection):
        fleet(connection)
        load_balancer(connection, spec.id, ("s1", "ready", "new", 5), ("s2", "ready", "new", 5), op="spares")

    database.write(fill)
    evacuation = Selection(host="compute1", hosts=("compute1", "digest"))
    located = {"a1", "c1", "s2", "d1"}
    made = database.write(lambda c: rotations.request_rotation(c, evacuation, 1, "admin@host", located))
    assert {name: one.amphorae for name, one in items(database, made.id).items()} == {"a": ("a1",), "c": ("c1",)}
    assert made.wanted == evacuation
    found = database.read(lambda c: c.execute(sa.select(amphora.c.id, amphora.c.state, amphora.c.reason)).all())
    spares = {row.id: (row.state, row.reason) for row in found if row.id.startswith("s")}
    assert spares == {"s1": ("ready", None), "s2": ("retiring", f"rotation {made.id} evacuates its location")}


def test_an_evacuation_without_located_amphorae_is_refused(database):
    database.write(fleet)
    with pytest.raises(Conflict, match="no amphora to replace"):
        database.write(lambda c: rotations.request_rotation(c, Selection(zone="az9"), 1, None, set()))
