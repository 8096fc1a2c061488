# SPDX-License-Identifier: Apache-2.0
"""Conversion of an uploaded keepalived configuration to the `vrrp` of a bundle.

Invariant: no I/O. keepalived never gets this text: the agent renders its own configuration with the numbers and
addresses of the text. The agent takes VIPs and routes from the plug requests.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from typing import NoReturn

from amphora_agent.bundle import Host, Partner, Vrrp
from amphora_agent.errors import RequestRefused

_TOKEN = re.compile(r"[^\s{}]+|[{}]|\n")
_LARGEST_ROUTER_ID, _LARGEST_PRIORITY = 255, 254
_FASTEST, _SLOWEST = 0.05, 40.0
_USUAL_ADVERT = 1.0


def read(text: str, interfaces: Collection[str]) -> Vrrp:
    """Return the VRRP part of a bundle. Raises RequestRefused without exactly one complete instance."""
    instances = [body for head, body in _blocks(text) if head[:1] == ["vrrp_instance"]]
    if len(instances) != 1:
        _refuse(f"one vrrp_instance is needed, there are {len(instances)}")
    lines = _lines(instances[0])
    blocks = {head[0]: inner for head, inner in _blocks(" ".join(instances[0])) if head}
    interface = _word(lines, "interface")
    if interface not in interfaces:
        _refuse(f"there is no interface {interface!r}")
    try:
        local = ipaddress.ip_address(_word(lines, "unicast_src_ip"))
        peers = [ipaddress.ip_address(word) for word in blocks.get("unicast_peer", []) if word != "\n"]
        router, priority = int(_word(lines, "virtual_router_id")), int(_word(lines, "priority"))
        advert = float(lines.get("advert_int", [str(_USUAL_ADVERT)])[0])
    except (ValueError, IndexError) as error:
        _refuse(str(error))
    if any(peer.version != local.version for peer in peers):
        _refuse("the partners' addresses are of different families")
    if not 1 <= router <= _LARGEST_ROUTER_ID or not 1 <= priority <= _LARGEST_PRIORITY:
        _refuse(f"virtual_router_id {router} or priority {priority} is out of range")
    if not _FASTEST <= advert <= _SLOWEST:
        _refuse(f"advert_int {advert} is not between {_FASTEST} and {_SLOWEST} seconds")
    others = tuple(partner(peer) for peer in dict.fromkeys(peers) if peer != local)
    return Vrrp(interface, router, priority, advert, partner(local), others)


def partner(address: Host) -> Partner:
    """Return a VRRP peer. The name is the address, because Octavia's text has no ids of amphorae."""
    return Partner(str(address).replace(".", "-").replace(":", "-").strip("-"), address)


def _refuse(why: str) -> NoReturn:
    raise RequestRefused("Invalid request", f"keepalived.conf: {why}")


def _word(lines: dict[str, list[str]], keyword: str) -> str:
    words = lines.get(keyword) or []
    if len(words) != 1:
        _refuse(f"{keyword} with one value is needed")
    return words[0]


def _blocks(text: str) -> list[tuple[list[str], list[str]]]:
    """Return the outermost blocks, each with the words before the brace and the words inside."""
    found: list[tuple[list[str], list[str]]] = []
    head: list[str] = []
    body: list[str] = []
    depth = 0
    uncommented = "\n".join(re.split(r"[#!]", line, maxsplit=1)[0] for line in text.split("\n"))
    for token in _TOKEN.findall(uncommented):
        if token == "}":  # noqa: S105 (a brace, no secret)
            depth -= 1
            if depth < 0:
                _refuse("a block ends that did not begin")
            if depth == 0:
                found.append((head, body))
                head, body = [], []
                continue
        if depth:
            body.append(token)
        elif token == "\n":  # noqa: S105
            head = []
        elif token != "{":  # noqa: S105
            head = [*head, token]
        depth += token == "{"  # noqa: S105
    if depth:
        _refuse("a block does not end")
    return found


def _lines(body: list[str]) -> dict[str, list[str]]:
    lines: list[list[str]] = [[]]
    depth = 0
    for token in body:
        depth += (token == "{") - (token == "}")  # noqa: S105
        if token == "\n":  # noqa: S105
            lines.append([])
        elif not depth and token != "}":  # noqa: S105
            lines[-1].append(token)
    return {line[0]: line[1:] for line in lines if line}
