# SPDX-License-Identifier: Apache-2.0
"""Validation of the options of each object that Octavia passes to the driver.

Invariant: every check is a pure function of one object without its children. The check returns, or raises
`UnsupportedOption` with the option and the value. The driver and the renderer use the same checks, so the renderer
ignores no accepted option. No check refuses a default of Octavia's API.
"""

from __future__ import annotations

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
from amphora_driver.validation.unsupported import NOT_SUPPORTED, refuse, require_absent, require_between, require_one_of

_PROXIED = (PoolProtocol.HTTP, PoolProtocol.TCP, PoolProtocol.HTTPS, PoolProtocol.PROXY, PoolProtocol.PROXYV2)
POOL_PROTOCOLS = (*_PROXIED, PoolProtocol.UDP, PoolProtocol.SCTP)
ALGORITHMS = tuple(Algorithm)
# Octavia permits `direct` only if the flavor sets allow_member_sriov. The driver also checks whether the network
# backend supports `direct`.
VNIC_TYPES = (None, "", "normal", "direct")
MAX_WEIGHT = 256
MAX_TIMEOUT = 2**31 - 1
"""Largest number of milliseconds of HAProxy's timers (manual section 2.5)."""

VIP_OPTIONS = ("vip_qos_policy_id", "vip_sg_ids")
"""Options of a load balancer that the network backend implements."""

READS_HTTP = (ListenerProtocol.HTTP, ListenerProtocol.TERMINATED_HTTPS)
"""Protocols of listeners that parse and change HTTP."""

BEHIND: dict[ListenerProtocol, tuple[PoolProtocol, ...]] = {
    ListenerProtocol.HTTP: (PoolProtocol.HTTP, PoolProtocol.PROXY, PoolProtocol.PROXYV2),
    ListenerProtocol.TCP: _PROXIED,
    ListenerProtocol.HTTPS: (PoolProtocol.HTTPS, PoolProtocol.TCP, PoolProtocol.PROXY, PoolProtocol.PROXYV2),
    ListenerProtocol.TERMINATED_HTTPS: (PoolProtocol.HTTP, PoolProtocol.PROXY, PoolProtocol.PROXYV2),
    ListenerProtocol.PROMETHEUS: (),
    ListenerProtocol.UDP: (PoolProtocol.UDP,),
    ListenerProtocol.SCTP: (PoolProtocol.SCTP,),
}
"""Pool protocols that each listener protocol accepts (Octavia's matrix)."""
LISTENER_PROTOCOLS = tuple(BEHIND)

_TIMEOUTS = ("timeout_client_data", "timeout_member_connect", "timeout_member_data", "timeout_tcp_inspect")


def check_loadbalancer(load_balancer: LoadBalancer) -> None:
    """Check the options of the load balancer itself.

    `profile.choose_profile` checks flavor and availability zone. `check_vip_options` checks the options of the VIP that
    depend on the network backend.
    """
    for security_group_id in load_balancer.vip_sg_ids or ():
        if not security_group_id:
            refuse("load balancer option vip_sg_ids", security_group_id, "it is not an id", "Remove it.")


def check_vip_options(load_balancer: LoadBalancer, backend: str, supports: Collection[str]) -> None:
    """Refuse options of the VIP that the network backend does not support."""
    for name in VIP_OPTIONS:
        if name not in supports:
            reason = f"the network backend {backend} does not support it"
            require_absent(f"load balancer option {name}", getattr(load_balancer, name), reason)


def check_listener(listener: Listener) -> None:
    """Check the options of a listener without its L7 policies.

    The check ignores TLS options of a listener without TLS, because the API sets some of them.
    """
    require_one_of("listener protocol", listener.protocol, LISTENER_PROTOCOLS)
    require_between("listener option protocol_port", listener.protocol_port, 1, 65535)
    if listener.connection_limit != -1:
        # A limit of 0 is refused, because HAProxy reads it as "no limit" (manual: maxconn).
        require_between("listener option connection_limit", listener.connection_limit, 1, MAX_TIMEOUT)
    for name in _TIMEOUTS:
        value = getattr(listener, name)
        if value is not None:
            require_between(f"listener option {name}", value, 0, MAX_TIMEOUT)
    for cidr in listener.allowed_cidrs or ():
        try:
            addresses.parse_network(cidr)
        except ValueError:
            form = "Use the form 198.51.100.0/24 or 2001:db8::/32."
            refuse("listener option allowed_cidrs", cidr, "it is not a network", form)
    insert_headers.check_inserted_headers(listener)
    _check_hsts(listener)
    if listener.protocol is ListenerProtocol.PROMETHEUS:
        require_absent("listener option default_pool_id", listener.default_pool_id, "a PROMETHEUS listener has no pool")
    if listener.uses_l4:
        udp.check_l4_listener(listener)
    tls.check_listener_tls(listener)


def _check_hsts(listener: Listener) -> None:
    age = listener.hsts_max_age
    if age is None:
        # Octavia keeps the other HSTS options when a user disables HSTS. Without hsts_max_age, these options have no
        # effect and need no check.
        return
    if listener.protocol is not ListenerProtocol.TERMINATED_HTTPS:
        reason = "only a TERMINATED_HTTPS listener can send the HSTS header"
        refuse("listener option hsts_max_age", age, reason, "Remove this option.")
    require_between("listener option hsts_max_age", age, 0, MAX_TIMEOUT)


def check_policy_listener(policy: L7Policy, listener: Listener) -> None:
    """Refuse an L7 policy of a listener that does not process HTTP."""
    if listener.protocol not in READS_HTTP:
        reason = f"its listener {listener.id} has the protocol {listener.protocol} and does not process HTTP"
        remedy = "Use a listener with the protocol HTTP or TERMINATED_HTTPS."
        refuse("L7 policy action", str(policy.action), reason, remedy)


def check_pool(pool: Pool) -> None:
    """Check the options of a pool without its members and its health monitor.

    Without tls_enabled the check ignores the other TLS options, because the API sets versions and ciphers of all pools.
    """
    require_one_of("pool protocol", pool.protocol, POOL_PROTOCOLS)
    require_one_of("pool option lb_algorithm", pool.lb_algorithm, ALGORITHMS)
    if pool.session_persistence is not None:
        check = udp.check_l4_persistence if pool.uses_l4 else _check_persistence
        check(pool, pool.session_persistence)
    tls.check_pool_tls(pool)


def _check_persistence(pool: Pool, persistence: SessionPersistence) -> None:
    option = "pool option session_persistence"
    require_one_of(option, persistence.type, tuple(PersistenceType))
    if persistence.type is not PersistenceType.SOURCE_IP:
        if pool.protocol in (PoolProtocol.TCP, PoolProtocol.HTTPS):
            reason = f"HAProxy does not read cookies for a {pool.protocol} pool"
            refuse(option, str(persistence.type), reason, "Use SOURCE_IP.")
        name = persistence.cookie_name
        needed = bool(name) or persistence.type is PersistenceType.APP_COOKIE
        if needed and not (isinstance(name, str) and l7.TOKEN.fullmatch(name)):
            reason = "it is not a valid name of a cookie"
            refuse(f"{option} cookie_name", name, reason, "Use letters, digits, '_' and '-'.")
    reason = "only UDP and SCTP pools have it"
    require_absent(f"{option} persistence_timeout", persistence.persistence_timeout, reason)
    require_absent(f"{option} persistence_granularity", persistence.persistence_granularity, reason)


def check_member(member: Member) -> None:
    """Check the options of a member."""
    if member.vnic_type not in VNIC_TYPES:
        refuse("member option vnic_type", member.vnic_type, NOT_SUPPORTED, "Use the value normal or direct.")
    _check_address("member option address", member.address)
    require_between("member option protocol_port", member.protocol_port, 1, 65535)
    require_between("member option weight", member.weight, 0, MAX_WEIGHT)
    if member.monitor_address is not None:
        _check_address("member option monitor_address", member.monitor_address)
    if member.monitor_port is not None:
        require_between("member option monitor_port", member.monitor_port, 1, 65535)


def _check_address(option: str, value: str) -> None:
    reason = addresses.member_address_objection(value)
    if reason is not None:
        refuse(option, value, reason, "Use a unicast address in a network that the load balancer can reach.")


def check_healthmonitor(monitor: HealthMonitor) -> None:
    """Check the options of a health monitor. The check ignores HTTP options of a monitor without HTTP."""
    health_monitors.parse_monitor(monitor)


check_l7policy = l7.check_l7policy
check_l7rule = l7.check_l7rule
