# SPDX-License-Identifier: Apache-2.0
"""VIPs and ports: what every network backend does.

Invariant: ports are found again by the thing they belong to (`owner`) and their network, so that repeating a call
after a crash never makes a second port. `release_*` and `delete_*` touch only what this provider made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

import msgspec

from amphora_driver.model.loadbalancer import Vip


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
    """What a user said about one VIP; everything else is for the backend to decide."""

    subnet_id: str | None = None
    network_id: str | None = None
    address: str | None = None
    port_id: str | None = None


class Network(Protocol):
    """A backend, made with the options and the database; that talks to nobody yet.

    Methods raise `NetworkError`; what a user got wrong raises `Conflict` or `UnsupportedOption`.

    Attributes:
        supports: the keys of flavors and availability zones it can fulfil; all others are refused by name.
        wiring: how a port becomes an interface; see `Compute.wiring`.
    """

    supports: ClassVar[frozenset[str]]
    wiring: ClassVar[str]

    def allocate_vip(self, load_balancer_id: str, project_id: str, wanted: Sequence[VipRequest]) -> tuple[Vip, ...]:
        """Take the addresses wanted, the primary VIP first, all on one port. Again with the same id: the same VIPs.

        Raises:
            Conflict: an address or port is in use.
            UnsupportedOption: an address lies outside its subnet, a subnet or network does not exist.
        """

    def release_vip(self, load_balancer_id: str) -> None:
        """Give back what `allocate_vip` took for this load balancer; a port the user brought stays."""

    def ensure_port(self, owner: str, network_id: str, subnet_ids: Sequence[str]) -> Port:
        """The port of this owner (an amphora id) on this network with an address on each subnet; made if missing."""

    def ports(self, owner: str) -> tuple[Port, ...]:
        """Every port of this owner."""

    def delete_port(self, port_id: str) -> None:
        """Remove a port; no error if it is not there."""

    def subnet(self, subnet_id: str) -> Subnet:
        """What is known of a subnet.

        Raises:
            UnsupportedOption: it does not exist.
        """
