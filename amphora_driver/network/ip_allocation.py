# SPDX-License-Identifier: Apache-2.0
"""Choosing addresses and MAC addresses for the embedded network backend.

Invariant: pure functions. What they refuse they refuse in a sentence that names the value and the subnet,
because a user of Octavia's API reads it.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Collection

import msgspec

from amphora_driver.errors import Conflict, NetworkError, UnsupportedOption

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """A network of this machine and the bridge that carries it. MTU in bytes."""

    id: str
    name: str
    bridge: str
    mtu: int


class AddressRange(msgspec.Struct, frozen=True, kw_only=True):
    """A subnet, and the part of it from which addresses are handed out."""

    id: str
    network_id: str
    name: str
    cidr: str
    gateway: str | None
    first: str
    last: str

    @property
    def version(self) -> int:
        """4 or 6."""
        return ipaddress.ip_network(self.cidr).version

    @property
    def prefix_length(self) -> int:
        """The number behind the slash."""
        return ipaddress.ip_network(self.cidr).prefixlen

    def __contains__(self, address: Address) -> bool:
        return address in ipaddress.ip_network(self.cidr)

    def __str__(self) -> str:
        return f"subnet {self.name} ({self.cidr})"


def parse_address(text: str, wanted: str) -> Address:
    """The address a user wrote.

    Raises:
        UnsupportedOption: it is none.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise UnsupportedOption(wanted, f"{text} is not an IPv4 or IPv6 address") from None
    if isinstance(address, ipaddress.IPv6Address) and address.scope_id:
        raise UnsupportedOption(wanted, f"{text} has a scope, which means something on one machine only")
    return address


def validate_address(address: Address, subnet: AddressRange, wanted: str) -> str:
    """The address as it is written down, if a port on this subnet may have it.

    Raises:
        UnsupportedOption: it lies outside, or is the network's or broadcast address.
        Conflict: it is the gateway's.
    """
    cidr = ipaddress.ip_network(subnet.cidr)
    remedy = f"Choose another address of {subnet.cidr}, or leave it to the provider."
    if address not in cidr:
        raise UnsupportedOption(wanted, f"{address} lies outside of {subnet}", remedy)
    broadcast = cidr.broadcast_address if cidr.version == 4 else None
    if cidr.num_addresses > 2 and address in {cidr.network_address, broadcast}:
        raise UnsupportedOption(wanted, f"{address} is the network's own address on {subnet}", remedy)
    if str(address) == subnet.gateway:
        raise Conflict(wanted, f"{address} is the gateway of {subnet}", remedy)
    return str(address)


def find_free_address(subnet: AddressRange, taken: Collection[str], wanted: str) -> str:
    """The lowest address of the range that nobody has.

    Raises:
        NetworkError: there is none left.
    """
    occupied = {int(ipaddress.ip_address(address)) for address in taken}
    if subnet.gateway is not None:
        occupied.add(int(ipaddress.ip_address(subnet.gateway)))
    first, last = ipaddress.ip_address(subnet.first), ipaddress.ip_address(subnet.last)
    # One more candidate than there are occupied ones always holds a free one, however large the range is.
    for number in range(int(first), min(int(last), int(first) + len(occupied)) + 1):
        if number not in occupied:
            return str(type(first)(number))
    raise NetworkError(
        wanted,
        f"every address of {subnet} from {first} to {last} is in use",
        "Delete what is no longer needed, or use another subnet.",
        final=True,
    )


def derive_mac(network_id: str, address: str, attempt: int = 0) -> str:
    """A MAC address made from the address it stands for.

    An address that is given to another port soon after its release then keeps its MAC address, and neighbours
    that still remember the old one are right. `attempt` leads away from the rare one that is already in use.
    """
    digest = hashlib.sha256(f"{network_id} {address} {attempt}".encode()).digest()
    return "fa:16:3e:" + ":".join(f"{byte:02x}" for byte in digest[:3])
