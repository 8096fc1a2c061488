# SPDX-License-Identifier: Apache-2.0
"""Interfaces, addresses, routes and rules of the inner namespace, as a bundle wants them.

Invariant: idempotent. Without ``removes``, `converge` removes nothing. Otherwise the namespace has exactly the wanted
interfaces, addresses, routes and rules afterwards. An unwanted interface is down, has no address, and is back in the
management namespace. Correct items are not touched.

A pass adds the VIPs last: the routes and rules of their replies exist before the first client finds a VIP.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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

    ``has_vips`` is False with VRRP: keepalived adds the VIPs, and this module only their routes and rules. ``forwards``
    adds the rule for forwarded packets of virtual servers.
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
    """Number of corrected items, whether all wanted interfaces exist, and the VIPs that the pass added."""

    changed: int
    complete: bool
    added_vips: tuple[AddedVip, ...] = ()


def converge(inner: Namespace, wanted: WantedNetwork, *, may_lack: bool = False, removes: bool = True) -> PassResult:
    """Add missing items, and remove unwanted ones with ``removes``. Added VIPs are not announced yet.

    With ``may_lack`` an interface without VIPs may be missing. Raises InterfaceError if another interface is missing,
    or the kernel refuses a request. Earlier changes stay, and the next call continues from there.
    """
    outer = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC) if removes else None
    try:
        with kernel_errors():
            done = inner.run(_run_pass, wanted, outer, lacking=False)
            if done is None:
                linking.move_in(inner, wanted.interfaces, may_lack=may_lack)
                done = inner.run(_run_pass, wanted, outer, lacking=True)
    finally:
        if outer is not None:
            os.close(outer)
    assert done is not None  # noqa: S101 (a pass with lacking=True returns a result)
    return done


def announce_vips(inner: Namespace, vips: Iterable[AddedVip]) -> None:
    """Announce VIPs to the neighbours; raises InterfaceError if the kernel refuses a request."""
    with kernel_errors():
        for one in vips:
            inner.run(announce, one.interface, one.mac, [one.vip])


@contextmanager
def kernel_errors() -> Iterator[None]:
    """Convert errors of the kernel within the block to `InterfaceError`."""
    try:
        yield
    except NetlinkError as error:
        raise InterfaceError("set up the interfaces", f"the kernel refused: {error}") from error
    except OSError as error:
        raise InterfaceError("set up the interfaces", str(error)) from error


class NamespaceState:
    """One reading of the namespace, and its differences from the wanted network."""

    def __init__(self, route: Any, wanted: WantedNetwork) -> None:
        self.route = route
        self.wanted = wanted
        self.links = {link.mac: link for link in linking.list_links(route)}
        self.interfaces = tuple(one for one in wanted.interfaces if one.mac in self.links)
        macs = {one.mac for one in self.interfaces}
        self.unwanted_links = [link for mac, link in self.links.items() if mac not in macs]
        self._unwanted_indexes = {link.index for link in self.unwanted_links}
        self.is_complete = len(self.interfaces) == len(wanted.interfaces)

    def unwanted_addresses(self, present: set[tuple[int, Address]]) -> Iterator[tuple[int, Address]]:
        """Yield unwanted addresses of wanted interfaces, each with its interface index."""
        known = {
            (self.links[one.mac].index, address) for one in self.interfaces for address in (*one.addresses, *one.vips)
        }
        for index, address in present - known:
            # Under VRRP, only keepalived may remove the VIPs (/32 or /128). If the agent removed a former VIP,
            # keepalived would release all VIPs.
            is_ours = self.wanted.has_vips or address.network.prefixlen != address.max_prefixlen
            if is_ours and index not in self._unwanted_indexes:
                yield index, address

    def route_changes(self) -> policy_routing.Changes:
        indexes = {one.mac: self.links[one.mac].index for one in self.interfaces}
        routes = policy_routing.read_routes(self.route)
        present = frozenset(one for one in routes if one.interface not in self._unwanted_indexes)
        return policy_routing.plan_changes(present, policy_routing.wanted_routes(self.interfaces, indexes))

    def wanted_rules(self) -> frozenset[policy_routing.Rule]:
        return policy_routing.wanted_rules(self.interfaces, forwards=self.wanted.forwards)


def _run_pass(wanted: WantedNetwork, outer: int | None, *, lacking: bool) -> PassResult | None:
    """Run one pass. The result is None, without a change, if interfaces are missing and not ``lacking``."""
    with IPRoute() as route:
        state = NamespaceState(route, wanted)
        if not (state.is_complete or lacking):
            return None
        changed = linking.configure_links(route, state.links, state.interfaces)
        present = set(present_addresses(route))
        for one in state.interfaces:
            changed += len(_add_addresses(state, one, one.addresses, present))
        routes, rules, present_rules = state.route_changes(), state.wanted_rules(), policy_routing.read_rules(route)
        for item in routes.replace:
            policy_routing.replace_route(route, item)
        for rule in rules - present_rules:
            policy_routing.add_rule(route, rule)
        vips = [
            AddedVip(one.name, one.mac, vip.ip)
            for one in (state.interfaces if wanted.has_vips else ())
            for vip in _add_addresses(state, one, one.vips, present)
        ]
        changed += len(routes.replace) + len(rules - present_rules) + len(vips)
        addresses = list(state.unwanted_addresses(present))
        left = len(state.unwanted_links) + len(addresses) + len(routes.delete) + len(present_rules - rules)
        if outer is not None:
            _remove_addresses(route, addresses)
            for rule in present_rules - rules:
                policy_routing.delete_rule(route, rule)
            for item in routes.delete:
                policy_routing.delete_route(route, item)
            linking.move_out(route, state.unwanted_links, outer)
            changed += left
        return PassResult(changed, state.is_complete, tuple(vips))


def _add_addresses(
    state: NamespaceState, interface: Interface, addresses: tuple[Address, ...], present: set[tuple[int, Address]]
) -> list[Address]:
    index = state.links[interface.mac].index
    missing = [address for address in addresses if (index, address) not in present]
    for address in missing:
        more = {}
        if address.version == 6:
            more["flags"] = _NODAD
            if address in interface.vips:
                # A deprecated IPv6 address (RFC 4862, section 5.5.4) accepts connections, but is not the source of the
                # amphora's own connections.
                more.update(preferred_lft=0, valid_lft=_FOREVER)
        state.route.addr("replace", index=index, address=str(address.ip), prefixlen=address.network.prefixlen, **more)
    return missing


def _remove_addresses(route: Any, addresses: Iterable[tuple[int, Address]]) -> None:
    for index, address in addresses:
        try:
            route.addr("del", index=index, address=str(address.ip), prefixlen=address.network.prefixlen)
        except NetlinkError as error:
            # The kernel removes secondary addresses together with their primary address. So this address may already be
            # gone, which is no error.
            if error.code != errno.EADDRNOTAVAIL:
                raise


def present_addresses(route: Any) -> Iterator[tuple[int, Address]]:
    """Yield all addresses except link-local ones and the loopback's, each with its interface index."""
    for message in route.get_addr():
        if message["scope"] == _SCOPE_LINK or message["index"] == 1:
            continue
        attribute = "IFA_LOCAL" if message["family"] == socket.AF_INET else "IFA_ADDRESS"
        yield message["index"], ipaddress.ip_interface(f"{message.get_attr(attribute)}/{message['prefixlen']}")


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
        addresses, routes = list(present_addresses(route)), _sorted_routes(route)
        return [
            {
                **{name: getattr(link, name) for name in ("name", "mac", "mtu", "up")},
                "addresses": [str(address) for index, address in addresses if index == link.index],
                "routes": [
                    _describe_route(one)
                    for one in routes
                    if one.table == policy_routing.MAIN and one.interface == link.index
                ],
            }
            for link in linking.list_links(route)
        ]


def _sorted_routes(route: Any) -> list[policy_routing.TableRoute]:
    routes = policy_routing.read_routes(route)
    return sorted(routes, key=lambda one: (one.table, one.destination.version, one.destination, one.metric))


def _describe_route(one: policy_routing.TableRoute) -> dict[str, str | None]:
    return {"destination": str(one.destination), "gateway": str(one.gateway) if one.gateway else None}


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
                {"table": one.table, **_describe_route(one), "interface": names.get(one.interface, str(one.interface))}
                for one in _sorted_routes(route)
            ],
        }


def _names(route: Any) -> dict[int, str]:
    return {link.index: link.name for link in linking.list_links(route)}


def _describe_neighbours() -> list[dict[str, Any]]:
    # Neighbour states of linux/neighbour.h, without NOARP (0x40) and PERMANENT (0x80), which the kernel never resolves.
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
