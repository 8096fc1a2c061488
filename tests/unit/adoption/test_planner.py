# SPDX-License-Identifier: Apache-2.0
"""The plan of an adoption: its actions, and the reasons against it."""

import re

import msgspec
import pytest

from amphora_driver.adoption.octavia_state import OctaviaState, OldAmphora
from amphora_driver.adoption.planner import Circumstances, plan
from amphora_driver.adoption.records import Step
from amphora_driver.model.enums import ListenerProtocol
from amphora_driver.model.loadbalancer import Listener, LoadBalancer, Vip

AROUND = Circumstances(provider="haproxy", network="neutron", recorded=False, remove_after=3600.0)
VIP = Vip(address="198.51.100.10", subnet_id="s", network_id="n", port_id="vip-port")
MASTER, BACKUP = (
    OldAmphora(id=name, status="ALLOCATED", role=role, compute_id=f"server-{name}", port_id=f"port-{name}")
    for name, role in (("a", "MASTER"), ("b", "BACKUP"))
)
SINGLE = OctaviaState(
    load_balancer_id="lb",
    project_id="demo",
    provider="amphora",
    status="ACTIVE",
    topology="SINGLE",
    vip_port_id="vip-port",
    server_group_id="servers",
    vnic_types=frozenset({"normal"}),
    amphorae=(msgspec.structs.replace(MASTER, role="STANDALONE"),),
    member_ports=("member-port",),
)
PAIR = msgspec.structs.replace(SINGLE, topology="ACTIVE_STANDBY", amphorae=(MASTER, BACKUP))


def tree(*protocols, **more):
    listeners = tuple(
        Listener(id=f"listener-{number}", loadbalancer_id="lb", protocol=one, protocol_port=80 + number)
        for number, one in enumerate(protocols)
    )
    return LoadBalancer(id="lb", project_id="demo", listeners=listeners, **{"vip": VIP, **more})


def changed(state, **more):
    return msgspec.structs.replace(state, **more)


@pytest.mark.parametrize("state", [SINGLE, PAIR], ids=["single", "pair"])
@pytest.mark.parametrize("protocol", ["HTTP", "HTTPS", "TCP", "TERMINATED_HTTPS", "UDP"])
def test_supported_load_balancers_have_all_actions_in_order(state, protocol):
    found = plan(state, tree(ListenerProtocol(protocol)), AROUND)
    assert found.refusals == ()
    assert [one.step for one in found.actions] == [
        *(Step.LOCK, Step.PREPARE, Step.TAKE, Step.CUT, Step.COMMIT, Step.REPORT, Step.KEEP, Step.REMOVE)
    ]


def test_the_actions_name_every_object_that_they_change():
    texts = {one.step: one.text for one in plan(PAIR, tree(ListenerProtocol.HTTP), AROUND).actions}
    assert "port-a, port-b" in texts[Step.CUT]
    assert "haproxy" in texts[Step.COMMIT]
    assert "a, b" in texts[Step.COMMIT]
    assert "3600 s" in texts[Step.KEEP]
    for name in ("server-a, server-b", "servers", "port-a, port-b, member-port"):
        assert name in texts[Step.REMOVE]


def test_additional_vips_and_a_port_of_the_user_are_supported():
    second = Vip(address="2001:db8::10", subnet_id="s6", network_id="n", port_id="vip-port")
    found = plan(changed(SINGLE, vip_owned=False), tree(additional_vips=(second,)), AROUND)
    assert found.refusals == ()
    assert "198.51.100.10, 2001:db8::10" in found.actions[2].text


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (changed(SINGLE, provider="ovn"), "its provider is ovn"),
        (changed(SINGLE, provider="haproxy"), "its provider is haproxy"),
        (changed(SINGLE, status="ERROR"), "its provisioning status is ERROR"),
        (changed(SINGLE, status="PENDING_UPDATE"), "its provisioning status is PENDING_UPDATE"),
        (changed(SINGLE, unsettled={"m": "ERROR"}), "the provisioning status of m is ERROR"),
        (changed(SINGLE, availability_zone="az1"), "availability zone"),
        (changed(SINGLE, vnic_types=frozenset({"normal", "direct"})), r"type direct \(SR-IOV\)"),
        (changed(SINGLE, vip_port_id=None), "no address, subnet or port"),
        (changed(SINGLE, vip_owned=None), "the owner of the VIP port is unknown"),
        (changed(SINGLE, topology="ACTIVE_ACTIVE"), "its topology is ACTIVE_ACTIVE"),
        (changed(SINGLE, topology=None), "its topology is None"),
        (changed(SINGLE, amphorae=()), "it has 0 amphorae"),
        (changed(PAIR, amphorae=(MASTER,)), "it has 1 amphorae, but the topology ACTIVE_STANDBY has 2"),
        (changed(PAIR, amphorae=(MASTER, changed(BACKUP, status="ERROR"))), "amphora b is ERROR"),
        (changed(PAIR, amphorae=(MASTER, changed(BACKUP, port_id=None))), "amphora b has no machine or no port"),
        (changed(PAIR, amphorae=(changed(MASTER, compute_id=None), BACKUP)), "amphora a has no machine or no port"),
    ],
)
def test_other_states_are_refused_with_the_reason(state, said):
    found = plan(state, tree(ListenerProtocol.HTTP), AROUND)
    assert found.actions == ()
    assert len(found.refusals) == 1
    (refusal,) = found.refusals
    assert re.search(said, refusal)


@pytest.mark.parametrize("provider", ["amphora", "amphorav2", "octavia", None])
def test_every_name_of_octavias_own_provider_is_accepted(provider):
    assert plan(changed(SINGLE, provider=provider), tree(), AROUND).refusals == ()


@pytest.mark.parametrize("protocol", ["SCTP", "PROMETHEUS"])
def test_other_protocols_are_refused(protocol):
    found = plan(SINGLE, tree(ListenerProtocol.HTTP, ListenerProtocol(protocol)), AROUND)
    assert found.refusals == (f"listener listener-1 has the protocol {protocol}",)


@pytest.mark.parametrize(
    ("around", "said"),
    [
        ({"network": "local"}, "the network backend local cannot disable the ports of other amphorae"),
        ({"recorded": True}, "this provider has recorded it already"),
        ({"objections": ("listener l: no",)}, "listener l: no"),
    ],
)
def test_the_circumstances_can_refuse(around, said):
    assert plan(SINGLE, tree(), msgspec.structs.replace(AROUND, **around)).refusals == (said,)


def test_all_reasons_are_listed():
    state = changed(SINGLE, status="ERROR", availability_zone="az1", amphorae=())
    assert len(plan(state, tree(ListenerProtocol.SCTP), AROUND).refusals) == 4
