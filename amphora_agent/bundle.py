# SPDX-License-Identifier: Apache-2.0
"""The bundle: the whole wanted state of an amphora, as typed values.

Invariant: what `parse` returns is complete and well-formed; a body with an unknown key, a missing one or a
value of the wrong type never becomes a `Bundle`. Parsing touches nothing outside its argument.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Interface, IPv4Network, IPv6Interface, IPv6Network
from typing import Any

from amphora_agent.errors import MalformedBundle

FORMAT = 1
_MAC = re.compile(r"(?:[0-9a-f]{2}:){5}[0-9a-f]{2}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,14}")
_SMALLEST_MTU, _LARGEST_MTU = 68, 65535

Address = IPv4Interface | IPv6Interface
Network = IPv4Network | IPv6Network


@dataclass(frozen=True)
class Route:
    """One route in the main table. Without a gateway the destination is on the link."""

    destination: Network
    gateway: ipaddress.IPv4Address | ipaddress.IPv6Address | None


@dataclass(frozen=True)
class Interface:
    """One interface of the inner namespace."""

    mac: str
    name: str
    mtu: int
    addresses: tuple[Address, ...]
    vips: tuple[Address, ...]
    routes: tuple[Route, ...]


@dataclass(frozen=True)
class Bundle:
    """Everything one amphora should be. ``haproxy`` is None where no HAProxy is wanted."""

    amphora_id: uuid.UUID
    load_balancer_id: uuid.UUID
    generation: int
    haproxy: str | None
    interfaces: tuple[Interface, ...]


def digest(body: bytes) -> str:
    """What `GET /v2/bundle` shows of a body."""
    return hashlib.sha256(body).hexdigest()


def parse(body: bytes) -> Bundle:
    """Read a request body.

    Raises:
        MalformedBundle: saying which key is wrong.
    """
    try:
        return _bundle(json.loads(body, object_pairs_hook=_without_repetition))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise MalformedBundle(
            "read the bundle", str(error).strip("'\""), "See docs/agent-api.md for its shape."
        ) from error


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("a key is given twice")
    return document


def _keys(document: Any, where: str, needed: Iterable[str]) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise TypeError(f"{where} is not an object")
    names = set(needed)
    if missing := names - document.keys():
        raise KeyError(f"{where} lacks {', '.join(sorted(missing))}")
    if unknown := document.keys() - names:
        raise KeyError(f"{where} has unknown keys: {', '.join(sorted(unknown))}")
    return document


def _typed(value: Any, kind: type, where: str) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{where} is not of type {kind.__name__}")
    return value


def _bundle(document: Any) -> Bundle:
    keys = ("format", "amphora_id", "load_balancer_id", "generation", "haproxy", "interfaces")
    found = _keys(document, "the bundle", keys)
    if found["format"] != FORMAT:
        raise ValueError(f"format {found['format']!r} is not known, only {FORMAT}")
    generation = _typed(found["generation"], int, "generation")
    if generation < 0:
        raise ValueError("generation is negative")
    text = found["haproxy"]
    if text is not None and "\0" in _typed(text, str, "haproxy"):
        raise ValueError("haproxy contains a NUL character")
    interfaces = tuple(_interface(item) for item in _typed(found["interfaces"], list, "interfaces"))
    for attribute in ("mac", "name"):
        values = [getattr(interface, attribute) for interface in interfaces]
        if len(set(values)) != len(values):
            raise ValueError(f"two interfaces have the same {attribute}")
    return Bundle(
        amphora_id=uuid.UUID(_typed(found["amphora_id"], str, "amphora_id")),
        load_balancer_id=uuid.UUID(_typed(found["load_balancer_id"], str, "load_balancer_id")),
        generation=generation,
        haproxy=text,
        interfaces=interfaces,
    )


def _interface(document: Any) -> Interface:
    found = _keys(document, "an interface", ("mac", "name", "mtu", "addresses", "vips", "routes"))
    mac = _typed(found["mac"], str, "mac").lower()
    name = _typed(found["name"], str, "name")
    if not _MAC.fullmatch(mac):
        raise ValueError(f"{mac!r} is not a MAC address")
    if not _NAME.fullmatch(name) or name == "lo":
        raise ValueError(f"{name!r} is not a name for an interface")
    mtu = _typed(found["mtu"], int, "mtu")
    if not _SMALLEST_MTU <= mtu <= _LARGEST_MTU:
        raise ValueError(f"mtu {mtu} is out of range")
    vips = tuple(_address(item, "vips") for item in _typed(found["vips"], list, "vips"))
    if wide := [str(vip) for vip in vips if vip.network.prefixlen != vip.max_prefixlen]:
        raise ValueError(f"VIP {wide[0]} is not a single address (/32 or /128)")
    return Interface(
        mac=mac,
        name=name,
        mtu=mtu,
        vips=vips,
        addresses=tuple(_address(item, "addresses") for item in _typed(found["addresses"], list, "addresses")),
        routes=tuple(_route(item) for item in _typed(found["routes"], list, "routes")),
    )


def _address(value: Any, where: str) -> Address:
    return ipaddress.ip_interface(_typed(value, str, where))


def _route(document: Any) -> Route:
    found = _keys(document, "a route", ("destination", "gateway"))
    destination = ipaddress.ip_network(_typed(found["destination"], str, "destination"))
    if found["gateway"] is None:
        return Route(destination, None)
    gateway = ipaddress.ip_address(_typed(found["gateway"], str, "gateway"))
    if gateway.version != destination.version:
        raise ValueError(f"route {destination} via {gateway} mixes address families")
    return Route(destination, gateway)
