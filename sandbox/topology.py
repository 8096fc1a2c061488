# SPDX-License-Identifier: Apache-2.0
"""The networks of the sandbox.

Invariant: all addresses are reserved for documentation (RFC 5737, RFC 3849), so that they cannot conflict with a real
network. Ids derive from names, so a network has the same id in every sandbox.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from amphora_driver.host import namespaces
from amphora_driver.model.network import FixedAddress
from amphora_driver.network import bridges
from amphora_driver.network.ip_allocation import AddressRange
from amphora_driver.network.port_security_rules import QosPolicy, Rule, SecurityGroup

if TYPE_CHECKING:
    from amphora_driver.network.local import LocalNetwork
    from sandbox.settings import Settings

CONTROL_ADDRESS = "203.0.113.2"
# The witness is a host without programs on the management network. Its kernel refuses connections, which proves that
# the network works.
WITNESS_ADDRESS = "203.0.113.3"
WITNESS_PORT = 22
MEMBERS = {"member1": 11, "member2": 12, "member3": 13}
CLIENT = "client"
_NAMESPACE = uuid.UUID("5f1f4ab5-70f2-4f3c-9f70-6f6d6d0b8d7e")


def derive_id(name: str) -> str:
    """The id of a network or subnet, derived from its name."""
    return str(uuid.uuid5(_NAMESPACE, name))


MANAGEMENT_NETWORK = derive_id("management")
VIP_NETWORK = derive_id("vip")
MEMBER_NETWORK = derive_id("members")
VIP_SUBNET = derive_id("vip-subnet")
VIP_SUBNET_6 = derive_id("vip-subnet-v6")
MEMBER_SUBNET = derive_id("member-subnet")
MEMBER_SUBNET_6 = derive_id("member-subnet-v6")

_NETWORKS = {
    MANAGEMENT_NETWORK: ("management", "br-mgmt"),
    VIP_NETWORK: ("vip", "br-vip"),
    MEMBER_NETWORK: ("members", "br-members"),
}
_SUBNETS = (
    ("management-subnet", MANAGEMENT_NETWORK, "203.0.113.0/24", None, "203.0.113.10", "203.0.113.254"),
    ("vip-subnet", VIP_NETWORK, "198.51.100.0/24", "198.51.100.1", "198.51.100.10", "198.51.100.254"),
    ("vip-subnet-v6", VIP_NETWORK, "2001:db8:1::/64", "2001:db8:1::1", "2001:db8:1::10", "2001:db8:1::ffff"),
    ("member-subnet", MEMBER_NETWORK, "192.0.2.0/24", "192.0.2.1", "192.0.2.100", "192.0.2.254"),
    ("member-subnet-v6", MEMBER_NETWORK, "2001:db8:2::/64", "2001:db8:2::1", "2001:db8:2::100", "2001:db8:2::ffff"),
)  # fmt: skip

_WEB = tuple(Rule(protocol="tcp", first_port=port, last_port=port) for port in (80, 443))


def define_networks(network: LocalNetwork) -> None:
    """Create the rows of networks and subnets, and an example security group and QoS policy."""
    for network_id, (name, bridge) in _NETWORKS.items():
        network.define_network(network_id, name, bridge)
    for name, network_id, cidr, gateway, first, last in _SUBNETS:
        network.define_subnet(
            AddressRange(
                id=derive_id(name), network_id=network_id, name=name, cidr=cidr, gateway=gateway, first=first, last=last
            )
        )
    network.port_security.define_group(SecurityGroup(id=derive_id("web"), name="web", rules=_WEB))
    network.port_security.define_policy(QosPolicy(id=derive_id("ten-megabit"), name="ten-megabit", egress_kbps=10_000))


def build_networks(settings: Settings, network: LocalNetwork) -> None:
    """Create the switch and the namespaces of control plane, witness, client and members."""
    switch = bridges.Switch(settings.switch, MANAGEMENT_NETWORK)
    switch.ensure(network.networks(), network.subnets())
    network.port_security.enforce()
    hosts = {
        "control": (MANAGEMENT_NETWORK, {"management-subnet": CONTROL_ADDRESS}),
        "witness": (MANAGEMENT_NETWORK, {"management-subnet": WITNESS_ADDRESS}),
        CLIENT: (VIP_NETWORK, {"vip-subnet": "198.51.100.2", "vip-subnet-v6": "2001:db8:1::2"}),
    }
    for name, number in MEMBERS.items():
        addresses = {"member-subnet": f"192.0.2.{number}", "member-subnet-v6": f"2001:db8:2::{number}"}
        hosts[name] = (MEMBER_NETWORK, addresses)
    segments = {one.id: one for one in network.networks()}
    for name, (network_id, addresses) in hosts.items():
        wanted = [FixedAddress(subnet_id=derive_id(subnet), address=address) for subnet, address in addresses.items()]
        port = network.fixed_port(name, network_id, wanted)
        place = namespaces.path(settings.host(name))
        namespaces.ensure(settings.host(name))
        switch.connect(port, segments[network_id], name, place, "eth0")
        bridges.configure_interface(place, "eth0", port, network.subnets(network_id))
