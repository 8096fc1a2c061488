# SPDX-License-Identifier: Apache-2.0
"""The plan for a pair: order of pushes, known peers, and replacement of both without an outage."""

import msgspec
import pytest
from pair_simulation import NOW, ROLES, VIP, B, M, Simulation, amphora, but, knows, retiring, wanted

from amphora_driver.model.amphora import AmphoraState, AttachedPort
from amphora_driver.model.loadbalancer import Vip
from amphora_driver.model.network import FixedAddress, Port
from amphora_driver.reconcile import plan as planning
from amphora_driver.reconcile import steps as step_types
from amphora_driver.reconcile import vrrp_peers


def test_a_new_pair_boots_in_parallel_and_gets_one_push():
    simulation = Simulation(wanted(generation=1, applied=0))
    log = simulation.run()
    assert log[:2] == ["Record MASTER", "Record BACKUP"]
    assert log[2:] == ["Push m0+b1", "QueryVips", "Confirm"], "one push for both, because neither serves"
    first, second = simulation.observed.values()
    assert [one.id for one in first.partners] == [second.id]
    assert [one.id for one in second.partners] == [first.id]


def test_slow_steps_begin_first():
    fresh = [but(one, state=AmphoraState.BOOTING, management_address=None, plugged=(), confirmed=0) for one in (M, B)]
    kinds = [type(step).__name__ for step in planning.plan(wanted(applied=3), tuple(fresh))]
    assert kinds == ["Boot", "Boot", "Plug", "Plug", "AwaitAgent", "AwaitAgent"]


def test_a_pair_without_differences_needs_no_step():
    assert planning.plan(wanted(), (M, B)) == []


@pytest.mark.parametrize(
    ("master", "backup", "order"),
    [
        ({}, {}, (("b",), ("m",))),
        ({"holds_vip": True}, {"holds_vip": False}, (("b",), ("m",))),
        ({"holds_vip": False}, {"holds_vip": True}, (("m",), ("b",))),
        ({"holds_vip": False}, {}, (("m",), ("b",))),
        ({"holds_vip": True, "heard_at": 100.0}, {"holds_vip": True, "heard_at": 101.0}, (("m",), ("b",))),
        ({"heard_at": 100.0}, {"holds_vip": False, "heard_at": 50.0}, (("m",), ("b",))),
        ({"holds_vip": True, "heard_at": 50.0}, {"holds_vip": True, "heard_at": 100.0}, (("b",), ("m",))),
    ],
    ids=["no report", "master", "backup", "not the master", "both", "silent standby", "silent master"],
)
def test_standby_is_first_and_silent_amphora_last(master, backup, order):
    found = planning.plan(wanted(generation=5), (but(M, **master), but(B, **backup)))
    assert [step.waves for step in found] == [order]
    assert found[0].whole
    assert not found[0].optional


def test_only_the_outdated_amphora_is_pushed():
    found = planning.plan(wanted(generation=5), (M, but(B, confirmed=5)))
    assert [(step.waves, step.whole) for step in found] == [((("m",),), True)]


def test_without_heartbeats_no_amphora_is_silent():
    assert vrrp_peers.find_silent((but(M, heard_at=10.0), but(B, heard_at=12.0)), 9.0) == frozenset()
    assert vrrp_peers.find_silent((but(M, heard_at=10.0), but(B, heard_at=20.0)), 9.0) == {"m"}
    assert vrrp_peers.find_silent((but(M, heard_at=10.0), B), 9.0) == frozenset(), (
        "an amphora without heartbeats may be new"
    )


def test_both_amphorae_are_replaced_and_the_standby_is_first():
    simulation = Simulation(wanted(generation=5), *retiring(M, B))
    assert simulation.run() == [
        "Record BACKUP",
        "Push m b0",
        "Release BACKUP b",
        "BumpGeneration",
        "Push b0 m",
        "HandOver m to b0",
        "Record MASTER",
        "BumpGeneration",
        "Push b0 m6",
        "ACTIVE",
        "Push m",
        "CheckDrain m",
        "Release MASTER m",
        "BumpGeneration",
        "Push b0 m6",
        "ACTIVE",
    ]
    assert {name: [one.id for one in each.partners] for name, each in simulation.observed.items()} == {
        "b0": ["m6"],
        "m6": ["b0"],
    }


def test_the_master_is_replaced_first_if_the_backup_has_the_vips():
    log = Simulation(wanted(generation=5), *retiring(but(M, holds_vip=False), but(B, holds_vip=True))).run()
    assert log[0] == "Record MASTER"
    assert [one for one in log if "Release" in one or "HandOver" in one] == [
        "Release MASTER m",
        "HandOver b to m0",
        "Release BACKUP b",
    ]


def test_a_silent_amphora_gets_no_push_and_no_hand_over():
    dead = but(M, holds_vip=True, heard_at=50.0)
    log = Simulation(wanted(generation=5), *retiring(dead, but(B, holds_vip=True, heard_at=100.0))).run()
    assert log[:3] == ["Record MASTER", "Push b m0", "Release MASTER m"]
    assert "HandOver b to m0" in log


def test_two_silent_amphorae_hand_nothing_over():
    dead = [but(one, heard_at=None) for one in retiring(M, B)]
    simulation = Simulation(wanted(generation=5), *dead)
    log = simulation.run()
    assert sorted(one.role for one in simulation.observed.values()) == ["BACKUP", "MASTER"]
    assert log[-1] == "ACTIVE"


def test_the_holder_is_queried_once_in_a_job():
    left = but(*retiring(but(M, holds_vip=True, heard_at=100.0)), handed_over=True, drains_until=NOW + 20)
    new = amphora("new", "BACKUP", 23, partners=(knows("m", 21),), holds_vip=False, heard_at=100.0)
    assert [type(step).__name__ for step in planning.plan(wanted(), (left, new))] == ["Record"]


def test_replaced_amphorae_are_pushed_without_a_wait():
    observed = (*retiring(M, B), amphora("new", "BACKUP", 23, confirmed=0))
    (push,) = planning.plan(wanted(generation=5), observed)
    assert push.waves == (("m",), ("new",)), "the holder knows the new peer before that peer starts"
    assert push.optional == {"m"}
    assert not push.whole, "the other role is not filled yet"


def test_amphorae_are_replaced_one_by_one():
    observed = (*retiring(M, B), amphora("new", "BACKUP", 23, state=AmphoraState.BOOTING, confirmed=0))
    kinds = {type(step).__name__ for step in planning.plan(wanted(generation=5), observed)}
    assert kinds == {"AwaitAgent"}
    served = amphora("new", "BACKUP", 23, confirmed=5, partners=(knows("m", 21), knows("b", 22)))
    found = planning.plan(wanted(generation=5), (*retiring(M, B), served))
    assert [(type(step).__name__, step.amphora_id) for step in found] == [("Release", "b")]
    alone = but(served, partners=(knows("m", 21),))
    found = planning.plan(wanted(generation=5), (*retiring(M), alone))
    assert [(type(step).__name__, step.to) for step in found] == [("HandOver", "new")]
    found = planning.plan(wanted(generation=5), (*retiring(but(M, handed_over=True)), alone))
    assert [step.role for step in found] == ["MASTER"]


def test_a_second_failover_during_the_first():
    """Replacements retire too: one of them serves, the other does not."""
    half = amphora("half", "BACKUP", 23, confirmed=4, partners=(knows("m", 21),))
    early = amphora("early", "MASTER", 24, confirmed=0)
    simulation = Simulation(wanted(generation=5), *retiring(M, half, early))
    simulation.run()
    assert len(simulation.observed) == 2
    assert {one.role for one in simulation.observed.values()} == set(ROLES)
    assert all(len(one.partners) == 1 for one in simulation.observed.values())


@pytest.mark.parametrize("stop", range(1, 14))
def test_a_controller_crash_after_any_step_does_not_change_the_result(stop):
    """Another controller computes the same plan; no step is repeated or left out."""
    simulation = Simulation(wanted(generation=5), *retiring(M, B))
    taken = 0
    while todo := planning.plan(simulation.want, tuple(simulation.observed.values())):
        for step in todo:
            if isinstance(step, step_types.Await):
                simulation.want = but(simulation.want, now=step.until)
                break
            simulation.take(step)
            taken += 1
            if taken == stop:
                break
        assert taken < 60
    assert taken >= stop
    assert sorted(one.role for one in simulation.observed.values()) == ["BACKUP", "MASTER"]
    assert len([one for one in simulation.log if one.startswith("Record")]) == 2


def test_an_amphora_with_a_departed_peer_is_pushed():
    alone = but(M, partners=(knows("b", 22), knows("old", 29)))
    found = planning.plan(wanted(), (alone, B))
    assert [type(step).__name__ for step in found] == ["BumpGeneration"]


def test_a_peer_with_another_address_causes_a_new_generation():
    found = planning.plan(wanted(), (but(M, partners=(knows("b", 99),)), B))
    assert [type(step).__name__ for step in found] == ["BumpGeneration"]


def test_a_booting_amphora_is_awaited_without_a_worker():
    coming = but(B, state=AmphoraState.BOOTING, confirmed=0, booted_at=NOW - 1)
    (step,) = planning.plan(wanted(absent=frozenset("b")), (M, coming))
    assert (type(step).__name__, step.until, step.amphorae) == ("Await", NOW + 1, ("b",))
    late = but(coming, booted_at=NOW - 40)
    (step,) = planning.plan(wanted(absent=frozenset("b")), (M, late))
    assert step.until == NOW + 5, "the check interval grows with the boot time"
    (step,) = planning.plan(wanted(absent=frozenset("b")), (M, but(coming, management_address=None)))
    assert type(step).__name__ == "Await", "the machine is not ordered again"


def test_a_new_pair_is_pushed_when_both_amphorae_are_ready():
    first = but(M, confirmed=0, partners=())
    coming = but(B, state=AmphoraState.BOOTING, confirmed=0, booted_at=NOW)
    kinds = [type(step).__name__ for step in planning.plan(wanted(applied=0), (first, coming))]
    assert kinds == ["AwaitAgent"]
    kinds = [type(step).__name__ for step in planning.plan(wanted(applied=0, absent=frozenset("b")), (first, coming))]
    assert kinds == ["Await"]


def test_the_serving_amphora_is_pushed_while_the_other_boots():
    coming = but(B, state=AmphoraState.BOOTING, confirmed=0, booted_at=NOW)
    behind = but(M, confirmed=3, partners=())
    assert [type(step).__name__ for step in planning.plan(wanted(), (behind, coming))] == ["AwaitAgent"]
    (push,) = planning.plan(wanted(absent=frozenset("b")), (behind, coming))
    assert (push.waves, push.whole) == ((("m",),), False)


def test_a_failed_boot_does_not_block_the_partner():
    coming = but(B, state=AmphoraState.BOOTING, confirmed=0)
    behind = but(M, confirmed=0, partners=())
    (push,) = planning.plan(wanted(attempts=1), (behind, coming))
    assert (push.waves, push.whole) == ((("m",),), False)
    served = but(M, partners=(knows("b", 22),))
    assert [type(step).__name__ for step in planning.plan(wanted(attempts=1), (served, coming))] == ["AwaitAgent"]


def begun(**more):
    """A pair that has just confirmed its first generation."""
    return tuple(but(one, confirmed_at=NOW - more.get("ago", 0.0)) for one in (M, B))


def test_a_new_pair_is_confirmed_after_the_vrrp_election():
    fresh = {"applied": 0}
    assert [type(step).__name__ for step in planning.plan(wanted(**fresh), begun())] == ["QueryVips"]
    (step,) = planning.plan(wanted(**fresh, vips_taken=False), begun())
    assert (type(step).__name__, step.until) == ("Await", NOW + 3.0), "VRRP needs three advertisement intervals"
    (step,) = planning.plan(wanted(**fresh, vips_taken=False), begun(ago=4.0))
    assert step.until == pytest.approx(NOW + 0.1)
    assert [type(step).__name__ for step in planning.plan(wanted(**fresh, vips_taken=True), begun())] == ["Confirm"]
    (step,) = planning.plan(wanted(**fresh, vips_taken=False), begun(ago=7.0))
    assert type(step).__name__ == "Confirm", "the wait is limited"
    (step,) = planning.plan(wanted(applied=3), begun())
    assert type(step).__name__ == "Confirm", "a pair that served before has its VIPs"


def test_a_new_pair_queries_the_vips_until_an_amphora_has_them():
    simulation = Simulation(wanted(generation=1, applied=0))
    simulation.looks = 3
    assert simulation.run()[2:] == ["Push m0+b1", *["QueryVips"] * 4, "Confirm"]
    assert simulation.want.now == pytest.approx(NOW + 3.2)


def test_a_deleted_pair_is_released():
    kinds = [type(step).__name__ for step in planning.plan(wanted(gone=True, tree=None, generation=5), (M, B))]
    assert kinds == ["Release", "Release"]


@pytest.mark.parametrize(
    ("vip", "expected"), [("198.51.100.10", "198.51.100.21"), ("2001:db8::10", "2001:db8::21"), ("203.0.113.9", None)]
)
def test_vrrp_peers_use_the_address_family_of_the_first_vip(vip, expected):
    both = AttachedPort(
        port=Port(
            id="p",
            network_id="n1",
            mac="fa:16:3e:00:00:01",
            mtu=1500,
            addresses=(
                FixedAddress(subnet_id="s6", address="2001:db8::21"),
                FixedAddress(subnet_id="s1", address="198.51.100.21"),
            ),
        ),
        subnets=(),
    )
    network = "elsewhere" if expected is None else "n1"
    place = Vip(address=vip, subnet_id="s", network_id=network, port_id="p")
    assert vrrp_peers.own_address(but(M, plugged=(both,)), place) == expected


def test_the_vrrp_instance_of_each_amphora():
    found = vrrp_peers.vrrp_instance(M, (M, B), VIP, 254, 0.2)
    assert msgspec.to_builtins(found) == {
        "interface": "eth1",
        "router_id": 1,
        "priority": 254,
        "advert_interval": 0.2,
        "local": {"name": "m", "address": "198.51.100.21"},
        "peers": ({"name": "b", "address": "198.51.100.22"},),
    }
    assert vrrp_peers.vrrp_instance(M, (M,), VIP, 254, 1.0).peers == ()
    assert vrrp_peers.vrrp_instance(M, (M, but(B, plugged=())), VIP, 254, 1.0).peers == (), (
        "an amphora without a port is no peer"
    )
    assert vrrp_peers.vrrp_instance(M, (M, B), VIP, None, 1.0) is None, "a single amphora has no instance"
