# SPDX-License-Identifier: Apache-2.0
"""Differences between a namespace and a bundle: the changes that `interfaces.converge` would make."""

from __future__ import annotations

from collections.abc import Iterator

from amphora_agent.bundle import Interface
from amphora_agent.network import interfaces as plugging
from amphora_agent.network import policy_routing
from amphora_agent.network.interfaces import NamespaceState, WantedNetwork
from amphora_agent.network.links import Link
from amphora_agent.network.namespace import Namespace
from amphora_agent.network.pyroute2_lazy import IPRoute

# A category of the heartbeat format, and a sentence that describes the difference.
Finding = tuple[str, str]


def find_drift(inner: Namespace, wanted: WantedNetwork) -> list[Finding]:
    """Return all differences; raises InterfaceError if the kernel refuses a request."""
    with plugging.kernel_errors():
        return inner.run(_find_drift, wanted)


def _find_drift(wanted: WantedNetwork) -> list[Finding]:
    with IPRoute() as route:
        state = NamespaceState(route, wanted)
        absent = (one for one in wanted.interfaces if one.mac not in state.links)
        found = [("interface", f"{one.name} ({one.mac}) is missing") for one in absent]
        found += [("interface", f"{link.name} is not wanted") for link in state.unwanted_links]
        for one in state.interfaces:
            found += _link(one, state.links[one.mac])
        return [*found, *_addresses(state), *_routing(state)]


def _link(wanted: Interface, link: Link) -> Iterator[Finding]:
    if link.name != wanted.name:
        yield "interface", f"{wanted.name} has the name {link.name}"
    if not link.up:
        yield "interface", f"{wanted.name} is down"
    if link.mtu != wanted.mtu:
        yield "interface", f"{wanted.name} has an MTU of {link.mtu}, not {wanted.mtu}"


def _addresses(state: NamespaceState) -> Iterator[Finding]:
    present = set(plugging.present_addresses(state.route))
    for one in state.interfaces:
        index = state.links[one.mac].index
        needed = (*one.addresses, *(one.vips if state.wanted.has_vips else ()))
        yield from (("address", f"{one.name} lacks {each}") for each in needed if (index, each) not in present)
    for _, address in sorted(state.unwanted_addresses(present), key=str):
        yield "address", f"{address} is not wanted"


def _routing(state: NamespaceState) -> Iterator[Finding]:
    changes = state.route_changes()
    yield from (("route", f"{one.destination} of table {one.table} is not as wanted") for one in changes.replace)
    yield from (("route", f"{one.destination} of table {one.table} is not wanted") for one in changes.delete)
    present, needed = policy_routing.read_rules(state.route), state.wanted_rules()
    yield from (("rule", f"from {_source(one)} is missing") for one in sorted(needed - present, key=str))
    # A rule of a missing interface is no drift, because the rule is harmless, and the interface needs the rule when it
    # returns.
    every = policy_routing.wanted_rules(state.wanted.interfaces, forwards=state.wanted.forwards)
    yield from (("rule", f"from {_source(one)} is not wanted") for one in sorted(present - needed - every, key=str))


def _source(rule: policy_routing.Rule) -> str:
    return "everywhere" if rule.source is None else str(rule.source)
