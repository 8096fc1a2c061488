# SPDX-License-Identifier: Apache-2.0
"""Validation of UDP and SCTP listeners and pools, whose traffic HAProxy does not handle.

Invariant: the driver and the renderer use the same checks, and each check raises `UnsupportedOption`, as in `options`.
Some checks concern several objects: a pool with its monitor, members with VIPs, the algorithm with session persistence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from amphora_driver.model.enums import Algorithm, MonitorType, PersistenceType
from amphora_driver.model.loadbalancer import Listener, Pool, SessionPersistence, Vip
from amphora_driver.validation import addresses
from amphora_driver.validation.unsupported import refuse, require_absent

MONITORS = (MonitorType.UDP_CONNECT, MonitorType.SCTP, MonitorType.TCP, MonitorType.HTTP, MonitorType.PING)
"""Monitor types of UDP and SCTP pools, as in Octavia's API. The monitor may use another protocol than the pool."""
L4_MONITORS = (MonitorType.UDP_CONNECT, MonitorType.SCTP)
DEFAULT_TIMEOUT = 360
"""Default persistence time-out in seconds, as in Octavia."""
MAX_TIMEOUT = 31 * 86_400
"""Longest persistence time-out in seconds: 31 days."""
FULL_LENGTH_V4, FULL_LENGTH_V6 = 32, 128

_TLS = ("default_tls_container_ref", "sni_container_refs", "client_ca_tls_container_ref", "client_crl_container_ref")
_LENGTH = re.compile(r"[1-9][0-9]{0,2}")
_OPTION = "pool option session_persistence"


class Prefixes(NamedTuple):
    """Number of leading bits of an address that identify a client, per address family."""

    v4: int
    v6: int


def check_l4_listener(listener: Listener) -> None:
    """Refuse TLS options of a UDP or SCTP listener, except Octavia's defaults."""
    reason = f"{listener.protocol} listeners do not support TLS"
    for name in _TLS:
        require_absent(f"listener option {name}", getattr(listener, name), reason)


def check_l4_persistence(pool: Pool, persistence: SessionPersistence) -> None:
    """Check the session persistence of a UDP or SCTP pool."""
    reason = f"{pool.protocol} has no cookies"
    if persistence.type is not PersistenceType.SOURCE_IP:
        refuse(_OPTION, str(persistence.type), reason, "Use SOURCE_IP.")
    require_absent(f"{_OPTION} cookie_name", persistence.cookie_name, reason)
    persistence_timeout(persistence)
    parse_granularity(persistence.persistence_granularity)


def persistence_timeout(persistence: SessionPersistence) -> int:
    """Return the seconds for which an idle client keeps its member; 0 and None mean the default."""
    seconds = persistence.persistence_timeout or DEFAULT_TIMEOUT
    if type(seconds) is not int or not 1 <= seconds <= MAX_TIMEOUT:
        reason = f"it is not a whole number of seconds from 1 to {MAX_TIMEOUT} (31 days)"
        refuse(f"{_OPTION} persistence_timeout", seconds, reason, "Use a value in this range.")
    return seconds


def parse_granularity(granularity: str | None) -> Prefixes:
    """Return the prefix lengths that identify a client.

    The option is an IPv4 mask (255.255.255.0), an IPv6 mask (ffff:ffff::), or the length of an IPv6 prefix. Each
    address of the other family is a client.
    """
    if not granularity:
        return Prefixes(FULL_LENGTH_V4, FULL_LENGTH_V6)
    if isinstance(granularity, str) and _LENGTH.fullmatch(granularity) and int(granularity) <= FULL_LENGTH_V6:
        return Prefixes(FULL_LENGTH_V4, int(granularity))
    option, form = f"{_OPTION} persistence_granularity", "Use a mask such as 255.255.255.0 or ffff:ffff:ffff:ffff::."
    try:
        mask = addresses.parse_address(granularity)
    except ValueError:
        refuse(option, granularity, "it is not a mask", form)
    ones = f"{int(mask):0{mask.max_prefixlen}b}".rstrip("0")
    if not ones or "0" in ones:
        reason = "a mask must begin with at least one 1 bit, and no 1 bit can follow a 0 bit"
        refuse(option, granularity, reason, form)
    return Prefixes(len(ones), FULL_LENGTH_V6) if mask.version == 4 else Prefixes(FULL_LENGTH_V4, len(ones))


def check_monitor_type(pool: Pool) -> None:
    """Check that the type of the pool's monitor suits its protocol."""
    if pool.healthmonitor is None:
        return
    kind = pool.healthmonitor.type
    if pool.uses_l4 and kind not in MONITORS:
        reason = f"{pool.protocol} pools do not support this type"
        refuse("health monitor type", str(kind), reason, f"Use one of {', '.join(map(str, MONITORS))}.")
    if not pool.uses_l4 and kind in L4_MONITORS:
        reason = f"only UDP and SCTP pools support this type, and pool {pool.id} has the protocol {pool.protocol}"
        refuse("health monitor type", str(kind), reason, "Use TCP, HTTP, HTTPS, TLS-HELLO or PING.")


def check_l4_algorithm(pool: Pool) -> None:
    """Refuse a UDP or SCTP pool that has LEAST_CONNECTIONS together with session persistence.

    An amphora selects the member of a persistent client by the client's address. The number of flows has no effect.
    """
    if pool.uses_l4 and pool.lb_algorithm is Algorithm.LEAST_CONNECTIONS and pool.session_persistence is not None:
        refuse(
            "pool option lb_algorithm",
            str(pool.lb_algorithm),
            f"for {pool.protocol} with session_persistence the client's address selects the member, so the number of"
            " connections has no effect",
            "Use the algorithm SOURCE_IP, or remove session_persistence.",
        )


def check_address_families(pool: Pool, vips: Iterable[Vip]) -> None:
    """Refuse members of a UDP or SCTP pool whose address family no VIP has.

    The amphora does not translate between families, so IPv6 members serve clients of IPv6 VIPs only. While the address
    of a VIP is unknown, the function accepts all members. Members of a pool without a listener may have any family.
    """
    known = [vip.address for vip in vips]
    if not pool.uses_l4 or not pool.members or not all(known):
        return
    families = {":" in one for one in known}
    for member in pool.members:
        if (":" in member.address) not in families:
            own, other = ("IPv6", "IPv4") if ":" in member.address else ("IPv4", "IPv6")
            refuse(
                "member option address",
                member.address,
                f"it is an {own} address, every VIP is {other}, and {pool.protocol} is not translated between them",
                f"Use an {other} address, or a load balancer with an additional {own} VIP.",
            )
