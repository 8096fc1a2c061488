# SPDX-License-Identifier: Apache-2.0
"""Conversion of the worker's firewall rules to the allowed networks of a bundle.

Invariant: no I/O. If a rule exists, the ports of HAProxy without a rule are closed. The bundle's `vrrp` opens the ports
of VRRP and the stick-table peers.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from amphora_agent.bundle import AllowedSources, Network
from amphora_agent.errors import RequestRefused

_KEYS = {"protocol", "cidr", "port"}
_PROTOCOLS = {"TCP", "UDP", "SCTP", "vrrp"}
_LARGEST_PORT = 65535
_EVERYBODY = (None, "0.0.0.0/0")


@dataclass(frozen=True)
class Rule:
    """One TCP port and the permitted network; None permits all clients."""

    port: int
    network: Network | None


def read(document: Any) -> tuple[Rule, ...]:
    """Return the rules in the body of PUT interface/<address>/rules. Raises RequestRefused."""
    try:
        return tuple(filter(None, map(_rule, _list(document))))
    except (ValueError, TypeError, KeyError) as error:
        raise RequestRefused("Invalid rules information", str(error)) from error


def allowed(rules: Iterable[Rule], ports: Collection[int]) -> tuple[AllowedSources, ...]:
    """Return the allowed networks of a bundle for these rules and the ports of HAProxy's listeners."""
    by_port: dict[int, list[Network | None]] = {port: [] for port in ports}
    for rule in rules:
        by_port.setdefault(rule.port, []).append(rule.network)
    return tuple(
        AllowedSources(port, tuple(network for network in dict.fromkeys(networks) if network is not None))
        for port, networks in sorted(by_port.items())
        if None not in networks
    )


def _list(document: Any) -> list[Any]:
    if not isinstance(document, list):
        raise TypeError("a list of rules is needed")
    return document


def _rule(document: Any) -> Rule | None:
    """Return a valid rule for TCP; None for another protocol."""
    if not isinstance(document, dict) or set(document) != _KEYS or document["protocol"] not in _PROTOCOLS:
        raise ValueError(f"{document!r} is not a rule")
    port, cidr = document["port"], document["cidr"]
    if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= _LARGEST_PORT:
        raise ValueError(f"port {port!r} is out of range")
    if document["protocol"] != "TCP":
        return None
    return Rule(port, None if cidr in _EVERYBODY else ipaddress.ip_network(cidr, strict=False))
