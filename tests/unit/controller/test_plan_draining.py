# SPDX-License-Identifier: Apache-2.0
"""The plan while an amphora without VIPs drains its connections: only its own release waits."""

import pytest
from pair_simulation import DRAIN, NOW, ROLES, B, M, Simulation, amphora, but, knows, retiring, wanted

from amphora_driver.model.amphora import AmphoraState
from amphora_driver.reconcile import plan as planning
from amphora_driver.reconcile import vrrp_peers

NEW_B = amphora("b2", "BACKUP", 23, partners=(knows("m", 21), knows("m2", 24)))
NEW_M = amphora("m2", "MASTER", 24, partners=(knows("b2", 23), knows("m", 21)))


def draining(**changes):
    """The former VIP holder, which knows the remaining amphorae."""
    known = (knows("b2", 23), knows("m2", 24))
    (old,) = retiring(but(M, holds_vip=False, partners=known))
    return but(old, **{"handed_over": True, "drains_until": NOW + DRAIN, **changes})


def kinds(steps):
    return [type(step).__name__ for step in steps]


@pytest.mark.parametrize(
    ("old", "expected"),
    [
        ({}, ["CheckDrain", "Await"]),
        ({"partners": (knows("b2", 23),)}, ["Push", "CheckDrain", "Await"]),
        ({"drains_until": NOW}, ["Release"]),
        ({"drains_until": 0.0}, ["Release"]),
        ({"drains_until": None}, ["Release"]),
    ],
    ids=["draining", "a peer is missing", "drain time is over", "drained", "release of the VIPs failed"],
)
def test_the_steps_of_a_former_holder(old, expected):
    stays = but(NEW_B, heard_at=NOW)
    found = planning.plan(wanted(), (draining(**old), stays, NEW_M))
    assert kinds(found) == expected


@pytest.mark.parametrize(("heard_at", "silent"), [(NOW - 100, True), (NOW - 1, False)])
def test_the_drain_check_marks_a_silent_amphora(heard_at, silent):
    look, _ = planning.plan(wanted(), (draining(heard_at=heard_at), but(NEW_B, heard_at=NOW), NEW_M))
    assert look.silent is silent


@pytest.mark.parametrize(("left", "expected"), [(DRAIN, 2.0), (1.5, 1.5)])
def test_the_time_of_the_next_drain_check(left, expected):
    found = planning.plan(wanted(), (draining(drains_until=NOW + left), NEW_B, NEW_M))
    assert found[-1].until == NOW + expected


@pytest.mark.parametrize("until", [NOW - 3600.0, NOW, NOW + 3600.0])
def test_after_a_clock_jump_the_agent_decides_about_the_drain(until):
    found = planning.plan(wanted(clock_set=True), (draining(drains_until=until), but(NEW_B, heard_at=NOW), NEW_M))
    assert kinds(found) == ["CheckDrain", "Await"]
    assert found[-1].until == NOW + 2.0


def test_after_a_clock_jump_a_finished_drain_stays_finished():
    for ended in (0.0, None):
        old = draining(drains_until=ended)
        assert kinds(planning.plan(wanted(clock_set=True), (old, but(NEW_B, heard_at=NOW), NEW_M))) == ["Release"]


def test_a_draining_amphora_learns_its_new_peer():
    (push, *_) = planning.plan(wanted(), (draining(partners=(knows("b2", 23),)), NEW_B, NEW_M))
    assert (push.waves, push.optional, push.whole) == ((("m",),), {"m"}, False)


def test_a_users_change_does_not_wait_for_a_draining_amphora():
    (push,) = planning.plan(wanted(generation=5), (draining(partners=()), NEW_B, NEW_M))
    assert push.waves == (("b2",), ("m2",))
    assert not push.optional
    assert push.whole, "this push makes the load balancer ACTIVE"


def test_an_unused_network_is_unplugged_during_the_drain():
    more = but(NEW_B.plugged[0], port=but(NEW_B.plugged[0].port, network_id="n2"))
    plugged = but(NEW_B, plugged=(*NEW_B.plugged, more))
    assert kinds(planning.plan(wanted(), (draining(), plugged, NEW_M))) == ["CheckDrain", "Unplug", "Await"]


def test_the_load_balancer_is_active_during_the_drain():
    simulation = Simulation(wanted(generation=5), *retiring(M, B))
    simulation.lasting = {"m": 3}
    log = simulation.run()
    assert log[log.index("ACTIVE") :][:6] == ["ACTIVE", "Push m", *["CheckDrain m"] * 4]
    assert log[-4:-2] == ["Release MASTER m", "BumpGeneration"]
    assert log[-1] == "ACTIVE"


def test_long_connections_end_with_the_drain_timeout():
    simulation = Simulation(wanted(generation=5), *retiring(M, B))
    simulation.lasting = {"m": 1000}
    log = simulation.run()
    assert "Release MASTER m" in log
    assert log.count("CheckDrain m") == DRAIN / 2
    assert simulation.want.now == NOW + DRAIN


def test_the_standby_is_released_without_a_drain():
    simulation = Simulation(wanted(generation=5), *retiring(M, B))
    assert "CheckDrain b" not in simulation.run()


def test_a_single_amphora_is_released_at_once():
    alone = wanted(roles=("STANDALONE",), priorities={})
    old = but(amphora("old", "STANDALONE", 21), state=AmphoraState.RETIRING)
    assert kinds(planning.plan(alone, (old, amphora("new", "STANDALONE", 22)))) == ["Release"]


def test_a_deleted_load_balancer_ends_the_drain():
    found = planning.plan(wanted(gone=True, tree=None, generation=5), (draining(), NEW_B, NEW_M))
    assert kinds(found) == ["Release", "Release", "Release"]


@pytest.mark.parametrize("holder", ["b2", "m2"])
def test_a_second_failover_during_the_drain(holder):
    """Three amphorae retire: the draining one does not block, and a hand-over needs exactly two others."""
    both = [but(one, holds_vip=one.id == holder, heard_at=NOW) for one in (NEW_B, NEW_M)]
    simulation = Simulation(wanted(generation=5), draining(heard_at=NOW), *retiring(*both))
    simulation.lasting = {"m": 1000}
    log = simulation.run()
    assert sorted(one.role for one in simulation.observed.values()) == sorted(ROLES)
    assert not {"m", "b2", "m2"} & simulation.observed.keys()
    assert next(one for one in log if "HandOver" in one).startswith(f"HandOver {holder}")
    assert log[-1] == "ACTIVE"


def test_an_amphora_that_keeps_the_vips_learns_its_peers_at_once():
    """Otherwise it advertises to its former partner only, and the new amphora takes the VIPs."""
    held = but(M, holds_vip=True, heard_at=NOW)
    simulation = Simulation(wanted(generation=5), *retiring(held, but(B, holds_vip=False, heard_at=NOW)))
    simulation.stubborn = {"m"}
    log = simulation.run()
    after = log[log.index("HandOver m to b0") + 1 :]
    assert log.count("HandOver m to b0") == 1, "one request"
    assert after[:4] == ["Record MASTER", "BumpGeneration", "Push b0 m m6", "ACTIVE"]
    assert after[4:] == ["Release MASTER m", "BumpGeneration", "Push b0 m6", "ACTIVE"]


def test_an_unreachable_amphora_is_released_once_its_replacement_serves():
    held = but(M, holds_vip=True, heard_at=NOW - 100, handed_over=True)
    served = but(NEW_M, confirmed=5, partners=(knows("b2", 23), knows("m", 21)))
    stays = but(NEW_B, confirmed=5, heard_at=NOW)
    found = planning.plan(wanted(generation=5, applied=5), (*retiring(held), stays, served))
    assert [(type(step).__name__, step.amphora_id) for step in found] == [("Release", "m")]


def test_an_amphora_that_released_its_vips_is_not_the_holder():
    old = draining(holds_vip=True, heard_at=NOW)
    assert vrrp_peers.find_holder((old, NEW_B, NEW_M), "MASTER", frozenset()) != "m"
    stubborn = draining(drains_until=None, holds_vip=True, heard_at=NOW)
    assert vrrp_peers.find_holder((stubborn, NEW_B, NEW_M), "MASTER", frozenset()) == "m"


@pytest.mark.parametrize("dead", ["m", "b"])
def test_a_dead_amphora_is_replaced_and_the_load_balancer_is_active_again(dead):
    """The load balancer is in ERROR because the dead amphora does not confirm the generation."""
    well = {"holds_vip": True, "heard_at": NOW, "confirmed": 5}
    gone = {"holds_vip": True, "heard_at": NOW - 100, "confirmed": 4}
    pair = [but(one, **(gone if one.id == dead else well)) for one in (M, B)]
    (push,) = planning.plan(wanted(generation=5, attempts=8), tuple(pair))
    assert push.waves == ((dead,),), "until the fail-over the push is retried"
    simulation = Simulation(wanted(generation=6, applied=4), *retiring(*pair))
    log = simulation.run()
    assert log[-1] == "ACTIVE"
    assert simulation.want.applied == simulation.want.generation
    assert log[2] == f"Release {'MASTER' if dead == 'm' else 'BACKUP'} {dead}"
    assert {one.role for one in simulation.observed.values()} == set(ROLES)
