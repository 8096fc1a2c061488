# SPDX-License-Identifier: Apache-2.0
"""Which options, and which values of them, this provider serves.

Invariant: every check is a pure function of one object, without its children, and either returns or raises
`UnsupportedOption` naming option and value.  The driver asks before it accepts, the renderer asks before it
renders: one answer for both, so nothing is accepted and then silently ignored.  Values that Octavia's API
fills in by itself are never refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from amphora_driver.model.enums import Algorithm, ListenerProtocol, PersistenceType, PoolProtocol
from amphora_driver.model.loadbalancer import (
    HealthMonitor,
    L7Policy,
    Listener,
    LoadBalancer,
    Member,
    Pool,
    SessionPersistence,
)
from amphora_driver.validation import addresses, health_monitors, insert_headers, l7, tls, udp
from amphora_driver.validation.unsupported import NOT_YET, absent, between, one_of, refuse

LISTENER_PROTOCOLS = (
    ListenerProtocol.HTTP,
    ListenerProtocol.TCP,
    ListenerProtocol.HTTPS,
    ListenerProtocol.TERMINATED_HTTPS,
    ListenerProtocol.PROMETHEUS,
    ListenerProtocol.UDP,
    ListenerProtocol.SCTP,
)
_PROXIED = (
    PoolProtocol.HTTP,
    PoolProtocol.TCP,
    PoolProtocol.HTTPS,
    PoolProtocol.PROXY,
    PoolProtocol.PROXYV2,
)
POOL_PROTOCOLS = (*_PROXIED, PoolProtocol.UDP, PoolProtocol.SCTP)
ALGORITHMS = tuple(Algorithm)
VNIC_TYPES = (None, "", "normal")
MAX_WEIGHT = 256
MAX_TIMEOUT = 2**31 - 1
"""Milliseconds: what HAProxy's timers hold (manual section 2.5)."""

VIP_OPTIONS = ("vip_qos_policy_id", "vip_sg_ids")
"""Options of a load balancer that the network backend fulfils."""

READS_HTTP = (ListenerProtocol.HTTP, ListenerProtocol.TERMINATED_HTTPS)
"""Listeners that read and change what their clients say."""

BEHIND: dict[ListenerProtocol, tuple[PoolProtocol, ...]] = {
    ListenerProtocol.TCP: _PROXIED,
    ListenerProtocol.HTTP: (PoolProtocol.HTTP, PoolProtocol.PROXY, PoolProtocol.PROXYV2),
    ListenerProtocol.HTTPS: (PoolProtocol.HTTPS, PoolProtocol.TCP, PoolProtocol.PROXY, PoolProtocol.PROXYV2),
    ListenerProtocol.TERMINATED_HTTPS: (PoolProtocol.HTTP, PoolProtocol.PROXY, PoolProtocol.PROXYV2),
    ListenerProtocol.PROMETHEUS: (),
    ListenerProtocol.UDP: (PoolProtocol.UDP,),
    ListenerProtocol.SCTP: (PoolProtocol.SCTP,),
}
"""Which pools can stand behind which listeners (Octavia's own matrix)."""

_TIMEOUTS = ("timeout_client_data", "timeout_member_connect", "timeout_member_data", "timeout_tcp_inspect")
# RFC 6265: a cookie's name is a token.
_COOKIE_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,255}")


def check_loadbalancer(load_balancer: LoadBalancer) -> None:
    """Check the options of the load balancer itself.

    Flavor and availability zone are looked at once, when it is created (`capabilities.profile`); what its VIP has
    besides addresses is for the network backend (`check_vip_options`).

    Raises:
        UnsupportedOption: an option, or a value of it, is not served.
    """
    for security_group_id in load_balancer.vip_sg_ids or ():
        if not security_group_id:
            refuse("load balancer option vip_sg_ids", security_group_id, "it is no id", "Leave it out.")


def check_vip_options(load_balancer: LoadBalancer, backend: str, supports: Collection[str]) -> None:
    """Refuse options of the VIP that a network backend does not know.

    Args:
        load_balancer: with its options.
        backend: the name of the network backend.
        supports: what it says that it can fulfil.

    Raises:
        UnsupportedOption: naming the option and the backend.
    """
    for name in VIP_OPTIONS:
        if name not in supports:
            reason = f"the network backend {backend} does not serve it"
            absent(f"load balancer option {name}", getattr(load_balancer, name), reason)


def check_listener(listener: Listener) -> None:
    """Check the options of a listener; its L7 policies have a check of their own.

    TLS options of a listener that does not speak TLS say nothing (the API fills some of them in) and are not
    looked at.

    Raises:
        UnsupportedOption: an option, or a value of it, is not served.
    """
    protocol = listener.protocol
    one_of("listener protocol", protocol, LISTENER_PROTOCOLS)
    between("listener option protocol_port", listener.protocol_port, 1, 65535)
    if listener.connection_limit != -1:
        # HAProxy reads 0 as "no limit" (manual: maxconn), the opposite of what it says.
        between("listener option connection_limit", listener.connection_limit, 1, MAX_TIMEOUT)
    for name in _TIMEOUTS:
        value = getattr(listener, name)
        if value is not None:
            between(f"listener option {name}", value, 0, MAX_TIMEOUT)
    for cidr in listener.allowed_cidrs or ():
        try:
            addresses.parse_network(cidr)
        except ValueError:
            refuse("listener option allowed_cidrs", cidr, "it is not a network", "Use one like 198.51.100.0/24.")
    insert_headers.check(listener)
    _check_hsts(listener)
    if protocol is ListenerProtocol.PROMETHEUS:
        absent("listener option default_pool_id", listener.default_pool_id, "a PROMETHEUS listener serves itself")
    if listener.uses_l4:
        udp.check_listener(listener)
    tls.check_listener(listener)


def _check_hsts(listener: Listener) -> None:
    age = listener.hsts_max_age
    if age is None:
        # The other two say nothing without it: Octavia keeps them when a user takes the age away.
        return
    if listener.protocol is not ListenerProtocol.TERMINATED_HTTPS:
        refuse("listener option hsts_max_age", age, "only a TERMINATED_HTTPS listener can send it", "Leave it out.")
    between("listener option hsts_max_age", age, 0, MAX_TIMEOUT)


def check_policy_place(policy: L7Policy, listener: Listener) -> None:
    """Refuse an L7 policy where nothing reads what it decides by.

    Raises:
        UnsupportedOption: naming the listener.
    """
    if listener.protocol not in READS_HTTP:
        reason = f"its listener {listener.id} is {listener.protocol}: nothing reads HTTP there"
        refuse("L7 policy action", str(policy.action), reason, "Use a listener of HTTP or TERMINATED_HTTPS.")


def check_pool(pool: Pool) -> None:
    """Check the options of a pool; its members and its health monitor have checks of their own.

    The other TLS options matter only with tls_enabled: the API fills in versions and ciphers for every pool.

    Raises:
        UnsupportedOption: an option, or a value of it, is not served.
    """
    one_of("pool protocol", pool.protocol, POOL_PROTOCOLS)
    one_of("pool option lb_algorithm", pool.lb_algorithm, ALGORITHMS)
    if pool.session_persistence is not None:
        check = udp.check_persistence if pool.uses_l4 else _check_persistence
        check(pool, pool.session_persistence)
    tls.check_pool(pool)


def _check_persistence(pool: Pool, persistence: SessionPersistence) -> None:
    option = "pool option session_persistence"
    one_of(option, persistence.type, tuple(PersistenceType))
    if persistence.type is not PersistenceType.SOURCE_IP:
        if pool.protocol in (PoolProtocol.TCP, PoolProtocol.HTTPS):
            refuse(
                option,
                str(persistence.type),
                f"nothing reads cookies on their way to a {pool.protocol} pool",
                "Use SOURCE_IP.",
            )
        name = persistence.cookie_name
        needed = bool(name) or persistence.type is PersistenceType.APP_COOKIE
        if needed and not (isinstance(name, str) and _COOKIE_NAME.fullmatch(name)):
            refuse(f"{option} cookie_name", name, "no cookie has such a name", "Use letters, digits, '_' and '-'.")
    reason = "it belongs to UDP and SCTP"
    absent(f"{option} persistence_timeout", persistence.persistence_timeout, reason)
    absent(f"{option} persistence_granularity", persistence.persistence_granularity, reason)


def check_member(member: Member) -> None:
    """Check the options of a member.

    Raises:
        UnsupportedOption: an option, or a value of it, is not served; an address is one that can never be a
            member.
    """
    if member.vnic_type not in VNIC_TYPES:
        refuse("member option vnic_type", member.vnic_type, NOT_YET, "Use normal.")
    _check_address("member option address", member.address)
    between("member option protocol_port", member.protocol_port, 1, 65535)
    between("member option weight", member.weight, 0, MAX_WEIGHT)
    if member.monitor_address is not None:
        _check_address("member option monitor_address", member.monitor_address)
    if member.monitor_port is not None:
        between("member option monitor_port", member.monitor_port, 1, 65535)


def _check_address(option: str, value: str) -> None:
    reason = addresses.objection(value)
    if reason is not None:
        refuse(option, value, reason, "Use a unicast address of a network the load balancer can reach.")


def check_healthmonitor(monitor: HealthMonitor) -> None:
    """Check the options of a health monitor. HTTP options of a monitor that does not speak HTTP say nothing.

    Raises:
        UnsupportedOption: an option, or a value of it, is not served.
    """
    health_monitors.checked(monitor)


check_l7policy = l7.check_l7policy
check_l7rule = l7.check_l7rule
