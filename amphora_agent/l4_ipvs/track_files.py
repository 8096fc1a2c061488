# SPDX-License-Identifier: Apache-2.0
"""What keepalived is told of members while it runs: two small files for each.

Invariant: pure. A member is known by ids only, so that a file's name needs no quoting. keepalived starts from a weight
of `BASE`; the files say the rest, so that states and weights need no reload, and a reload no states.

    ID.ID.down      1: it is taken out of IPVS, and its flows are given to others; 0: it is in
    ID.ID.weight    what is added to `BASE`: -1 keeps its flows and gives it no more

Who is down has no weight either: keepalived 2.2.7 puts members that are down back for some milliseconds when it reads
its configuration again, and nobody must be sent there meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

from amphora_agent.l4 import eligible_members
from amphora_agent.l4.eligible_members import States
from amphora_agent.l4.model import Member, VirtualServer

DIRECTORY = "lvs"
DOWN, WEIGHT = "down", "weight"
BASE = 1
# Maglev hashing: when a member goes only its own clients move, and two amphorae come to the same one.
SCHEDULERS = {"ROUND_ROBIN": "wrr", "LEAST_CONNECTIONS": "wlc", "SOURCE_IP": "mh", "SOURCE_IP_PORT": "mh"}
OUT = {DOWN: "1\n", WEIGHT: f"{-BASE}\n"}


def name(server_id: str, member_id: str, what: str) -> str:
    """Of the file, and of what keepalived calls it."""
    return f"{server_id}.{member_id}.{what}"


def weights(server: VirtualServer, up: States) -> dict[str, int | None]:
    """By id of the member: its weight now, 0 if it keeps what it has, None if it is out."""
    kept = {one.id for one in eligible_members.kept(server, up)}
    serving = {one.id for version in (4, 6) for one in eligible_members.serving(server, up, version)}
    return {one.id: (one.weight if one.id in serving else 0) if one.id in kept else None for one in server.members}


def contents(servers: Sequence[VirtualServer], up: States) -> dict[str, str]:
    """By name, in the order in which they are to be written: nobody comes in with a weight of before."""
    found: dict[str, str] = {}
    for server in servers:
        for member, weight in weights(server, up).items():
            down, share = name(server.id, member, DOWN), name(server.id, member, WEIGHT)
            if weight is None:
                found |= {down: OUT[DOWN], share: OUT[WEIGHT]}
            else:
                found |= {share: f"{weight - BASE}\n", down: "0\n"}
    return found


def members(server: VirtualServer, version: int) -> tuple[Member, ...]:
    """Whom keepalived is told of for VIPs of a family, in an order that does not depend on the bundle's."""
    found = (one for one in server.members if one.enabled and one.address.version == version)
    return tuple(sorted(found, key=lambda one: one.id))
