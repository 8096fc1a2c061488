# SPDX-License-Identifier: Apache-2.0
"""What of a namespace's interfaces is not as a bundle wants it.

Invariant: changes nothing. What is said here is what `interfaces.settle` would do, and nothing else: what belongs to
keepalived, or to the tunnel of a hand-over, is not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from amphora_agent.bundle import Interface
from amphora_agent.network import interfaces as plugging
from amphora_agent.network import links as linking
from amphora_agent.network import policy_routing
from amphora_agent.network.interfaces import Wanted
from amphora_agent.network.links import Link
from amphora_agent.network.namespace import Namespace
from amphora_agent.network.pyroute2_lazy import IPRoute

# A word of docs/heartbeat.md, and a sentence.
Said = tuple[str, str]


def differences(inner: Namespace, wanted: Wanted) -> list[Said]:
    """What is not as wanted.

    Raises:
        InterfaceError: the kernel refused to tell.
    """
    with plugging.told():
        return inner.run(_differences, wanted)


def _differences(wanted: Wanted) -> list[Said]:
    with IPRoute() as route:
        links = {link.mac: link for link in linking.dump(route)}
        present = tuple(one for one in wanted.interfaces if one.mac in links)
        found = [("interface", f"{one.name} ({one.mac}) is gone") for one in wanted.interfaces if one.mac not in links]
        macs = {one.mac for one in present}
        strange = {link.index for mac, link in links.items() if mac not in macs}
        found += [("interface", f"{link.name} is nobody's") for link in links.values() if link.index in strange]
        for one in present:
            found += _link(one, links[one.mac])
        found += _addresses(route, wanted, present, links, strange)
        return [*found, *_ways(route, wanted, present, links, strange)]


def _link(wanted: Interface, link: Link) -> Iterator[Said]:
    if link.name != wanted.name:
        yield "interface", f"{wanted.name} is called {link.name}"
    if not link.up:
        yield "interface", f"{wanted.name} is down"
    if link.mtu != wanted.mtu:
        yield "interface", f"{wanted.name} has an MTU of {link.mtu}, not {wanted.mtu}"


def _addresses(
    route: Any, wanted: Wanted, interfaces: tuple[Interface, ...], links: dict[str, Link], strange: set[int]
) -> Iterator[Said]:
    present = set(plugging.present_addresses(route))
    known = set()
    for one in interfaces:
        index = links[one.mac].index
        known |= {(index, address) for address in (*one.addresses, *one.vips)}
        needed = (*one.addresses, *(one.vips if wanted.has_vips else ()))
        yield from (("address", f"{one.name} lacks {each}") for each in needed if (index, each) not in present)
    for index, address in sorted(present - known, key=str):
        # As for `settle`: single addresses are keepalived's in a pair.
        ours = wanted.has_vips or address.network.prefixlen != address.max_prefixlen
        if index not in strange and ours:
            yield "address", f"{address} is nobody's"


def _ways(
    route: Any, wanted: Wanted, interfaces: tuple[Interface, ...], links: dict[str, Link], strange: set[int]
) -> Iterator[Said]:
    indexes = {one.mac: links[one.mac].index for one in interfaces}
    changes = policy_routing.changes(
        frozenset(one for one in policy_routing.present_routes(route) if one.interface not in strange),
        policy_routing.wanted_routes(interfaces, indexes),
    )
    yield from (("route", f"{one.destination} of table {one.table} is not as wanted") for one in changes.put)
    yield from (("route", f"{one.destination} of table {one.table} is nobody's") for one in changes.drop)
    present, needed = (
        policy_routing.present_rules(route),
        policy_routing.wanted_rules(interfaces, forwards=wanted.forwards),
    )
    yield from (("rule", f"the one from {_of(one)} is not there") for one in sorted(needed - present, key=str))
    # Those of an interface that is gone are in nobody's way until it is back.
    others = present - needed - policy_routing.wanted_rules(wanted.interfaces, forwards=wanted.forwards)
    yield from (("rule", f"the one from {_of(one)} is nobody's") for one in sorted(others, key=str))


def _of(rule: policy_routing.Rule) -> str:
    return "everywhere" if rule.source is None else str(rule.source)
