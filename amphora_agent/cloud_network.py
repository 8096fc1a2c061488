# SPDX-License-Identifier: Apache-2.0
"""The management interface: from the cloud's network document to a file of systemd-networkd.

Invariant: pure. No text of the document enters a file: each value is parsed as an address, a MAC address or a number.
Only the management interface is configured; the agent moves all others to the load balancer's namespace. Source:
OpenStack's network_data.json (Nova, "Metadata"); systemd.network(5).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from amphora_agent.errors import SettingsError

Address = ipaddress.IPv4Interface | ipaddress.IPv6Interface
_MAC = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")
_LEAST_MTU, _LARGEST_MTU = 576, 65535
_MOST = 64
# For these network types, network_data.json has no address, because DHCP or router advertisements assign the address.
# Each value has the address family for DHCP, and whether the interface accepts router advertisements.
_DYNAMIC = {
    "ipv4_dhcp": ("ipv4", False),
    "ipv6_dhcp": ("ipv6", True),
    "ipv6_slaac": ("", True),
    "ipv6_dhcpv6-stateful": ("ipv6", True),
    "ipv6_dhcpv6-stateless": ("", True),
}
FALLBACK = (
    "[Match]\nName=eth0\n\n[Network]\nDHCP=yes\nLLMNR=no\nMulticastDNS=no\n\n[DHCPv4]\nUseDNS=no\nUseHostname=no\n"
)
_WANTED = "read the config drive's network_data.json"


@dataclass(frozen=True)
class Route:
    """A route to a network."""

    destination: ipaddress.IPv4Network | ipaddress.IPv6Network
    gateway: ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class Interface:
    """The management interface; ``mtu`` None is the default of the kernel.

    ``dhcp`` has "ipv4" and "ipv6" if the interface uses DHCP. ``routers``: the interface accepts router advertisements.
    """

    mac: str
    mtu: int | None
    addresses: tuple[Address, ...]
    routes: tuple[Route, ...]
    dhcp: frozenset[str]
    routers: bool


def management(document: Mapping[str, Any], address: str | None) -> Interface | None:
    """Return the management interface of network_data.json; None if the document has no interface.

    The address of the agent selects the interface, because after a migration the document may also have ports of the
    load balancer. Without a match, the first interface is returned. Raises SettingsError for another format.
    """
    try:
        links = _listed(document, "links")
        networks = _listed(document, "networks")
        if not links:
            return None
        found = [_interface(link, [one for one in networks if one.get("link") == link.get("id")]) for link in links]
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise SettingsError(_WANTED, f"{type(error).__name__}: {error}") from error
    wanted = [one for one in found if address in {str(own.ip) for own in one.addresses}]
    return (wanted or found)[0]


def time_servers(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the addresses of the NTP servers in the document."""
    found = []
    services = document.get("services")
    for one in services[:_MOST] if isinstance(services, list) else ():
        if isinstance(one, dict) and one.get("type") == "ntp":
            try:
                found.append(str(ipaddress.ip_address(str(one.get("address")))))
            except ValueError:
                continue
    return tuple(found)


def rendered(interface: Interface) -> str:
    """Return the file of systemd-networkd for an interface."""
    mtu = [] if interface.mtu is None else ["[Link]", f"MTUBytes={interface.mtu}", ""]
    dhcp = {0: "no", 1: next(iter(interface.dhcp), "no"), 2: "yes"}[len(interface.dhcp)]
    lines = [
        *("[Match]", f"MACAddress={interface.mac}", "", *mtu),
        *("[Network]", *(f"Address={address.with_prefixlen}" for address in interface.addresses)),
        *(f"DHCP={dhcp}", f"IPv6AcceptRA={'yes' if interface.routers else 'no'}"),
        # The amphora resolves no host names. Each interface keeps its address without a carrier, because the agent
        # listens on the address.
        *("LLMNR=no", "MulticastDNS=no", "IgnoreCarrierLoss=yes", "ConfigureWithoutCarrier=yes", ""),
        *("[DHCPv4]", "UseDNS=no", "UseHostname=no", "", "[DHCPv6]", "UseDNS=no", ""),
    ]
    for route in interface.routes:
        lines += ["[Route]", f"Destination={route.destination}", f"Gateway={route.gateway}", "GatewayOnLink=yes", ""]
    return "\n".join(lines)


def _listed(document: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    found = document.get(key) or []
    if not isinstance(found, list) or len(found) > _MOST or not all(isinstance(one, dict) for one in found):
        raise TypeError(f"{key} is not a list of at most {_MOST} objects")
    return found


def _interface(link: Mapping[str, Any], networks: Iterable[Mapping[str, Any]]) -> Interface:
    mac = str(link["ethernet_mac_address"]).lower()
    if not _MAC.fullmatch(mac):
        raise ValueError("ethernet_mac_address is not a MAC address")
    addresses: list[Address] = []
    routes: list[Route] = []
    dhcp: set[str] = set()
    routers = False
    for network in networks:
        kind = str(network.get("type"))
        if kind in _DYNAMIC:
            family, listens = _DYNAMIC[kind]
            dhcp |= {family} - {""}
            routers |= listens
        elif kind in {"ipv4", "ipv6"}:
            addresses.append(_address(network))
            routes += _routes(network)
    if not addresses and not dhcp and not routers:
        dhcp, routers = {"ipv4", "ipv6"}, True
    return Interface(
        mac, _mtu(link.get("mtu")), tuple(addresses), tuple(dict.fromkeys(routes)), frozenset(dhcp), routers
    )


def _address(network: Mapping[str, Any]) -> Address:
    text = str(network["ip_address"])
    return ipaddress.ip_interface(text if "/" in text else f"{text}/{_prefix(str(network['netmask']))}")


def _prefix(netmask: str) -> int:
    """Return the prefix length of a mask or number; ipaddress parses IPv4 masks only."""
    if netmask.isdecimal():
        return int(netmask)
    mask = ipaddress.ip_address(netmask)
    bits = f"{int(mask):0{mask.max_prefixlen}b}"
    if "01" in bits:
        raise ValueError(f"netmask {netmask} has a 1 after a 0")
    return bits.count("1")


def _routes(network: Mapping[str, Any]) -> list[Route]:
    found = []
    listed = _listed(network, "routes")
    if network.get("gateway"):
        # Nova before 2016 and some other clouds store the default route under the key `gateway`.
        everything = "::" if network["type"] == "ipv6" else "0.0.0.0"
        listed = [{"network": everything, "netmask": everything, "gateway": network["gateway"]}, *listed]
    for route in listed:
        destination = ipaddress.ip_network(f"{route['network']}/{_prefix(str(route['netmask']))}")
        gateway = ipaddress.ip_address(str(route["gateway"]))
        if gateway.version != destination.version:
            raise ValueError("a route's gateway is of another family")
        found.append(Route(destination, gateway))
    return found


def _mtu(value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not _LEAST_MTU <= value <= _LARGEST_MTU:
        raise ValueError("mtu is not a number of bytes")
    return value
