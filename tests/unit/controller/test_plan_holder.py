# SPDX-License-Identifier: Apache-2.0
"""The VIP holder during a replacement: the agents are asked, because heartbeats may be older."""

import pytest
from pair_simulation import NOW, B, M, Simulation, amphora, but, knows, retiring, wanted

from amphora_driver.model.amphora import AmphoraState
from amphora_driver.reconcile import plan as planning

UNASKED = {"holder_asked": False}
# Heartbeats: M has the VIPs and B has not; or none at all, right after the boot.
HEARD = {"m": {"holds_vip": True, "heard_at": NOW}, "b": {"holds_vip": False, "heard_at": NOW}}
UNHEARD = {"m": {}, "b": {}}


def pair(heard, *going):
    """M and B with their heartbeats; the named amphorae retire."""
    return tuple(
        but(one, **heard[one.id], **({"state": AmphoraState.RETIRING} if one.id in going else {})) for one in (M, B)
    )


@pytest.mark.parametrize("heard", [HEARD, UNHEARD], ids=["heartbeats", "no heartbeats"])
def test_a_backup_with_the_vips_hands_them_over_before_its_release(heard):
    """Neither has another peer, so the connections continue."""
    simulation = Simulation(wanted(**UNASKED), *pair(heard, "b"))
    simulation.truth = {"m": False, "b": True}
    log = simulation.run()
    assert log[0] == "HandOver b to m"
    assert simulation.observed["m"].handed_over is False
    assert "CheckDrain b" in log, "its connections drain"


@pytest.mark.parametrize("heard", [HEARD, UNHEARD], ids=["heartbeats", "no heartbeats"])
def test_a_master_without_the_vips_hands_nothing_over(heard):
    simulation = Simulation(wanted(**UNASKED), *pair(heard, "m"))
    simulation.truth = {"m": False, "b": True}
    log = simulation.run()
    assert log[0] == "Record MASTER"
    assert not [one for one in log if "HandOver" in one]


@pytest.mark.parametrize("heard", [HEARD, UNHEARD], ids=["heartbeats", "no heartbeats"])
def test_the_amphora_without_the_vips_is_replaced_first(heard):
    simulation = Simulation(wanted(generation=5, **UNASKED), *pair(heard, "m", "b"))
    simulation.truth = {"m": False, "b": True}
    log = simulation.run()
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
    ids=["no removal", "dead", "silent", "handed over", "without a port", "never served", "no partner"],
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
    """N serves and replaces B; M stays."""
    m = but(M, partners=(knows("b", 22), knows("n", 23)))
    n = amphora("n", "BACKUP", 23, partners=(knows("b", 22), knows("m", 21)))
    return m, n, *retiring(but(B, partners=(knows("m", 21), knows("n", 23)), **of_old))


def test_a_retiring_amphora_hands_over_unexpected_vips_before_its_release():
    """M was unavailable for a moment while N booted: connections end, and new ones are accepted at once."""
    simulation = Simulation(wanted(**UNASKED), *three())
    simulation.truth = {"b": True, "m": False, "n": False}
    log = simulation.run()
    assert log[:2] == ["HandOver b to m", "Release BACKUP b"]
    assert log.count("HandOver b to m") == 1
    assert simulation.observed.keys() == {"m", "n"}
    stubborn = Simulation(wanted(**UNASKED), *three())
    stubborn.truth, stubborn.stubborn = simulation.truth, {"b"}
    assert stubborn.run()[:2] == ["HandOver b to m", "Release BACKUP b"], "the release does not depend on the hand-over"


def test_unresponsive_agent_gets_no_further_request():
    """Without an answer the role decides; three amphorae allow no hand-over without a known holder."""
    assert Simulation(wanted(**UNASKED), *three()).run()[0] == "Release BACKUP b"
