# SPDX-License-Identifier: Apache-2.0
"""Network interfaces: found by MAC address, moved into the namespace, renamed, configured, moved out."""

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
# Interfaces that stay in their namespace: the loopback interface and the hand-over tunnel (`connection_tunnel.NAME`).
_OWN = ("lo", "handover0")


@dataclass(frozen=True)
class Link:
    """An interface as the kernel has it."""

    index: int
    name: str
    mac: str
    mtu: int
    up: bool


def list_links(route: Any) -> Iterator[Link]:
    """Yield all interfaces except the loopback and the tunnel of a hand-over."""
    for message in route.get_links():
        name = message.get_attr("IFLA_IFNAME")
        if name not in _OWN:
            mac = (message.get_attr("IFLA_ADDRESS") or "").lower()
            yield Link(message["index"], name, mac, message.get_attr("IFLA_MTU"), bool(message["flags"] & _UP))


def move_in(inner: Namespace, wanted: Sequence[Interface], *, may_lack: bool) -> None:
    """Move wanted interfaces that are still outside into the namespace, under a unique temporary name.

    With ``may_lack`` an interface without VIPs may be missing. Raises InterfaceError if another interface does not
    exist.
    """
    present = inner.run(_macs)
    absent = [interface for interface in wanted if interface.mac not in present]
    if not absent:
        return
    descriptor = inner.run(os.open, "/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with IPRoute() as route:
            outside = {link.mac: link for link in list_links(route)}
            for interface in absent:
                link = outside.get(interface.mac)
                if link is not None:
                    route.link("set", index=link.index, ifname=_spare_name(link.mac), net_ns_fd=descriptor)
                elif interface.vips or not may_lack:
                    cause = f"no interface has the MAC address {interface.mac}"
                    raise InterfaceError(f"set up {interface.name}", cause, "Attach the port to the amphora.")
    finally:
        os.close(descriptor)


def _macs() -> frozenset[str]:
    with IPRoute() as route:
        return frozenset(link.mac for link in list_links(route))


def _spare_name(mac: str) -> str:
    return "x" + mac.replace(":", "")


def configure_links(route: Any, links: dict[str, Link], wanted: Sequence[Interface]) -> int:
    """Set names and MTUs of wanted interfaces, and set them up. Updates ``links``; returns the changes."""
    changed = 0
    for interface in wanted:
        _set_name(route, links, interface)
    for interface in wanted:
        link = links[interface.mac]
        if (link.mtu, link.up) != (interface.mtu, True):
            route.link("set", index=link.index, mtu=interface.mtu, state="up")
            changed += 1
    return changed


def _set_name(route: Any, links: dict[str, Link], interface: Interface) -> None:
    link = links[interface.mac]
    if link.name == interface.name:
        return
    for other in list(links.values()):
        if other.name == interface.name:
            _rename(route, links, other, _spare_name(other.mac))
    _rename(route, links, link, interface.name)


def _rename(route: Any, links: dict[str, Link], link: Link, name: str) -> None:
    """Rename a link. Linux before 6.2 requires it to be down, which interrupts its routes for a moment."""
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


def move_out(route: Any, links: Collection[Link], outer: int) -> None:
    """Set interfaces down, remove their addresses, and move them to the namespace of descriptor `outer`."""
    for link in links:
        route.link("set", index=link.index, state="down")
        route.flush_addr(index=link.index)
        route.link("set", index=link.index, ifname=_spare_name(link.mac), net_ns_fd=outer)
