# SPDX-License-Identifier: Apache-2.0
"""IP addresses as users write them, and which of them can be a member.

Invariant: one parser for the check and for the rendering, so both speak of the same address.  Results are
remembered: an address is parsed when it is first seen, not at every rendering of a thousand members.
"""

from __future__ import annotations

import re
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

IPAddress = IPv4Address | IPv6Address
IPNetwork = IPv4Network | IPv6Network

_REMEMBERED = 16_384
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
# Nearly every member's address. What a regular expression sees takes a tenth of the time of `ipaddress`, which matters
# for thousands of them; what it does not see goes the long way.
ORDINARY = rf"(?!0\.|127\.|169\.254\.)(?:22[0-3]|2[01][0-9]|1[0-9]{{2}}|[1-9]?[0-9])(?:\.{_OCTET}){{3}}"
"""A pattern of IPv4 unicast addresses in canonical form that can be members."""
_ORDINARY = re.compile(ORDINARY)


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


def is_ordinary(text: str) -> bool:
    """Whether this is an IPv4 unicast address in canonical form that can be a member. False says nothing."""
    return _ORDINARY.fullmatch(text) is not None


@lru_cache(maxsize=_REMEMBERED)
def parse_network(text: str) -> IPNetwork:
    """A network from its text form, in canonical form: bits behind the prefix are dropped, as the API does.

    Raises:
        ValueError: it is not an address with a prefix length (or without: then it is one address).
    """
    if not isinstance(text, str) or "%" in text:
        raise ValueError("not a network, or one with a scope")
    return IPv6Network(text, strict=False) if ":" in text else IPv4Network(text, strict=False)


def objection(text: str) -> str | None:
    """Why this cannot be the address of a member, or None if it can."""
    return None if isinstance(text, str) and is_ordinary(text) else _objection(text)


@lru_cache(maxsize=_REMEMBERED)
def _objection(text: str) -> str | None:
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
