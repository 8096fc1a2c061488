# SPDX-License-Identifier: Apache-2.0
"""Topologies: the number and the roles of the amphorae of a load balancer.

Invariant: a topology is pure. It states the desired roles; the plan computes the steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import ClassVar, Protocol


class Topology(Protocol):
    """A topology; its entry point (group amphora_driver.topology) has its name.

    `roles` has one role for each amphora of a load balancer. The first role counts as the VIP holder while no amphora
    reports that it holds the VIPs. `priorities` has the VRRP priority of each role (RFC 9568).
    """

    name: ClassVar[str]
    roles: ClassVar[tuple[str, ...]]
    priorities: ClassVar[Mapping[str, int]]


class SingleTopology:
    """SINGLE: one amphora. A failed amphora is replaced by a new one."""

    name: ClassVar[str] = "SINGLE"
    roles: ClassVar[tuple[str, ...]] = ("STANDALONE",)
    priorities: ClassVar[Mapping[str, int]] = MappingProxyType({})


class ActiveStandbyTopology:
    """ACTIVE_STANDBY: two amphorae; the standby takes over the VIPs.

    A role states the preferred VIP holder at the first election and does not change during the life of an amphora. The
    VIPs do not move back when the preferred amphora recovers.
    """

    name: ClassVar[str] = "ACTIVE_STANDBY"
    roles: ClassVar[tuple[str, ...]] = ("MASTER", "BACKUP")
    # VRRP reserves priority 255 for the owner of the addresses (RFC 9568, section 5.2.4), and keepalived cannot lower
    # it. So both priorities are below 255.
    priorities: ClassVar[Mapping[str, int]] = MappingProxyType({"MASTER": 254, "BACKUP": 253})


def effective_priorities(desired: Topology, present: Collection[str], known: Iterable[Topology]) -> dict[str, int]:
    """Return the VRRP priorities by role, also while a load balancer changes its topology.

    The result is empty without VRRP. If the desired topology has no VRRP, amphorae of a former topology hand the VIPs
    over by VRRP before their removal. Until then the desired roles have a lower priority than the former roles.
    Amphorae of a former topology without VRRP cannot hand over the VIPs, so the result does not have their roles.

    Args:
        desired: the recorded topology of the load balancer.
        present: the roles of the amphorae that exist and may have the VIPs.
        known: every topology that the load balancer may have had.
    """
    if desired.priorities or set(present) <= set(desired.roles):
        return dict(desired.priorities)
    former = {role: priority for one in known for role, priority in one.priorities.items() if role in present}
    return former | dict.fromkeys(desired.roles, min(former.values()) - 1) if former else {}
