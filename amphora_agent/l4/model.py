# SPDX-License-Identifier: Apache-2.0
"""Virtual servers of a bundle: UDP and SCTP listeners with their members. Standard library only."""

from __future__ import annotations

import ipaddress
import json
import re
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

Host = ipaddress.IPv4Address | ipaddress.IPv6Address

PROTOCOLS = ("UDP", "SCTP")
ALGORITHMS = ("ROUND_ROBIN", "LEAST_CONNECTIONS", "SOURCE_IP", "SOURCE_IP_PORT")
CLIENT_ADDRESSES = ("hidden", "preserved")
MONITORS = ("UDP-CONNECT", "SCTP", "TCP", "HTTP", "PING")
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "TRACE", "OPTIONS", "PATCH", "CONNECT")
VERSIONS = ("1.0", "1.1")
LARGEST_PORT, LARGEST_WEIGHT, LONGEST = 65535, 256, 2**31 - 1
LONGEST_FORMAT = 2048
# Keys that bundles of an older controller do not have.
_OPTIONAL = ("log_format",)
_CODES = re.compile(r"[1-5][0-9]{2}(?:-[1-5][0-9]{2})?")
# A space or a line end would break the request line of an HTTP check (RFC 9112, section 3).
_PATH = re.compile(r"/[!-~]*")
_HOST = re.compile(r"[A-Za-z0-9.:\[\]_-]{1,255}")


@dataclass(frozen=True)
class Persistence:
    """Seconds that a client stays with its member, and the prefix lengths that identify a client."""

    timeout: int
    prefix_v4: int
    prefix_v6: int


@dataclass(frozen=True)
class Monitor:
    """A health monitor; times are in seconds. The fields of HTTP are None for other types."""

    id: str
    type: str
    interval: int
    timeout: int
    rise: int
    fall: int
    method: str | None = None
    path: str | None = None
    codes: tuple[str, ...] = ()
    host: str | None = None
    version: str | None = None


@dataclass(frozen=True)
class Member:
    """One member. ``check_address`` and ``check_port`` are None for its own address and port.

    The texts are cached, because a change of one member writes the texts of all members.
    """

    id: str
    address: Host
    port: int
    weight: int
    backup: bool
    enabled: bool
    check_address: Host | None = None
    check_port: int | None = None

    @cached_property
    def address_text(self) -> str:
        return str(self.address)

    @cached_property
    def place(self) -> str:
        """Address and port in the notation of nft."""
        return f"{self.address_text} . {self.port}"

    @cached_property
    def document_text(self) -> str:
        """The member in JSON."""
        return json.dumps(_plain(self), separators=(",", ":"))


_MEMBER_KEYS = Member.__dataclass_fields__.keys()


@dataclass(frozen=True)
class VirtualServer:
    """One listener. ``log_format`` is the format of its flow log (`l4_flow_log.format`); None for no log."""

    id: str
    protocol: str
    port: int
    addresses: tuple[Host, ...]
    connection_limit: int | None
    pool_id: str | None
    algorithm: str
    persistence: Persistence | None
    client_address: str
    monitor: Monitor | None
    members: tuple[Member, ...]
    log_format: str | None = None


def parse(value: Any, known: Sequence[VirtualServer] = ()) -> tuple[VirtualServer, ...]:
    """Return the virtual servers of a bundle's list; raises ValueError, KeyError or TypeError.

    The result contains the same objects as ``known`` for equal members, which are compared and not parsed.
    """
    before = {server.id: {member.id: member for member in server.members} for server in known}
    found = tuple(_server(item, before) for item in _of(list, value, "virtual_servers"))
    for what, values in (
        ("id", [one.id for one in found]),
        ("protocol and port", [(one.protocol, one.port) for one in found]),
    ):
        if len(set(values)) != len(values):
            raise ValueError(f"two virtual servers have the same {what}")
    return found


def reject_scope(value: str, where: str) -> str:
    """Return an address without a scope (RFC 4007, section 11) unchanged; raises ValueError for a scope.

    The standard library accepts any text after the "%" of an IPv6 address, even a line end. The text would reach the
    input of nft and keepalived.
    """
    if "%" in value:
        raise ValueError(f"{where} {value!r} has a scope, which is not supported")
    return value


def to_document(servers: Sequence[VirtualServer]) -> list[dict[str, Any]]:
    """Return the list that `parse` reads."""
    return [_plain(server) for server in servers]


def to_json(servers: Sequence[VirtualServer]) -> str:
    """Return the list that `parse` reads, in JSON."""
    return f"[{','.join(map(_server_text, servers))}]"


def _server_text(server: VirtualServer) -> str:
    head = json.dumps(head_document(server), separators=(",", ":"))
    return f'{head[:-1]},"members":[{",".join([member.document_text for member in server.members])}]}}'


def head_document(server: VirtualServer) -> dict[str, Any]:
    """Return the document of a virtual server without its members."""
    document: dict[str, Any] = _plain(replace(server, members=()))
    del document["members"]
    return document


def member_document(member: Member) -> dict[str, Any]:
    """Return a document of `parse_members`."""
    document: dict[str, Any] = _plain(member)
    return document


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if hasattr(value, "__dataclass_fields__"):
        found = {name: getattr(value, name) for name in value.__dataclass_fields__}
        return {name: _plain(one) for name, one in found.items() if one is not None or name not in _OPTIONAL}
    return str(value) if isinstance(value, (ipaddress.IPv4Address, ipaddress.IPv6Address)) else value


def _keys(shape: type, value: Any, where: str, optional: Collection[str] = ()) -> dict[str, Any]:
    found: dict[str, Any] = _of(dict, value, where)
    names = set(shape.__dataclass_fields__)  # type: ignore[attr-defined]
    if missing := names - found.keys() - {*optional}:
        raise KeyError(f"{where} lacks {', '.join(sorted(missing))}")
    if unknown := found.keys() - names:
        raise KeyError(f"{where} has unknown keys: {', '.join(sorted(unknown))}")
    return found


def _of(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{where} is not of type {kind.__name__}")
    return value


def _id(value: Any, where: str) -> str:
    text: str = _of(str, value, where)
    if str(uuid.UUID(text)) != text:
        raise ValueError(f"{where} {text!r} is not a UUID")
    return text


def _number(value: Any, least: int, most: int, where: str) -> int:
    number: int = _of(int, value, where)
    if not least <= number <= most:
        raise ValueError(f"{where} {number} is not between {least} and {most}")
    return number


def _one_of(value: Any, known: Iterable[str], where: str) -> str:
    text: str = _of(str, value, where)
    if text not in known:
        raise ValueError(f"{where} {text!r} is not known")
    return text


def _maybe(read: Callable[[Any], Any], value: Any) -> Any:
    return None if value is None else read(value)


def _address(value: Any, where: str) -> Host:
    return ipaddress.ip_address(reject_scope(_of(str, value, where), where))


def _server(value: Any, known: Mapping[str, Mapping[str, Member]]) -> VirtualServer:
    found = _keys(VirtualServer, value, "a virtual server", _OPTIONAL)
    name = _id(found["id"], "the id of a virtual server")
    where = f"virtual server {name}:"
    members = parse_members(found["members"], known.get(name, {}), where)
    listed = _of(list, found["addresses"], f"{where} addresses")
    addresses = tuple(_address(item, f"{where} address") for item in listed)
    if not addresses or len(set(addresses)) != len(addresses):
        raise ValueError(f"{where} the list of addresses is empty, or has an address twice")
    return VirtualServer(
        id=name,
        protocol=_one_of(found["protocol"], PROTOCOLS, f"{where} protocol"),
        port=_number(found["port"], 1, LARGEST_PORT, f"{where} port"),
        addresses=addresses,
        connection_limit=_maybe(lambda one: _number(one, 1, LONGEST, f"{where} limit"), found["connection_limit"]),
        pool_id=_maybe(lambda one: _id(one, f"{where} pool_id"), found["pool_id"]),
        algorithm=_one_of(found["algorithm"], ALGORITHMS, f"{where} algorithm"),
        persistence=_maybe(lambda one: _persistence(one, where), found["persistence"]),
        client_address=_one_of(found["client_address"], CLIENT_ADDRESSES, f"{where} client_address"),
        monitor=_maybe(lambda one: _monitor(one, where), found["monitor"]),
        members=members,
        log_format=_maybe(lambda one: _log_format(one, f"{where} log_format"), found.get("log_format")),
    )


def _log_format(value: Any, where: str) -> str:
    """Return a printable text, because a line must stay one line and fit into one write to a pipe."""
    text: str = _of(str, value, where)
    if not text.isprintable() or not 1 <= len(text) <= LONGEST_FORMAT:
        raise ValueError(f"{where} is not one line of 1 to {LONGEST_FORMAT} printable characters")
    return text


def _persistence(value: Any, where: str) -> Persistence:
    found = _keys(Persistence, value, f"{where} persistence")
    return Persistence(
        timeout=_number(found["timeout"], 1, LONGEST, f"{where} timeout"),
        prefix_v4=_number(found["prefix_v4"], 0, 32, f"{where} prefix_v4"),
        prefix_v6=_number(found["prefix_v6"], 0, 128, f"{where} prefix_v6"),
    )


def parse_members(value: Any, known: Mapping[str, Member], where: str) -> tuple[Member, ...]:
    """Return the members of a list; see `parse`."""
    members = tuple(
        [_known_member(item, known) or _member(item, where) for item in _of(list, value, f"{where} members")]
    )
    refuse_repeated(members, where)
    return members


def refuse_repeated(members: Sequence[Member], where: str) -> None:
    """Raise ValueError if two members have the same id."""
    if len({one.id for one in members}) != len(members):
        raise ValueError(f"{where} two members have the same id")


def _known_member(value: Any, known: Mapping[str, Member]) -> Member | None:
    """Return the known member that a document describes in the notation of this module; None otherwise."""
    if not known or type(value) is not dict or value.keys() != _MEMBER_KEYS or type(value["id"]) is not str:
        return None
    found = known.get(value["id"])
    # The types are compared too, because True equals 1.
    return (
        found
        if found is not None
        and value["address"] == found.address_text
        and (type(value["port"]), value["port"]) == (int, found.port)
        and (type(value["weight"]), value["weight"]) == (int, found.weight)
        and value["backup"] is found.backup
        and value["enabled"] is found.enabled
        and value["check_address"] == (None if found.check_address is None else str(found.check_address))
        and (type(value["check_port"]), value["check_port"]) == (type(found.check_port), found.check_port)
        else None
    )


def _member(value: Any, where: str) -> Member:
    found = _keys(Member, value, f"{where} member")
    name = _id(found["id"], f"{where} member id")
    where = f"{where} member {name}:"
    return Member(
        id=name,
        address=_address(found["address"], f"{where} address"),
        port=_number(found["port"], 1, LARGEST_PORT, f"{where} port"),
        weight=_number(found["weight"], 0, LARGEST_WEIGHT, f"{where} weight"),
        backup=_of(bool, found["backup"], f"{where} backup"),
        enabled=_of(bool, found["enabled"], f"{where} enabled"),
        check_address=_maybe(lambda one: _address(one, f"{where} check_address"), found["check_address"]),
        check_port=_maybe(lambda one: _number(one, 1, LARGEST_PORT, f"{where} check_port"), found["check_port"]),
    )


def _monitor(value: Any, where: str) -> Monitor:
    found = _keys(Monitor, value, f"{where} monitor")
    where = f"{where} monitor"
    kind = _one_of(found["type"], MONITORS, f"{where} type")
    codes = tuple(_of(str, item, f"{where} codes") for item in _of(list, found["codes"], f"{where} codes"))
    if kind == "HTTP":
        _one_of(found["method"], METHODS, f"{where} method")
        _one_of(found["version"], VERSIONS, f"{where} version")
        if not _PATH.fullmatch(_of(str, found["path"], f"{where} path")):
            raise ValueError(f"{where} path {found['path']!r} is not valid in a request")
        if not codes or not all(_CODES.fullmatch(code) for code in codes):
            raise ValueError(f"{where} codes {codes} are not status codes")
        if found["host"] is not None and not _HOST.fullmatch(_of(str, found["host"], f"{where} host")):
            raise ValueError(f"{where} host {found['host']!r} is not a host name")
    elif codes or any(found[name] is not None for name in ("method", "path", "host", "version")):
        raise ValueError(f"{where} of type {kind} has options of HTTP")
    return Monitor(
        id=_id(found["id"], f"{where} id"),
        type=kind,
        interval=_number(found["interval"], 1, LONGEST, f"{where} interval"),
        timeout=_number(found["timeout"], 1, LONGEST, f"{where} timeout"),
        rise=_number(found["rise"], 1, LONGEST, f"{where} rise"),
        fall=_number(found["fall"], 1, LONGEST, f"{where} fall"),
        method=found["method"],
        path=found["path"],
        codes=codes,
        host=found["host"],
        version=found["version"],
    )
