# SPDX-License-Identifier: Apache-2.0
"""How many amphorae serve a load balancer, and as what: what every topology says.

Invariant: a topology is pure. It says what is wanted; the plan finds out what is missing, and the steps do it.
"""

from __future__ import annotations

from typing import ClassVar, Protocol


class Topology(Protocol):
    """A topology; its entry point (group amphora_driver.topology) carries its name.

    Attributes:
        name: as users and operators know it (`loadbalancer_topology`).
        roles: what the amphorae of a load balancer are to each other, one word for each amphora that is wanted.
    """

    name: ClassVar[str]
    roles: ClassVar[tuple[str, ...]]
