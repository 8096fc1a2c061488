# SPDX-License-Identifier: Apache-2.0
"""Make the inner namespace's interfaces what a bundle says.

Invariant: idempotent. `add` takes nothing away that something might still use; after `settle` the namespace has the
wanted interfaces, each with the wanted addresses, and the wanted routes and rules, and no other ones. An interface that
is not wanted is down, bare, and back in the management namespace. What is as wanted is not touched.

A VIP comes last: what leads its answers back is there before the first client finds it.
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
class Wanted:
    """What a bundle wants of the network.

    ``has_vips`` is False in a pair: keepalived adds the VIPs there and takes them away, so they are neither added nor
    removed here; what leads their packets is. ``forwards``: packets of virtual servers are led, too.
    """

    interfaces: tuple[Interface, ...]
    has_vips: bool
    forwards: bool = False


def wanted_of(bundle: Bundle) -> Wanted:
    """What a bundle wants of the network."""
    return Wanted(bundle.interfaces, bundle.vrrp is None, bool(bundle.virtual_servers))


NOTHING = Wanted((), has_vips=True)


@dataclass(frozen=True)
class Taken:
    """A VIP, and the interface that has it."""

    interface: str
    mac: str
    vip: Host


def vips_of(wanted: Wanted) -> tuple[Taken, ...]:
    """The VIPs that are ours to take."""
    every = wanted.interfaces if wanted.has_vips else ()
    return tuple(Taken(one.name, one.mac, vip.ip) for one in every for vip in one.vips)


@dataclass(frozen=True)
class Done:
    """How many things were made as wanted, how many are there and not wanted, and whether nothing is lacking.

    ``taken`` are the VIPs that were not there before.
    """

    changed: int
    left: int
    complete: bool
    taken: tuple[Taken, ...] = ()


def add(inner: Namespace, wanted: Wanted, *, may_lack: bool = False) -> Done:
    """Bring in what is wanted and not there; nobody is told yet of VIPs that were taken.

    Args:
        may_lack: go without interfaces that are nowhere and have no VIP.

    Raises:
        InterfaceError: an interface is missing, or the kernel refused something. What was done before is left, and
            another call goes on from there.
    """
    return _with_interfaces(inner, wanted, None, may_lack=may_lack)


def settle(inner: Namespace, wanted: Wanted, *, may_lack: bool = False) -> Done:
    """Bring in what is wanted, and take away everything else; the neighbours are told of VIPs that were taken.

    Raises:
        InterfaceError: as for `add`.
    """
    outer = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        done = _with_interfaces(inner, wanted, outer, may_lack=may_lack)
    finally:
        os.close(outer)
    tell(inner, done.taken)
    return done


def tell(inner: Namespace, taken: Iterable[Taken]) -> None:
    """Tell the neighbours where VIPs are now.

    Raises:
        InterfaceError: the kernel refused something.
    """
    with told():
        for one in taken:
            inner.run(announce, one.interface, one.mac, [one.vip])


def _with_interfaces(inner: Namespace, wanted: Wanted, outer: int | None, *, may_lack: bool) -> Done:
    """Do it, after having fetched what is not here yet."""
    with told():
        done = inner.run(_do, wanted, outer, lacking=False)
        if done is None:
            linking.fetch(inner, wanted.interfaces, may_lack=may_lack)
            done = inner.run(_do, wanted, outer, lacking=True)
    assert done is not None  # noqa: S101 (it goes on with what there is)
    return done


@contextmanager
def told() -> Iterator[None]:
    """What the kernel refuses within the block is an `InterfaceError`."""
    try:
        yield
    except NetlinkError as error:
        raise InterfaceError("set up the interfaces", f"the kernel refused: {error}") from error
    except OSError as error:
        raise InterfaceError("set up the interfaces", str(error)) from error


def _do(wanted: Wanted, outer: int | None, *, lacking: bool) -> Done | None:
    """In the namespace.

    Args:
        outer: where to give interfaces back; None to take nothing away.
        lacking: go on without interfaces that are not here; otherwise do nothing and return None.
    """
    with IPRoute() as route:
        work = _Work(route, wanted)
        if not (work.is_complete or lacking):
            return None
        done = work.add()
        if outer is None or not done.left:
            return done
        return replace(done, changed=done.changed + work.take_away(outer), left=0)


class _Work:
    """One look at the namespace, and what follows from it."""

    def __init__(self, route: Any, wanted: Wanted) -> None:
        self._route = route
        self._links = {link.mac: link for link in linking.dump(route)}
        self._wanted = wanted
        self._interfaces = tuple(one for one in wanted.interfaces if one.mac in self._links)
        macs = {interface.mac for interface in self._interfaces}
        self._strangers = [link for mac, link in self._links.items() if mac not in macs]
        self._addresses: list[tuple[int, Address]] = []
        self._taken: list[Taken] = []
        self._routes: tuple[policy_routing.TableRoute, ...] = ()
        self._rules: frozenset[policy_routing.Rule] = frozenset()
        self.is_complete = len(self._interfaces) == len(wanted.interfaces)

    def add(self) -> Done:
        changed = linking.set_up(self._route, self._links, self._interfaces)
        present = set(present_addresses(self._route))
        for interface in self._interfaces:
            changed += self._add_addresses(interface, interface.addresses, present)
        changed += self._lead()
        for interface in self._interfaces if self._wanted.has_vips else ():
            changed += self._add_addresses(interface, interface.vips, present)
        known = {
            (self._links[interface.mac].index, address)
            for interface in self._interfaces
            for address in (*interface.addresses, *interface.vips)
        }
        strange = {link.index for link in self._strangers}
        self._addresses = [
            (index, address)
            for index, address in present - known
            # Single addresses are keepalived's in a pair. It takes a former VIP away itself when it reads its new file;
            # if anybody else does before, it believes to have lost its VIPs and gives all of them up.
            if index not in strange and (self._wanted.has_vips or address.network.prefixlen != address.max_prefixlen)
        ]
        left = len(self._strangers) + len(self._addresses) + len(self._routes) + len(self._rules)
        return Done(changed, left, self.is_complete, tuple(self._taken))

    def _add_addresses(
        self, interface: Interface, addresses: tuple[Address, ...], present: set[tuple[int, Address]]
    ) -> int:
        """Add those that are missing."""
        index, changed = self._links[interface.mac].index, 0
        for address in addresses:
            if (index, address) in present:
                continue
            is_vip, more = address in interface.vips, {}
            if address.version == 6:
                more["flags"] = _NODAD
                if is_vip:  # "deprecated" (RFC 4862, 5.5.4): nothing that this machine begins itself comes from a VIP
                    more.update(preferred_lft=0, valid_lft=_FOREVER)
            self._route.addr(
                "replace", index=index, address=str(address.ip), prefixlen=address.network.prefixlen, **more
            )
            if is_vip:
                self._taken.append(Taken(interface.name, interface.mac, address.ip))
            changed += 1
        return changed

    def _lead(self) -> int:
        """Routes and rules; what is not wanted of them is noted."""
        strange = {link.index for link in self._strangers}
        indexes = {interface.mac: self._links[interface.mac].index for interface in self._interfaces}
        wanted = policy_routing.changes(
            frozenset(one for one in policy_routing.present_routes(self._route) if one.interface not in strange),
            policy_routing.wanted_routes(self._interfaces, indexes),
        )
        for item in wanted.put:
            policy_routing.put(self._route, item)
        present = policy_routing.present_rules(self._route)
        rules = policy_routing.wanted_rules(self._interfaces, forwards=self._wanted.forwards)
        for rule in rules - present:
            policy_routing.put_rule(self._route, rule)
        self._routes, self._rules = wanted.drop, present - rules
        return len(wanted.put) + len(rules - present)

    def take_away(self, outer: int) -> int:
        """What `add` has found and nobody wants. Routes go with the interfaces they are of."""
        for index, address in self._addresses:
            try:
                self._route.addr("del", index=index, address=str(address.ip), prefixlen=address.network.prefixlen)
            except NetlinkError as error:
                if error.code != errno.EADDRNOTAVAIL:  # the kernel took it away with the first one of its subnet
                    raise
        for rule in self._rules:
            policy_routing.drop_rule(self._route, rule)
        for item in self._routes:
            policy_routing.drop(self._route, item)
        linking.give_back(self._route, self._strangers, outer)
        return len(self._addresses) + len(self._rules) + len(self._routes) + len(self._strangers)


def present_addresses(route: Any) -> Iterator[tuple[int, Address]]:
    """Every address but those of links themselves and of the loopback, with the number of its interface."""
    for message in route.get_addr():
        if message["scope"] == _SCOPE_LINK or message["index"] == 1:
            continue
        attribute = "IFA_LOCAL" if message["family"] == socket.AF_INET else "IFA_ADDRESS"
        yield message["index"], ipaddress.ip_interface(f"{message.get_attr(attribute)}/{message['prefixlen']}")


# -- for a person to read -------------------------------------------------------------------------------------------


def describe(inner: Namespace) -> list[dict[str, Any]]:
    """Interfaces, their addresses, and their routes in the main table."""
    return inner.run(_describe)


def describe_routing(inner: Namespace) -> dict[str, Any]:
    """Rules, and the routes of every table that came from somebody."""
    return inner.run(_describe_routing)


def describe_neighbours(inner: Namespace) -> list[dict[str, Any]]:
    """Whom the namespace has spoken with on its links."""
    return inner.run(_describe_neighbours)


def _describe() -> list[dict[str, Any]]:
    with IPRoute() as route:
        addresses, routes = list(present_addresses(route)), policy_routing.present_routes(route)
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
            for link in linking.dump(route)
        ]


def _sorted(routes: frozenset[policy_routing.TableRoute]) -> list[policy_routing.TableRoute]:
    return sorted(routes, key=lambda one: (one.table, one.destination.version, one.destination, one.metric))


def _describe_routing() -> dict[str, Any]:
    with IPRoute() as route:
        names = _names(route)
        rules = sorted(
            policy_routing.present_rules(route), key=lambda one: (one.version, one.priority, str(one.source))
        )
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
                for one in _sorted(policy_routing.present_routes(route))
            ],
        }


def _names(route: Any) -> dict[int, str]:
    return {link.index: link.name for link in linking.dump(route)}


def _describe_neighbours() -> list[dict[str, Any]]:
    # include/uapi/linux/neighbour.h; what needs no resolving (0x40) is left out
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
