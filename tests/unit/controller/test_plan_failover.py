# SPDX-License-Identifier: Apache-2.0
"""The plan for the replacement of one amphora, after a failure or on request."""

import pytest
from pair_story import DRAIN, NOW, ROLES, B, House, M, amphora, but, knows, retiring, wanted

from amphora_driver.model.amphora import AmphoraState
from amphora_driver.reconcile import plan as planning
from amphora_driver.reconcile import vrrp_peers


def dead(one, **changes):
    """An amphora without heartbeats and answers; its last report is old."""
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
def test_a_dead_one_of_a_pair_is_replaced_and_its_partner_goes_on(old, stays, role):
    """The VIPs stay where they are, the newcomer never learns of the dead, and it is gone in one round."""
    house = House(wanted(), old, stays)
    log = house.run()
    new = next(one for one in house.observed.values() if one.id != stays.id)
    assert log == [
        f"Record {role}",
        "BumpGeneration",
        f"Release {role} {old.id}",
        f"Push {stays.id} {new.id}",
        "ACTIVE",
    ], "it may have the VIPs: it is gone before its partner forgets it"
    assert [one.id for one in new.partners] == [stays.id]
    assert [one.id for one in house.observed[stays.id].partners] == [new.id], "no further push"


def test_dead_amphora_is_not_asked_before_the_partners_report():
    """Right after a death, heartbeats still say that the dead one has the VIPs."""
    log = House(wanted(), dead(M, heard_at=NOW), but(B, heard_at=NOW, holds_vip=False)).run()
    assert not [one for one in log if "HandOver" in one or one.startswith("Push m")]


def test_both_of_a_pair_are_dead_at_once():
    """No amphora serves: both are booted in parallel and pushed together; otherwise each takes the VIPs."""
    house = House(wanted(), dead(M), dead(B, holds_vip=False))
    house.never_fewer = 0
    log = house.run()
    assert log[:2] == ["Record MASTER", "Record BACKUP"] or log[:2] == ["Record BACKUP", "Record MASTER"]
    assert log[2:4] == ["Release MASTER m", "Release BACKUP b"]
    assert log[4].startswith("Push ")
    assert "+" in log[4]
    assert log[5:] == ["ACTIVE"]


def test_a_dead_amphora_precedes_a_planned_replacement():
    """A fail-over of the load balancer, of which one is dead: the dead one is replaced first, whatever its machine."""
    house = House(wanted(generation=5, attempts=1), dead(M, confirmed=4), *retiring(but(B, **WELL)))
    log = house.run()
    assert log[0] == "Record MASTER"
    assert next(one for one in log if "HandOver" in one).startswith("HandOver b to m0")
    assert "Release MASTER m" not in log[: log.index("HandOver b to m0")], "its machine may take long to go"
    assert sorted(one.role for one in house.observed.values()) == sorted(ROLES)
    assert not {"m", "b"} & house.observed.keys()


def test_the_replacement_waits_for_no_machine_to_be_destroyed():
    """Once that was tried in vain, all of it is served before the compute backend is asked again."""
    for observed in ((dead(M), but(B, **WELL)), (dead(M), dead(B))):
        house = House(wanted(attempts=1), *observed)
        house.never_fewer = 0
        log = house.run()
        assert [one for one in log if "Release" in one] == log[log.index("ACTIVE") + 1 :]
    house = House(alone(), dead(amphora("old", "STANDALONE", 21)))
    house.never_fewer = 0
    assert house.run() == ["Record STANDALONE", "Push s0", "ACTIVE", "Release STANDALONE old"]


def test_the_replacement_falls_silent_before_it_confirmed():
    """The same rule replaces it, without a partner."""
    lost = dead(amphora("lost", "MASTER", 29, confirmed=0), holds_vip=None)
    house = House(wanted(), dead(M), lost, but(B, **WELL))
    log = house.run()
    assert log[0] == "Record MASTER"
    assert {one.split()[-1] for one in log if "Release" in one} == {"m", "lost"}
    assert "lost" not in {each.id for one in house.observed.values() for each in one.partners}
    only = House(alone(), dead(amphora("old", "STANDALONE", 21)), dead(amphora("lost", "STANDALONE", 22, confirmed=0)))
    only.never_fewer = 0
    assert only.run()[:3] == ["Record STANDALONE", "Push s0", "ACTIVE"]


def test_a_change_of_the_users_neither_waits_for_the_machine_nor_keeps_it_from_being_ordered():
    """The change is served by the one that lives; ACTIVE it is with the replacement."""
    coming = amphora("new", "MASTER", 24, confirmed=0, state=AmphoraState.BOOTING)
    (record,) = planning.plan(wanted(generation=5), (dead(M), but(B, **WELL)))
    assert type(record).__name__ == "Record", "whatever becomes of the change"
    meanwhile = wanted(generation=5, absent=frozenset({"new"}))
    (fence,) = planning.plan(meanwhile, (dead(M), but(B, **WELL), coming))
    assert type(fence).__name__ == "Release", "its partner is about to forget it"
    (push,) = planning.plan(meanwhile, (dead(M), but(B, **WELL, partners=()), coming))
    assert push.waves == (("b",),), "it has forgotten it already"
    (push,) = planning.plan(but(meanwhile, attempts=1), (dead(M), but(B, **WELL), coming))
    assert (push.waves, push.whole) == ((("b",),), False)
    log = House(wanted(generation=5), dead(M), but(B, **WELL)).run()
    assert log[1:] == ["Release MASTER m", "Push b m0", "ACTIVE"]
    single = House(alone(generation=5), dead(amphora("old", "STANDALONE", 21)))
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
    """The connections continue: without a hand-over there is no conflict."""
    pair = [dead(one) if one.id == lost else but(one, **WELL) for one in (NEW_B, NEW_M)]
    house = House(wanted(), draining(), *pair)
    house.lasting = {"m": 3}
    log = house.run()
    assert log[0] == f"Record {'BACKUP' if lost == 'b2' else 'MASTER'}"
    assert "Release MASTER m" not in log[: log.index("ACTIVE")]
    assert not [one for one in log if "HandOver" in one]
    assert "m" not in house.observed
    assert sorted(one.role for one in house.observed.values()) == sorted(ROLES)


def test_the_one_that_drains_dies_itself():
    house = House(wanted(), but(draining(), heard_at=NOW - 100), but(NEW_B, **WELL), NEW_M)
    assert house.run()[:2] == ["CheckDrain m", "Release MASTER m"]


def test_deleted_meanwhile():
    found = planning.plan(wanted(gone=True, tree=None, generation=5), (dead(M), B))
    assert kinds(found) == ["Release", "Release"]


def test_a_fail_over_of_one_that_lives_hands_over():
    """An operator has the holder replaced: its partner has no other peer, takes the VIPs and keeps them."""
    house = House(wanted(), *retiring(but(M, **WELL)), but(B, heard_at=NOW, holds_vip=False))
    log = house.run()
    assert log[0] == "HandOver m to b"
    assert log[1] == "Record MASTER"
    assert "ACTIVE" in log
    standby = House(wanted(), but(M, **WELL), *retiring(but(B, heard_at=NOW, holds_vip=False)))
    log = standby.run()
    assert not [one for one in log if "HandOver" in one]
    assert log[-1] == "ACTIVE"


@pytest.mark.parametrize("spares", [(), ("w1", "w2")])
def test_a_spare_is_taken_where_there_is_one(spares):
    (step,) = planning.plan(wanted(spares=spares, pool="pool"), (dead(M), but(B, **WELL)))
    assert type(step).__name__ == ("Adopt" if spares else "Record")
    assert step.role == "MASTER"


def test_a_load_balancer_that_begins_takes_no_spares():
    (step,) = planning.plan(alone(applied=0, spares=("w1",)), ())
    assert type(step).__name__ == "Record"


def test_an_adopted_spare_is_plugged_and_pushed():
    warm = amphora("w1", "STANDALONE", 0, plugged=(), confirmed=0)
    old = dead(amphora("old", "STANDALONE", 21))
    assert kinds(planning.plan(alone(), (old, warm))) == ["Plug"]
    plugged = but(warm, plugged=M.plugged)
    assert kinds(planning.plan(alone(), (old, plugged))) == ["Push"]


def test_dead_amphora_has_no_vips_and_no_partner():
    old = dead(M, heard_at=NOW)
    assert vrrp_peers.find_holder((old, B), "MASTER", frozenset({"m"})) == "b"
    assert vrrp_peers.vrrp_instance(B, (old, B), wanted().tree.vip, 253, 1.0).peers == ()


def test_of_two_that_are_dead_the_one_that_can_be_booted_is_served():
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


def test_a_machine_that_does_not_go_is_no_reason_to_leave_a_dead_one_unreplaced():
    """B was replaced and cannot be destroyed; then A dies."""
    stays = amphora("b2", "BACKUP", 23, partners=(knows("b", 22), knows("m", 21)), heard_at=NOW, holds_vip=True)
    (stuck,) = retiring(but(B, heard_at=NOW, holds_vip=False))
    for attempts in (0, 3):
        (step,) = planning.plan(wanted(attempts=attempts), (stuck, stays, dead(M)))
        assert (type(step).__name__, step.role) == ("Record", "MASTER")
    holds = but(stuck, holds_vip=True, partners=(knows("b2", 23), knows("m", 21)))
    (step,) = planning.plan(wanted(), (holds, but(stays, holds_vip=False), dead(M)))
    assert (type(step).__name__, step.amphora_id) == ("HandOver", "b"), "the VIP holder is replaced first"
    (step,) = planning.plan(wanted(), (but(holds, handed_over=True), but(stays, holds_vip=False), dead(M)))
    assert type(step).__name__ == "Release", "it was asked"
    (step,) = planning.plan(wanted(), (but(holds, plugged=()), but(stays, holds_vip=False), dead(M)))
    assert type(step).__name__ == "Record", "without a port the VIPs serve no client"
