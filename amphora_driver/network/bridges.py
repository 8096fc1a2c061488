# SPDX-License-Identifier: Apache-2.0
"""The virtual switch of the local network backend: bridges in one namespace, veth pairs to others.

Invariant: all bridges are in the switch namespace; the root network namespace never changes. Every call is idempotent.
A veth pair is created atomically: both ends, the peer in its namespace with its MAC address. The name of the switch
interface derives from the port id, and its alias is the owner of the port. A crash between creation and connection
leaves a pair that is on no bridge; a repeated call connects it.
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

# IFA_F_NODAD: the kernel uses the address without duplicate address detection. The database guarantees unique
# addresses.
_NO_DAD = 0x02
# Seconds to wait until the name of a removed interface is free. The kernel frees the name some milliseconds after it
# confirms the removal.
_NAME_FREE_AFTER = 2.0


class Switch:
    """The bridges of a machine in one namespace. The management network has no gateway and no routing."""

    def __init__(self, name: str, management: str) -> None:
        self._name = name
        self._management = management

    def ensure(self, segments: tuple[Segment, ...], subnets: tuple[AddressRange, ...]) -> None:
        """Create the namespace, a bridge for each network, and the gateway addresses."""
        namespaces.ensure(self._name)

        def work(kernel: Any) -> None:
            namespaces.write_sysctl("net/ipv6/conf/all/forwarding", 1)
            for segment in segments:
                own = tuple(subnet for subnet in subnets if subnet.network_id == segment.id)
                self._ensure_bridge(kernel, segment, own)

        namespaces.run_with_netlink(namespaces.path(self._name), work)

    def connect(self, port: Port, segment: Segment, owner: str, place: str | Path, interface: str | None) -> None:
        """Connect a namespace (path `place`) to the port's bridge by a veth pair; an existing pair is reused.

        The peer interface gets the MAC address of the port. Its name derives from the port id if `interface` is None.
        `owner` is the alias of the switch interface (see `disconnect_owner`).
        """
        near, far = switch_interface_name(port.id), interface or peer_interface_name(port.id)

        def work(kernel: Any) -> None:
            if not kernel.link_lookup(ifname=near):
                self._create_veth(kernel, near, port, far, namespace.fileno())
            bridge = kernel.link_lookup(ifname=segment.bridge)
            if not bridge:
                raise NetworkError(f"connect port {port.id}", f"bridge {segment.bridge} does not exist in {self._name}")
            index = kernel.link_lookup(ifname=near)[0]
            kernel.link("set", index=index, master=bridge[0], ifalias=owner, state="up")

        with Path(place).open("rb") as namespace:
            namespaces.run_with_netlink(namespaces.path(self._name), work)

    def disconnect(self, port_id: str) -> None:
        """Remove the veth pair or tap of a port; no error if it does not exist."""
        self._delete(lambda kernel: kernel.link_lookup(ifname=switch_interface_name(port_id)))

    def disconnect_owner(self, owner: str) -> None:
        """Remove all veth pairs and taps of this owner, also those of ports that have no record."""

        def owned_links(kernel: Any) -> list[int]:
            return [link["index"] for link in kernel.get_links() if link.get_attr("IFLA_IFALIAS") == owner]

        self._delete(owned_links)

    def _delete(self, choose: Callable[[Any], list[int]]) -> None:
        def work(kernel: Any) -> None:
            for index in choose(kernel):
                with _ignoring(errno.ENODEV):
                    kernel.link("del", index=index)

        if namespaces.exists(self._name):
            namespaces.run_with_netlink(namespaces.path(self._name), work)

    def _ensure_bridge(self, kernel: Any, segment: Segment, subnets: tuple[AddressRange, ...]) -> None:
        with _ignoring(errno.EEXIST):
            # With a fixed MAC address of the bridge, the ARP entries of neighbours stay valid after the removal of
            # ports. Multicast snooping would drop VRRP and neighbour discovery, so snooping is off.
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

    def _create_veth(self, kernel: Any, near: str, port: Port, far: str, namespace: int) -> None:
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
            raise NetworkError(f"create the veth pair {near} and {peer['ifname']}", os.strerror(error.code)) from error
        return False
    return True


def switch_interface_name(port_id: str) -> str:
    """The name of the port's interface in the switch."""
    return f"p{port_id.replace('-', '')[:13]}"


def peer_interface_name(port_id: str) -> str:
    """The default name of the port's interface in the other namespace."""
    return f"n{port_id.replace('-', '')[:13]}"


def has_mac(place: str | Path, mac: str) -> bool:
    """Whether the namespace at `place` has an interface with this MAC address; False without a namespace."""
    try:
        return bool(namespaces.run_with_netlink(place, lambda kernel: kernel.link_lookup(address=mac.lower())))
    except (FileNotFoundError, ProcessLookupError):
        return False


def configure_interface(place: str | Path, interface: str, port: Port, subnets: tuple[AddressRange, ...]) -> None:
    """Configure the addresses and default routes of a port on its interface."""
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
    """Add an address to an interface; no error if the interface has it."""
    options = {"flags": _NO_DAD} if ip_address(address).version == 6 else {}
    with _ignoring(errno.EEXIST):
        kernel.addr("add", index=index, address=address, prefixlen=prefix_length, **options)


@contextmanager
def _ignoring(code: int) -> Iterator[None]:
    """Ignore this errno in an answer of the kernel."""
    try:
        yield
    except NetlinkError as error:
        if error.code != code:
            raise
