# SPDX-License-Identifier: Apache-2.0
"""Parses the state that a running HAProxy reports, and compares it with a configuration.

Invariant: pure. The comparison finds runtime actions with a successful answer but without an effect.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from amphora_agent.haproxy.config_parser import AGENT_PREFIX, Configuration, Section, Server

PROXIES, SERVERS = "show stat -1 3 -1", "show servers state"
_Key = tuple[str, str]
# Positions of columns in HAProxy's answer to `show servers state` (management guide, 9.3).
_BACKEND, _NAME, _ADDRESS, _RUNNING, _ADMIN, _WEIGHT, _PORT = 1, 3, 4, 5, 6, 7, 18
_CHECK_PORT, _CHECK_ADDRESS, _FIELDS = 21, 22, 25
# Bits of HAProxy's administrative state of a server: maintenance and draining.
_FORCED_MAINTENANCE, _FORCED_DRAIN = 0x01, 0x08
_UP = "2"
_PROXY, _KIND, _LIMIT, _STATUS = 0, 1, 6, 17
_LISTENS = ("OPEN", "FULL")
# Number of lines up to the first server: the version of the format, the column names, and the first server's line.
_HEAD_LINES = 3
# Maximum number of servers that are searched one by one in HAProxy's answer. For more servers, parsing all lines is
# faster.
_MAX_SEARCHED = 20


class ServerState(NamedTuple):
    """The reported state of a server; "-" and 0 are an unset check address and port."""

    up: bool
    weight: int
    maintenance: bool
    draining: bool
    address: str
    port: int
    check_address: str
    check_port: int

    @property
    def serves(self) -> bool:
        """Whether the server gets new requests."""
        return self.up and self.weight > 0 and not (self.maintenance or self.draining)


@dataclass(frozen=True)
class Loaded:
    """The reported listeners with their limits, and backends with their numbers of servers."""

    frontends: dict[str, int]
    members: dict[str, int]

    def document(self) -> dict[str, object]:
        return {"listeners": sorted(self.frontends), "members": sum(self.members.values())}


NOTHING_LOADED = Loaded({}, {})


def parse_servers(answer: str) -> dict[tuple[str, str], ServerState]:
    """Return the states of all servers of a load balancer, by backend and name."""
    rows = filter(None, map(_parse_server, answer.splitlines()))
    return {(backend, name): state for backend, name, state in rows}


def _parse_server(line: str) -> tuple[str, str, ServerState] | None:
    fields = line.split(" ")
    if len(fields) < _FIELDS or line.startswith("#") or fields[_BACKEND].startswith(AGENT_PREFIX):
        return None
    admin = int(fields[_ADMIN])
    state = ServerState(
        up=fields[_RUNNING] == _UP,
        weight=int(fields[_WEIGHT]),
        maintenance=bool(admin & _FORCED_MAINTENANCE),
        draining=bool(admin & _FORCED_DRAIN),
        address=fields[_ADDRESS],
        port=int(fields[_PORT]),
        check_address=fields[_CHECK_ADDRESS],
        check_port=int(fields[_CHECK_PORT]),
    )
    return fields[_BACKEND], fields[_NAME], state


def select_servers(answer: str, backend: str, names: Collection[str]) -> tuple[int, dict[tuple[str, str], ServerState]]:
    """Return the number of servers of a backend, and the states of the named ones.

    A backend may have 10,000 servers, so only the lines of the named servers are parsed.
    """
    first = next(
        (line for line in answer.split("\n", _HEAD_LINES)[:_HEAD_LINES] if line.split(" ")[_BACKEND:2] == [backend]), ""
    )
    begin = f"\n{first.partition(' ')[0]} {backend} "
    count = answer.count(begin) if first else 0
    if len(names) > _MAX_SEARCHED:
        return count, {key: state for key, state in parse_servers(answer).items() if key[1] in names}
    found = {}
    for name in names:
        place = answer.find(f" {name} ")
        while place >= 0:
            line = answer[answer.rfind("\n", 0, place) + 1 : answer.find("\n", place)]
            if (one := _parse_server(line)) is not None and one[:2] == (backend, name):
                found[one[:2]] = one[2]
                break
            place = answer.find(f" {name} ", place + 1)
    return count, found


def _proxies(answer: str, kind: str, last: int) -> list[list[str]]:
    """Return the rows of one kind that have the column `last`."""
    rows = [line.split(",", last + 1) for line in answer.splitlines()]
    return [row for row in rows if len(row) > last and row[_KIND] == kind]


def backend_names(answer: str) -> set[str]:
    """Return the backends of a load balancer."""
    return {row[_PROXY] for row in _proxies(answer, "BACKEND", _KIND) if not row[_PROXY].startswith(AGENT_PREFIX)}


def listener_limits(answer: str) -> dict[str, int]:
    """Return the connection limit of each listener."""
    return {row[_PROXY]: int(row[_LIMIT] or 0) for row in _proxies(answer, "FRONTEND", _LIMIT)}


def closed_listeners(answer: str) -> list[str]:
    """Return the listeners that do not accept connections: disabled by an operator, or paused by HAProxy."""
    closed = [row[_PROXY] for row in _proxies(answer, "FRONTEND", _STATUS) if row[_STATUS] not in _LISTENS]
    return sorted(name for name in closed if not name.startswith(AGENT_PREFIX))


def find_difference(
    wanted: Configuration, listeners: dict[str, int], servers: dict[tuple[str, str], ServerState]
) -> str:
    """Return the first difference from the configuration in words; empty for none."""
    if why := _listener_difference(wanted, listeners):
        return why
    live = _enabled(wanted.backends)
    return _member_difference({key: server for key, server in wanted.servers.items() if key[0] in live}, servers)


def _member_difference(members: Mapping[_Key, Server], servers: Mapping[_Key, ServerState]) -> str:
    if missing := members.keys() ^ servers.keys():
        backend, name = min(missing)
        return f"member {name} of {backend} is missing or unexpected"
    for (backend, name), server in members.items():
        if why := _server_difference(server, servers[backend, name]):
            return f"member {name} of {backend} {why}"
    return ""


@dataclass(frozen=True)
class PartialState:
    """All listeners with their limits, all backends, and the changed servers that HAProxy reports.

    ``members`` has the numbers of servers of the backends with a changed server.
    """

    listeners: dict[str, int]
    backends: set[str]
    members: dict[str, int]
    servers: dict[tuple[str, str], ServerState]


def find_partial_difference(wanted: Configuration, touched: Collection[tuple[str, str]], found: PartialState) -> str:
    """Return the same as `find_difference`, if only `touched` servers have changed since then."""
    if why := _listener_difference(wanted, found.listeners):
        return why
    if different := _enabled(wanted.backends).keys() ^ found.backends:
        return f"backend {min(different)} is missing or unexpected"
    for backend in sorted({backend for backend, _ in touched}):
        wanted_count = len(wanted.backends[backend].servers)
        if (count := found.members.get(backend, 0)) != wanted_count:
            return f"{backend} has {count} members, not {wanted_count}"
    return _member_difference(wanted.find_servers(touched), found.servers)


def _enabled(sections: dict[str, Section]) -> dict[str, Section]:
    return {name: section for name, section in sections.items() if section.setting("disabled") is None}


def _listener_difference(wanted: Configuration, listeners: dict[str, int]) -> str:
    expected = _enabled(wanted.frontends)
    if different := listeners.keys() ^ expected.keys():
        return f"listener {min(different)} is missing or unexpected"
    for name, section in expected.items():
        limit = section.setting("maxconn")
        if limit is not None and limit[0].isdecimal() and listeners[name] != int(limit[0]):
            return f"listener {name} accepts {listeners[name]} connections, not {limit[0]}"
    return ""


def _server_difference(server: Server, state: ServerState) -> str:
    if not _same_endpoint(server, state.address, state.port):
        return f"is at {state.address} port {state.port}, not at {server.address}"
    if server.checked:
        address, port = server.value("addr"), server.value("port")
        if _is_address(address) and not _same_address(address, state.check_address):
            return f"is monitored at {state.check_address}, not at {address}"
        if port.isdecimal() and int(port) != state.check_port:
            return f"is monitored on port {state.check_port}, not {port}"
    if "agent-check" in server.keywords:
        # With `agent-check`, the member itself sets its weight and its maintenance. Both may differ from the
        # configuration, so the agent does not compare them.
        return ""
    if (state.weight, state.maintenance) != (server.weight, server.disabled):
        wanted = (server.weight, server.disabled)
        return f"has (weight, maintenance) {(state.weight, state.maintenance)}, not {wanted}"
    return "gets no new requests" if state.draining else ""


def _same_endpoint(server: Server, host: str, port: int) -> bool:
    if server.address == f"{host}:{port}":
        # Most addresses have the same text in the configuration and in HAProxy's answer, so the faster comparison of
        # texts comes first.
        return True
    wanted, number = server.endpoint
    if not (_is_address(wanted) and number.isdecimal()):
        # No runtime command can change a host name, a socket path or a port offset, so such addresses are not compared.
        return True
    return _same_address(wanted, host) and int(number) == port


def _is_address(text: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(text)
        return True
    return False


def _same_address(one: str, other: str) -> bool:
    return one == other or (_is_address(other) and ipaddress.ip_address(one) == ipaddress.ip_address(other))
