# SPDX-License-Identifier: Apache-2.0
"""The plan as a table: desired and observed state, and the resulting steps."""

import pytest

from amphora_driver.model.amphora import Amphora, AmphoraState, AttachedPort
from amphora_driver.model.loadbalancer import LoadBalancer, Vip
from amphora_driver.model.network import FixedAddress, Port, Subnet
from amphora_driver.reconcile import plan as planning
from amphora_driver.reconcile import steps as step_types

VIP = Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1")
TREE = LoadBalancer(id="lb", project_id="demo", vip=VIP)


def wanted(**more):
    values = {
        "load_balancer_id": "lb",
        "generation": 4,
        "applied": 3,
        "gone": False,
        "readable": True,
        "tree": TREE,
        "networks": {"n1": ("s1",)},
    }
    return step_types.LoadBalancerView(**{**values, **more})


def port(network="n1", subnets=("s1",), **more):
    return AttachedPort(
        port=Port(
            id=f"p-{network}",
            network_id=network,
            mac="fa:16:3e:00:00:01",
            mtu=1500,
            addresses=tuple(FixedAddress(subnet_id=one, address="198.51.100.20") for one in subnets),
        ),
        subnets=tuple(Subnet(id=one, network_id=network, cidr="198.51.100.0/24", gateway=None) for one in subnets),
        **more,
    )


def amphora(**more):
    values = {
        "id": "a1",
        "load_balancer_id": "lb",
        "role": "STANDALONE",
        "state": AmphoraState.READY,
        "compute_id": "c1",
        "management_address": "203.0.113.11",
        "confirmed": 4,
        "plugged": (port(),),
    }
    return Amphora(**{**values, **more})


@pytest.mark.parametrize(
    ("want", "observed", "steps"),
    [
        pytest.param(wanted(), (), ["Record"], id="no amphora"),
        pytest.param(
            wanted(),
            (amphora(state=AmphoraState.BOOTING, management_address=None, plugged=(), confirmed=0),),
            ["Boot", "Plug", "AwaitAgent"],
            id="amphora recorded",
        ),
        pytest.param(
            wanted(),
            (amphora(state=AmphoraState.BOOTING, plugged=(), confirmed=0),),
            ["Plug", "AwaitAgent"],
            id="booted",
        ),
        pytest.param(
            wanted(readable=False),
            (amphora(state=AmphoraState.BOOTING, plugged=(), confirmed=0),),
            ["AwaitAgent"],
            id="boots before the tree is read back",
        ),
        pytest.param(
            wanted(readable=False),
            (amphora(plugged=(), confirmed=0),),
            ["Await"],
            id="no push from an incomplete tree",
        ),
        pytest.param(wanted(), (amphora(confirmed=3),), ["Push"], id="behind"),
        pytest.param(
            wanted(networks={"n1": ("s1",), "n2": ("s2",)}),
            (amphora(confirmed=3),),
            ["Plug"],
            id="a member's network is attached first",
        ),
        pytest.param(
            wanted(networks={"n1": ("s1", "s3")}),
            (amphora(confirmed=3),),
            ["Plug"],
            id="one more subnet on an attached network",
        ),
        pytest.param(wanted(), (amphora(),), ["Confirm"], id="confirmed, not recorded"),
        pytest.param(wanted(applied=4), (amphora(),), [], id="no difference"),
        pytest.param(
            wanted(applied=4),
            (amphora(plugged=(port(), port("n2", ("s2",)))),),
            ["Unplug"],
            id="an unused network",
        ),
        pytest.param(
            wanted(networks={"n1": ("s1",), "n2": ("s2",)}, sr_iov_networks={"n2": ("s2",)}),
            (amphora(confirmed=3, plugged=(port(), port("n2", ("s2",)))),),
            ["Plug"],
            id="a member with SR-IOV joins a network with an ordinary port",
        ),
        pytest.param(
            wanted(networks={"n1": ("s1",), "n2": ("s2",)}, sr_iov_networks={"n2": ("s2",)}),
            (amphora(confirmed=3, plugged=(port(), port("n2", ("s2",), sr_iov=True))),),
            ["Plug"],
            id="an ordinary member joins a network with an SR-IOV port",
        ),
        pytest.param(
            wanted(applied=4, sr_iov_networks={"n2": ("s2",)}),
            (amphora(plugged=(port(), port("n2", ("s2",), sr_iov=True), port("n2", ("s2",)))),),
            ["Unplug"],
            id="an unused ordinary port beside one with SR-IOV",
        ),
        pytest.param(
            wanted(),
            (amphora(state=AmphoraState.RETIRING),),
            ["Record"],
            id="fail-over: the replacement is recorded first",
        ),
        pytest.param(
            wanted(),
            (amphora(state=AmphoraState.RETIRING), amphora(id="a2", confirmed=0)),
            ["Push"],
            id="fail-over: replacement serves before the release",
        ),
        pytest.param(
            wanted(applied=4),
            (amphora(state=AmphoraState.RETIRING), amphora(id="a2")),
            ["Release"],
            id="fail-over: the old amphora is released",
        ),
        pytest.param(wanted(gone=True, tree=None), (amphora(),), ["Release"], id="delete: amphorae are released first"),
        pytest.param(wanted(gone=True, tree=None), (), ["ReleaseVip"], id="delete: addresses are released last"),
        pytest.param(wanted(gone=True, tree=None, applied=4), (), [], id="deleted"),
    ],
)
def test_plan(want, observed, steps):
    found = planning.plan(want, observed)
    assert [type(step).__name__ for step in found] == steps
    assert all(step.reason for step in found)


@pytest.mark.parametrize(
    ("there", "missing"),
    [(("MASTER",), "BACKUP"), (("BACKUP",), "MASTER"), (("BACKUP", "BACKUP"), "MASTER")],
)
def test_an_amphora_is_recorded_for_the_missing_role(there, missing):
    observed = tuple(amphora(id=f"a{number}", role=role) for number, role in enumerate(there))
    assert [step.role for step in planning.plan(wanted(roles=("MASTER", "BACKUP")), observed)] == [missing]


@pytest.mark.parametrize(("applied", "roles"), [(0, ["MASTER", "BACKUP"]), (3, ["MASTER"])], ids=["new", "lost"])
def test_the_amphorae_of_a_new_load_balancer_are_recorded_together(applied, roles):
    found = planning.plan(wanted(roles=("MASTER", "BACKUP"), applied=applied), ())
    assert [step.role for step in found] == roles


def test_a_retiring_amphora_fills_no_role():
    retiring = amphora(role="MASTER", state=AmphoraState.RETIRING, confirmed=0)
    found = planning.plan(wanted(roles=("MASTER", "BACKUP")), (retiring, amphora(id="a2", role="BACKUP")))
    assert [step.role for step in found] == ["MASTER"]
