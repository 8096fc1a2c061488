# SPDX-License-Identifier: Apache-2.0
"""The bundle: the complete configuration of an amphora as one document (docs/reference/agent-api.md).

Invariant: the same load balancer, generation and ports give the same bytes, so that an agent recognises a repeated
bundle.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Sequence

import msgspec

from amphora_driver.model.amphora import AttachedPort
from amphora_driver.model.loadbalancer import Listener, LoadBalancer
from amphora_driver.render.udp import VirtualServer
from amphora_driver.secret import Secret
from amphora_driver.validation import addresses

_TCP = "tcp"


class BundleRoute(msgspec.Struct, frozen=True, kw_only=True):
    """A route of the inner namespace. Without a gateway, the destination is on the link."""

    destination: str
    gateway: str | None


class BundleInterface(msgspec.Struct, frozen=True, kw_only=True):
    """An interface of the inner namespace. Only the interface on the VIP's network has VIPs."""

    mac: str
    name: str
    mtu: int
    addresses: tuple[str, ...]
    vips: tuple[str, ...]
    routes: tuple[BundleRoute, ...]


class BundleFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that the configuration names. Only the encoded document contains its content in clear."""

    name: str
    content: Secret


class BundleLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of HAProxy and its replaced workers (`drain` in seconds). None: the machine's limit."""

    connections: int | None
    threads: int | None
    drain: int | None = None
    workers: int | None = None


class BundleAllowed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The networks that may connect to a port. A port without an entry is open."""

    port: int
    networks: tuple[str, ...]
    protocol: str = _TCP


class BundlePartner(msgspec.Struct, frozen=True, kw_only=True):
    """One amphora of a pair: its name in stick tables, and its address on the VIP's network."""

    name: str
    address: str


class BundleVrrp(msgspec.Struct, frozen=True, kw_only=True):
    """The VRRP settings of a pair. The interval is in seconds."""

    interface: str
    router_id: int
    priority: int
    advert_interval: float
    local: BundlePartner
    peers: tuple[BundlePartner, ...]


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """The rendered parts of a bundle: HAProxy's configuration if any, and addresses to ping by member id."""

    text: str | None
    files: tuple[BundleFile, ...] = ()
    pings: dict[str, str] = {}
    virtual: tuple[VirtualServer, ...] = ()


class Bundle(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The desired state of one amphora. The document does not contain an empty list of virtual servers."""

    format: int
    amphora_id: str
    load_balancer_id: str
    generation: int
    haproxy: str | None
    files: tuple[BundleFile, ...]
    pings: dict[str, str]
    limits: BundleLimits
    interfaces: tuple[BundleInterface, ...]
    allowed: tuple[BundleAllowed, ...]
    vrrp: BundleVrrp | None
    virtual_servers: tuple[VirtualServer, ...] = ()


def bundle(
    tree: LoadBalancer,
    generation: int,
    amphora_id: str,
    plugged: Sequence[AttachedPort],
    served: Served,
    vrrp: BundleVrrp | None = None,
    *,
    vips_held: bool = False,
) -> bytes:
    """Return the JSON document for one amphora. `plugged` includes the port on the VIP's network.

    With `vips_held` the amphora serves the listeners, but has no VIP.
    """
    return msgspec.json.encode(
        Bundle(
            format=1,
            amphora_id=amphora_id,
            load_balancer_id=tree.id,
            generation=generation,
            haproxy=served.text,
            files=served.files,
            pings=served.pings,
            limits=BundleLimits(
                connections=tree.profile.process_connection_limit, threads=tree.profile.process_threads
            ),
            interfaces=interfaces(tree, plugged, vips_held=vips_held),
            allowed=allowed(tree, served),
            vrrp=vrrp,
            virtual_servers=served.virtual,
        ),
        enc_hook=_in_clear,
    )


def allowed(tree: LoadBalancer, served: Served) -> tuple[BundleAllowed, ...]:
    """Return the restrictions of ports for the listeners of `served`.

    Another listener has none: its port may belong to a served listener, or its networks are invalid.
    """
    frontends = (line.split(" ")[1] for line in (served.text or "").splitlines() if line.startswith("frontend "))
    there = {*frontends, *(one.id for one in served.virtual)}
    return tuple(
        BundleAllowed(
            port=listener.protocol_port,
            networks=tuple(dict.fromkeys(str(addresses.parse_network(cidr)) for cidr in listener.allowed_cidrs)),
            protocol=_transport(listener),
        )
        for listener in sorted(tree.listeners, key=lambda one: (one.protocol_port, _transport(one)))
        if listener.allowed_cidrs and listener.id in there
    )


def _transport(listener: Listener) -> str:
    return listener.protocol.value.lower() if listener.uses_l4 else _TCP


def _in_clear(value: object) -> str:
    if isinstance(value, Secret):
        # The text of a UnicodeDecodeError would quote the secret. So invalid UTF-8 is replaced and raises no error.
        return value.reveal().decode(errors="replace")
    raise TypeError(f"a {type(value).__name__} is not part of a bundle")


def interfaces(
    tree: LoadBalancer, plugged: Sequence[AttachedPort], *, vips_held: bool = False
) -> tuple[BundleInterface, ...]:
    """Return the interfaces of an amphora: eth1 for the VIPs, then those for members only."""
    ordered = sorted(plugged, key=lambda one: (one.key != (tree.vip.network_id, False), one.key))
    per_network = Counter(one.port.network_id for one in plugged)
    found = (
        _interface(tree, one, _member_routes(tree, one) if per_network[one.port.network_id] > 1 else ())
        for one in ordered
    )
    return tuple(msgspec.structs.replace(one, vips=()) if vips_held else one for one in found)


def _member_routes(tree: LoadBalancer, plugged: AttachedPort) -> tuple[str, ...]:
    """Return the destinations of the members of a port whose network has another port too.

    Both ports connect the same subnets, so only a route for each member selects the port. A member that is behind a
    router has none.
    """
    members = [
        one for pool in tree.pools for one in pool.members if not addresses.member_address_objection(one.address)
    ]
    through_sr_iov = {addresses.parse_address(one.address) for one in members if tree.uses_sr_iov(one)}
    others = {addresses.parse_address(one.address) for one in members} - through_sr_iov
    connected = [addresses.parse_network(subnet.cidr) for subnet in plugged.subnets]
    chosen = through_sr_iov if plugged.sr_iov else others
    found = [one for one in chosen if any(one in network for network in connected)]
    return tuple(f"{one}/{one.max_prefixlen}" for one in sorted(found, key=lambda one: (one.version, int(one))))


def _interface(tree: LoadBalancer, plugged: AttachedPort, member_routes: Sequence[str]) -> BundleInterface:
    port = plugged.port
    prefix_lengths = {subnet.id: ipaddress.ip_network(subnet.cidr).prefixlen for subnet in plugged.subnets}
    is_vip = plugged.key == (tree.vip.network_id, False)
    routes: list[tuple[str, str | None]] = [(destination, None) for destination in member_routes]
    routes += [(route.destination, route.gateway) for subnet in plugged.subnets for route in subnet.routes]
    if is_vip:
        # Clients, and members outside the attached networks, are reachable only through the gateway of the VIP network.
        # So the default route uses this gateway.
        gateways = [subnet.gateway for subnet in plugged.subnets if subnet.gateway is not None]
        routes += [("::/0" if ":" in gateway else "0.0.0.0/0", gateway) for gateway in gateways]
    # The kernel refuses a second route to the same destination. So only the first route to each destination is used.
    first: dict[str, str | None] = {}
    for destination, gateway in routes:
        first.setdefault(destination, gateway)
    return BundleInterface(
        mac=port.mac,
        # The name depends on this port only. Otherwise, a change of another interface could rename this interface and
        # end its connections.
        name="eth1" if is_vip else f"m{port.mac.replace(':', '')}",
        mtu=port.mtu,
        addresses=tuple(f"{fixed.address}/{prefix_lengths[fixed.subnet_id]}" for fixed in port.addresses),
        vips=tuple(f"{vip.address}/{128 if ':' in vip.address else 32}" for vip in tree.vips) if is_vip else (),
        routes=tuple(BundleRoute(destination=destination, gateway=gateway) for destination, gateway in first.items()),
    )
