# SPDX-License-Identifier: Apache-2.0
"""The state from all requests of Octavia's worker, and its conversion to a bundle.

Octavia's API configures a load balancer in parts, so that each request is one more generation. The state contains no
content of files.
"""

from __future__ import annotations

import ipaddress
import json
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from amphora_agent.bundle import OCTAVIA_API_V1_ID, Bundle, Interface, Limits, parse_stored
from amphora_agent.errors import MachineError
from amphora_agent.octavia_api_v1 import firewall_rules as rules_of
from amphora_agent.octavia_api_v1.firewall_rules import Rule
from amphora_agent.paths import write_atomically


@dataclass(frozen=True)
class State:
    """The state from all requests of the worker.

    ``wanted`` has the interfaces with all VIPs, the text to serve (not the last upload), and the VRRP part, also before
    the start of keepalived. ``ports`` are the ports of the text.
    """

    wanted: Bundle
    load_balancer_id: str | None = None
    uploaded: str | None = None
    vrrp_started: bool = False
    ports: frozenset[int] = frozenset()
    rules: tuple[Rule, ...] | None = None

    @property
    def interfaces(self) -> tuple[Interface, ...]:
        return self.wanted.interfaces


def blank(amphora_id: uuid.UUID) -> State:
    """Return the state of an amphora without any request."""
    return State(Bundle(amphora_id, OCTAVIA_API_V1_ID, 0, None, (), {}, Limits(None, None), ()))


def recovered(served: Bundle) -> State:
    """Return the state from the served bundle, after a loss of the stored state.

    The next plug request changes nothing else. The worker uploads HAProxy's text again with each update.
    """
    return State(replace(served, generation=0, allowed=()), vrrp_started=served.vrrp is not None)


def bundle(state: State, generation: int, *, pair: bool) -> Bundle:
    """Return the bundle of a state.

    An amphora of a pair has no VIPs until keepalived starts, because its partner may have the VIPs.
    """
    interfaces = state.interfaces
    if (pair or state.wanted.vrrp is not None) and not state.vrrp_started:
        interfaces = tuple(replace(each, vips=()) for each in interfaces)
    return replace(
        state.wanted,
        generation=generation,
        interfaces=interfaces,
        vrrp=state.wanted.vrrp if state.vrrp_started else None,
        allowed=() if state.rules is None else rules_of.allowed(state.rules, state.ports),
    )


def write(path: Path, state: State) -> None:
    """Write the state to a file. Raises OSError."""
    document: dict[str, Any] = {
        "wanted": state.wanted.without_contents().to_document(),
        "load_balancer_id": state.load_balancer_id,
        "uploaded": state.uploaded,
        "vrrp_started": state.vrrp_started,
        "ports": sorted(state.ports),
        "rules": None
        if state.rules is None
        else [[rule.port, None if rule.network is None else str(rule.network)] for rule in state.rules],
    }
    write_atomically(path, json.dumps(document))


def read(path: Path) -> State | None:
    """Return the stored state; None without a file. Raises MachineError for an unreadable file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        rules = found["rules"]
        return State(
            wanted=parse_stored(found["wanted"]),
            load_balancer_id=found["load_balancer_id"],
            uploaded=found["uploaded"],
            vrrp_started=found["vrrp_started"],
            ports=frozenset(found["ports"]),
            rules=None if rules is None else tuple(_rule(*each) for each in rules),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MachineError(
            f"read {path}", str(error), "Octavia's worker sends most of it again with its next update."
        ) from error


def _rule(port: int, network: str | None) -> Rule:
    return Rule(port, None if network is None else ipaddress.ip_network(network))
