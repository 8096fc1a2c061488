# SPDX-License-Identifier: Apache-2.0
"""IP addresses as users write them, and which of them can be a member.

Invariant: one parser for the check and for the rendering, so both speak of the same address.  Results are
remembered: an address is parsed when it is first seen, not at every rendering of a thousand members.
"""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address

IPAddress = IPv4Address | IPv6Address

_REMEMBERED = 16_384


@lru_cache(maxsize=_REMEMBERED)
def parse(text: str) -> IPAddress:
    """An address from its text form.

    Args:
        text: IPv4 or IPv6, without port, prefix or scope.

    Raises:
        ValueError: anything else. `ipaddress` would take any text at all behind the `%` of a scope, hence the
            refusal.
    """
    if not isinstance(text, str) or "%" in text:
        raise ValueError("not an address, or an address with a scope")
    # The colon decides the family; `ip_address` would try both.
    return IPv6Address(text) if ":" in text else IPv4Address(text)


@lru_cache(maxsize=_REMEMBERED)
def objection(text: str) -> str | None:
    """Why this cannot be the address of a member, or None if it can.

    A member at 127.0.0.1 would be the amphora, one at 169.254.169.254 the cloud's metadata service, one at
    0.0.0.0 whatever the client asked for: a load balancer must not become a way to reach them.
    """
    try:
        parsed = parse(text)
    except ValueError:
        return "it is not an IP address"
    seen = parsed.ipv4_mapped if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped else parsed
    if seen.is_loopback or seen.is_link_local or seen.is_multicast or seen.is_unspecified:
        return "a loopback, link-local, multicast or unspecified address cannot be a member"
    # 0.0.0.0/8 is "this network", 240.0.0.0/4 is reserved and ends with the broadcast address.
    if isinstance(seen, IPv4Address) and (seen.is_reserved or int(seen) < 2**24):
        return "a reserved address cannot be a member"
    return None
