# SPDX-License-Identifier: Apache-2.0
"""Two amphorae: one has the VIPs, the other takes them over.

Invariant: a role says who is preferred when both begin, and stays with an amphora for life. Who has the VIPs is another
matter: nobody gives them back only because the preferred one is well again.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar


class ActiveStandbyTopology:
    """ACTIVE_STANDBY."""

    name: ClassVar[str] = "ACTIVE_STANDBY"
    roles: ClassVar[tuple[str, ...]] = ("MASTER", "BACKUP")
    # 255 would say that the addresses are its own (RFC 9568, 5.2.4), and nothing could lower it any more.
    priorities: ClassVar[Mapping[str, int]] = MappingProxyType({"MASTER": 254, "BACKUP": 253})
