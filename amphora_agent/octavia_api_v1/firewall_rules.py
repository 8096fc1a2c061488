# SPDX-License-Identifier: Apache-2.0
"""Conversion of the worker's firewall rules to the allowed networks of a bundle.

Invariant: no I/O. Rules name permitted traffic. If a rule exists, the ports of HAProxy without a rule are closed. Rules
do not change VRRP and the stick-table peers, which the bundle's `vrrp` defines.
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
        return tuple(_rule(each) for each in _list(document) if each["protocol"] == "TCP")
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


def _list(document: Any) -> list[dict[str, Any]]:
    if not isinstance(document, list):
        raise TypeError("a list of rules is needed")
    for each in document:
        if not isinstance(each, dict) or set(each) != _KEYS or each["protocol"] not in _PROTOCOLS:
            raise ValueError(f"{each!r} is not a rule")
        port = each["port"]
        if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= _LARGEST_PORT:
            raise ValueError(f"port {port!r} is out of range")
    return document


def _rule(document: dict[str, Any]) -> Rule:
    cidr = document["cidr"]
    return Rule(document["port"], None if cidr in _EVERYBODY else ipaddress.ip_network(cidr, strict=False))
