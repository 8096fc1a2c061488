# SPDX-License-Identifier: Apache-2.0
"""What a running HAProxy says of listeners and servers, compared with what was wanted.

Invariant: pure. Whatever HAProxy can be asked for is compared: a change that was answered and not made is found here.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from amphora_agent.haproxy.config_parser import OWN, Configuration, Server

PROXIES, SERVERS = "show stat -1 3 -1", "show servers state"
"""What HAProxy is asked."""
# Columns of `show servers state` (management guide, 9.3).
_BACKEND, _NAME, _ADDRESS, _RUNNING, _ADMIN, _WEIGHT, _PORT = 1, 3, 4, 5, 6, 7, 18
_CHECK_PORT, _CHECK_ADDRESS, _FIELDS = 21, 22, 25
# Set while a server is disabled. Another bit, 0x04, remembers that the file said so, even after it was enabled.
_FORCED_MAINTENANCE, _FORCED_DRAIN = 0x01, 0x08
_UP = "2"
_PROXY, _KIND, _LIMIT, _STATUS = 0, 1, 6, 17
_LISTENS = ("OPEN", "FULL")
# The version, the names of the columns, and the first server.
_HEAD_LINES = 3
_MOST_SOUGHT = 20


class State(NamedTuple):
    """What HAProxy says of a server: an address that was never said is "-", a port 0."""

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
        """Whether it gets new requests."""
        return self.up and self.weight > 0 and not (self.maintenance or self.draining)


@dataclass(frozen=True)
class Loaded:
    """What HAProxy says it runs: listeners with their limits of connections, backends with how many servers."""

    frontends: dict[str, int]
    members: dict[str, int]

    def document(self) -> dict[str, object]:
        return {"listeners": sorted(self.frontends), "members": sum(self.members.values())}


NOTHING = Loaded({}, {})


def states(answer: str) -> dict[tuple[str, str], State]:
    """Every server of a load balancer, by backend and name."""
    found = {}
    for line in answer.splitlines():
        if (one := _state(line)) is not None:
            found[one[:2]] = one[2]
    return found


def _state(line: str) -> tuple[str, str, State] | None:
    fields = line.split(" ")
    if len(fields) < _FIELDS or line.startswith("#") or fields[_BACKEND].startswith(OWN):
        return None
    admin = int(fields[_ADMIN])
    state = State(
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


def some(answer: str, backend: str, names: Collection[str]) -> tuple[int, dict[tuple[str, str], State]]:
    """How many servers a backend has, and what is said of these; one line of 10,000 is found without reading them."""
    first = next(
        (line for line in answer.split("\n", _HEAD_LINES)[:_HEAD_LINES] if line.split(" ")[_BACKEND:2] == [backend]), ""
    )
    begin = f"\n{first.partition(' ')[0]} {backend} "
    count = answer.count(begin) if first else 0
    if len(names) > _MOST_SOUGHT:
        return count, {key: state for key, state in states(answer).items() if key[1] in names}
    found = {}
    for name in names:
        place = answer.find(f" {name} ")
        while place >= 0:
            line = answer[answer.rfind("\n", 0, place) + 1 : answer.find("\n", place)]
            if (one := _state(line)) is not None and one[:2] == (backend, name):
                found[one[:2]] = one[2]
                break
            place = answer.find(f" {name} ", place + 1)
    return count, found


def backends(answer: str) -> set[str]:
    """The backends of a load balancer."""
    rows = [line.split(",", _KIND + 1) for line in answer.splitlines()]
    return {
        row[_PROXY] for row in rows if len(row) > _KIND and row[_KIND] == "BACKEND" and not row[_PROXY].startswith(OWN)
    }


def limits(answer: str) -> dict[str, int]:
    """Every listener with the number of connections that it takes at once."""
    rows = [line.split(",", _LIMIT + 1) for line in answer.splitlines()]
    return {row[_PROXY]: int(row[_LIMIT] or 0) for row in rows if len(row) > _LIMIT and row[_KIND] == "FRONTEND"}


def deaf(answer: str) -> list[str]:
    """Listeners that take no connection although they are there: somebody has switched them off by hand."""
    rows = [line.split(",", _STATUS + 1) for line in answer.splitlines()]
    return sorted(
        row[_PROXY]
        for row in rows
        if len(row) > _STATUS
        and row[_KIND] == "FRONTEND"
        and row[_STATUS] not in _LISTENS
        and not row[_PROXY].startswith(OWN)
    )


def difference(wanted: Configuration, listeners: dict[str, int], servers: dict[tuple[str, str], State]) -> str:
    """The first thing that is not as wanted, in words; empty if everything is."""
    if why := _listeners(wanted, listeners):
        return why
    live = {name for name, section in wanted.backends.items() if section.setting("disabled") is None}
    members = {key: server for key, server in wanted.servers.items() if key[0] in live}
    if missing := members.keys() ^ servers.keys():
        backend, name = min(missing)
        return f"member {name} of {backend} is not as wanted"
    for (backend, name), server in members.items():
        if why := _unlike(server, servers[backend, name]):
            return f"member {name} of {backend} {why}"
    return ""


@dataclass(frozen=True)
class Glance:
    """What HAProxy says after some servers were changed.

    Attributes:
        listeners: with their limits.
        backends: all of them.
        members: how many servers there are in those where some were changed.
        servers: the changed ones that are there.
    """

    listeners: dict[str, int]
    backends: set[str]
    members: dict[str, int]
    servers: dict[tuple[str, str], State]


def changed_difference(wanted: Configuration, touched: Collection[tuple[str, str]], found: Glance) -> str:
    """The same as `difference`, where nothing but servers was touched since that found none.

    Args:
        touched: the servers that were, by backend and name.
    """
    if why := _listeners(wanted, found.listeners):
        return why
    live = {name for name, section in wanted.backends.items() if section.setting("disabled") is None}
    if different := live ^ found.backends:
        return f"backend {min(different)} is not as wanted"
    for backend in sorted({backend for backend, _ in touched}):
        section = wanted.backends[backend]
        if (count := found.members.get(backend, 0)) != len(section.servers):
            return f"{backend} has {count} members, not {len(section.servers)}"
        names = {name for each, name in touched if each == backend}
        members = {server.name: server for server in section.servers if server.name in names}
        if missing := members.keys() ^ {name for each, name in found.servers if each == backend}:
            return f"member {min(missing)} of {backend} is not as wanted"
        for name, server in members.items():
            if why := _unlike(server, found.servers[backend, name]):
                return f"member {name} of {backend} {why}"
    return ""


def _listeners(wanted: Configuration, listeners: dict[str, int]) -> str:
    expected = {name: section for name, section in wanted.frontends.items() if section.setting("disabled") is None}
    if different := listeners.keys() ^ expected.keys():
        return f"listener {min(different)} is not as wanted"
    for name, section in expected.items():
        limit = section.setting("maxconn")
        if limit is not None and limit[0].isdecimal() and listeners[name] != int(limit[0]):
            return f"listener {name} takes {listeners[name]} connections, not {limit[0]}"
    return ""


def _unlike(server: Server, state: State) -> str:
    """What of a server is not as wanted."""
    if not _same(server.address, state.address, state.port):
        return f"is at {state.address} port {state.port}, not at {server.address}"
    if server.checked:
        address, port = server.value("addr"), server.value("port")
        if _is_address(address) and not _equal(address, state.check_address):
            return f"is monitored at {state.check_address}, not at {address}"
        if port.isdecimal() and int(port) != state.check_port:
            return f"is monitored on port {state.check_port}, not {port}"
    if "agent-check" in server.keywords:  # it says itself how it is
        return ""
    if (state.weight, state.maintenance) != (server.weight, server.disabled):
        wanted = (server.weight, server.disabled)
        return f"has (weight, maintenance) {(state.weight, state.maintenance)}, not {wanted}"
    return "gets no new requests" if state.draining else ""


def _same(address: str, host: str, port: int) -> bool:
    if address == f"{host}:{port}":  # most of them, and there may be 10,000
        return True
    wanted, _, number = address.rpartition(":")
    wanted = wanted.removeprefix("[").removesuffix("]")
    if not (_is_address(wanted) and number.isdecimal()):
        return True  # a name, a socket, a port that is added to the client's: nothing that is ever changed
    return _equal(wanted, host) and int(number) == port


def _is_address(text: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(text)
        return True
    return False


def _equal(one: str, other: str) -> bool:
    return one == other or (_is_address(other) and ipaddress.ip_address(one) == ipaddress.ip_address(other))
