# SPDX-License-Identifier: Apache-2.0
"""Rules of the deployment's security groups. Pure.

Invariant: the firewall of the amphora enforces listeners, client networks and partners in each mode. The
security groups only decide which packets reach the amphora.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import msgspec

from amphora_driver.model.network import ListenerRule

FAMILIES = ("IPv4", "IPv6")
# IP protocol number of VRRP, between the two amphorae of a load balancer.
_VRRP = "112"
# Ports between the two amphorae of a load balancer: synchronization of HAProxy's stick tables (TCP), and the tunnel of
# a planned handover (UDP).
_PEER_PORTS = (("tcp", 1025), ("udp", 4789))
# Maps the names and numbers of protocols in Neutron's answers to the values that the driver uses.
_NUMBERS = {"vrrp": _VRRP, "6": "tcp", "17": "udp", "132": "sctp", "ipv6-icmp": "icmpv6", "58": "icmpv6", "1": "icmp"}


class Group(str, Enum):
    """A security group of the deployment.

    Attributes:
        TRAFFIC: all traffic, for ports without groups of the user.
        PEERS: traffic between the amphorae of a pair, beside stateful groups of the user.
        PEERS_STATELESS: the same beside stateless groups, because Neutron does not mix both on one port.
        OUTBOUND: answers only, for member ports in the mode `listener_rules`.
        MANAGEMENT: the agent.
        VIPS: nothing. Only the deployment can put a port into this group, so it is the evidence of its VIP ports.
    """

    TRAFFIC = "traffic"
    PEERS = "peers"
    PEERS_STATELESS = "peers-stateless"
    OUTBOUND = "outbound"
    MANAGEMENT = "management"
    VIPS = "vips"

    @property
    def stateful(self) -> bool:
        """Whether Neutron tracks the connections. A hand-over without loss needs a port without tracking."""
        return self not in (Group.TRAFFIC, Group.PEERS_STATELESS, Group.VIPS)


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """A rule of a security group, in the spelling of this module.

    Attributes:
        ethertype: `IPv4` or `IPv6`.
        direction: `ingress` or `egress`.
        protocol: a name or a number; None for all.
        port: one port; None for all.
        cidr: permitted remote addresses; None for all.
        own_group: only ports in the same group.
        other: a rule that this module never creates.
    """

    ethertype: str
    direction: str = "ingress"
    protocol: str | None = None
    port: int | None = None
    cidr: str | None = None
    own_group: bool = False
    other: str = ""


def group_rules(group: Group, agent_port: int) -> frozenset[Rule]:
    """Return all rules of a group of the deployment."""
    found = set(_EGRESS)
    for family in FAMILIES:
        if group is Group.TRAFFIC:
            found.add(Rule(ethertype=family))
        elif group in (Group.PEERS, Group.PEERS_STATELESS):
            found |= _peer_rules(family, own_group=False)
        elif group is Group.MANAGEMENT:
            ping = "icmp" if family == "IPv4" else "icmpv6"
            found |= {Rule(ethertype=family, protocol="tcp", port=agent_port), Rule(ethertype=family, protocol=ping)}
    return frozenset(found)


def load_balancer_rules(listeners: Iterable[ListenerRule], families: Collection[str]) -> frozenset[Rule]:
    """Return all rules of the group of one load balancer.

    Args:
        listeners: the open ports.
        families: `IPv4`, `IPv6` or both: the families of the VIPs.
    """
    found = set(_EGRESS)
    for family in FAMILIES:
        found |= _peer_rules(family, own_group=True)
    for one in listeners:
        for family in families if one.cidr is None else {family_of(one.cidr)} & set(families):
            found.add(Rule(ethertype=family, protocol=one.protocol, port=one.port, cidr=_cidr(one.cidr)))
    return frozenset(found)


_EGRESS = frozenset(Rule(ethertype=family, direction="egress") for family in FAMILIES)


def _peer_rules(family: str, *, own_group: bool) -> set[Rule]:
    ports = {Rule(ethertype=family, protocol=name, port=port, own_group=own_group) for name, port in _PEER_PORTS}
    return {Rule(ethertype=family, protocol=_VRRP, own_group=own_group), *ports}


def family_of(address: str) -> str:
    """Return the family of an address or a network."""
    return f"IPv{ipaddress.ip_interface(address).version}"


def _cidr(text: str | None) -> str | None:
    if text is None:
        return None
    network = ipaddress.ip_network(text, strict=False)
    return None if network.prefixlen == 0 else str(network)


def read_rule(rule: Mapping[str, Any]) -> Rule:
    """Return a rule of Neutron. Two equal results have the same effect."""
    protocol = None if rule["protocol"] is None else _NUMBERS.get(str(rule["protocol"]), str(rule["protocol"]))
    low, high, remote = rule["port_range_min"], rule["port_range_max"], rule["remote_group_id"]
    own_group = remote is not None and remote == rule["security_group_id"]
    strange = low != high or (remote is not None and not own_group) or bool(rule.get("remote_address_group_id"))
    return Rule(
        ethertype=rule["ethertype"],
        direction=rule["direction"],
        protocol=protocol,
        port=low,
        cidr=_cidr(rule["remote_ip_prefix"]),
        own_group=own_group,
        other=rule["id"] if strange else "",
    )


def rule_body(rule: Rule, group_id: str, project_id: str) -> dict[str, object]:
    """Return the body that creates a rule."""
    return {
        "security_group_id": group_id,
        "project_id": project_id,
        "direction": rule.direction,
        "ethertype": rule.ethertype,
        "protocol": rule.protocol,
        "port_range_min": rule.port,
        "port_range_max": rule.port,
        "remote_ip_prefix": rule.cidr,
        "remote_group_id": group_id if rule.own_group else None,
    }


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The difference between the rules of a group and the wanted rules.

    Attributes:
        missing: the wanted rules that do not exist.
        surplus: the ids of the rules that are not wanted.
        repeated: the ids of wanted rules that exist already with a smaller id. Neutron refuses a rule that exists, but
            not if two processes create it at the same moment. All processes keep the same one.
    """

    missing: tuple[Rule, ...]
    surplus: tuple[str, ...]
    repeated: tuple[str, ...]


def difference(existing: Sequence[Mapping[str, Any]], wanted: Collection[Rule]) -> Difference:
    """Compare the rules of a group, as Neutron returns them, with the wanted rules."""
    by_rule: dict[Rule, list[str]] = {}
    for one in existing:
        by_rule.setdefault(read_rule(one), []).append(one["id"])
    return Difference(
        missing=tuple(sorted((one for one in wanted if one not in by_rule), key=repr)),
        surplus=tuple(one for rule, ids in by_rule.items() if rule not in wanted for one in ids),
        repeated=tuple(one for rule, ids in by_rule.items() if rule in wanted for one in sorted(ids)[1:]),
    )
