# SPDX-License-Identifier: Apache-2.0
"""Network interfaces: find them by their MAC address, bring them in, name them, give them back.

Invariant: no two interfaces ever want the same name at once, and one that goes back is down and bare. A link that is as
it should be is not touched.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from amphora_agent.bundle import Interface
from amphora_agent.errors import InterfaceError
from amphora_agent.network.namespace import Namespace
from amphora_agent.network.pyroute2_lazy import IPRoute, NetlinkError

_UP = 1
# The second is `detour.NAME`.
_OWN = ("lo", "handover0")


@dataclass(frozen=True)
class Link:
    """An interface as the kernel has it."""

    index: int
    name: str
    mac: str
    mtu: int
    up: bool


def dump(route: Any) -> Iterator[Link]:
    """Every interface but the loopback and the tunnel of a hand-over."""
    for message in route.get_links():
        name = message.get_attr("IFLA_IFNAME")
        if name not in _OWN:
            mac = (message.get_attr("IFLA_ADDRESS") or "").lower()
            yield Link(message["index"], name, mac, message.get_attr("IFLA_MTU"), bool(message["flags"] & _UP))


def fetch(inner: Namespace, wanted: Sequence[Interface], *, may_lack: bool) -> None:
    """Move the wanted interfaces that are still outside into the namespace, under a name nobody else has.

    Args:
        may_lack: leave out one that is nowhere, instead of failing. One with VIPs has to be there.

    Raises:
        InterfaceError: one is nowhere.
    """
    present = inner.run(_macs)
    absent = [interface for interface in wanted if interface.mac not in present]
    if not absent:
        return
    descriptor = inner.run(os.open, "/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with IPRoute() as route:
            outside = {link.mac: link for link in dump(route)}
            for interface in absent:
                link = outside.get(interface.mac)
                if link is not None:
                    route.link("set", index=link.index, ifname=_spare_name(link.mac), net_ns_fd=descriptor)
                elif interface.vips or not may_lack:
                    raise InterfaceError(
                        f"set up {interface.name}",
                        f"no interface has the MAC address {interface.mac}",
                        "Attach the port to the amphora.",
                    )
    finally:
        os.close(descriptor)


def _macs() -> frozenset[str]:
    with IPRoute() as route:
        return frozenset(link.mac for link in dump(route))


def _spare_name(mac: str) -> str:
    return "x" + mac.replace(":", "")


def set_up(route: Any, links: dict[str, Link], wanted: Sequence[Interface]) -> int:
    """Give the wanted interfaces their names and MTUs, and switch them on.

    Args:
        links: every interface of the namespace by MAC address; kept up to date.

    Returns:
        How many of them were not as wanted.
    """
    changed = 0
    for interface in wanted:
        _name(route, links, interface)
    for interface in wanted:
        link = links[interface.mac]
        if (link.mtu, link.up) != (interface.mtu, True):
            route.link("set", index=link.index, mtu=interface.mtu, state="up")
            changed += 1
    return changed


def _name(route: Any, links: dict[str, Link], interface: Interface) -> None:
    link = links[interface.mac]
    if link.name == interface.name:
        return
    for other in list(links.values()):
        if other.name == interface.name:
            _rename(route, links, other, _spare_name(other.mac))
    _rename(route, links, link, interface.name)


def _rename(route: Any, links: dict[str, Link], link: Link, name: str) -> None:
    """A kernel older than 6.2 renames only what is down, which costs its routes and connections a moment."""
    up = link.up
    try:
        route.link("set", index=link.index, ifname=name)
    except NetlinkError as error:
        if error.code != errno.EBUSY:
            raise
        route.link("set", index=link.index, state="down")
        route.link("set", index=link.index, ifname=name)
        up = False
    links[link.mac] = Link(link.index, name, link.mac, link.mtu, up)


def give_back(route: Any, links: Collection[Link], outer: int) -> None:
    """Take interfaces down, empty them, and move them to the namespace of the descriptor `outer`."""
    for link in links:
        route.link("set", index=link.index, state="down")
        route.flush_addr(index=link.index)
        route.link("set", index=link.index, ifname=_spare_name(link.mac), net_ns_fd=outer)
