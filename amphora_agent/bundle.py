# SPDX-License-Identifier: Apache-2.0
"""The bundle: the complete desired state of an amphora, as typed values.

Invariant: `parse` refuses a body with an unknown key, a missing key or a value of the wrong type. No error repeats the
content of a file.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from ipaddress import IPv4Interface, IPv4Network, IPv6Interface, IPv6Network
from typing import Any

from amphora_agent.errors import MalformedBundle
from amphora_agent.l4 import model
from amphora_agent.l4.model import VirtualServer

FORMAT = 1
OCTAVIA_API_V1_ID = uuid.UUID(int=0)
"""The load balancer id in bundles that come from Octavia's amphora API 1.0.

Octavia plugs an amphora before it names the load balancer. No other controller uses this id.
"""
_MAC = re.compile(r"(?:[0-9a-f]{2}:){5}[0-9a-f]{2}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,14}")
_MIN_MTU, _MAX_MTU = 68, 65535
# No part of a TLS file's name may begin with a dot, because the part ".." would refer to a parent directory.
_FILE = re.compile(r"tls/[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}/[a-z0-9_][a-z0-9_.-]{0,99}")
_PARTNER = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_MAX_PORT = 65535
_TCP = "tcp"
PROTOCOLS = (_TCP, "udp", "sctp")
_MIN_ADVERT_SECONDS = 0.05
_SHA256 = re.compile(r"[0-9a-f]{64}")
MAX_FILES = 4096
MAX_FILE_BYTES = 4 * 1024 * 1024
MAX_FILES_BYTES = 16 * 1024 * 1024
"""The memory of the amphora has to hold two sets of files at once."""

Address = IPv4Interface | IPv6Interface
Host = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = IPv4Network | IPv6Network


@dataclass(frozen=True)
class Route:
    """One route in the main table. Without a gateway, the destination is on the link."""

    destination: Network
    gateway: Host | None


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
class File:
    """A TLS file. Files with the same name and digest are equal, with or without content."""

    name: str
    sha256: str
    content: str | None = field(default=None, repr=False, compare=False)

    @property
    def object_id(self) -> str:
        """The id of the file's listener or pool."""
        return self.name.split("/")[1]


@dataclass(frozen=True)
class Limits:
    """The limits of HAProxy; None is the limit of the machine, or the agent's default.

    ``drain`` limits the time of an old worker in seconds. ``workers`` limits the number of old workers.
    """

    connections: int | None
    threads: int | None
    drain: int | None = None
    workers: int | None = None


@dataclass(frozen=True)
class AllowedSources:
    """The networks that may connect to a port; a port without an entry is open to all clients."""

    port: int
    networks: tuple[Network, ...]
    protocol: str = _TCP


@dataclass(frozen=True)
class Partner:
    """One amphora of a pair: its name in the stick tables' peers, and its address on the VIP's network."""

    name: str
    address: Host


@dataclass(frozen=True)
class Vrrp:
    """The VRRP settings of an amphora in a pair (RFC 9568); ``advert_interval`` is in seconds.

    ``interface`` is the name of the interface with the VIPs.
    """

    interface: str
    router_id: int
    priority: int
    advert_interval: float
    local: Partner
    peers: tuple[Partner, ...]


@dataclass(frozen=True)
class VrrpInstance:
    """The VRRP settings of an amphora with the addresses that they protect.

    ``fixed`` are the amphora's own addresses on the interface of the VIPs.
    """

    vrrp: Vrrp
    vips: tuple[Address, ...]
    mtu: int
    fixed: tuple[Address, ...] = ()

    @property
    def first_vip(self) -> Host:
        """The VIP whose presence shows that all VIPs are present."""
        return self.vips[0].ip


@dataclass(frozen=True)
class Bundle:
    """The desired state of one amphora. ``haproxy`` is None if no listener needs HAProxy.

    ``pings`` has the addresses to ping for members with a PING monitor, by member id. ``vrrp`` is None for a single
    amphora. ``virtual_servers`` are the UDP and SCTP listeners.
    """

    amphora_id: uuid.UUID
    load_balancer_id: uuid.UUID
    generation: int
    haproxy: str | None
    files: tuple[File, ...]
    pings: dict[str, Host]
    limits: Limits
    interfaces: tuple[Interface, ...]
    allowed: tuple[AllowedSources, ...] = ()
    vrrp: Vrrp | None = None
    virtual_servers: tuple[VirtualServer, ...] = ()

    @property
    def vrrp_instance(self) -> VrrpInstance | None:
        """The VRRP instance; None for a single amphora, or if the interface has no VIPs."""
        vrrp = self.vrrp
        if vrrp is None:
            return None
        found = next((one for one in self.interfaces if one.name == vrrp.interface and one.vips), None)
        return None if found is None else VrrpInstance(vrrp, found.vips, found.mtu, found.addresses)

    def without_contents(self) -> Bundle:
        """Return the bundle without the contents of its files, which are secret."""
        return replace(self, files=tuple(File(file.name, file.sha256) for file in self.files))

    def to_document(self) -> dict[str, Any]:
        """Return the bundle for the disk, without the contents of its files."""
        return {
            "format": FORMAT,
            "amphora_id": str(self.amphora_id),
            "load_balancer_id": str(self.load_balancer_id),
            "generation": self.generation,
            "haproxy": self.haproxy,
            "files": [{"name": file.name, "sha256": file.sha256} for file in self.files],
            "pings": {member: str(address) for member, address in self.pings.items()},
            "limits": asdict(self.limits),
            "interfaces": [_plain(interface) for interface in self.interfaces],
            "allowed": [_allowed_document(one) for one in self.allowed],
            "vrrp": None if self.vrrp is None else _plain(self.vrrp),
            # Agents before version 2.0 refuse the key `virtual_servers`, so it is present only if it is needed.
            **({"virtual_servers": model.to_document(self.virtual_servers)} if self.virtual_servers else {}),
        }

    def to_json(self) -> str:
        """Return the document of `to_document` in JSON."""
        head = json.dumps(replace(self, virtual_servers=()).to_document())
        servers = f', "virtual_servers": {model.to_json(self.virtual_servers)}' if self.virtual_servers else ""
        return f"{head[:-1]}{servers}}}"


def _plain(value: Any) -> Any:
    """Return a value of a bundle in the types of JSON: addresses become texts."""
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    return value if value is None or isinstance(value, int | float) else str(value)


def _allowed_document(one: AllowedSources) -> dict[str, Any]:
    document: dict[str, Any] = _plain(one)
    return {name: value for name, value in document.items() if (name, value) != ("protocol", _TCP)}


def digest(body: bytes) -> str:
    """Return the SHA-256 of a body or a file."""
    return hashlib.sha256(body).hexdigest()


def parse(body: bytes, known: Sequence[VirtualServer] = ()) -> Bundle:
    """Parse a request body. A `MalformedBundle` names the wrong key.

    Members of ``known`` virtual servers need no parsing (`model.parse`).
    """
    try:
        return _bundle(json.loads(body, object_pairs_hook=_reject_duplicate_keys), _file, known)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise MalformedBundle(
            "read the bundle", str(error).strip("'\""), "See docs/reference/agent-api.md for the format."
        ) from error


def parse_stored(document: Any) -> Bundle:
    """Parse the result of `Bundle.to_document`.

    Raises ValueError, KeyError or TypeError for another document.
    """
    return _bundle(document, _stored_file)


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("a key is given twice")
    return document


def _keys(document: Any, where: str, needed: Iterable[str], optional: Iterable[str] = ()) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise TypeError(f"{where} is not an object")
    names = set(needed)
    if missing := names - document.keys():
        raise KeyError(f"{where} lacks {', '.join(sorted(missing))}")
    if unknown := document.keys() - names - {*optional}:
        raise KeyError(f"{where} has unknown keys: {', '.join(sorted(unknown))}")
    return document


def _typed(value: Any, kind: type, where: str) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{where} is not of type {kind.__name__}")
    return value


def _bundle(document: Any, read_file: Callable[[Any, str], File], known: Sequence[VirtualServer] = ()) -> Bundle:
    head = ("format", "amphora_id", "load_balancer_id", "generation")
    parts = ("haproxy", "files", "pings", "limits", "interfaces", "allowed", "vrrp")
    found = _keys(document, "the bundle", (*head, *parts), optional=["virtual_servers"])
    if _typed(found["format"], int, "format") != FORMAT:
        raise ValueError(f"format {found['format']!r} is not known, only {FORMAT}")
    generation = _typed(found["generation"], int, "generation")
    if generation < 0:
        raise ValueError("generation is negative")
    if found["haproxy"] is not None:
        _encoded(found["haproxy"], "haproxy")
    interfaces = tuple(_interface(item) for item in _typed(found["interfaces"], list, "interfaces"))
    for attribute in ("mac", "name"):
        values = [getattr(interface, attribute) for interface in interfaces]
        if len(set(values)) != len(values):
            raise ValueError(f"two interfaces have the same {attribute}")
    allowed = tuple(_allowed(item) for item in _typed(found["allowed"], list, "allowed"))
    if len({(one.protocol, one.port) for one in allowed}) != len(allowed):
        raise ValueError("a port is allowed twice")
    return Bundle(
        amphora_id=uuid.UUID(_typed(found["amphora_id"], str, "amphora_id")),
        load_balancer_id=uuid.UUID(_typed(found["load_balancer_id"], str, "load_balancer_id")),
        generation=generation,
        haproxy=found["haproxy"],
        files=_files(found["files"], read_file),
        pings=_pings(found["pings"]),
        limits=_limits(found["limits"]),
        interfaces=interfaces,
        allowed=allowed,
        vrrp=None if found["vrrp"] is None else _vrrp(found["vrrp"], interfaces),
        virtual_servers=model.parse(found.get("virtual_servers", []), known),
    )


def _encoded(value: Any, where: str) -> bytes:
    text: str = _typed(value, str, where)
    if "\0" in text:
        raise ValueError(f"{where} contains a NUL character")
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where} contains half of a surrogate pair") from None


def _files(value: Any, read_file: Callable[[Any, str], File]) -> tuple[File, ...]:
    items = _typed(value, list, "files")
    if len(items) > MAX_FILES:
        raise ValueError(f"{len(items)} files are more than {MAX_FILES}")
    found = [read_file(item, f"file {number}") for number, item in enumerate(items, start=1)]
    if len({file.name for file in found}) != len(found):
        raise ValueError("two files have the same name")
    if (size := sum(len(file.content or "") for file in found)) > MAX_FILES_BYTES:
        raise ValueError(f"all files together have {size} characters, at most {MAX_FILES_BYTES} are allowed")
    return tuple(sorted(found, key=lambda file: file.name))


def _file(document: Any, where: str) -> File:
    found = _keys(document, where, ("name", "content"))
    name = _file_name(found["name"], where)
    content = _encoded(found["content"], f"the content of {name}")
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"{name} has {len(content)} bytes, at most {MAX_FILE_BYTES} are allowed")
    return File(name, digest(content), found["content"])


def _stored_file(document: Any, where: str) -> File:
    found = _keys(document, where, ("name", "sha256"))
    if not _SHA256.fullmatch(_typed(found["sha256"], str, where)):
        raise ValueError(f"{where} has no SHA-256")
    return File(_file_name(found["name"], where), found["sha256"])


def _file_name(value: Any, where: str) -> str:
    name: str = _typed(value, str, f"the name of {where}")
    if not _FILE.fullmatch(name):
        raise ValueError(f"the name of {where} is not of the form tls/<object id>/<name>")
    return name


def _pings(value: Any) -> dict[str, Host]:
    found = _typed(value, dict, "pings")
    for member in found:
        if str(uuid.UUID(member)) != member:
            raise ValueError(f"pings: {member!r} is not the id of a member")
    return {member: _host(address, "pings") for member, address in found.items()}


def _limits(value: Any) -> Limits:
    found = _keys(value, "limits", ("connections", "threads", "drain", "workers"))
    for name, limit in found.items():
        if limit is not None and _typed(limit, int, name) < 1:
            raise ValueError(f"limits: {name} is below 1")
    return Limits(**found)


def _allowed(document: Any) -> AllowedSources:
    found = _keys(document, "an entry of allowed", ("port", "networks"), optional=["protocol"])
    protocol = _typed(found.get("protocol", _TCP), str, "protocol")
    if protocol not in PROTOCOLS:
        raise ValueError(f"allowed: protocol {protocol!r} is not known")
    port = _typed(found["port"], int, "port")
    if not 1 <= port <= _MAX_PORT:
        raise ValueError(f"port {port} is out of range")
    listed = _typed(found["networks"], list, "networks")
    return AllowedSources(port, tuple(ipaddress.ip_network(_unscoped(one, "networks")) for one in listed), protocol)


def _vrrp(document: Any, interfaces: tuple[Interface, ...]) -> Vrrp:
    found = _keys(document, "vrrp", [one.name for one in fields(Vrrp)])
    interface = _typed(found["interface"], str, "interface")
    if interface not in {each.name for each in interfaces}:
        raise ValueError(f"vrrp: there is no interface {interface!r}")
    for name, largest in (("router_id", 255), ("priority", 254)):
        if not 1 <= _typed(found[name], int, name) <= largest:
            raise ValueError(f"vrrp: {name} {found[name]} is not between 1 and {largest}")
    seconds = found["advert_interval"]
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not _MIN_ADVERT_SECONDS <= seconds <= 40:
        raise ValueError(f"vrrp: advert_interval {seconds!r} is not between {_MIN_ADVERT_SECONDS} and 40 seconds")
    local = _partner(found["local"])
    peers = tuple(_partner(item) for item in _typed(found["peers"], list, "peers"))
    if len({one.name for one in (local, *peers)}) != len(peers) + 1:
        raise ValueError("vrrp: two partners have the same name")
    if any(peer.address.version != local.address.version for peer in peers):
        raise ValueError("vrrp: the partners' addresses are of different families")
    return Vrrp(interface, found["router_id"], found["priority"], float(seconds), local, peers)


def _partner(document: Any) -> Partner:
    found = _keys(document, "a partner", ("name", "address"))
    name = _typed(found["name"], str, "name")
    if not _PARTNER.fullmatch(name):
        raise ValueError(f"vrrp: {name!r} is not a partner's name")
    return Partner(name, _host(found["address"], "address"))


def _interface(document: Any) -> Interface:
    found = _keys(document, "an interface", [one.name for one in fields(Interface)])
    mac = _typed(found["mac"], str, "mac").lower()
    name = _typed(found["name"], str, "name")
    if not _MAC.fullmatch(mac):
        raise ValueError(f"{mac!r} is not a MAC address")
    if not _NAME.fullmatch(name) or name == "lo":
        raise ValueError(f"{name!r} is not a name for an interface")
    mtu = _typed(found["mtu"], int, "mtu")
    if not _MIN_MTU <= mtu <= _MAX_MTU:
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


def _unscoped(value: Any, where: str) -> str:
    return model.reject_scope(_typed(value, str, where), where)


def _host(value: Any, where: str) -> Host:
    return ipaddress.ip_address(_unscoped(value, where))


def _address(value: Any, where: str) -> Address:
    return ipaddress.ip_interface(_unscoped(value, where))


def _route(document: Any) -> Route:
    found = _keys(document, "a route", ("destination", "gateway"))
    destination = ipaddress.ip_network(_unscoped(found["destination"], "destination"))
    if found["gateway"] is None:
        return Route(destination, None)
    gateway = _host(found["gateway"], "gateway")
    if gateway.version != destination.version:
        raise ValueError(f"route {destination} via {gateway} mixes address families")
    return Route(destination, gateway)
