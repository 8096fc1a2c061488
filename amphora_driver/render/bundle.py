# SPDX-License-Identifier: Apache-2.0
"""The bundle: the complete configuration of an amphora as one document (docs/reference/agent-api.md).

Invariant: pure. The same load balancer, generation and ports give the same bytes, so that an agent recognises a
repeated bundle.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

import msgspec

from amphora_driver.model.amphora import AttachedPort
from amphora_driver.model.loadbalancer import Listener, LoadBalancer
from amphora_driver.render.udp import VirtualServer
from amphora_driver.secret import Secret
from amphora_driver.validation import addresses

_TCP = "tcp"
_FRONTEND = "frontend "


class BundleRoute(msgspec.Struct, frozen=True, kw_only=True):
    """A route of the inner namespace."""

    destination: str
    gateway: str


class BundleInterface(msgspec.Struct, frozen=True, kw_only=True):
    """An interface of the inner namespace; only the one on the VIP's network has VIPs."""

    mac: str
    name: str
    mtu: int
    addresses: tuple[str, ...]
    vips: tuple[str, ...]
    routes: tuple[BundleRoute, ...]


class BundleFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that the configuration names. Its content is in clear only in the encoded document."""

    name: str
    content: Secret


class BundleLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of HAProxy; None means the limit of the machine.

    Attributes:
        drain: seconds for which a replaced worker may continue its connections.
        workers: the number of replaced workers at one time.
    """

    connections: int | None
    threads: int | None
    drain: int | None
    workers: int | None


class BundleAllowed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The networks that may connect to a port; a port without an entry is open.

    The default protocol, TCP, is omitted in the document.
    """

    port: int
    networks: tuple[str, ...]
    protocol: str = _TCP


class BundlePartner(msgspec.Struct, frozen=True, kw_only=True):
    """One amphora of a pair: its name in stick tables, and its address on the VIP's network."""

    name: str
    address: str


class BundleVrrp(msgspec.Struct, frozen=True, kw_only=True):
    """The VRRP settings of a pair; the interval is in seconds."""

    interface: str
    router_id: int
    priority: int
    advert_interval: float
    local: BundlePartner
    peers: tuple[BundlePartner, ...]


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """The rendered parts of a bundle.

    Attributes:
        text: HAProxy's configuration; None if HAProxy serves nothing.
        files: the files that it names, with their contents.
        pings: the addresses to ping, by member id.
        virtual: the UDP and SCTP listeners.
    """

    text: str | None
    files: tuple[BundleFile, ...] = ()
    pings: dict[str, str] = {}
    virtual: tuple[VirtualServer, ...] = ()


class Bundle(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The desired state of one amphora. An empty list of virtual servers is omitted."""

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
) -> bytes:
    """Return the JSON document for one amphora.

    Args:
        tree: the load balancer.
        generation: the generation of the bundle.
        amphora_id: the amphora.
        plugged: its ports, including the one on the VIP's network.
        served: the rendered parts.
        vrrp: the VRRP settings of a pair; None for a single amphora.
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
                connections=tree.profile.process_connection_limit,
                threads=tree.profile.process_threads,
                drain=None,
                workers=None,
            ),
            interfaces=interfaces(tree, plugged),
            allowed=allowed(tree, served),
            vrrp=vrrp,
            virtual_servers=served.virtual,
        ),
        enc_hook=_in_clear,
    )


def allowed(tree: LoadBalancer, served: Served) -> tuple[BundleAllowed, ...]:
    """Return the restrictions of ports for listeners that are served.

    A listener that is left out has none: its port may belong to another listener, or its networks are invalid.
    """
    there = {*_frontends(served.text or ""), *(one.id for one in served.virtual)}
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
    """Encode a secret in clear: the only place where a secret enters a document."""
    if isinstance(value, Secret):
        # Replacing avoids a decoding error, whose text would contain the secret.
        return value.reveal().decode(errors="replace")
    raise TypeError(f"a {type(value).__name__} is not part of a bundle")


def interfaces(tree: LoadBalancer, plugged: Sequence[AttachedPort]) -> tuple[BundleInterface, ...]:
    """Return the interfaces of an amphora: eth1 on the VIP's network, then the member networks."""
    ordered = sorted(plugged, key=lambda one: (one.port.network_id != tree.vip.network_id, one.port.network_id))
    return tuple(_interface(tree, _name(tree, one), one) for one in ordered)


def _name(tree: LoadBalancer, plugged: AttachedPort) -> str:
    """Return a name that does not depend on other interfaces: a rename would end connections."""
    if plugged.port.network_id == tree.vip.network_id:
        return "eth1"
    return f"m{plugged.port.mac.replace(':', '')}"


def _interface(tree: LoadBalancer, name: str, plugged: AttachedPort) -> BundleInterface:
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
        # The default route, for clients and for members that are on no network of the amphora.
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
    """Keep one route for each destination: the kernel would refuse a second default route."""
    found: dict[str, BundleRoute] = {}
    for route in routes:
        found.setdefault(route.destination, route)
    return list(found.values())


def _frontends(text: str) -> set[str]:
    """Return the names of the frontend sections in a rendered text."""
    return {line.removeprefix(_FRONTEND) for line in text.splitlines() if line.startswith(_FRONTEND)}
