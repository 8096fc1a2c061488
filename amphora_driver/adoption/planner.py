# SPDX-License-Identifier: Apache-2.0
"""The plan of an adoption: its actions, or the reasons against it. Pure.

Invariant: an adoption starts only for a plan without refusals. Everything that the plan does not know is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from amphora_driver.adoption.octavia_state import OctaviaState
from amphora_driver.adoption.records import Step
from amphora_driver.model.enums import ListenerProtocol, Topology
from amphora_driver.model.loadbalancer import LoadBalancer

_PROTOCOLS = (
    ListenerProtocol.HTTP,
    ListenerProtocol.HTTPS,
    ListenerProtocol.TCP,
    ListenerProtocol.TERMINATED_HTTPS,
    ListenerProtocol.UDP,
)
_NUMBERS = {Topology.SINGLE.value: 1, Topology.ACTIVE_STANDBY.value: 2}
_ACTIVE, _ALLOCATED, _NORMAL = "ACTIVE", "ALLOCATED", "normal"
NEUTRON = "neutron"


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """One action on the objects of a load balancer."""

    step: Step
    text: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The actions in their order. With a refusal, none of them begins."""

    load_balancer_id: str
    actions: tuple[Action, ...] = ()
    refusals: tuple[str, ...] = ()


class Circumstances(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan depends on beside the load balancer.

    Attributes:
        provider: the name of this provider in Octavia.
        network: the network backend.
        recorded: this provider has the load balancer already.
        remove_after: seconds until the former amphorae are removed.
        objections: refusals of the provider driver: reasons of single objects.
    """

    provider: str
    network: str
    recorded: bool
    remove_after: float
    objections: tuple[str, ...] = ()


def plan(state: OctaviaState, tree: LoadBalancer, around: Circumstances) -> Plan:
    """Return the plan for a load balancer that is not locked yet."""
    refusals = tuple(dict.fromkeys([*_refusals(state, tree, around), *around.objections]))
    return Plan(
        load_balancer_id=state.load_balancer_id,
        actions=() if refusals else tuple(_actions(state, tree, around)),
        refusals=refusals,
    )


def _refusals(state: OctaviaState, tree: LoadBalancer, around: Circumstances) -> list[str]:
    found: list[str] = []
    if not state.is_amphora:
        found.append(f"its provider is {state.provider}, not amphora")
    if around.recorded:
        found.append("this provider has recorded it already")
    if around.network != NEUTRON:
        found.append(f"the network backend {around.network} cannot disable the ports of other amphorae")
    if state.status != _ACTIVE:
        found.append(f"its provisioning status is {state.status}")
    found += [f"the provisioning status of {one} is {status}" for one, status in sorted(state.unsettled.items())]
    if state.availability_zone:
        found.append("it has an availability zone, whose metadata belong to the provider amphora")
    if other := sorted(state.vnic_types - {_NORMAL}):
        found.append(f"it uses ports of the type {', '.join(other)} (SR-IOV)")
    if any(not vip.address or not vip.subnet_id for vip in tree.vips) or not state.vip_port_id:
        found.append("a VIP has no address, subnet or port")
    if state.vip_owned is None:
        found.append("the owner of the VIP port is unknown, because octavia_owned is NULL in Octavia's table vip")
    return [*found, *_of_amphorae(state), *_of_listeners(tree)]


def _of_amphorae(state: OctaviaState) -> list[str]:
    number = _NUMBERS.get(state.topology or "")
    if number is None:
        return [f"its topology is {state.topology}"]
    found = [
        f"amphora {one.id} is {one.status}, not {_ALLOCATED}" for one in state.amphorae if one.status != _ALLOCATED
    ]
    found += [
        f"amphora {one.id} has no machine or no port on the VIP network"
        for one in state.amphorae
        if not (one.compute_id and one.port_id)
    ]
    if len(state.amphorae) != number:
        found.append(f"it has {len(state.amphorae)} amphorae, but the topology {state.topology} has {number}")
    return found


def _of_listeners(tree: LoadBalancer) -> list[str]:
    return [
        f"listener {one.id} has the protocol {one.protocol.value}"
        for one in tree.listeners
        if one.protocol not in _PROTOCOLS
    ]


def _actions(state: OctaviaState, tree: LoadBalancer, around: Circumstances) -> Iterable[Action]:
    old, ports = _names(one.id for one in state.amphorae), _names(str(one.port_id) for one in state.amphorae)
    vips = _names(vip.address for vip in tree.vips)
    number = len(state.amphorae)
    yield Action(step=Step.LOCK, text="set PENDING_UPDATE in Octavia; requests of users get status 409 from now on")
    yield Action(step=Step.PREPARE, text=f"boot {number} new amphorae, and push the configuration without the VIPs")
    yield Action(step=Step.TAKE, text=f"the new amphorae take and announce {vips}; open connections end")
    yield Action(step=Step.CUT, text=f"disable the ports {ports}")
    yield Action(step=Step.COMMIT, text=f"set the provider {around.provider}, and delete the rows of amphorae {old}")
    yield Action(step=Step.REPORT, text="set ACTIVE in Octavia")
    yield Action(step=Step.KEEP, text=f"keep the former amphorae for {around.remove_after:g} s, for a revert")
    yield Action(step=Step.REMOVE, text=_removal(state))


def _removal(state: OctaviaState) -> str:
    machines = _names(str(one.compute_id) for one in state.amphorae)
    ports = _names([*(str(one.port_id) for one in state.amphorae), *state.member_ports])
    group = f", the server group {state.server_group_id}" if state.server_group_id else ""
    return f"delete the servers {machines}{group}, the ports {ports} and the security group of the load balancer"


def _names(names: Iterable[str]) -> str:
    found: Sequence[str] = list(names)
    return ", ".join(found)
