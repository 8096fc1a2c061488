# SPDX-License-Identifier: Apache-2.0
"""What Octavia's worker has said so far, and the bundle that follows from it.

Invariant: pure, but for reading and writing one file. Octavia's API says a load balancer in pieces; `bundle` makes the
whole of them at any moment, so that each request is one more generation of the same kind as any other. No file's
content is in the state.
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
    """Everything the worker has said.

    ``wanted`` holds its parts as those of a bundle: the interfaces with all VIPs, the text that is to be served (not
    the one that was uploaded last), and how the amphora is one of a pair, whether or not keepalived was started.
    ``ports`` are those of the text.
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
    """An amphora that has been told nothing yet."""
    return State(Bundle(amphora_id, OCTAVIA_API_V1_ID, 0, None, (), {}, Limits(None, None), ()))


def recovered(served: Bundle) -> State:
    """What can be known from the bundle that is served, where the state itself is lost.

    The next plugging leaves the rest as it is; HAProxy's text is the worker's to upload again, and it does with each
    update.
    """
    return State(replace(served, generation=0, allowed=()), vrrp_started=served.vrrp is not None)


def bundle(state: State, generation: int, *, pair: bool) -> Bundle:
    """What the amphora is to be now.

    Args:
        pair: whether this is one of two, even if nobody has said how. Then the VIPs are not here before keepalived
            was started: the partner may have them.
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
    """Write it down.

    Raises:
        OSError: the disk is full, for example.
    """
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
    """The state that was written last; None where none was.

    Raises:
        MachineError: there is a file, but it cannot be read.
    """
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
        raise MachineError(f"read {path}", str(error), "The next update says most of it again.") from error


def _rule(port: int, network: str | None) -> Rule:
    return Rule(port, None if network is None else ipaddress.ip_network(network))
