# SPDX-License-Identifier: Apache-2.0
"""What virtual servers serve: listeners and pools of UDP and SCTP, which never pass through HAProxy.

Invariant: pure, and one answer for the door and for the bundle, as in `options`. What depends on more than one object
(a pool with its monitor, its members with the VIPs, its algorithm with the amphora) is asked here too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address
from typing import NamedTuple

from amphora_driver.model.enums import Algorithm, MonitorType, PersistenceType
from amphora_driver.model.loadbalancer import Listener, Pool, SessionPersistence, Vip
from amphora_driver.validation import addresses
from amphora_driver.validation.unsupported import absent, refuse

MONITORS = (MonitorType.UDP_CONNECT, MonitorType.SCTP, MonitorType.TCP, MonitorType.HTTP, MonitorType.PING)
"""As Octavia's API has it, for UDP and SCTP alike: a member may be asked at a port where it speaks something else."""
ONLY_HERE = (MonitorType.UDP_CONNECT, MonitorType.SCTP)
DEFAULT_TIMEOUT = 360
"""Seconds a client stays with its member where nobody says how long: Octavia's own default."""
LONGEST_TIMEOUT = 31 * 86_400
"""Longest persistence time-out in seconds: 31 days."""
WHOLE_V4, WHOLE_V6 = 32, 128

_TLS = (
    "default_tls_container_ref",
    "sni_container_refs",
    "client_ca_tls_container_ref",
    "client_crl_container_ref",
)
_LENGTH = re.compile(r"[1-9][0-9]{0,2}")
_GRANULARITY = "pool option session_persistence persistence_granularity"


class Prefixes(NamedTuple):
    """How many leading bits of a client's address are the client."""

    v4: int
    v6: int


def check_listener(listener: Listener) -> None:
    """Refuse options of a UDP or SCTP listener that would promise encryption.

    What Octavia fills in by itself (versions, ciphers, time-outs) says nothing here and is taken.

    Raises:
        UnsupportedOption: naming the option.
    """
    for name in _TLS:
        absent(f"listener option {name}", getattr(listener, name), f"{listener.protocol} carries no TLS")


def check_persistence(pool: Pool, persistence: SessionPersistence) -> None:
    """Check what keeps the clients of a UDP or SCTP pool.

    Raises:
        UnsupportedOption: an option, or a value of it, is not served.
    """
    option = "pool option session_persistence"
    if persistence.type is not PersistenceType.SOURCE_IP:
        reason = f"{pool.protocol} has no cookies"
        refuse(option, str(persistence.type), reason, "Use SOURCE_IP.")
    absent(f"{option} cookie_name", persistence.cookie_name, f"{pool.protocol} has no cookies")
    timeout(persistence)
    prefixes(persistence.persistence_granularity)


def timeout(persistence: SessionPersistence) -> int:
    """Seconds a client stays with its member after it was heard last; 0 is the default, as Octavia has it.

    Raises:
        UnsupportedOption: it is out of range.
    """
    seconds = persistence.persistence_timeout or DEFAULT_TIMEOUT
    if type(seconds) is not int or not 1 <= seconds <= LONGEST_TIMEOUT:
        refuse(
            "pool option session_persistence persistence_timeout",
            seconds,
            f"it is not a whole number of seconds from 1 to {LONGEST_TIMEOUT} (31 days)",
            "Choose a value in that range.",
        )
    return seconds


def prefixes(granularity: str | None) -> Prefixes:
    """How much of an address is the client.

    Octavia has one option for both families, written as an address: a mask of the one says nothing of clients of the
    other, and those count each for themselves.

    Args:
        granularity: an IPv4 mask (255.255.255.0), an IPv6 mask (ffff:ffff::), or the length of an IPv6 prefix.

    Raises:
        UnsupportedOption: it is none of these, or empty.
    """
    if not granularity:
        return Prefixes(WHOLE_V4, WHOLE_V6)
    if isinstance(granularity, str) and _LENGTH.fullmatch(granularity) and int(granularity) <= WHOLE_V6:
        return Prefixes(WHOLE_V4, int(granularity))
    try:
        mask = addresses.parse(granularity)
    except ValueError:
        refuse(_GRANULARITY, granularity, "it is not a mask", "Use one like 255.255.255.0 or ffff:ffff:ffff:ffff::.")
    length = _length(mask)
    if length is None:
        reason = "the bits of a client's address have to be the first ones, and at least one"
        refuse(_GRANULARITY, granularity, reason, "Use a mask like 255.255.255.0 or ffff:ffff:ffff:ffff::.")
    return Prefixes(length, WHOLE_V6) if mask.version == 4 else Prefixes(WHOLE_V4, length)


def _length(mask: IPv4Address | IPv6Address) -> int | None:
    """How many ones a mask begins with; None if others follow a zero, or there is none."""
    bits = f"{int(mask):0{mask.max_prefixlen}b}"
    ones = bits.rstrip("0")
    return len(ones) if ones and "0" not in ones else None


def check_monitor(pool: Pool) -> None:
    """Make sure that the members of a pool can be checked as its monitor says, if it has one.

    Raises:
        UnsupportedOption: members of this kind of pool cannot.
    """
    if pool.healthmonitor is None:
        return
    kind = pool.healthmonitor.type
    if pool.uses_l4 and kind not in MONITORS:
        reason = f"members of {pool.protocol} pools are not checked so"
        refuse("health monitor type", str(kind), reason, f"Use one of {', '.join(map(str, MONITORS))}.")
    if not pool.uses_l4 and kind in ONLY_HERE:
        reason = f"only members of UDP and SCTP pools are checked so, and pool {pool.id} is {pool.protocol}"
        refuse("health monitor type", str(kind), reason, "Use TCP, HTTP, HTTPS, TLS-HELLO or PING.")


def check_algorithm(pool: Pool) -> None:
    """Refuse a UDP or SCTP pool that has LEAST_CONNECTIONS together with session persistence.

    An amphora selects the member of a persistent client by the client's address. The number of flows has no effect.

    Raises:
        UnsupportedOption: the pool has both.
    """
    if not pool.uses_l4 or pool.lb_algorithm is not Algorithm.LEAST_CONNECTIONS or pool.session_persistence is None:
        return
    refuse(
        "pool option lb_algorithm",
        str(pool.lb_algorithm),
        f"for {pool.protocol} with session_persistence the client's address selects the member, so the number of"
        " connections has no effect",
        "Use SOURCE_IP, or no session_persistence.",
    )


def check_families(pool: Pool, vips: Iterable[Vip]) -> None:
    """Make sure that every member of a UDP or SCTP pool can get clients.

    Packets keep their family on the way, so that members of IPv6 serve clients of IPv6 VIPs only. Where an address of
    the VIPs is not known yet, nothing is said. A pool without a listener has no clients: its members may be of any
    family until a listener would serve it.

    Args:
        pool: the default pool of a listener, with the members to look at.
        vips: of its load balancer.

    Raises:
        UnsupportedOption: naming the first member whose family no VIP has.
    """
    known = [vip.address for vip in vips]
    if not pool.uses_l4 or not pool.members or not all(known):
        return
    families = {":" in one for one in known}
    for member in pool.members:
        if (":" in member.address) not in families:
            ours, theirs = ("IPv6", "IPv4") if ":" in member.address else ("IPv4", "IPv6")
            refuse(
                "member option address",
                member.address,
                f"it is {ours}, every VIP is {theirs}, and {pool.protocol} is not translated between them",
                f"Use an {theirs} address, or a load balancer with an {ours} VIP too.",
            )
