# SPDX-License-Identifier: Apache-2.0
"""A pair's whole life with stand-ins for machines, agents and networks (`control.py`)."""

import time

import pytest
from control import LB, LISTENER, TREE, controlled

from amphora_driver.model.amphora import AmphoraState
from amphora_driver.model.enums import Kind
from amphora_driver.store import amphorae


@pytest.fixture
def control(tmp_path):
    with controlled(tmp_path, options="boot_timeout = 0.1") as control:
        control.intents.create_load_balancer(TREE, read_back=False)
        control.work()
        assert control.provisioning() == {LB: "ACTIVE", LISTENER: "ACTIVE"}
        yield control


def change(control):
    control.intents.update_object(Kind.LISTENER, LISTENER, {"connection_limit": control.row().generation})


@pytest.mark.parametrize("dead_one_has_vips", [False, True], ids=["the standby", "the one with the VIPs"])
def test_a_dead_one_means_error_until_it_is_replaced(control, dead_one_has_vips):
    world = control.world
    standby = next(one for one in control.observed() if one != world.holder)
    dead = world.holder if dead_one_has_vips else standby
    alive = standby if dead_one_has_vips else world.holder
    world.dead, world.holder = {dead}, alive
    control.heartbeats(silent=(dead,))
    change(control)
    for attempt in range(control.conf.amp_controller.give_up_after):
        assert control.pending() == {LB, LISTENER}, f"nothing is ACTIVE before attempt {attempt}"
        assert control.work() == 1
        assert control.observed()[alive].confirmed == 2, "users are served what they wanted"
        control.hurry()
    assert control.provisioning() == {LB: "ERROR", LISTENER: "ERROR"}
    assert control.pending() == {LB, LISTENER}, "it is still wanted"

    control.intents.fail_over(LB)
    control.work()
    assert control.provisioning() == {LB: "ACTIVE", LISTENER: "ACTIVE"}
    assert control.pending() == set()
    while control.row().dirty:
        control.hurry()
        control.work()
    now = control.observed()
    assert now.keys() == world.machines.keys()
    assert not {dead, alive} & now.keys()
    assert sorted(one.role for one in now.values()) == ["BACKUP", "MASTER"]
    assert {one.confirmed for one in now.values()} == {control.row().generation} == {control.row().applied}
    assert world.holder in now, "the one that lived has handed them over"


def draining(control):
    """A fail-over, up to where connections go on by way of the former holder; returns its id."""
    old = control.world.holder
    control.world.lasting = True
    control.intents.fail_over(LB)
    assert control.work() == 1, "one job, that ends and is due later"
    assert control.provisioning()[LB] == "ACTIVE"
    assert control.observed()[old].state is AmphoraState.RETIRING
    assert len(control.observed()) == 3
    return old


def test_drain_delays_no_other_work(control):
    old = draining(control)
    row = control.row()
    assert (row.owner, row.dirty) == (None, True)
    assert time.time() < row.due_at < time.time() + 3
    assert control.jobs.next_due() == row.due_at
    known = {peer["name"] for peer in control.world.served[old]["vrrp"]["peers"]}
    assert known == control.observed().keys() - {old}
    assert control.world.served[old]["vrrp"]["priority"] == 1

    change(control)
    assert control.work() == 1, "at once"
    generation = control.row().generation
    assert control.pending() == set()
    assert control.world.served[old]["generation"] < generation, "it is told of no change any more"
    assert old in control.observed()

    control.world.lasting = False
    for _ in range(2):
        control.hurry()
        control.work()
    assert old not in control.observed()
    assert old not in control.world.machines
    assert not control.row().dirty
    for one, document in control.world.served.items():
        if one in control.world.machines:
            assert old not in {peer["name"] for peer in document["vrrp"]["peers"]}


def test_its_time_is_over(control):
    old = draining(control)
    control.database.write(lambda c: amphorae.update_amphora(c, old, drains_until=time.time() - 1))
    control.hurry()
    control.work()
    assert old not in control.observed()
    assert not control.row().dirty


def test_the_amphora_ends_during_the_job(control):
    """It does not answer: it is given up with its time, or as soon as it is missed."""
    old = draining(control)
    control.world.dead = {old}
    control.hurry()
    assert control.work() == 1
    assert old in control.observed()

    control.heartbeats(silent=(old,))
    for _ in range(2):
        control.hurry()
        control.work()
    assert old not in control.observed()
    assert not control.row().dirty


def test_the_load_balancer_is_deleted_meanwhile(control):
    draining(control)
    control.intents.delete_load_balancer(LB)
    assert control.work() == 1
    assert control.world.machines == {}
    assert control.observed() == {}
    assert control.provisioning() == {LB: "DELETED", LISTENER: "DELETED"}


def test_fail_over_again_meanwhile(control):
    old = draining(control)
    before = control.observed().keys()
    control.intents.fail_over(LB)
    control.work()
    assert control.provisioning()[LB] == "ACTIVE"
    now = control.observed()
    assert old not in now, "its place was needed"
    assert len(now.keys() - before) == 2
    assert len(now) == 3, "now the second one's connections go on"
