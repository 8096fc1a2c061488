# SPDX-License-Identifier: Apache-2.0
"""How many amphorae serve a load balancer, and as what: what every topology says.

Invariant: a topology is pure. It says what is wanted; the plan finds out what is missing, and the steps do it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol


class Topology(Protocol):
    """A topology; its entry point (group amphora_driver.topology) carries its name.

    Attributes:
        name: as users and operators know it (`loadbalancer_topology`).
        roles: what the amphorae of a load balancer are to each other, one word for each amphora that is wanted. The
            first one counts as the one that has the VIPs where nobody says who does.
        priorities: by role, who is preferred to have the VIPs (VRRP, RFC 9568); empty where nobody takes over.
    """

    name: ClassVar[str]
    roles: ClassVar[tuple[str, ...]]
    priorities: ClassVar[Mapping[str, int]]
