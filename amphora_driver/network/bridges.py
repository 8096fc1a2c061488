# SPDX-License-Identifier: Apache-2.0
"""The kernel's part of the embedded networks: bridges in one namespace, and cables into others.

Invariant: everything hangs in the switch namespace; the machine's own network namespace is never touched.
Every call may be repeated. A cable is laid whole (both ends, the far one in its namespace with its MAC
address) or not at all; its near end is named after the port and carries its owner as alias, so that it can be
found again. Laid is not joined: who dies in between leaves one that leads nowhere until somebody connects it again.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from pyroute2.netlink.exceptions import NetlinkError

from amphora_driver.errors import NetworkError
from amphora_driver.host import namespaces
from amphora_driver.model.network import Port
from amphora_driver.network.ip_allocation import AddressRange, Segment, derive_mac

# Usable at once, no duplicate address detection: the database has made sure of that.
_NO_DAD = 0x02
# The kernel takes a removed interface's name back some milliseconds after it answered.
_NAME_FREE_AFTER = 2.0


class Switch:
    """The bridges of a machine.

    Args:
        name: the switch namespace.
        management: the network that has no gateway and is routed nowhere.
    """

    def __init__(self, name: str, management: str) -> None:
        self._name = name
        self._management = management

    def ensure(self, segments: tuple[Segment, ...], subnets: tuple[AddressRange, ...]) -> None:
        """Make the namespace, a bridge for each network, and the gateways."""
        namespaces.ensure(self._name)

        def work(kernel: Any) -> None:
            namespaces.write_sysctl("net/ipv6/conf/all/forwarding", 1)
            for segment in segments:
                own = tuple(subnet for subnet in subnets if subnet.network_id == segment.id)
                self._ensure_bridge(kernel, segment, own)

        namespaces.run_with_netlink(namespaces.path(self._name), work)

    def connect(self, port: Port, segment: Segment, owner: str, place: str | Path, interface: str | None) -> None:
        """Lay a cable from the port's bridge into the namespace at `place`, unless it is there.

        Args:
            port: its MAC address goes to the far end.
            segment: the port's network.
            owner: written on the cable; see `disconnect_owner`.
            place: path of the namespace.
            interface: name of the far end; None for one made from the port's id.
        """
        near, far = switch_interface_name(port.id), interface or peer_interface_name(port.id)

        def work(kernel: Any) -> None:
            if not kernel.link_lookup(ifname=near):
                self._create_cable(kernel, near, port, far, namespace.fileno())
            bridge = kernel.link_lookup(ifname=segment.bridge)
            if not bridge:
                raise NetworkError(f"connect port {port.id}", f"there is no bridge {segment.bridge} in {self._name}")
            index = kernel.link_lookup(ifname=near)[0]
            kernel.link("set", index=index, master=bridge[0], ifalias=owner, state="up")

        with Path(place).open("rb") as namespace:
            namespaces.run_with_netlink(namespaces.path(self._name), work)

    def disconnect(self, port_id: str) -> None:
        """Remove a port's cable; no error if it is not there."""
        self._delete(lambda kernel: kernel.link_lookup(ifname=switch_interface_name(port_id)))

    def disconnect_owner(self, owner: str) -> None:
        """Remove every cable of this owner, also of ports nobody remembers."""

        def cables(kernel: Any) -> list[int]:
            return [link["index"] for link in kernel.get_links() if link.get_attr("IFLA_IFALIAS") == owner]

        self._delete(cables)

    def _delete(self, choose: Callable[[Any], list[int]]) -> None:
        def work(kernel: Any) -> None:
            for index in choose(kernel):
                with _ignoring(errno.ENODEV):
                    kernel.link("del", index=index)

        if namespaces.exists(self._name):
            namespaces.run_with_netlink(namespaces.path(self._name), work)

    def _ensure_bridge(self, kernel: Any, segment: Segment, subnets: tuple[AddressRange, ...]) -> None:
        with _ignoring(errno.EEXIST):
            # A MAC address of its own: a bridge without one takes its lowest port's, and then every
            # neighbour's memory of the gateway is wrong when that port goes. Without a querier on the
            # network, snooping could only lose multicast (VRRP, neighbour discovery).
            mac = derive_mac(segment.id, "bridge")
            kernel.link("add", kind="bridge", ifname=segment.bridge, address=mac, br_mcast_snooping=0)
        index = kernel.link_lookup(ifname=segment.bridge)[0]
        kernel.link("set", index=index, mtu=segment.mtu, state="up")
        for family in ("ip", "ip6", "arp"):
            namespaces.write_sysctl(f"net/bridge/bridge-nf-call-{family}tables", 0)
        routed = segment.id != self._management
        namespaces.write_sysctl(f"net/ipv4/conf/{segment.bridge}/forwarding", int(routed))
        namespaces.write_sysctl(f"net/ipv6/conf/{segment.bridge}/disable_ipv6", int(not routed))
        for subnet in subnets if routed else ():
            if subnet.gateway is not None:
                add_address(kernel, index, subnet.gateway, subnet.prefix_length)

    def _create_cable(self, kernel: Any, near: str, port: Port, far: str, namespace: int) -> None:
        peer = {"ifname": far, "address": port.mac, "mtu": port.mtu, "net_ns_fd": namespace}
        deadline = time.monotonic() + _NAME_FREE_AFTER
        while not _try_add_veth(kernel, near, port.mtu, peer):
            if time.monotonic() > deadline:
                raise NetworkError(f"connect port {port.id}", f"the name {near} or {far} is in use")
            time.sleep(0.01)


def _try_add_veth(kernel: Any, near: str, mtu: int, peer: dict[str, Any]) -> bool:
    try:
        kernel.link("add", kind="veth", ifname=near, mtu=mtu, peer=peer)
    except NetlinkError as error:
        if error.code != errno.EEXIST:
            raise NetworkError(f"make the cable {near} to {peer['ifname']}", os.strerror(error.code)) from error
        return False
    return True


def switch_interface_name(port_id: str) -> str:
    """The name of a cable's end in the switch."""
    return f"p{port_id.replace('-', '')[:13]}"


def peer_interface_name(port_id: str) -> str:
    """The name of the other end, where nobody gave it one."""
    return f"n{port_id.replace('-', '')[:13]}"


def has_mac(place: str | Path, mac: str) -> bool:
    """Whether an interface with this MAC address is in the namespace at `place`; False if there is none."""
    try:
        return bool(namespaces.run_with_netlink(place, lambda kernel: kernel.link_lookup(address=mac.lower())))
    except (FileNotFoundError, ProcessLookupError):
        return False


def configure_interface(place: str | Path, interface: str, port: Port, subnets: tuple[AddressRange, ...]) -> None:
    """Give an interface its port's addresses and default routes."""
    known = {subnet.id: subnet for subnet in subnets}

    def work(kernel: Any) -> None:
        index = kernel.link_lookup(ifname=interface)[0]
        kernel.link("set", index=index, state="up")
        for fixed in port.addresses:
            subnet = known[fixed.subnet_id]
            add_address(kernel, index, fixed.address, subnet.prefix_length)
            if subnet.gateway is not None:
                default = "default" if subnet.version == 4 else "::/0"
                kernel.route("replace", dst=default, gateway=subnet.gateway, oif=index)

    namespaces.run_with_netlink(place, work)


def add_address(kernel: Any, index: int, address: str, prefix_length: int) -> None:
    """Give an interface an address it may have already."""
    options = {"flags": _NO_DAD} if ip_address(address).version == 6 else {}
    with _ignoring(errno.EEXIST):
        kernel.addr("add", index=index, address=address, prefixlen=prefix_length, **options)


@contextmanager
def _ignoring(code: int) -> Iterator[None]:
    """Take this answer of the kernel for a yes."""
    try:
        yield
    except NetlinkError as error:
        if error.code != code:
            raise
