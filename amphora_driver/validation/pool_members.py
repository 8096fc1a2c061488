# SPDX-License-Identifier: Apache-2.0
"""Validation of all members of one pool together.

Invariant: a pool contains each server once, in any form of its address. A duplicate would have two weights, two health
checks and two sets of statistics.
"""

from __future__ import annotations

import contextlib

from amphora_driver.errors import UnsupportedOption
from amphora_driver.model.loadbalancer import Pool
from amphora_driver.validation import addresses


def check_members_distinct(pool: Pool) -> None:
    """Raise UnsupportedOption for two members of a pool with the same address and port."""
    seen: set[tuple[object, int]] = set()
    for member in pool.members:
        address: object = member.address
        # An invalid address is ignored here, because `options.check_member` refuses it.
        with contextlib.suppress(ValueError):
            address = addresses.parse_address(member.address)
        endpoint = (address, member.protocol_port)
        if endpoint in seen:
            raise UnsupportedOption(
                f"add two members of pool {pool.id} with address {member.address} and port {member.protocol_port}",
                "a pool can contain a server only once",
                "Remove one of them, or use another address or port.",
            )
        seen.add(endpoint)
