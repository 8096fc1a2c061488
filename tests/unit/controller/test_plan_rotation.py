# SPDX-License-Identifier: Apache-2.0
"""Replacement of a pair without a new generation: the VIP holder must know the new peer."""

from pair_simulation import B, M, Simulation, amphora, but, knows, retiring, wanted

from amphora_driver.reconcile import plan as planning


def test_the_holder_learns_a_new_peer_in_a_generation_of_its_own():
    """The holder refuses other content for a served generation, and the new amphora would take the VIPs."""
    simulation = Simulation(wanted(), *retiring(M, B))
    log = simulation.run()
    assert log[:5] == ["Record BACKUP", "BumpGeneration", "Push m b0", "Release BACKUP b", "BumpGeneration"]
    assert log.index("HandOver m to b0") < log.index("Record MASTER")
    assert sorted(one.role for one in simulation.observed.values()) == ["BACKUP", "MASTER"]


def expiring(one, at):
    return but(one, certificate_expires_at=at)


def test_certificate_renewal_of_a_retiring_amphora_is_last():
    """The amphora may be dead: the replacement of its partner must not wait for it in every job."""
    renewals = {"m": "half of its time is over"}
    first = planning.plan(wanted(now=100.0, renewals=renewals), (expiring(M, 500.0), B))
    assert [type(step).__name__ for step in first] == ["RenewCertificate"]
    steps = planning.plan(wanted(now=100.0, renewals=renewals), retiring(expiring(M, 500.0), B))
    assert [type(step).__name__ for step in steps] == ["Record"]
    # An amphora with an expired certificate accepts no other request.
    steps = planning.plan(wanted(now=100.0, renewals=renewals), retiring(expiring(M, 99.0), B))
    assert [type(step).__name__ for step in steps] == ["RenewCertificate"]


def test_the_certificate_of_a_draining_amphora_is_renewed():
    knowing = but(expiring(M, 500.0), partners=(knows("b", 22), knows("new", 23)))
    draining = but(knowing, drains_until=200.0, handed_over=True)
    new = amphora("new", "MASTER", 23, partners=(knows("b", 22),), holds_vip=True)
    log = [new, but(B, partners=(knows("new", 23),))]
    steps = planning.plan(wanted(now=100.0, renewals={"m": "due"}), (*retiring(draining), *log))
    kinds = [type(step).__name__ for step in steps]
    assert "CheckDrain" in kinds
    assert kinds[0] == "RenewCertificate"


def test_an_agent_receives_a_new_certificate_once():
    knowing = but(M, partners=(knows("b", 22), knows("new", 23)))
    new = amphora("new", "BACKUP", 23, confirmed=0)
    kinds = {type(step).__name__ for step in planning.plan(wanted(), (*retiring(knowing, B), new))}
    assert kinds == {"Push"}


def test_a_silent_agent_receives_nothing():
    dead, alive = but(M, holds_vip=True, heard_at=50.0), but(B, holds_vip=True, heard_at=100.0)
    new = amphora("new", "MASTER", 23, confirmed=0)
    steps = planning.plan(wanted(), (*retiring(dead), but(alive, partners=(knows("m", 21), knows("new", 23))), new))
    assert "BumpGeneration" not in {type(step).__name__ for step in steps}
