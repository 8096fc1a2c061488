# SPDX-License-Identifier: Apache-2.0
"""Conversion of plug requests to interfaces of a bundle.

Invariant: no I/O. A MAC address identifies a port, which keeps its first name.
"""

from __future__ import annotations

import ipaddress
import itertools
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from amphora_agent.bundle import Address, Interface, Network, Route
from amphora_agent.errors import RequestRefused

VIP_NAME = "eth1"
_FIRST_MEMBER_NETWORK = 2
_USUAL_MTU = 1500
_SMALLEST_MTU, _LARGEST_MTU = 68, 65535
_MAC = re.compile(r"(?:[0-9a-f]{2}:){5}[0-9a-f]{2}")
_EVERYTHING = {4: ipaddress.ip_network("0.0.0.0/0"), 6: ipaddress.ip_network("::/0")}


def vip_port(vip: str, document: Any) -> Interface:
    """Return the interface for the body of POST plug/vip with this primary VIP. Raises RequestRefused."""
    try:
        found = _object(document)
        own = [_fixed(found["vrrp_ip"], found["subnet_cidr"])]
        primary = {**found, "ip_address": vip}
        vips = [primary, *(_object(each) for each in found.get("additional_vips") or ())]
        return Interface(
            mac=_mac(found["mac_address"]),
            name=VIP_NAME,
            mtu=_mtu(found.get("mtu")),
            addresses=tuple(own),
            vips=tuple(_single(each["ip_address"]) for each in vips),
            routes=_unique(route for each in vips for route in _vip_routes(each, own)),
        )
    except KeyError as error:
        raise RequestRefused("Invalid subnet information", f"{error} is missing") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise RequestRefused("Invalid VIP", str(error)) from error


def member_port(document: Any, plugged: Collection[Interface]) -> Interface:
    """Return the interface for the body of POST plug/network. Raises RequestRefused.

    A repeated port changes its interface, which is one of the `plugged` ones.
    """
    try:
        found = _object(document)
        mac = _mac(found["mac_address"])
        known = next((each for each in plugged if each.mac == mac), None)
        fixed = [_object(each) for each in found.get("fixed_ips") or ()]
        if found.get("vip_net_info") or (known is not None and known.name == VIP_NAME):
            return _shared(found, fixed, known)
        taken = {each.name for each in plugged}
        free = next(name for n in itertools.count(_FIRST_MEMBER_NETWORK) if (name := f"eth{n}") not in taken)
        return Interface(
            mac=mac,
            name=known.name if known is not None else free,
            mtu=_mtu(found.get("mtu")),
            addresses=tuple(_fixed(each["ip_address"], each["subnet_cidr"]) for each in fixed),
            vips=(),
            routes=_unique(route for each in fixed for route in _host_routes(each)),
        )
    except KeyError as error:
        raise RequestRefused("Invalid port information", f"{error} is missing") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise RequestRefused("Invalid network port", str(error)) from error


def with_port(plugged: Collection[Interface], port: Interface) -> tuple[Interface, ...]:
    """Return the interfaces with one added or replaced."""
    return tuple(sorted((*(each for each in plugged if each.name != port.name), port), key=lambda each: each.name))


def _shared(found: Mapping[str, Any], fixed: list[dict[str, Any]], known: Interface | None) -> Interface:
    if found.get("vip_net_info"):
        net_info = _object(found["vip_net_info"])
        port = vip_port(net_info["vip"], {"mac_address": found["mac_address"], **net_info})
        # If a request for a member network names the VIP network, the request lacks the additional VIPs. So the agent
        # keeps the VIPs that it knows.
        if known is not None and not net_info.get("additional_vips"):
            port = _joined(port, (), known.vips, known.routes)
    elif known is not None:
        port = known
    addresses = [_fixed(each["ip_address"], each["subnet_cidr"]) for each in fixed]
    routes = [route for each in fixed for route in (*_default(each), *_host_routes(each))]
    return _joined(port, addresses, (), routes)


def _joined(
    port: Interface, addresses: Iterable[Address], vips: Iterable[Address], routes: Iterable[Route]
) -> Interface:
    return replace(
        port,
        addresses=tuple(dict.fromkeys((*port.addresses, *addresses))),
        vips=tuple(dict.fromkeys((*port.vips, *vips))),
        routes=_unique((*port.routes, *routes)),
    )


def _vip_routes(vip: Mapping[str, Any], own: Collection[Address]) -> list[Route]:
    """Return the on-link route of a VIP's subnet, for an amphora without an address in it."""
    subnet = ipaddress.ip_network(vip["subnet_cidr"], strict=False)
    near = [] if any(address.network == subnet for address in own) else [Route(subnet, None)]
    return [*near, *_default(vip), *_host_routes(vip)]


def _default(subnet: Mapping[str, Any]) -> list[Route]:
    if not subnet.get("gateway"):
        return []
    gateway = ipaddress.ip_address(subnet["gateway"])
    return [Route(_EVERYTHING[gateway.version], gateway)]


def _host_routes(subnet: Mapping[str, Any]) -> list[Route]:
    return [
        Route(ipaddress.ip_network(each["destination"], strict=False), ipaddress.ip_address(each["nexthop"]))
        for each in subnet.get("host_routes") or ()
    ]


def _unique(routes: Iterable[Route]) -> tuple[Route, ...]:
    """Return the first route of each destination."""
    found: dict[Network, Route] = {}
    for route in routes:
        found.setdefault(route.destination, route)
    return tuple(found.values())


def _object(document: Any) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise TypeError("the request is not a JSON object")
    return document


def _fixed(address: Any, subnet: Any) -> Address:
    if not isinstance(address, str):
        raise TypeError("the port needs a fixed address, because the amphora does not use DHCP")
    length = ipaddress.ip_network(subnet, strict=False).prefixlen
    return ipaddress.ip_interface(f"{ipaddress.ip_address(address)}/{length}")


def _single(address: Any) -> Address:
    host = ipaddress.ip_address(str(address))
    return ipaddress.ip_interface(f"{host}/{host.max_prefixlen}")


def _mac(value: Any) -> str:
    if not isinstance(value, str) or not _MAC.fullmatch(value.lower()):
        raise ValueError(f"{value!r} is not a MAC address")
    return value.lower()


def _mtu(value: Any) -> int:
    mtu = _USUAL_MTU if value is None else value
    if not isinstance(mtu, int) or isinstance(mtu, bool) or not _SMALLEST_MTU <= mtu <= _LARGEST_MTU:
        raise ValueError(f"{mtu!r} is not an MTU")
    return mtu
