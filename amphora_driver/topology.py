# SPDX-License-Identifier: Apache-2.0
"""Topologies: the number and the roles of the amphorae of a load balancer.

Invariant: a topology is pure. It states the desired roles; the plan computes the steps.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    # The VRRP priority 255 marks the owner of the addresses (RFC 9568, section 5.2.4). keepalived cannot lower the
    # priority 255, so both priorities are below 255.
    priorities: ClassVar[Mapping[str, int]] = MappingProxyType({"MASTER": 254, "BACKUP": 253})
