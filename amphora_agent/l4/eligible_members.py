# SPDX-License-Identifier: Apache-2.0
"""The members of a virtual server that keep their flows, and the members that get new flows.

Invariant: pure. A disabled or failed member keeps no flow and gets none. A member of weight 0 keeps its flows and gets
no new ones. A backup member gets flows only while no other member of its family does.

The kernel cannot forward an IPv4 client to an IPv6 member, so each member serves only the VIPs of its own family.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from amphora_agent.l4.model import Member, VirtualServer

MemberHealth = Mapping[tuple[str, str], bool]
"""Whether a member is up, by virtual server id and member id. A member without an entry is up."""


def retained_members(server: VirtualServer, up: MemberHealth) -> tuple[Member, ...]:
    """Return the members whose flows continue."""
    if not up:
        return tuple([one for one in server.members if one.enabled])
    return tuple([one for one in server.members if one.enabled and up.get((server.id, one.id), True)])


def serving_members(server: VirtualServer, up: MemberHealth, version: int) -> tuple[Member, ...]:
    """Return the members that get new flows of an IP version, in the order of the bundle."""
    return serving_of(retained_members(server, up), version)


def serving_of(retained: Sequence[Member], version: int) -> tuple[Member, ...]:
    """Return those of the retained members that get new flows of an IP version."""
    able = [one for one in retained if one.weight and one.address.version == version]
    return tuple([one for one in able if not one.backup]) or tuple(able)


def vip_families(server: VirtualServer) -> tuple[int, ...]:
    """Return the IP versions of the VIPs, sorted."""
    return tuple(sorted({address.version for address in server.addresses}))
