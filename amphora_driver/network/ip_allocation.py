# SPDX-License-Identifier: Apache-2.0
"""Allocation of IP and MAC addresses for the local network backend.

Invariant: pure functions. Their errors name the value and the subnet, because they reach the user of Octavia's API.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Collection

import msgspec
from netaddr import EUI, IPRange, IPSet, mac_unix_expanded

from amphora_driver.errors import Conflict, NetworkError, UnsupportedOption

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
# OpenStack's MAC prefix (fa:16:3e) as the highest three bytes of a number.
_OUI = 0xFA163E << 24


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """A network of this machine and its bridge. MTU in bytes."""

    id: str
    name: str
    bridge: str
    mtu: int


class AddressRange(msgspec.Struct, frozen=True, kw_only=True):
    """A subnet and its allocation pool, from `first` to `last`."""

    id: str
    network_id: str
    name: str
    cidr: str
    gateway: str | None
    first: str
    last: str

    @property
    def version(self) -> int:
        """The IP version, 4 or 6."""
        return ipaddress.ip_network(self.cidr).version

    @property
    def prefix_length(self) -> int:
        """The prefix length."""
        return ipaddress.ip_network(self.cidr).prefixlen

    def __contains__(self, address: Address) -> bool:
        return address in ipaddress.ip_network(self.cidr)

    def __str__(self) -> str:
        return f"subnet {self.name} ({self.cidr})"


def parse_address(text: str, wanted: str) -> Address:
    """Parse an address of a request.

    Raises:
        UnsupportedOption: the text is not an IP address, or it has a scope.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise UnsupportedOption(wanted, f"{text} is not an IPv4 or IPv6 address") from None
    if isinstance(address, ipaddress.IPv6Address) and address.scope_id:
        raise UnsupportedOption(wanted, f"{text} has a scope, which is valid on one machine only")
    return address


def validate_address(address: Address, subnet: AddressRange, wanted: str) -> str:
    """The address in its canonical form, if a port on this subnet may have it.

    Raises:
        UnsupportedOption: the address is outside the subnet, or is its network or broadcast address.
        Conflict: the address is the gateway.
    """
    cidr = ipaddress.ip_network(subnet.cidr)
    remedy = f"Choose another address of {subnet.cidr}, or omit the address."
    if address not in cidr:
        raise UnsupportedOption(wanted, f"{address} lies outside of {subnet}", remedy)
    broadcast = cidr.broadcast_address if cidr.version == 4 else None
    if cidr.num_addresses > 2 and address in {cidr.network_address, broadcast}:
        raise UnsupportedOption(wanted, f"{address} is the network's own address on {subnet}", remedy)
    if str(address) == subnet.gateway:
        raise Conflict(wanted, f"{address} is the gateway of {subnet}", remedy)
    return str(address)


def find_free_address(subnet: AddressRange, taken: Collection[str], wanted: str) -> str:
    """The lowest free address of the allocation pool.

    Raises:
        NetworkError: no address is free.
    """
    pool = IPSet(IPRange(subnet.first, subnet.last))
    free = pool - IPSet([*taken, *([] if subnet.gateway is None else [subnet.gateway])])
    for lowest in free.iter_ipranges():
        return str(lowest[0])
    raise NetworkError(
        wanted,
        f"every address of {subnet} from {subnet.first} to {subnet.last} is in use",
        "Delete unused load balancers or ports, or use another subnet.",
        final=True,
    )


def derive_mac(network_id: str, address: str, attempt: int = 0) -> str:
    """A MAC address that derives from the network and the IP address.

    If a released IP address goes to another port, its MAC address stays the same: ARP entries of neighbours remain
    valid. `attempt` selects another MAC address in the rare case that the first address is in use.
    """
    digest = hashlib.sha256(f"{network_id} {address} {attempt}".encode()).digest()
    return str(EUI(_OUI + int.from_bytes(digest[:3], "big"), dialect=mac_unix_expanded))
