# SPDX-License-Identifier: Apache-2.0
"""The actions that change a running HAProxy.

Invariant: pure data. An action has the name of a file, never its content, so that actions can be compared and logged.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from amphora_agent.haproxy.config_parser import Server

Store = Literal["cert", "ca-file", "crl-file"]
"""HAProxy's store for a file, as in the command ``set ssl ...`` (management guide, 9.3)."""


@dataclass(frozen=True)
class AddServer:
    """Add a server.

    With `awaits_cookie` the server gets no requests before `ComputeCookies`, and with `awaits_check` none before its
    first successful check.
    """

    backend: str
    server: Server
    awaits_cookie: bool = False
    awaits_check: bool = False


@dataclass(frozen=True)
class ReplaceServer:
    """Remove a server and add it with other keywords, while one of the `others` serves.

    An ``idle`` server was disabled before and gets no requests, so no other server has to serve.
    """

    backend: str
    server: Server
    others: frozenset[str]
    idle: bool


@dataclass(frozen=True)
class RemoveServer:
    """Remove a server; a disabled server needs no drain."""

    backend: str
    name: str
    disabled: bool


@dataclass(frozen=True)
class SetWeight:
    """Change the weight of a server."""

    backend: str
    name: str
    weight: int


@dataclass(frozen=True)
class SetMaintenance:
    """Disable or enable a server."""

    backend: str
    name: str
    maintenance: bool


@dataclass(frozen=True)
class SetAddress:
    """Change the address of a server."""

    backend: str
    name: str
    address: str
    port: int


@dataclass(frozen=True)
class SetCheck:
    """Change the address or port of a server's check; None leaves the value as it is."""

    backend: str
    name: str
    address: str | None
    port: int | None


@dataclass(frozen=True)
class SetServerMaxconn:
    """Change the connection limit of a server; 0 for no limit."""

    backend: str
    name: str
    maxconn: int


@dataclass(frozen=True)
class SetFrontendMaxconn:
    """Change the connection limit of a listener; None for the limit of the process."""

    frontend: str
    maxconn: int | None


@dataclass(frozen=True)
class ComputeCookies:
    """Compute the dynamic cookies of new servers, and then enable these servers."""

    backend: str
    key: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class LoadFile:
    """Load a file into HAProxy's memory; it replaces a former content with this name."""

    store: Store
    name: str


@dataclass(frozen=True)
class UnloadFile:
    """Remove an unused file from HAProxy's memory, unless HAProxy still uses it."""

    store: Store
    name: str


@dataclass(frozen=True)
class AddToCrtList:
    """Add a certificate to a listener's crt-list."""

    crt_list: str
    name: str


@dataclass(frozen=True)
class RemoveFromCrtList:
    """Remove a certificate from a listener's crt-list."""

    crt_list: str
    name: str


@dataclass(frozen=True)
class AddTicketKeys:
    """Add the last `count` ticket keys of a file; HAProxy drops the same number of the oldest keys."""

    name: str
    count: int


FileAction = LoadFile | UnloadFile | AddToCrtList | RemoveFromCrtList | AddTicketKeys
ServerChange = SetWeight | SetMaintenance | SetAddress | SetCheck | SetServerMaxconn
SetAction = ServerChange | SetFrontendMaxconn
Action = FileAction | SetAction | AddServer | ComputeCookies | RemoveServer | ReplaceServer


def changed_servers(actions: Iterable[Action]) -> set[tuple[str, str]]:
    """Return the servers that actions change, by backend and name."""
    found: set[tuple[str, str]] = set()
    for action in actions:
        match action:
            case AddServer() | ReplaceServer():
                found.add((action.backend, action.server.name))
            case ComputeCookies():
                found |= {(action.backend, name) for name in action.names}
            case RemoveServer() | SetWeight() | SetMaintenance() | SetAddress() | SetCheck() | SetServerMaxconn():
                found.add((action.backend, action.name))
    return found
