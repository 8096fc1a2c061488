# SPDX-License-Identifier: Apache-2.0
"""Ports, subnets and VIP requests.

Network backends, compute backends and the store share these types.
"""

from __future__ import annotations

import msgspec

DIRECT = "direct"
"""Neutron's `binding:vnic_type` of a port that uses SR-IOV. The port has neither security groups nor address pairs."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """A host route of a subnet."""

    destination: str
    gateway: str


class Subnet(msgspec.Struct, frozen=True, kw_only=True):
    """A subnet; `cidr` in CIDR notation, `gateway` None where it has none."""

    id: str
    network_id: str
    cidr: str
    gateway: str | None
    routes: tuple[Route, ...] = ()


class FixedAddress(msgspec.Struct, frozen=True, kw_only=True):
    """An address of a port on one subnet."""

    subnet_id: str
    address: str


class Port(msgspec.Struct, frozen=True, kw_only=True):
    """A port: a MAC address and its fixed addresses on one network. MTU in bytes."""

    id: str
    network_id: str
    mac: str
    mtu: int
    addresses: tuple[FixedAddress, ...]


class VipRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The user's request for one VIP; the network backend chooses everything that is None."""

    subnet_id: str | None = None
    network_id: str | None = None
    address: str | None = None
    port_id: str | None = None


class ListenerRule(msgspec.Struct, frozen=True, kw_only=True):
    """Permitted traffic to one listener.

    Attributes:
        protocol: `tcp`, `udp` or `sctp`.
        port: the listener's port.
        cidr: permitted clients; None for all addresses.
    """

    protocol: str
    port: int
    cidr: str | None = None


class VipOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The QoS policy and the security groups of a VIP, by their Neutron ids.

    Attributes:
        listener_rules: only for a network backend with `listener_rules`; empty for all others.
    """

    qos_policy_id: str | None = None
    security_group_ids: tuple[str, ...] = ()
    listener_rules: tuple[ListenerRule, ...] = ()

    def __bool__(self) -> bool:
        """Whether any option is set."""
        return bool(self.qos_policy_id or self.security_group_ids or self.listener_rules)
