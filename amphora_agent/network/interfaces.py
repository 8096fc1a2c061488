# SPDX-License-Identifier: Apache-2.0
"""Interfaces, addresses, routes and rules of the inner namespace, as a bundle wants them.

Invariant: idempotent. `add_missing` removes nothing. After `converge` the namespace has exactly the wanted interfaces,
addresses, routes and rules. An unwanted interface is down, has no address, and is back in the management namespace.
Correct items are not touched.

The VIPs are added last: the routes and rules of their replies exist before the first client finds a VIP.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from amphora_agent.bundle import Address, Bundle, Host, Interface
from amphora_agent.errors import InterfaceError
from amphora_agent.network import links as linking
from amphora_agent.network import policy_routing
from amphora_agent.network.garp import announce
from amphora_agent.network.namespace import Namespace
from amphora_agent.network.pyroute2_lazy import IPRoute, NetlinkError

_NODAD = 0x02
_SCOPE_LINK = 253
_FOREVER = 0xFFFFFFFF


@dataclass(frozen=True)
class WantedNetwork:
    """The network that a bundle wants.

    ``has_vips`` is False with VRRP: keepalived adds and removes the VIPs, and this module only their routes and rules.
    ``forwards`` adds the rule for forwarded packets of virtual servers.
    """

    interfaces: tuple[Interface, ...]
    has_vips: bool
    forwards: bool = False


def wanted_network(bundle: Bundle) -> WantedNetwork:
    """Return the network that a bundle wants."""
    return WantedNetwork(bundle.interfaces, bundle.vrrp is None, bool(bundle.virtual_servers))


NO_NETWORK = WantedNetwork((), has_vips=True)


@dataclass(frozen=True)
class AddedVip:
    """A VIP, and the interface that it was added to."""

    interface: str
    mac: str
    vip: Host


def own_vips(wanted: WantedNetwork) -> tuple[AddedVip, ...]:
    """Return the VIPs that this module adds; none with VRRP."""
    every = wanted.interfaces if wanted.has_vips else ()
    return tuple(AddedVip(one.name, one.mac, vip.ip) for one in every for vip in one.vips)


@dataclass(frozen=True)
class PassResult:
    """Result of one pass.

    ``changed`` counts corrected items, ``left`` unwanted items that are still there. ``complete`` is whether all wanted
    interfaces exist. ``added_vips`` were not there before.
    """

    changed: int
    left: int
    complete: bool
    added_vips: tuple[AddedVip, ...] = ()


def add_missing(inner: Namespace, wanted: WantedNetwork, *, may_lack: bool = False) -> PassResult:
    """Add missing items. Added VIPs are not announced yet.

    Args:
        may_lack: accept that an interface without VIPs does not exist.

    Raises:
        InterfaceError: an interface is missing, or the kernel refused a request. Earlier changes stay, and the next
            call continues from there.
    """
    return _converge(inner, wanted, None, may_lack=may_lack)


def converge(inner: Namespace, wanted: WantedNetwork, *, may_lack: bool = False) -> PassResult:
    """Add missing items, remove unwanted ones, and announce the added VIPs.

    Raises:
        InterfaceError: as for `add_missing`.
    """
    outer = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        done = _converge(inner, wanted, outer, may_lack=may_lack)
    finally:
        os.close(outer)
    announce_vips(inner, done.added_vips)
    return done


def announce_vips(inner: Namespace, vips: Iterable[AddedVip]) -> None:
    """Announce VIPs to the neighbours.

    Raises:
        InterfaceError: the kernel refused a request.
    """
    with kernel_errors():
        for one in vips:
            inner.run(announce, one.interface, one.mac, [one.vip])


def _converge(inner: Namespace, wanted: WantedNetwork, outer: int | None, *, may_lack: bool) -> PassResult:
    """Run one pass; move in missing interfaces first, if there are any."""
    with kernel_errors():
        done = inner.run(_run_pass, wanted, outer, lacking=False)
        if done is None:
            linking.move_in(inner, wanted.interfaces, may_lack=may_lack)
            done = inner.run(_run_pass, wanted, outer, lacking=True)
    assert done is not None  # noqa: S101 (a pass with lacking=True returns a result)
    return done


@contextmanager
def kernel_errors() -> Iterator[None]:
    """Convert errors of the kernel within the block to `InterfaceError`."""
    try:
        yield
    except NetlinkError as error:
        raise InterfaceError("set up the interfaces", f"the kernel refused: {error}") from error
    except OSError as error:
        raise InterfaceError("set up the interfaces", str(error)) from error


def _run_pass(wanted: WantedNetwork, outer: int | None, *, lacking: bool) -> PassResult | None:
    """Run one pass in the namespace.

    Args:
        outer: descriptor of the namespace for unwanted interfaces; None to remove nothing.
        lacking: continue without missing interfaces; otherwise do nothing and return None.
    """
    with IPRoute() as route:
        one_pass = _Pass(route, wanted)
        if not (one_pass.is_complete or lacking):
            return None
        done = one_pass.add()
        if outer is None or not done.left:
            return done
        return replace(done, changed=done.changed + one_pass.remove_unwanted(outer), left=0)


class _Pass:
    """One reading of the namespace, and the changes that follow from it."""

    def __init__(self, route: Any, wanted: WantedNetwork) -> None:
        self._route = route
        self._links = {link.mac: link for link in linking.list_links(route)}
        self._wanted = wanted
        self._interfaces = tuple(one for one in wanted.interfaces if one.mac in self._links)
        macs = {interface.mac for interface in self._interfaces}
        self._unwanted_links = [link for mac, link in self._links.items() if mac not in macs]
        self._unwanted_addresses: list[tuple[int, Address]] = []
        self._added_vips: list[AddedVip] = []
        self._unwanted_routes: tuple[policy_routing.TableRoute, ...] = ()
        self._unwanted_rules: frozenset[policy_routing.Rule] = frozenset()
        self.is_complete = len(self._interfaces) == len(wanted.interfaces)

    def add(self) -> PassResult:
        changed = linking.configure_links(self._route, self._links, self._interfaces)
        present = set(present_addresses(self._route))
        for interface in self._interfaces:
            changed += self._add_addresses(interface, interface.addresses, present)
        changed += self._add_routing()
        for interface in self._interfaces if self._wanted.has_vips else ():
            changed += self._add_addresses(interface, interface.vips, present)
        known = {
            (self._links[interface.mac].index, address)
            for interface in self._interfaces
            for address in (*interface.addresses, *interface.vips)
        }
        unwanted = {link.index for link in self._unwanted_links}
        self._unwanted_addresses = [
            (index, address)
            for index, address in present - known
            # With VRRP, host addresses belong to keepalived. It removes a former VIP when it reads its new file. If
            # another process removes one before, keepalived assumes that it lost its VIPs and releases all of them.
            if index not in unwanted and (self._wanted.has_vips or address.network.prefixlen != address.max_prefixlen)
        ]
        left = (
            len(self._unwanted_links)
            + len(self._unwanted_addresses)
            + len(self._unwanted_routes)
            + len(self._unwanted_rules)
        )
        return PassResult(changed, left, self.is_complete, tuple(self._added_vips))

    @property
    def _unwanted_count(self) -> int:
        routing = len(self._unwanted_routes) + len(self._unwanted_rules)
        return len(self._unwanted_links) + len(self._unwanted_addresses) + routing

    def _add_addresses(
        self, interface: Interface, addresses: tuple[Address, ...], present: set[tuple[int, Address]]
    ) -> int:
        """Add missing addresses; returns their number."""
        index, changed = self._links[interface.mac].index, 0
        for address in addresses:
            if (index, address) in present:
                continue
            is_vip, more = address in interface.vips, {}
            if address.version == 6:
                more["flags"] = _NODAD
                if is_vip:  # "deprecated" (RFC 4862, 5.5.4): own connections do not use a VIP as their source
                    more.update(preferred_lft=0, valid_lft=_FOREVER)
            self._route.addr(
                "replace", index=index, address=str(address.ip), prefixlen=address.network.prefixlen, **more
            )
            if is_vip:
                self._added_vips.append(AddedVip(interface.name, interface.mac, address.ip))
            changed += 1
        return changed

    def _add_routing(self) -> int:
        """Add routes and rules, and remember unwanted ones; returns the number of additions."""
        unwanted = {link.index for link in self._unwanted_links}
        indexes = {interface.mac: self._links[interface.mac].index for interface in self._interfaces}
        wanted = policy_routing.plan_changes(
            frozenset(one for one in policy_routing.read_routes(self._route) if one.interface not in unwanted),
            policy_routing.wanted_routes(self._interfaces, indexes),
        )
        for item in wanted.replace:
            policy_routing.replace_route(self._route, item)
        present = policy_routing.read_rules(self._route)
        rules = policy_routing.wanted_rules(self._interfaces, forwards=self._wanted.forwards)
        for rule in rules - present:
            policy_routing.add_rule(self._route, rule)
        self._unwanted_routes, self._unwanted_rules = wanted.delete, present - rules
        return len(wanted.replace) + len(rules - present)

    def remove_unwanted(self, outer: int) -> int:
        """Remove the unwanted items that `add` found; returns their number."""
        for index, address in self._unwanted_addresses:
            try:
                self._route.addr("del", index=index, address=str(address.ip), prefixlen=address.network.prefixlen)
            except NetlinkError as error:
                if error.code != errno.EADDRNOTAVAIL:  # the kernel removes secondary addresses with the first
                    raise
        for rule in self._unwanted_rules:
            policy_routing.delete_rule(self._route, rule)
        for item in self._unwanted_routes:
            policy_routing.delete_route(self._route, item)
        linking.move_out(self._route, self._unwanted_links, outer)
        return (
            len(self._unwanted_addresses)
            + len(self._unwanted_rules)
            + len(self._unwanted_routes)
            + len(self._unwanted_links)
        )


def present_addresses(route: Any) -> Iterator[tuple[int, Address]]:
    """Yield all addresses except link-local ones and the loopback's, each with its interface index."""
    for message in route.get_addr():
        if message["scope"] == _SCOPE_LINK or message["index"] == 1:
            continue
        attribute = "IFA_LOCAL" if message["family"] == socket.AF_INET else "IFA_ADDRESS"
        yield message["index"], ipaddress.ip_interface(f"{message.get_attr(attribute)}/{message['prefixlen']}")


# -- diagnostics -----------------------------------------------------------------------------------------------------


def describe(inner: Namespace) -> list[dict[str, Any]]:
    """Return the interfaces with their addresses and their routes in the main table."""
    return inner.run(_describe)


def describe_routing(inner: Namespace) -> dict[str, Any]:
    """Return the rules, and the routes of all tables except those of the kernel."""
    return inner.run(_describe_routing)


def describe_neighbours(inner: Namespace) -> list[dict[str, Any]]:
    """Return the neighbour table."""
    return inner.run(_describe_neighbours)


def _describe() -> list[dict[str, Any]]:
    with IPRoute() as route:
        addresses, routes = list(present_addresses(route)), policy_routing.read_routes(route)
        return [
            {
                "name": link.name,
                "mac": link.mac,
                "mtu": link.mtu,
                "up": link.up,
                "addresses": [str(address) for index, address in addresses if index == link.index],
                "routes": [
                    {"destination": str(one.destination), "gateway": str(one.gateway) if one.gateway else None}
                    for one in _sorted(routes)
                    if one.table == policy_routing.MAIN and one.interface == link.index
                ],
            }
            for link in linking.list_links(route)
        ]


def _sorted(routes: frozenset[policy_routing.TableRoute]) -> list[policy_routing.TableRoute]:
    return sorted(routes, key=lambda one: (one.table, one.destination.version, one.destination, one.metric))


def _describe_routing() -> dict[str, Any]:
    with IPRoute() as route:
        names = _names(route)
        rules = sorted(policy_routing.read_rules(route), key=lambda one: (one.version, one.priority, str(one.source)))
        return {
            "rules": [
                {
                    "priority": rule.priority,
                    "from": "all" if rule.source is None else str(rule.source),
                    "table": rule.table,
                    **dict(rule.further),
                }
                for rule in rules
            ],
            "routes": [
                {
                    "table": one.table,
                    "destination": str(one.destination),
                    "gateway": str(one.gateway) if one.gateway else None,
                    "interface": names.get(one.interface, str(one.interface)),
                }
                for one in _sorted(policy_routing.read_routes(route))
            ],
        }


def _names(route: Any) -> dict[int, str]:
    return {link.index: link.name for link in linking.list_links(route)}


def _describe_neighbours() -> list[dict[str, Any]]:
    # include/uapi/linux/neighbour.h; without NOARP (0x40)
    states = {0x01: "incomplete", 0x02: "reachable", 0x04: "stale", 0x08: "delay", 0x10: "probe", 0x20: "failed"}
    with IPRoute() as route:
        names = _names(route)
        return [
            {
                "address": message.get_attr("NDA_DST"),
                "mac": message.get_attr("NDA_LLADDR"),
                "interface": names[message["ifindex"]],
                "state": states[message["state"]],
            }
            for family in (socket.AF_INET, socket.AF_INET6)
            for message in route.get_neighbours(family)
            if message["ifindex"] in names and message["state"] in states
        ]
