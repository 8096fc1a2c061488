# SPDX-License-Identifier: Apache-2.0
"""The firewall rules that Octavia's worker sends, as what a bundle allows.

Invariant: pure. Rules name what is let in; as soon as there are any, a port that HAProxy listens on and no rule names
is closed. VRRP and the entries of stick tables are the bundle's `vrrp`, no rule opens or closes them.
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
    """One TCP port and who reaches it; no network means everybody."""

    port: int
    network: Network | None


def read(document: Any) -> tuple[Rule, ...]:
    """The rules of a body of PUT interface/<address>/rules.

    Raises:
        RequestRefused: the body is not one.
    """
    try:
        return tuple(_rule(each) for each in _list(document) if each["protocol"] == "TCP")
    except (ValueError, TypeError, KeyError) as error:
        raise RequestRefused("Invalid rules information", str(error)) from error


def allowed(rules: Iterable[Rule], ports: Collection[int]) -> tuple[AllowedSources, ...]:
    """What a bundle says for these rules.

    Args:
        ports: those that HAProxy listens on.
    """
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
