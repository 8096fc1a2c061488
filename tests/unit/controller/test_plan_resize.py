# SPDX-License-Identifier: Apache-2.0
"""The plan after a change of the topology: SINGLE to ACTIVE_STANDBY, and back."""

import pytest
from pair_simulation import DRAIN, NOW, ROLES, B, M, Simulation, amphora, but, knows, retiring, wanted

from amphora_driver.model.amphora import AmphoraState
from amphora_driver.reconcile import plan as planning
from amphora_driver.reconcile import steps as step_types
from amphora_driver.reconcile import vrrp_peers
from amphora_driver.topology import ActiveStandbyTopology, SingleTopology, effective_priorities

KNOWN = {"SINGLE": SingleTopology, "ACTIVE_STANDBY": ActiveStandbyTopology}
O = amphora("o", "STANDALONE", 20)  # noqa: E741 - the old amphora, as M and B
HOLDS = {"heard_at": NOW, "holds_vip": True}
STANDS_BY = {"heard_at": NOW, "holds_vip": False}


class Catalogue:
    """The installed topologies."""

    def topology(self, name):
        return KNOWN[name]


class Resize(Simulation):
    """A resize that has been recorded; the priorities depend on the present amphorae, as in a job."""

    def __init__(self, topology, *observed, **more):
        self.topology = topology
        super().__init__(wanted(generation=5, roles=KNOWN[topology].roles, priorities={}, **more), *observed)

    def plan(self):
        found = vrrp_peers.find_priorities(Catalogue(), self.topology, self.observed.values())
        self.want = but(self.want, priorities=found)
        return super().plan()


def to_single(**more):
    return Resize("SINGLE", *retiring(but(M, **HOLDS), but(B, **STANDS_BY)), **more)


def to_pair(**more):
    return Resize("ACTIVE_STANDBY", *retiring(O), **more)


def test_a_pair_hands_its_vips_over_to_the_new_single_amphora():
    """The former standby is removed first: the holder must not give the VIPs to it."""
    simulation = to_single()
    log = simulation.run()
    (new,) = simulation.observed.values()
    assert log == [
        "Record STANDALONE",
        f"Push m {new.id}",
        "Release BACKUP b",
        "BumpGeneration",
        f"Push {new.id} m",
        f"HandOver m to {new.id}",
        "Confirm",
        "CheckDrain m",
        "Release MASTER m",
        "BumpGeneration",
        f"Push {new.id}",
        "ACTIVE",
    ]
    assert (new.role, new.partners) == ("STANDALONE", ())


def test_connections_to_a_former_pair_drain():
    simulation = to_single()
    simulation.lasting = {"m": 3}
    log = simulation.run()
    after = log.index("Confirm")
    assert log[after + 1 : after + 6] == [*["CheckDrain m"] * 4, "Release MASTER m"], "users do not wait for the drain"


def test_the_drain_of_a_former_pair_has_a_limit():
    simulation = to_single()
    simulation.lasting = {"m": 1000}
    assert simulation.run().count("CheckDrain m") == DRAIN / 2


def test_the_standby_of_the_former_pair_holds_the_vips():
    simulation = Resize("SINGLE", *retiring(but(M, **STANDS_BY), but(B, **HOLDS)))
    log = simulation.run()
    assert log.index("Release MASTER m") < next(place for place, one in enumerate(log) if one.startswith("HandOver b"))


def test_the_holder_keeps_its_vips_although_it_was_asked():
    """It cannot release them: its removal moves the VIPs by VRRP."""
    simulation = to_single()
    simulation.stubborn = {"m"}
    log = simulation.run()
    assert log[-6:-4] == [one for one in log if one.startswith("HandOver")] + ["Confirm"]
    assert log[-4:] == ["Release MASTER m", "BumpGeneration", log[-2], "ACTIVE"]


def test_without_reports_the_former_master_counts_as_the_holder():
    log = Resize("SINGLE", *retiring(M, B)).run()
    assert [one for one in log if one.startswith("HandOver m")]


def test_a_former_holder_without_heartbeats_gets_no_request():
    """The new amphora has taken the VIPs by VRRP."""
    new = amphora("s", "STANDALONE", 24, confirmed=5, partners=(knows("b", 22), knows("m", 21)), **HOLDS)
    silent = but(M, heard_at=NOW - 100, holds_vip=True)
    simulation = Resize("SINGLE", *retiring(silent, but(B, **STANDS_BY)), new)
    log = simulation.run()
    assert not [one for one in log if "HandOver" in one]
    assert set(simulation.observed) == {"s"}


def test_a_new_pair_takes_over_from_a_single_amphora():
    """Both amphorae boot at once and are pushed together. The old one stays until the pair has the VIPs."""
    simulation = to_pair()
    simulation.looks = 1
    log = simulation.run()
    master, backup = (one.id for one in sorted(simulation.observed.values(), key=lambda one: one.role, reverse=True))
    assert log == [
        "Record MASTER",
        "Record BACKUP",
        f"Push {master}+{backup}",
        "QueryVips",
        "QueryVips",
        "Confirm",
        "Release STANDALONE o",
    ]
    assert sorted(one.role for one in simulation.observed.values()) == sorted(ROLES)
    assert [one.id for one in simulation.observed[master].partners] == [backup], "the old amphora is no peer"


def test_a_single_amphora_gets_no_request_for_a_hand_over():
    """It has no VRRP, also if it reports VIPs."""
    steps = []
    simulation = Resize("ACTIVE_STANDBY", *retiring(but(O, **HOLDS)))
    take = simulation.take
    simulation.take = lambda step: (steps.append(type(step)), take(step))
    simulation.run()
    assert not {step_types.HandOver, step_types.QueryVipHolder, step_types.CheckDrain} & set(steps)


def test_the_single_amphora_serves_while_the_pair_boots():
    absent = frozenset({"m2", "b2"})
    booting = [
        amphora(name, role, 0, state=AmphoraState.BOOTING, plugged=(), confirmed=0, booted_at=NOW)
        for name, role in (("m2", "MASTER"), ("b2", "BACKUP"))
    ]
    simulation = Resize("ACTIVE_STANDBY", *retiring(O), *booting, absent=absent, plugs_while_booting=False)
    (step,) = simulation.plan()
    assert isinstance(step, step_types.Await)
    assert set(step.amphorae) == absent


@pytest.mark.parametrize("lost", ["MASTER", "BACKUP"])
def test_one_amphora_of_the_new_pair_never_boots(lost):
    """The other one is pushed after a failed attempt; the old one stays until the pair is complete."""
    booting = {"state": AmphoraState.BOOTING, "management_address": None, "plugged": (), "confirmed": 0}
    pair = [
        amphora(role[0], role, number, **(booting if role == lost else {"confirmed": 0}))
        for number, role in ((23, "MASTER"), (24, "BACKUP"))
    ]
    there = next(one for one in pair if one.role != lost)
    gone = frozenset({lost[0]})
    simulation = Resize("ACTIVE_STANDBY", *retiring(O), *pair, attempts=1, absent=gone, plugs_while_booting=False)
    (push,) = simulation.plan()
    assert (push.waves, push.whole) == (((there.id,),), False)
    simulation.take(push)
    (step,) = simulation.plan()
    assert isinstance(step, step_types.Await)


def test_an_amphora_recorded_by_a_job_of_the_former_topology_is_removed():
    """The job had observed the former topology before the resize was recorded."""
    stray = amphora("x", "BACKUP", 0, state=AmphoraState.BOOTING, management_address=None, plugged=(), confirmed=0)
    simulation = Resize("SINGLE", *retiring(but(M, **HOLDS)), stray)
    log = simulation.run()
    assert "Release BACKUP x" in log
    assert [one.role for one in simulation.observed.values()] == ["STANDALONE"]
    assert [one for one in log if one.startswith("HandOver m")]


def test_an_undeletable_single_amphora_does_not_delay_a_failover_of_the_pair():
    """It is no VRRP peer, so the hand-over is between two amphorae."""
    (old,) = retiring(O)
    holds = but(retiring(but(M, **HOLDS))[0], confirmed=5)
    simulation = Resize("ACTIVE_STANDBY", old, holds, but(B, confirmed=5, **STANDS_BY), applied=5)
    assert simulation.run()[0] == "HandOver m to b"


def test_a_deletion_ends_the_resize():
    found = planning.plan(wanted(gone=True, tree=None, generation=6, roles=("STANDALONE",)), retiring(M, B))
    assert [type(one) for one in found] == [step_types.Release] * 2


@pytest.mark.parametrize(
    ("topology", "observed", "roles"),
    [("SINGLE", (but(M, **HOLDS), but(B, **STANDS_BY)), ["STANDALONE"]), ("ACTIVE_STANDBY", (O,), sorted(ROLES))],
    ids=["to SINGLE", "to ACTIVE_STANDBY"],
)
def test_a_crash_after_each_step_changes_nothing(topology, observed, roles):
    """Another controller plans from the rows after each step in turn, and knows nothing else."""
    undisturbed = Resize(topology, *retiring(*observed))
    expected = undisturbed.run()
    number = 0
    while True:
        simulation = Resize(topology, *retiring(*observed))
        if not _crash_after(simulation, number):
            break
        assert _without_queries(simulation.run()) == _without_queries(expected), f"after step {number}"
        assert sorted(one.role for one in simulation.observed.values()) == roles
        number += 1
    assert number >= len(expected)


def _crash_after(simulation, number):
    """Perform so many steps and one more, and forget everything except rows; return False without such a step."""
    for _ in range(50):
        for step in simulation.plan():
            if isinstance(step, step_types.Await):
                simulation.want = but(simulation.want, now=step.until, vips_taken=None)
                break
            simulation.take(step)
            number -= 1
            if number < 0:
                simulation.want = but(simulation.want, absent=frozenset(), vips_taken=None, holder_asked=False)
                return True
        if not simulation.plan():
            return False
    raise AssertionError("it never ends")


def _without_queries(log):
    return [one for one in log if one != "QueryVips"]


@pytest.mark.parametrize(
    ("topology", "present", "expected"),
    [
        (SingleTopology, (), {}),
        (SingleTopology, ("STANDALONE",), {}),
        (SingleTopology, ("MASTER", "BACKUP"), {"MASTER": 254, "BACKUP": 253, "STANDALONE": 252}),
        (SingleTopology, ("STANDALONE", "BACKUP"), {"BACKUP": 253, "STANDALONE": 252}),
        (ActiveStandbyTopology, ("STANDALONE",), {"MASTER": 254, "BACKUP": 253}),
        (ActiveStandbyTopology, ("MASTER", "BACKUP"), {"MASTER": 254, "BACKUP": 253}),
    ],
)
def test_priorities_during_a_change_of_the_topology(topology, present, expected):
    assert effective_priorities(topology, present, KNOWN.values()) == expected


@pytest.mark.parametrize(
    "changes", [{"dead": True}, {"confirmed": 0}, {"plugged": ()}], ids=["dead", "never served", "without ports"]
)
def test_amphorae_that_cannot_have_the_vips_keep_no_vrrp(changes):
    gone = [but(one, **changes) for one in retiring(M, B)]
    assert vrrp_peers.find_priorities(Catalogue(), "SINGLE", gone) == {}
