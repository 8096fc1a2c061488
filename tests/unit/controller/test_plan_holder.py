# SPDX-License-Identifier: Apache-2.0
"""The VIP holder during a replacement: the agents are asked, because heartbeats may be older."""

import pytest
from pair_story import NOW, B, House, M, amphora, but, knows, retiring, wanted

from amphora_driver.model.amphora import AmphoraState
from amphora_driver.reconcile import plan as planning

UNASKED = {"holder_asked": False}
# What was heard of them: M has the VIPs, B has not; or nothing at all, right after they were made.
HEARD = {"m": {"holds_vip": True, "heard_at": NOW}, "b": {"holds_vip": False, "heard_at": NOW}}
UNHEARD = {"m": {}, "b": {}}


def pair(heard, *going):
    """M and B as they were heard; those named are to be replaced."""
    return tuple(
        but(one, **heard[one.id], **({"state": AmphoraState.RETIRING} if one.id in going else {})) for one in (M, B)
    )


@pytest.mark.parametrize("heard", [HEARD, UNHEARD], ids=["heard", "unheard"])
def test_the_backup_that_has_them_hands_them_over_before_it_goes(heard):
    """Both have no other peer: the connections continue."""
    house = House(wanted(**UNASKED), *pair(heard, "b"))
    house.truth = {"m": False, "b": True}
    log = house.run()
    assert log[0] == "HandOver b to m"
    assert house.observed["m"].handed_over is False
    assert "CheckDrain b" in log, "its connections are seen off"


@pytest.mark.parametrize("heard", [HEARD, UNHEARD], ids=["heard", "unheard"])
def test_the_standby_has_nothing_to_hand_over_though_it_is_the_master(heard):
    house = House(wanted(**UNASKED), *pair(heard, "m"))
    house.truth = {"m": False, "b": True}
    log = house.run()
    assert log[0] == "Record MASTER"
    assert not [one for one in log if "HandOver" in one]


@pytest.mark.parametrize("heard", [HEARD, UNHEARD], ids=["heard", "unheard"])
def test_of_two_the_one_without_them_is_replaced_first(heard):
    house = House(wanted(generation=5, **UNASKED), *pair(heard, "m", "b"))
    house.truth = {"m": False, "b": True}
    log = house.run()
    assert log[0] == "Record MASTER"
    assert [one for one in log if "HandOver" in one] == ["HandOver b to m0"]
    assert log.index("Release MASTER m") < log.index("HandOver b to m0") < log.index("Release BACKUP b")


def test_the_holder_is_queried_first_and_once():
    (step,) = planning.plan(wanted(generation=5, **UNASKED), pair(HEARD, "m", "b"))
    assert (type(step).__name__, step.amphora_ids) == ("QueryVipHolder", ("m", "b"))
    (step,) = planning.plan(wanted(generation=5), pair(HEARD, "m", "b"))
    assert type(step).__name__ == "Record"


@pytest.mark.parametrize(
    "observed",
    [
        pair(HEARD),
        (but(M, dead=True, state=AmphoraState.RETIRING), B),
        (but(M, state=AmphoraState.RETIRING, holds_vip=True, heard_at=NOW - 100), but(B, heard_at=NOW)),
        (but(M, state=AmphoraState.RETIRING, handed_over=True, drains_until=NOW + 20), B),
        (but(M, state=AmphoraState.RETIRING, plugged=()), B),
        (*retiring(amphora("new", "MASTER", 23, confirmed=0)), B),
        retiring(M),
    ],
    ids=["no removal", "dead", "silent", "handed over", "without a port", "it never served", "on its own"],
)
def test_agents_are_not_asked_without_need(observed):
    found = planning.plan(wanted(**UNASKED), observed)
    assert "QueryVipHolder" not in {type(step).__name__ for step in found}


def test_a_single_amphora_is_not_queried():
    old, new = amphora("old", "STANDALONE", 21), amphora("new", "STANDALONE", 22)
    one = wanted(roles=("STANDALONE",), priorities={}, **UNASKED)
    (step,) = planning.plan(one, (*retiring(old), new))
    assert type(step).__name__ == "Release"


def three(**of_old):
    """B is replaced by N, which serves; M goes on."""
    m = but(M, partners=(knows("b", 22), knows("n", 23)))
    n = amphora("n", "BACKUP", 23, partners=(knows("b", 22), knows("m", 21)))
    return m, n, *retiring(but(B, partners=(knows("m", 21), knows("n", 23)), **of_old))


def test_vips_that_come_to_one_that_goes_leave_without_a_moment_without_them():
    """M was ill for a moment while N came: its connections end, new ones are answered at once."""
    house = House(wanted(**UNASKED), *three())
    house.truth = {"b": True, "m": False, "n": False}
    log = house.run()
    assert log[:2] == ["HandOver b to m", "Release BACKUP b"]
    assert log.count("HandOver b to m") == 1
    assert house.observed.keys() == {"m", "n"}
    stubborn = House(wanted(**UNASKED), *three())
    stubborn.truth, stubborn.stubborn = house.truth, {"b"}
    assert stubborn.run()[:2] == ["HandOver b to m", "Release BACKUP b"], "that it goes does not depend on it"


def test_unresponsive_agent_gets_no_further_request():
    """Without an answer the role decides; with three amphorae no hand-over follows from a guess."""
    assert House(wanted(**UNASKED), *three()).run()[0] == "Release BACKUP b"
