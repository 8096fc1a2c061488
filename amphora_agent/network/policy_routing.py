# SPDX-License-Identifier: Apache-2.0
"""Routing tables and rules for the replies to clients.

Invariant: packets from a VIP leave by the VIP's network, whatever other networks the amphora has. A rule for each VIP
("from VIP lookup table 1") leads to a table with the connected subnets and the routes of the VIP's interface. A packet
from a member of a virtual server to a client keeps the member's source address until the last moment. So a rule for a
mark leads this packet to the same table. All other packets use the main table. There are no other routes and rules,
except those of the kernel, which are not touched.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from amphora_agent.bundle import Host, Interface, Network
from amphora_agent.network.pyroute2_lazy import NetlinkError

MAIN = 254
FORWARDED = 0x616D
"""Mark of packets from a member of a virtual server to a client."""
FIRST_TABLE = 1
"""Table of the first interface with VIPs. There is only one; a second one would have the next table."""
_PRIORITY = 100
# The metric that the kernel gives to a route if none is specified, for IPv4 and IPv6 (include/net/ip6_route.h).
_METRICS = {4: 0, 6: 1024}
_FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}
_EVERYTHING = {socket.AF_INET: "0.0.0.0/0", socket.AF_INET6: "::/0"}
# Constants of linux/rtnetlink.h: route protocols, route type, route flag and route scope.
_PROTOCOL_KERNEL, _PROTOCOL_STATIC, _PROTOCOL_ROUTER_ADVERTISEMENT = 2, 4, 9
_UNICAST, _CLONED, _SCOPE_LINK = 1, 0x200, 253
# Priorities and tables (local, main, default) of the rules that each network namespace has from the kernel.
_KERNEL_RULES = {(0, 255), (32766, MAIN), (32767, 253)}
_LEADS_TO_A_TABLE = 1
_MARK = "FRA_FWMARK"
_MARKED = ((_MARK, str(FORWARDED)),)
_FURTHER_SELECTORS = ("FRA_DST", "FRA_IIFNAME", "FRA_OIFNAME", _MARK, "FRA_IP_PROTO", "FRA_SPORT_RANGE")


@dataclass(frozen=True)
class TableRoute:
    """A route of one table. ``interface`` is an index; without a gateway the destination is on the link."""

    table: int
    destination: Network
    gateway: Host | None
    interface: int
    metric: int

    @property
    def key(self) -> tuple[int, Network, int]:
        """Identity of a route: the kernel has at most one route with this key."""
        return self.table, self.destination, self.metric


@dataclass(frozen=True)
class Rule:
    """A rule: packets from a source use a table. ``further`` are other selectors, for example a mark."""

    version: int
    priority: int
    table: int
    source: Network | None
    further: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Changes:
    """Routes to add or replace, in this order, and routes to delete afterwards."""

    replace: tuple[TableRoute, ...]
    delete: tuple[TableRoute, ...]


def _tables(interfaces: Sequence[Interface]) -> Iterator[tuple[int, Interface]]:
    return enumerate((interface for interface in interfaces if interface.vips), start=FIRST_TABLE)


def wanted_rules(interfaces: Sequence[Interface], *, forwards: bool = False) -> frozenset[Rule]:
    """Return a rule for each VIP, also of the partner. ``forwards`` adds one for packets to clients."""
    found = {(table, vip) for table, interface in _tables(interfaces) for vip in interface.vips}
    rules = {Rule(vip.version, _PRIORITY, table, vip.network) for table, vip in found}
    marked = {Rule(vip.version, _PRIORITY, table, None, _MARKED) for table, vip in found if table == FIRST_TABLE}
    return frozenset(rules | marked if forwards else rules)


def wanted_routes(interfaces: Sequence[Interface], indexes: Mapping[str, int]) -> frozenset[TableRoute]:
    """Return all routes except those that the kernel derives from addresses.

    If two routes have the same destination, the first one wins. A connected subnet takes precedence over both.
    ``indexes`` are interface indexes by MAC address.
    """
    connected = {address.network for interface in interfaces for address in interface.addresses}
    found: dict[tuple[int, Network], TableRoute] = {}

    def want(table: int, interface: Interface, destination: Network, gateway: Host | None) -> None:
        made = TableRoute(table, destination, gateway, indexes[interface.mac], _METRICS[destination.version])
        found.setdefault((table, destination), made)

    for interface in interfaces:
        for route in interface.routes:
            if route.destination not in connected:
                want(MAIN, interface, route.destination, route.gateway)
    for table, interface in _tables(interfaces):
        for address in interface.addresses:
            want(table, interface, address.network, None)
        for route in interface.routes:
            want(table, interface, route.destination, route.gateway)
    return frozenset(found.values())


def plan_changes(present: frozenset[TableRoute], wanted: frozenset[TableRoute]) -> Changes:
    """Return the changes; routes to gateways come first, so that no destination is without a route."""
    replace = sorted(
        wanted - present, key=lambda one: (one.gateway is not None, one.table, -one.destination.prefixlen, str(one))
    )
    replaced = {one.key for one in replace}
    delete = sorted(
        (one for one in present - wanted if one.key not in replaced), key=lambda one: (one.gateway is None, str(one))
    )
    return Changes(tuple(replace), tuple(delete))


def read_routes(route: Any) -> frozenset[TableRoute]:
    """Return all routes except those that the kernel derives from addresses and links."""
    messages = (message for family in _EVERYTHING for message in route.get_routes(family=family))
    return frozenset(filter(None, map(_parse_route, messages)))


def _parse_route(message: Any) -> TableRoute | None:
    if message["proto"] in (_PROTOCOL_KERNEL, _PROTOCOL_ROUTER_ADVERTISEMENT) or message["flags"] & _CLONED:
        return None
    if message["type"] != _UNICAST or message.get_attr("RTA_OIF") is None:
        return None
    target, gateway = message.get_attr("RTA_DST"), message.get_attr("RTA_GATEWAY")
    text = _EVERYTHING[message["family"]] if target is None else f"{target}/{message['dst_len']}"
    return TableRoute(
        table=message.get_attr("RTA_TABLE") or message["table"],
        destination=ipaddress.ip_network(text),
        gateway=ipaddress.ip_address(gateway) if gateway else None,
        interface=message.get_attr("RTA_OIF"),
        metric=message.get_attr("RTA_PRIORITY") or 0,
    )


def read_rules(route: Any) -> frozenset[Rule]:
    """Return all rules except the initial ones of a namespace."""
    found = set()
    for version, family in _FAMILIES.items():
        for message in route.get_rules(family=family):
            priority = message.get_attr("FRA_PRIORITY") or 0
            table = message.get_attr("FRA_TABLE") or message["table"]
            source = message.get_attr("FRA_SRC")
            if source is None and (priority, table) in _KERNEL_RULES:
                continue
            network = None if source is None else ipaddress.ip_network(f"{source}/{message['src_len']}")
            further = [(name, message.get_attr(name)) for name in _FURTHER_SELECTORS if message.get_attr(name)]
            further += [(key, message[key]) for key in ("dst_len", "tos") if message[key]]
            if message["action"] != _LEADS_TO_A_TABLE:
                further.append(("action", message["action"]))
            found.add(Rule(version, priority, table, network, tuple((name, str(value)) for name, value in further)))
    return frozenset(found)


def replace_route(route: Any, item: TableRoute) -> None:
    """Add a route, or replace the one with the same key."""
    route.route("replace", proto=_PROTOCOL_STATIC, **_arguments(item))


def delete_route(route: Any, item: TableRoute) -> None:
    """Delete a route; no error if it does not exist."""
    _delete(errno.ESRCH, route.route, _arguments(item))


def _arguments(item: TableRoute) -> dict[str, Any]:
    family = _FAMILIES[item.destination.version]
    arguments: dict[str, Any] = {"dst": str(item.destination), "oif": item.interface, "table": item.table}
    if item.metric:
        arguments["priority"] = item.metric
    if item.gateway is not None:
        arguments["gateway"] = str(item.gateway)
    elif item.destination.version == 4:
        arguments["scope"] = _SCOPE_LINK
    return {**arguments, "family": family}


def add_rule(route: Any, rule: Rule) -> None:
    """Add a rule that does not exist."""
    route.rule("add", **_rule_arguments(rule))


def delete_rule(route: Any, rule: Rule) -> None:
    """Delete a rule; no error if it does not exist."""
    _delete(errno.ENOENT, route.rule, _rule_arguments(rule))


def _rule_arguments(rule: Rule) -> dict[str, Any]:
    arguments: dict[str, Any] = {"family": _FAMILIES[rule.version], "table": rule.table, "priority": rule.priority}
    if rule.source is not None:
        arguments.update(src=str(rule.source.network_address), src_len=rule.source.prefixlen)
    if mark := dict(rule.further).get(_MARK):
        arguments["fwmark"] = int(mark)
    return arguments


def _delete(missing: int, request: Callable[..., object], arguments: dict[str, Any]) -> None:
    try:
        request("del", **arguments)
    except NetlinkError as error:
        if error.code != missing:
            raise
