# SPDX-License-Identifier: Apache-2.0
"""A pair from its creation to its deletion, with fake machines, agents and networks (`control.py`)."""

import time

import pytest
from control import LB, LISTENER, TREE, controlled

from amphora_driver.model.amphora import AmphoraState
from amphora_driver.model.enums import Kind
from amphora_driver.store import amphorae


@pytest.fixture
def control(tmp_path):
    with controlled(tmp_path, options="boot_timeout = 0.1") as control:
        control.recorder.create_load_balancer(TREE, read_back=False)
        control.work()
        assert control.provisioning() == {LB: "ACTIVE", LISTENER: "ACTIVE"}
        yield control


def change(control):
    control.recorder.update_object(Kind.LISTENER, LISTENER, {"connection_limit": control.row().generation})


@pytest.mark.parametrize("dead_one_has_vips", [False, True], ids=["the standby", "the holder"])
def test_a_dead_amphora_causes_an_error_until_it_is_replaced(control, dead_one_has_vips):
    cloud = control.cloud
    standby = next(one for one in control.observed() if one != cloud.holder)
    dead = cloud.holder if dead_one_has_vips else standby
    alive = standby if dead_one_has_vips else cloud.holder
    cloud.dead, cloud.holder = {dead}, alive
    control.heartbeats(silent=(dead,))
    change(control)
    for attempt in range(control.conf.amp_controller.give_up_after):
        assert control.pending() == {LB, LISTENER}, f"not ACTIVE before attempt {attempt}"
        assert control.work() == 1
        assert control.observed()[alive].confirmed == 2, "the live amphora serves the change"
        control.make_all_due()
    assert control.provisioning() == {LB: "ERROR", LISTENER: "ERROR"}
    assert control.pending() == {LB, LISTENER}, "the change stays pending"

    control.recorder.fail_over(LB)
    control.work()
    assert control.provisioning() == {LB: "ACTIVE", LISTENER: "ACTIVE"}
    assert control.pending() == set()
    while control.row().dirty:
        control.make_all_due()
        control.work()
    now = control.observed()
    assert now.keys() == cloud.machines.keys()
    assert not {dead, alive} & now.keys()
    assert sorted(one.role for one in now.values()) == ["BACKUP", "MASTER"]
    assert {one.confirmed for one in now.values()} == {control.row().generation} == {control.row().applied}
    assert cloud.holder in now, "the former live amphora handed over its VIPs"


def draining(control):
    """Fail over until connections drain through the former holder; return its id."""
    old = control.cloud.holder
    control.cloud.lasting = True
    control.recorder.fail_over(LB)
    assert control.work() == 1, "one job, which ends and is due again later"
    assert control.provisioning()[LB] == "ACTIVE"
    assert control.observed()[old].state is AmphoraState.RETIRING
    assert len(control.observed()) == 3
    return old


def test_a_drain_delays_no_other_work(control):
    old = draining(control)
    row = control.row()
    assert (row.owner, row.dirty) == (None, True)
    assert time.time() < row.due_at < time.time() + 3
    assert control.jobs.next_due() == row.due_at
    known = {peer["name"] for peer in control.cloud.served[old]["vrrp"]["peers"]}
    assert known == control.observed().keys() - {old}
    assert control.cloud.served[old]["vrrp"]["priority"] == 1

    change(control)
    assert control.work() == 1, "the change is applied at once"
    generation = control.row().generation
    assert control.pending() == set()
    assert control.cloud.served[old]["generation"] < generation, "a draining amphora gets no changes"
    assert old in control.observed()

    control.cloud.lasting = False
    for _ in range(2):
        control.make_all_due()
        control.work()
    assert old not in control.observed()
    assert old not in control.cloud.machines
    assert not control.row().dirty
    for one, document in control.cloud.served.items():
        if one in control.cloud.machines:
            assert old not in {peer["name"] for peer in document["vrrp"]["peers"]}


def test_the_drain_timeout_releases_the_amphora(control):
    old = draining(control)
    control.database.write(lambda c: amphorae.update_amphora(c, old, drains_until=time.time() - 1))
    control.make_all_due()
    control.work()
    assert old not in control.observed()
    assert not control.row().dirty


def test_a_draining_amphora_fails(control):
    """An amphora that does not answer is released at its drain time-out, or when it is silent."""
    old = draining(control)
    control.cloud.dead = {old}
    control.make_all_due()
    assert control.work() == 1
    assert old in control.observed()

    control.heartbeats(silent=(old,))
    for _ in range(2):
        control.make_all_due()
        control.work()
    assert old not in control.observed()
    assert not control.row().dirty


def test_a_deletion_during_the_drain(control):
    draining(control)
    control.recorder.delete_load_balancer(LB)
    assert control.work() == 1
    assert control.cloud.machines == {}
    assert control.observed() == {}
    assert control.provisioning() == {LB: "DELETED", LISTENER: "DELETED"}


def test_a_second_failover_during_the_drain(control):
    old = draining(control)
    before = control.observed().keys()
    control.recorder.fail_over(LB)
    control.work()
    assert control.provisioning()[LB] == "ACTIVE"
    now = control.observed()
    assert old not in now, "the second drain needs its place"
    assert len(now.keys() - before) == 2
    assert len(now) == 3, "the second former holder drains"
