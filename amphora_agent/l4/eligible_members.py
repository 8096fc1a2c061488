# SPDX-License-Identifier: Apache-2.0
"""Who of a virtual server's members gets clients, and whose clients stay.

Invariant: pure. A member that is disabled or down gets nobody and keeps nobody; one of weight 0 gets nobody and keeps
whom it has. A backup gets somebody only while no other member of its family does.

Families are apart: a client of IPv4 cannot be handed to a member of IPv6, so each member serves the VIPs of its own
family only.
"""

from __future__ import annotations

from collections.abc import Mapping

from amphora_agent.l4.model import Member, VirtualServer

States = Mapping[tuple[str, str], bool]
"""By id of the virtual server and of the member: whether it is up. Who is not named is up."""


def kept(server: VirtualServer, up: States) -> tuple[Member, ...]:
    """Whose clients stay with them."""
    return tuple(one for one in server.members if one.enabled and up.get((server.id, one.id), True))


def serving(server: VirtualServer, up: States, version: int) -> tuple[Member, ...]:
    """Who gets new clients of a family, in the order of the bundle, each by its weight.

    Args:
        version: 4 or 6.
    """
    able = [one for one in kept(server, up) if one.weight and one.address.version == version]
    return tuple(one for one in able if not one.backup) or tuple(able)


def versions(server: VirtualServer) -> tuple[int, ...]:
    """The families that clients come by."""
    return tuple(sorted({address.version for address in server.addresses}))
