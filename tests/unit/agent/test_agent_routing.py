# SPDX-License-Identifier: Apache-2.0
"""Routes and rules of interfaces, and the changes between two sets."""

from __future__ import annotations

import ipaddress

import pytest

from amphora_agent.bundle import Interface, Route
from amphora_agent.network.policy_routing import (
    MAIN,
    Changes,
    Rule,
    TableRoute,
    plan_changes,
    wanted_routes,
    wanted_rules,
)

INDEXES = {"a": 2, "b": 3, "c": 4}


def interface(mac, addresses=(), vips=(), routes=()):
    """Routes are pairs of destination and gateway."""
    return Interface(
        mac=mac,
        name=mac,
        mtu=1500,
        addresses=tuple(map(ipaddress.ip_interface, addresses)),
        vips=tuple(map(ipaddress.ip_interface, vips)),
        routes=tuple(
            Route(ipaddress.ip_network(destination), ipaddress.ip_address(gateway) if gateway else None)
            for destination, gateway in routes
        ),
    )


def route(table, destination, gateway, index):
    network = ipaddress.ip_network(destination)
    via = ipaddress.ip_address(gateway) if gateway else None
    return TableRoute(table, network, via, index, 1024 if network.version == 6 else 0)


VIPS = interface(
    "a",
    ("198.51.100.11/24", "2001:db8:1::11/64"),
    ("198.51.100.5/32", "2001:db8:1::5/128", "198.51.100.6/32"),
    (("0.0.0.0/0", "198.51.100.1"), ("::/0", "2001:db8:1::1"), ("10.9.0.0/16", "198.51.100.2")),
)
MEMBERS = interface("b", ("192.0.2.11/24",), (), (("203.0.113.0/24", "192.0.2.1"), ("10.9.0.0/16", "192.0.2.1")))
OUT = [
    ("0.0.0.0/0", "198.51.100.1", 2),
    ("::/0", "2001:db8:1::1", 2),
    ("10.9.0.0/16", "198.51.100.2", 2),
]
CONNECTED = [("198.51.100.0/24", None, 2), ("2001:db8:1::/64", None, 2)]


@pytest.mark.parametrize(
    ("interfaces", "wanted"),
    [
        ((), set()),
        ((interface("b", ("192.0.2.11/24",)),), set()),
        # An interface without a VIP has no table of its own.
        ((MEMBERS,), {route(MAIN, "203.0.113.0/24", "192.0.2.1", 3), route(MAIN, "10.9.0.0/16", "192.0.2.1", 3)}),
        # The VIP's table has the subnets and routes of its interface, and none of the members' network. Of two routes
        # to one destination, the one of the first interface is used.
        (
            (VIPS, MEMBERS),
            {route(table, *each) for table in (1, MAIN) for each in OUT}
            | {route(1, *each) for each in CONNECTED}
            | {route(MAIN, "203.0.113.0/24", "192.0.2.1", 3)},
        ),
        # The amphora reaches a connected subnet on its link, even if the VIP's network has a route to it.
        (
            (
                interface("a", ("198.51.100.11/24",), ("198.51.100.5/32",), (("192.0.2.0/24", "198.51.100.1"),)),
                interface("b", ("192.0.2.11/24",)),
            ),
            {route(1, "198.51.100.0/24", None, 2), route(1, "192.0.2.0/24", "198.51.100.1", 2)},
        ),
        # A second interface with VIPs has the next table.
        (
            (
                interface("a", ("198.51.100.11/24",), ("198.51.100.5/32",)),
                interface("c", ("192.0.2.11/24",), ("192.0.2.5/32",)),
            ),
            {route(1, "198.51.100.0/24", None, 2), route(2, "192.0.2.0/24", None, 4)},
        ),
    ],
)
def test_routes_are_computed(interfaces, wanted):
    assert wanted_routes(interfaces, INDEXES) == wanted


def test_each_vip_has_a_rule():
    assert wanted_rules((MEMBERS, VIPS)) == {
        Rule(4, 100, 1, ipaddress.ip_network("198.51.100.5/32")),
        Rule(4, 100, 1, ipaddress.ip_network("198.51.100.6/32")),
        Rule(6, 100, 1, ipaddress.ip_network("2001:db8:1::5/128")),
    }
    assert wanted_rules((MEMBERS,)) == frozenset()


LINK = route(1, "198.51.100.0/24", None, 2)
OLD, NEW = route(1, "0.0.0.0/0", "198.51.100.1", 2), route(1, "0.0.0.0/0", "198.51.100.2", 2)


@pytest.mark.parametrize(
    ("present", "wanted", "expected"),
    [
        ((), (), Changes((), ())),
        ((OLD, LINK), (OLD, LINK), Changes((), ())),
        # The route to a gateway is added before the routes through it and removed after them.
        ((), (OLD, LINK), Changes((LINK, OLD), ())),
        ((OLD, LINK), (), Changes((), (OLD, LINK))),
        # A new gateway replaces the old one in one step, so that a route always exists.
        ((OLD, LINK), (NEW, LINK), Changes((NEW,), ())),
        # There are two rules at one priority; one of them is wanted.
        ((OLD, NEW), (NEW,), Changes((), (OLD,))),
    ],
)
def test_changes_are_ordered(present, wanted, expected):
    assert plan_changes(frozenset(present), frozenset(wanted)) == expected
