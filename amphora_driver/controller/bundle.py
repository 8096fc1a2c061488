# SPDX-License-Identifier: Apache-2.0
"""The document an amphora is given (docs/agent-api.md).

Invariant: pure. The same load balancer, generation and ports make the same bytes, so that an agent can tell "the same
again" from "something else" by looking.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

import msgspec

from amphora_driver.model.loadbalancer import LoadBalancer
from amphora_driver.store.amphorae import Plugged


class BundleRoute(msgspec.Struct, frozen=True, kw_only=True):
    """A route of the inner namespace."""

    destination: str
    gateway: str


class BundleInterface(msgspec.Struct, frozen=True, kw_only=True):
    """An interface of the inner namespace; VIPs only on the one of the VIP's network."""

    mac: str
    name: str
    mtu: int
    addresses: tuple[str, ...]
    vips: tuple[str, ...]
    routes: tuple[BundleRoute, ...]


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """The whole wanted state of one amphora."""

    format: int
    amphora_id: str
    load_balancer_id: str
    generation: int
    haproxy: str | None
    interfaces: tuple[BundleInterface, ...]


def bundle(
    tree: LoadBalancer, generation: int, amphora_id: str, plugged: Sequence[Plugged], haproxy: str | None
) -> bytes:
    """The JSON document for one amphora.

    Args:
        plugged: its ports, the one on the VIP's network included.
        haproxy: the rendered configuration, None when there is nothing to serve.
    """
    return msgspec.json.encode(
        Bundle(
            format=1,
            amphora_id=amphora_id,
            load_balancer_id=tree.id,
            generation=generation,
            haproxy=haproxy,
            interfaces=interfaces(tree, plugged),
        )
    )


def interfaces(tree: LoadBalancer, plugged: Sequence[Plugged]) -> tuple[BundleInterface, ...]:
    """The interfaces an amphora needs: eth1 on the VIP's network, then the member networks."""
    ordered = sorted(plugged, key=lambda one: (one.port.network_id != tree.vip.network_id, one.port.network_id))
    return tuple(_interface(tree, f"eth{number}", one) for number, one in enumerate(ordered, start=1))


def _interface(tree: LoadBalancer, name: str, plugged: Plugged) -> BundleInterface:
    subnets = {subnet.id: subnet for subnet in plugged.subnets}
    is_vip = plugged.port.network_id == tree.vip.network_id
    addresses = []
    for fixed in plugged.port.addresses:
        length = ipaddress.ip_network(subnets[fixed.subnet_id].cidr).prefixlen
        addresses.append(f"{fixed.address}/{length}")
    routes = [
        BundleRoute(destination=route.destination, gateway=route.gateway)
        for subnet in plugged.subnets
        for route in subnet.routes
    ]
    if is_vip:
        # One way out for everything that is on no network of the amphora's own, and the way back to the clients.
        routes += [
            BundleRoute(destination="::/0" if ":" in subnet.gateway else "0.0.0.0/0", gateway=subnet.gateway)
            for subnet in plugged.subnets
            if subnet.gateway is not None
        ]
    return BundleInterface(
        mac=plugged.port.mac,
        name=name,
        mtu=plugged.port.mtu,
        addresses=tuple(addresses),
        vips=tuple(_host(vip.address) for vip in tree.vips) if is_vip else (),
        routes=tuple(_once(routes)),
    )


def _host(address: str) -> str:
    return f"{address}/{128 if ':' in address else 32}"


def _once(routes: Sequence[BundleRoute]) -> list[BundleRoute]:
    """One route for each destination: the kernel would refuse a second default route."""
    found: dict[str, BundleRoute] = {}
    for route in routes:
        found.setdefault(route.destination, route)
    return list(found.values())
