# SPDX-License-Identifier: Apache-2.0
"""The members of one pool, looked at together.

Invariant: pure. However its address is written, a server is in a pool once: twice would be two weights, two health
checks and two statistics for the same thing.
"""

from __future__ import annotations

from amphora_driver.errors import UnsupportedOption
from amphora_driver.model.loadbalancer import Pool
from amphora_driver.validation import addresses


def check_distinct(pool: Pool) -> None:
    """Make sure that no two members of a pool are at one address and port.

    Raises:
        UnsupportedOption: two are.
    """
    seen: set[tuple[object, int]] = set()
    for member in pool.members:
        endpoint = (_parsed(member.address), member.protocol_port)
        if endpoint in seen:
            raise UnsupportedOption(
                f"have two members of pool {pool.id} at {member.address} port {member.protocol_port}",
                "a pool has a server once",
                "Leave one of them out, or choose another address or port.",
            )
        seen.add(endpoint)


def _parsed(address: str) -> object:
    try:
        return addresses.parse(address)
    except ValueError:
        # Refused for itself, by the member's own check.
        return address
