# SPDX-License-Identifier: Apache-2.0
"""Differences between the interfaces of a namespace and a bundle.

Invariant: read-only. It reports exactly the changes that `interfaces.converge` would make. It ignores the addresses of
keepalived and the tunnel of a hand-over.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from amphora_agent.bundle import Interface
from amphora_agent.network import interfaces as plugging
from amphora_agent.network import links as linking
from amphora_agent.network import policy_routing
from amphora_agent.network.interfaces import WantedNetwork
from amphora_agent.network.links import Link
from amphora_agent.network.namespace import Namespace
from amphora_agent.network.pyroute2_lazy import IPRoute

# A category of the heartbeat format, and a sentence.
Finding = tuple[str, str]


def find_drift(inner: Namespace, wanted: WantedNetwork) -> list[Finding]:
    """Return all differences.

    Raises:
        InterfaceError: the kernel refused a request.
    """
    with plugging.kernel_errors():
        return inner.run(_find_drift, wanted)


def _find_drift(wanted: WantedNetwork) -> list[Finding]:
    with IPRoute() as route:
        links = {link.mac: link for link in linking.list_links(route)}
        present = tuple(one for one in wanted.interfaces if one.mac in links)
        absent = [one for one in wanted.interfaces if one.mac not in links]
        found = [("interface", f"{one.name} ({one.mac}) is missing") for one in absent]
        macs = {one.mac for one in present}
        unwanted = {link.index for mac, link in links.items() if mac not in macs}
        found += [("interface", f"{link.name} is not wanted") for link in links.values() if link.index in unwanted]
        for one in present:
            found += _link(one, links[one.mac])
        found += _addresses(route, wanted, present, links, unwanted)
        return [*found, *_routing(route, wanted, present, links, unwanted)]


def _link(wanted: Interface, link: Link) -> Iterator[Finding]:
    if link.name != wanted.name:
        yield "interface", f"{wanted.name} has the name {link.name}"
    if not link.up:
        yield "interface", f"{wanted.name} is down"
    if link.mtu != wanted.mtu:
        yield "interface", f"{wanted.name} has an MTU of {link.mtu}, not {wanted.mtu}"


def _addresses(
    route: Any, wanted: WantedNetwork, interfaces: tuple[Interface, ...], links: dict[str, Link], unwanted: set[int]
) -> Iterator[Finding]:
    present = set(plugging.present_addresses(route))
    known = set()
    for one in interfaces:
        index = links[one.mac].index
        known |= {(index, address) for address in (*one.addresses, *one.vips)}
        needed = (*one.addresses, *(one.vips if wanted.has_vips else ()))
        yield from (("address", f"{one.name} lacks {each}") for each in needed if (index, each) not in present)
    for index, address in sorted(present - known, key=str):
        # As in `converge`: with VRRP, host addresses belong to keepalived.
        ours = wanted.has_vips or address.network.prefixlen != address.max_prefixlen
        if index not in unwanted and ours:
            yield "address", f"{address} is not wanted"


def _routing(
    route: Any, wanted: WantedNetwork, interfaces: tuple[Interface, ...], links: dict[str, Link], unwanted: set[int]
) -> Iterator[Finding]:
    indexes = {one.mac: links[one.mac].index for one in interfaces}
    changes = policy_routing.plan_changes(
        frozenset(one for one in policy_routing.read_routes(route) if one.interface not in unwanted),
        policy_routing.wanted_routes(interfaces, indexes),
    )
    yield from (("route", f"{one.destination} of table {one.table} is not as wanted") for one in changes.replace)
    yield from (("route", f"{one.destination} of table {one.table} is not wanted") for one in changes.delete)
    present, needed = (
        policy_routing.read_rules(route),
        policy_routing.wanted_rules(interfaces, forwards=wanted.forwards),
    )
    yield from (("rule", f"from {_source(one)} is missing") for one in sorted(needed - present, key=str))
    # The rules of a missing interface do no harm, and are needed when it returns.
    others = present - needed - policy_routing.wanted_rules(wanted.interfaces, forwards=wanted.forwards)
    yield from (("rule", f"from {_source(one)} is not wanted") for one in sorted(others, key=str))


def _source(rule: policy_routing.Rule) -> str:
    return "everywhere" if rule.source is None else str(rule.source)
