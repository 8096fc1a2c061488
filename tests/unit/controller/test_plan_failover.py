# SPDX-License-Identifier: Apache-2.0
"""The plan for the replacement of one amphora, after a failure or on request."""

import pytest
from pair_simulation import DRAIN, NOW, ROLES, B, M, Simulation, amphora, but, knows, retiring, wanted

from amphora_driver.model.amphora import AmphoraState
from amphora_driver.reconcile import plan as planning
from amphora_driver.reconcile import vrrp_peers


def dead(one, **changes):
    """An amphora without heartbeats and answers; its last heartbeat is old."""
    return but(
        one, **{"state": AmphoraState.RETIRING, "dead": True, "heard_at": NOW - 20, "holds_vip": True, **changes}
    )


def alone(**more):
    return wanted(roles=("STANDALONE",), priorities={}, **more)


def kinds(steps):
    return [type(step).__name__ for step in steps]


WELL = {"heard_at": NOW, "holds_vip": True}


@pytest.mark.parametrize(
    ("old", "stays", "role"),
    [(dead(M), but(B, **WELL), "MASTER"), (dead(B, holds_vip=False), but(M, **WELL), "BACKUP")],
    ids=["the holder", "the standby"],
)
def test_a_dead_amphora_of_a_pair_is_replaced_and_its_partner_serves(old, stays, role):
    """The partner keeps the VIPs, the new amphora never has the dead peer, and one round releases the dead amphora."""
    simulation = Simulation(wanted(), old, stays)
    log = simulation.run()
    new = next(one for one in simulation.observed.values() if one.id != stays.id)
    assert log == [
        f"Record {role}",
        "BumpGeneration",
        f"Release {role} {old.id}",
        f"Push {stays.id} {new.id}",
        "ACTIVE",
    ], "fence the possible holder before its partner forgets it"
    assert [one.id for one in new.partners] == [stays.id]
    assert [one.id for one in simulation.observed[stays.id].partners] == [new.id], "no further push"


def test_a_dead_amphora_gets_no_request_before_its_partner_reports_the_vips():
    """Right after a failure, the last heartbeats still name the dead amphora as the holder."""
    log = Simulation(wanted(), dead(M, heard_at=NOW), but(B, heard_at=NOW, holds_vip=False)).run()
    assert not [one for one in log if "HandOver" in one or one.startswith("Push m")]


def test_both_amphorae_of_a_pair_are_dead():
    """No amphora serves: both replacements boot in parallel and get one push; otherwise each takes the VIPs."""
    simulation = Simulation(wanted(), dead(M), dead(B, holds_vip=False))
    simulation.never_fewer = 0
    log = simulation.run()
    assert log[:2] == ["Record MASTER", "Record BACKUP"] or log[:2] == ["Record BACKUP", "Record MASTER"]
    assert log[2:4] == ["Release MASTER m", "Release BACKUP b"]
    assert log[4].startswith("Push ")
    assert "+" in log[4]
    assert log[5:] == ["ACTIVE"]


def test_a_dead_amphora_precedes_a_planned_replacement():
    """A dead amphora is replaced before a requested fail-over, without a wait for its machine."""
    simulation = Simulation(wanted(generation=5, attempts=1), dead(M, confirmed=4), *retiring(but(B, **WELL)))
    log = simulation.run()
    assert log[0] == "Record MASTER"
    assert next(one for one in log if "HandOver" in one).startswith("HandOver b to m0")
    assert "Release MASTER m" not in log[: log.index("HandOver b to m0")], "the release of the machine may take long"
    assert sorted(one.role for one in simulation.observed.values()) == sorted(ROLES)
    assert not {"m", "b"} & simulation.observed.keys()


def test_the_replacement_does_not_wait_for_the_destruction_of_the_machine():
    """After a failed attempt, everything serves before the next request to the compute backend."""
    for observed in ((dead(M), but(B, **WELL)), (dead(M), dead(B))):
        simulation = Simulation(wanted(attempts=1), *observed)
        simulation.never_fewer = 0
        log = simulation.run()
        assert [one for one in log if "Release" in one] == log[log.index("ACTIVE") + 1 :]
    simulation = Simulation(alone(), dead(amphora("old", "STANDALONE", 21)))
    simulation.never_fewer = 0
    assert simulation.run() == ["Record STANDALONE", "Push s0", "ACTIVE", "Release STANDALONE old"]


def test_a_replacement_that_falls_silent_before_it_confirmed_is_replaced():
    """The same rule applies to a STANDALONE amphora."""
    lost = dead(amphora("lost", "MASTER", 29, confirmed=0), holds_vip=None)
    simulation = Simulation(wanted(), dead(M), lost, but(B, **WELL))
    log = simulation.run()
    assert log[0] == "Record MASTER"
    assert {one.split()[-1] for one in log if "Release" in one} == {"m", "lost"}
    assert "lost" not in {each.id for one in simulation.observed.values() for each in one.partners}
    only = Simulation(
        alone(), dead(amphora("old", "STANDALONE", 21)), dead(amphora("lost", "STANDALONE", 22, confirmed=0))
    )
    only.never_fewer = 0
    assert only.run()[:3] == ["Record STANDALONE", "Push s0", "ACTIVE"]


def test_a_users_change_neither_waits_for_the_machine_nor_prevents_its_order():
    """The live amphora serves the change; the load balancer is ACTIVE once the replacement serves."""
    coming = amphora("new", "MASTER", 24, confirmed=0, state=AmphoraState.BOOTING)
    (record,) = planning.plan(wanted(generation=5), (dead(M), but(B, **WELL)))
    assert type(record).__name__ == "Record", "the replacement is recorded in any case"
    meanwhile = wanted(generation=5, absent=frozenset({"new"}))
    (fence,) = planning.plan(meanwhile, (dead(M), but(B, **WELL), coming))
    assert type(fence).__name__ == "Release", "fence the dead amphora before its partner forgets it"
    (push,) = planning.plan(meanwhile, (dead(M), but(B, **WELL, partners=()), coming))
    assert push.waves == (("b",),), "the partner has forgotten the dead amphora"
    (push,) = planning.plan(but(meanwhile, attempts=1), (dead(M), but(B, **WELL), coming))
    assert (push.waves, push.whole) == ((("b",),), False)
    log = Simulation(wanted(generation=5), dead(M), but(B, **WELL)).run()
    assert log[1:] == ["Release MASTER m", "Push b m0", "ACTIVE"]
    single = Simulation(alone(generation=5), dead(amphora("old", "STANDALONE", 21)))
    single.never_fewer = 0
    assert single.run() == ["Record STANDALONE", "Push s0", "ACTIVE", "Release STANDALONE old"]


def draining():
    known = (knows("b2", 23), knows("m2", 24))
    return but(
        retiring(but(M, holds_vip=False, heard_at=NOW, partners=known))[0], handed_over=True, drains_until=NOW + DRAIN
    )


NEW_B = amphora("b2", "BACKUP", 23, partners=(knows("m", 21), knows("m2", 24)))
NEW_M = amphora("m2", "MASTER", 24, partners=(knows("b2", 23), knows("m", 21)))


@pytest.mark.parametrize("lost", ["b2", "m2"])
def test_an_amphora_ends_while_connections_drain(lost):
    """The drain continues: no hand-over is needed."""
    pair = [dead(one) if one.id == lost else but(one, **WELL) for one in (NEW_B, NEW_M)]
    simulation = Simulation(wanted(), draining(), *pair)
    simulation.lasting = {"m": 3}
    log = simulation.run()
    assert log[0] == f"Record {'BACKUP' if lost == 'b2' else 'MASTER'}"
    assert "Release MASTER m" not in log[: log.index("ACTIVE")]
    assert not [one for one in log if "HandOver" in one]
    assert "m" not in simulation.observed
    assert sorted(one.role for one in simulation.observed.values()) == sorted(ROLES)


def test_a_draining_amphora_falls_silent():
    simulation = Simulation(wanted(), but(draining(), heard_at=NOW - 100), but(NEW_B, **WELL), NEW_M)
    assert simulation.run()[:2] == ["CheckDrain m", "Release MASTER m"]


def test_a_deletion_ends_the_failover():
    found = planning.plan(wanted(gone=True, tree=None, generation=5), (dead(M), B))
    assert kinds(found) == ["Release", "Release"]


def test_a_failover_of_a_live_holder_hands_over():
    """An operator replaces the holder: its partner has no other peer, takes the VIPs and keeps them."""
    simulation = Simulation(wanted(), *retiring(but(M, **WELL)), but(B, heard_at=NOW, holds_vip=False))
    log = simulation.run()
    assert log[0] == "HandOver m to b"
    assert log[1] == "Record MASTER"
    assert "ACTIVE" in log
    standby = Simulation(wanted(), but(M, **WELL), *retiring(but(B, heard_at=NOW, holds_vip=False)))
    log = standby.run()
    assert not [one for one in log if "HandOver" in one]
    assert log[-1] == "ACTIVE"


@pytest.mark.parametrize("spares", [(), ("w1", "w2")])
def test_an_available_spare_is_adopted(spares):
    (step,) = planning.plan(wanted(spares=spares, pool="pool"), (dead(M), but(B, **WELL)))
    assert type(step).__name__ == ("Adopt" if spares else "Record")
    assert step.role == "MASTER"


def test_a_new_load_balancer_adopts_no_spare():
    (step,) = planning.plan(alone(applied=0, spares=("w1",)), ())
    assert type(step).__name__ == "Record"


def test_an_adopted_spare_is_plugged_and_pushed():
    warm = amphora("w1", "STANDALONE", 0, plugged=(), confirmed=0)
    old = dead(amphora("old", "STANDALONE", 21))
    assert kinds(planning.plan(alone(), (old, warm))) == ["Plug"]
    plugged = but(warm, plugged=M.plugged)
    assert kinds(planning.plan(alone(), (old, plugged))) == ["Push"]


def test_a_dead_amphora_is_no_holder_and_no_peer():
    old = dead(M, heard_at=NOW)
    assert vrrp_peers.find_holder((old, B), "MASTER", frozenset({"m"})) == "b"
    assert vrrp_peers.vrrp_instance(B, (old, B), wanted().tree.vip, 253, 1.0).peers == ()


def test_the_bootable_one_of_two_replacements_is_served():
    """D cannot be booted: after that C has precedence at any age and serves alone."""
    d = amphora("d", "MASTER", 0, state=AmphoraState.BOOTING, management_address=None, plugged=(), confirmed=0)
    c = amphora("c", "BACKUP", 0, state=AmphoraState.BOOTING, plugged=(), confirmed=0)
    steps = planning.plan(wanted(attempts=1), (dead(M), dead(B), d, c))
    assert [(type(step).__name__, step.amphora_id) for step in steps] == [
        ("Plug", "c"),
        ("AwaitAgent", "c"),
        ("Boot", "d"),
        ("Plug", "d"),
        ("AwaitAgent", "d"),
    ]
    there = but(c, state=AmphoraState.READY, plugged=B.plugged)
    (push,) = planning.plan(wanted(attempts=1), (dead(M), dead(B), d, there))
    assert (push.waves, push.whole) == ((("c",),), False)


def test_an_undeletable_machine_does_not_delay_the_replacement_of_a_dead_amphora():
    """B is replaced and its machine cannot be destroyed; then A fails."""
    stays = amphora("b2", "BACKUP", 23, partners=(knows("b", 22), knows("m", 21)), heard_at=NOW, holds_vip=True)
    (stuck,) = retiring(but(B, heard_at=NOW, holds_vip=False))
    for attempts in (0, 3):
        (step,) = planning.plan(wanted(attempts=attempts), (stuck, stays, dead(M)))
        assert (type(step).__name__, step.role) == ("Record", "MASTER")
    holds = but(stuck, holds_vip=True, partners=(knows("b2", 23), knows("m", 21)))
    (step,) = planning.plan(wanted(), (holds, but(stays, holds_vip=False), dead(M)))
    assert (type(step).__name__, step.amphora_id) == ("HandOver", "b"), "the VIP holder is replaced first"
    (step,) = planning.plan(wanted(), (but(holds, handed_over=True), but(stays, holds_vip=False), dead(M)))
    assert type(step).__name__ == "Release", "the hand-over was requested before"
    (step,) = planning.plan(wanted(), (but(holds, plugged=()), but(stays, holds_vip=False), dead(M)))
    assert type(step).__name__ == "Record", "without a port the VIPs serve no client"
