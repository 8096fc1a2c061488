# SPDX-License-Identifier: Apache-2.0
"""The steps by which a running HAProxy is changed.

Invariant: pure data. A step never holds the content of a file, only its name, so that steps can be shown, compared and
logged; who carries them out reads the content from the directory that the new configuration names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from amphora_agent.haproxy.config_parser import Server

Store = Literal["cert", "ca-file", "crl-file"]
"""Where HAProxy keeps a file: its own word in ``set ssl ...`` (management guide, 9.3)."""


@dataclass(frozen=True)
class AddServer:
    """A server that is new.

    One that `waits` gets no requests before a later step lets it have some, one that is `unproven` none before its
    first good check.
    """

    backend: str
    server: Server
    waits: bool = False
    unproven: bool = False


@dataclass(frozen=True)
class ReplaceServer:
    """A server with other keywords: it is taken away and added again while `others` serve.

    One that was ``idle`` (disabled before) serves nobody, and nobody has to.
    """

    backend: str
    server: Server
    others: frozenset[str]
    idle: bool


@dataclass(frozen=True)
class RemoveServer:
    """A server that is no longer wanted; one that was disabled has nothing to drain."""

    backend: str
    name: str
    disabled: bool


@dataclass(frozen=True)
class SetWeight:
    """A server whose share changes."""

    backend: str
    name: str
    weight: int


@dataclass(frozen=True)
class SetMaintenance:
    """A server that is disabled, or no longer."""

    backend: str
    name: str
    maintenance: bool


@dataclass(frozen=True)
class SetAddress:
    """A server that is somewhere else."""

    backend: str
    name: str
    address: str
    port: int


@dataclass(frozen=True)
class SetCheck:
    """A server whose check goes somewhere else; None is what is not said of it, before and after."""

    backend: str
    name: str
    address: str | None
    port: int | None


@dataclass(frozen=True)
class SetServerMaxconn:
    """How many connections a server takes at once; 0 for as many as come."""

    backend: str
    name: str
    maxconn: int


@dataclass(frozen=True)
class SetFrontendMaxconn:
    """How many connections a listener takes at once; None for as many as the process."""

    frontend: str
    maxconn: int | None


@dataclass(frozen=True)
class NameServers:
    """The new servers' values of the dynamic cookie are to be computed, and then they get requests."""

    backend: str
    key: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class LoadFile:
    """HAProxy's memory is to hold what is now in a file, whether or not it held something by that name."""

    store: Store
    name: str


@dataclass(frozen=True)
class ForgetFile:
    """Nothing uses a file any more: it goes from HAProxy's memory, if HAProxy lets it go."""

    store: Store
    name: str


@dataclass(frozen=True)
class ListCertificate:
    """A certificate that is new in a listener's list."""

    listed: str
    name: str


@dataclass(frozen=True)
class UnlistCertificate:
    """A certificate that goes from a listener's list."""

    listed: str
    name: str


@dataclass(frozen=True)
class AddTicketKeys:
    """The last `count` keys of a file follow those that are known; as many of the oldest are forgotten."""

    name: str
    count: int


FileStep = LoadFile | ForgetFile | ListCertificate | UnlistCertificate | AddTicketKeys
ServerStep = (
    AddServer
    | NameServers
    | RemoveServer
    | ReplaceServer
    | SetWeight
    | SetMaintenance
    | SetAddress
    | SetCheck
    | SetServerMaxconn
)
Step = FileStep | ServerStep | SetFrontendMaxconn


def touched(steps: Iterable[Step]) -> set[tuple[str, str]]:
    """The servers that steps change, by backend and name."""
    found: set[tuple[str, str]] = set()
    for step in steps:
        match step:
            case AddServer() | ReplaceServer():
                found.add((step.backend, step.server.name))
            case NameServers():
                found |= {(step.backend, name) for name in step.names}
            case RemoveServer() | SetWeight() | SetMaintenance() | SetAddress() | SetCheck() | SetServerMaxconn():
                found.add((step.backend, step.name))
            case _:
                pass
    return found
