# SPDX-License-Identifier: Apache-2.0
"""Make the inner namespace's interfaces what a bundle says.

Invariant: idempotent. After `apply` the namespace has the wanted interfaces, each with the wanted addresses
and routes and no other ones; an interface that is not wanted is down, bare, and back in the management
namespace.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from amphora_agent.bundle import Address, Interface, Route
from amphora_agent.errors import InterfaceError
from amphora_agent.network.announce import announce
from amphora_agent.network.namespace import Namespace

_NODAD = 0x02
_SCOPE_LINK = 253
_PROTO_STATIC = 4
_MAIN_TABLE = 254
_UNICAST = 1
_FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}
# The VIP may be configured after HAProxy binds it; addresses and routes come from the bundle and nowhere
# else.
_SYSCTLS = {
    "ipv4/ip_nonlocal_bind": "1",
    "ipv6/ip_nonlocal_bind": "1",
    "ipv6/conf/default/accept_ra": "0",
    "ipv6/conf/default/autoconf": "0",
    "ipv6/conf/default/accept_dad": "0",
}


@dataclass(frozen=True)
class Link:
    """An interface as the kernel has it."""

    index: int
    name: str
    mac: str
    mtu: int
    up: bool


def prepare(inner: Namespace) -> None:
    """Set what every interface that comes into the namespace finds there."""
    inner.run(_write_sysctls)


def _write_sysctls() -> None:
    for key, value in _SYSCTLS.items():
        file = Path("/proc/sys/net") / key
        try:
            file.write_text(value, encoding="ascii")
        except OSError as error:
            raise InterfaceError(f"set {key}", str(error)) from error


def apply(inner: Namespace, wanted: Sequence[Interface]) -> None:
    """Make it so.

    Raises:
        InterfaceError: an interface is missing, or the kernel refused something; what was done before is
        left, and
            another call goes on from there.
    """
    outer = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        present = inner.run(_links)
        _fetch(inner, wanted, {link.mac for link in present})
        inner.run(_arrange, wanted, outer)
    except NetlinkError as error:
        raise InterfaceError("set up the interfaces", f"the kernel refused: {error}") from error
    except OSError as error:
        raise InterfaceError("set up the interfaces", str(error)) from error
    finally:
        os.close(outer)


def describe(inner: Namespace) -> list[dict[str, Any]]:
    """Interfaces, addresses and routes, for a person to read."""
    return inner.run(_describe)


def _links() -> list[Link]:
    with IPRoute() as route:
        return list(_dump(route))


def _dump(route: Any) -> Iterator[Link]:
    for message in route.get_links():
        name = message.get_attr("IFLA_IFNAME")
        if name != "lo":
            mac = (message.get_attr("IFLA_ADDRESS") or "").lower()
            yield Link(message["index"], name, mac, message.get_attr("IFLA_MTU"), bool(message["flags"] & 1))


def _fetch(inner: Namespace, wanted: Sequence[Interface], present: set[str]) -> None:
    """Move the wanted interfaces that are still outside into the namespace, under a name nobody else has."""
    absent = [interface for interface in wanted if interface.mac not in present]
    if not absent:
        return
    descriptor = inner.run(os.open, "/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with IPRoute() as route:
            outside = {link.mac: link for link in _dump(route)}
            for interface in absent:
                link = outside.get(interface.mac)
                if link is None:
                    raise InterfaceError(
                        f"set up {interface.name}",
                        f"no interface has the MAC address {interface.mac}",
                        "Attach the port to the amphora.",
                    )
                route.link("set", index=link.index, ifname=_spare_name(link.mac), net_ns_fd=descriptor)
    finally:
        os.close(descriptor)


def _spare_name(mac: str) -> str:
    return "x" + mac.replace(":", "")


def _arrange(wanted: Sequence[Interface], outer: int) -> None:
    """In the namespace: everything but finding the interfaces."""
    with IPRoute() as route:
        macs = {interface.mac for interface in wanted}
        links = {link.mac: link for link in _dump(route)}
        for link in links.values():
            if link.mac not in macs:
                route.link("set", index=link.index, state="down")
                route.flush_addr(index=link.index)
                route.link("set", index=link.index, ifname=_spare_name(link.mac), net_ns_fd=outer)
        for interface in wanted:
            _rename(route, links, interface)
        for interface in wanted:
            link = links[interface.mac]
            route.link("set", index=link.index, mtu=interface.mtu, state="up")
            _remove_addresses(route, link.index, interface)
        for interface in wanted:
            index = links[interface.mac].index
            new = _add_addresses(route, index, interface)
            _set_routes(route, index, interface.routes)
            announce(interface.name, interface.mac, [vip.ip for vip in interface.vips if vip in new])


def _rename(route: Any, links: dict[str, Link], interface: Interface) -> None:
    link = links[interface.mac]
    if link.name == interface.name:
        return
    for other in _dump(route):
        if other.name == interface.name:
            route.link("set", index=other.index, state="down")
            route.link("set", index=other.index, ifname=_spare_name(other.mac))
            links[other.mac] = Link(other.index, _spare_name(other.mac), other.mac, other.mtu, up=False)
    route.link("set", index=link.index, state="down")
    route.link("set", index=link.index, ifname=interface.name)


def _present(route: Any, index: int) -> Iterator[Address]:
    for message in route.get_addr(index=index):
        if message["index"] == index and message["scope"] != _SCOPE_LINK:
            attribute = "IFA_LOCAL" if message["family"] == socket.AF_INET else "IFA_ADDRESS"
            yield ipaddress.ip_interface(f"{message.get_attr(attribute)}/{message['prefixlen']}")


def _remove_addresses(route: Any, index: int, interface: Interface) -> None:
    wanted = {*interface.addresses, *interface.vips}
    for address in list(_present(route, index)):
        if address in wanted:
            continue
        try:
            route.addr("del", index=index, address=str(address.ip), prefixlen=address.network.prefixlen)
        except NetlinkError as error:
            if error.code != errno.EADDRNOTAVAIL:  # the kernel took it away with the first one of its subnet
                raise


def _add_addresses(route: Any, index: int, interface: Interface) -> set[Address]:
    """Add what is missing; fixed addresses first, so that they are the source of what the machine sends."""
    present = set(_present(route, index))
    new = []
    for address in (*interface.addresses, *interface.vips):
        if address not in present:
            flags = {"flags": _NODAD} if address.version == 6 else {}
            route.addr("replace", index=index, address=str(address.ip), prefixlen=address.network.prefixlen, **flags)
            new.append(address)
    return set(new)


def _set_routes(route: Any, index: int, wanted: Sequence[Route]) -> None:
    present = set(_static_routes(route, index))
    for item in present - set(wanted):
        route.route("del", **_route_arguments(item, index))
    for item in wanted:
        if item not in present:
            route.route("replace", **_route_arguments(item, index))


def _route_arguments(item: Route, index: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "dst": str(item.destination),
        "oif": index,
        "proto": _PROTO_STATIC,
        "table": _MAIN_TABLE,
        "family": _FAMILIES[item.destination.version],
    }
    if item.gateway is not None:
        arguments["gateway"] = str(item.gateway)
    elif item.destination.version == 4:
        arguments["scope"] = _SCOPE_LINK
    return arguments


def _static_routes(route: Any, index: int) -> Iterator[Route]:
    """The routes that came from us; those of addresses are the kernel's."""
    for family, everything in ((socket.AF_INET, "0.0.0.0/0"), (socket.AF_INET6, "::/0")):
        for message in route.get_routes(family=family, table=_MAIN_TABLE, proto=_PROTO_STATIC):
            if message.get_attr("RTA_OIF") != index or message["proto"] != _PROTO_STATIC:
                continue
            target, gateway = message.get_attr("RTA_DST"), message.get_attr("RTA_GATEWAY")
            text = everything if target is None else f"{target}/{message['dst_len']}"
            yield Route(ipaddress.ip_network(text), ipaddress.ip_address(gateway) if gateway else None)


def _describe() -> list[dict[str, Any]]:
    with IPRoute() as route:
        return [
            {
                "name": link.name,
                "mac": link.mac,
                "mtu": link.mtu,
                "up": link.up,
                "addresses": [str(address) for address in _present(route, link.index)],
                "routes": [
                    {"destination": str(r.destination), "gateway": str(r.gateway) if r.gateway else None}
                    for r in _static_routes(route, link.index)
                ],
            }
            for link in _dump(route)
        ]
