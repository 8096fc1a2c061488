# SPDX-License-Identifier: Apache-2.0
"""Which options, and which values of them, this provider serves.

Invariant: every check is a pure function of one object, without its children, and either returns or raises
`UnsupportedOption` naming option and value.  The driver asks before it accepts, the renderer asks before it
renders: one answer for both, so nothing is accepted and then silently ignored.  Values that Octavia's API
fills in by itself are never refused.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NoReturn

from amphora_driver.capabilities import addresses, flavors, monitoring, zones
from amphora_driver.errors import UnsupportedOption
from amphora_driver.model.loadbalancer import (
    HealthMonitor,
    L7Policy,
    L7Rule,
    Listener,
    LoadBalancer,
    Member,
    Pool,
)
from amphora_driver.model.vocabulary import Algorithm, ListenerProtocol, MonitorType, PoolProtocol

LISTENER_PROTOCOLS = (ListenerProtocol.HTTP, ListenerProtocol.TCP, ListenerProtocol.HTTPS)
POOL_PROTOCOLS = (PoolProtocol.HTTP, PoolProtocol.TCP, PoolProtocol.HTTPS)
ALGORITHMS = (Algorithm.ROUND_ROBIN, Algorithm.LEAST_CONNECTIONS, Algorithm.SOURCE_IP)
MONITOR_TYPES = (MonitorType.HTTP, MonitorType.TCP)
VNIC_TYPES = ("normal",)
MAX_WEIGHT = 256
MAX_TIMEOUT = 2**31 - 1
"""Milliseconds: what HAProxy's timers hold (manual section 2.5)."""

NOT_YET = "this provider does not serve it yet"


def _refuse(option: str, value: object, reason: str, remedy: str) -> NoReturn:
    shown = repr(value)
    if len(shown) > 80:
        shown = f"{shown[:77]}..."
    raise UnsupportedOption(f"use {option} {shown}", reason, remedy)


def _one_of(option: str, value: object, served: Collection[object]) -> None:
    if value not in served:
        _refuse(option, str(value), NOT_YET, f"Use one of {', '.join(map(str, served))}.")


def _absent(option: str, value: object) -> None:
    """Refuse any value but those that say nothing: None, False, empty."""
    if value:
        _refuse(option, value, NOT_YET, "Leave it out.")


def _between(option: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        _refuse(option, value, f"it is not a whole number from {low} to {high}", "Choose a value in that range.")


def check_loadbalancer(load_balancer: LoadBalancer) -> None:
    """Check the options of the load balancer itself, flavor and availability zone included.

    Raises:
        UnsupportedOption: an option, or a value of it, is not served.
    """
    flavors.validate(load_balancer.flavor)
    zones.validate(load_balancer.availability_zone)
    _absent("load balancer option vip_qos_policy_id", load_balancer.vip_qos_policy_id)
    _absent("load balancer option vip_sg_ids", load_balancer.vip_sg_ids)


def check_listener(listener: Listener) -> None:
    """Check the options of a listener; its L7 policies have a check of their own.

    TLS options of a listener that does not speak TLS say nothing (the API fills some of them in) and are not
    looked at.

    Raises:
        UnsupportedOption: an option, or a value of it, is not served.
    """
    _one_of("listener protocol", listener.protocol, LISTENER_PROTOCOLS)
    _between("listener option protocol_port", listener.protocol_port, 1, 65535)
    if listener.connection_limit != -1:
        # HAProxy reads 0 as "no limit" (manual: maxconn), the opposite of what it says.
        _between("listener option connection_limit", listener.connection_limit, 1, MAX_TIMEOUT)
    for name in (
        "timeout_client_data",
        "timeout_member_connect",
        "timeout_member_data",
        "timeout_tcp_inspect",
    ):
        value = getattr(listener, name)
        if value is not None:
            _between(f"listener option {name}", value, 0, MAX_TIMEOUT)
    _absent("listener option insert_headers", listener.insert_headers)
    _absent("listener option allowed_cidrs", listener.allowed_cidrs)
    if listener.hsts_max_age is not None:
        _refuse("listener option hsts_max_age", listener.hsts_max_age, NOT_YET, "Leave it out.")
    _absent("listener option hsts_include_subdomains", listener.hsts_include_subdomains)
    _absent("listener option hsts_preload", listener.hsts_preload)


def check_pool(pool: Pool) -> None:
    """Check the options of a pool; its members and its health monitor have checks of their own.

    The other TLS options matter only with tls_enabled: the API fills in versions and ciphers for every pool.

    Raises:
        UnsupportedOption: an option, or a value of it, is not served.
    """
    _one_of("pool protocol", pool.protocol, POOL_PROTOCOLS)
    _one_of("pool option lb_algorithm", pool.lb_algorithm, ALGORITHMS)
    if pool.session_persistence is not None:
        _refuse("pool option session_persistence", str(pool.session_persistence.type), NOT_YET, "Leave it out.")
    _absent("pool option tls_enabled", pool.tls_enabled)


def check_member(member: Member) -> None:
    """Check the options of a member.

    Raises:
        UnsupportedOption: an option, or a value of it, is not served; an address is one that can never be a
            member.
    """
    _one_of("member option vnic_type", member.vnic_type or VNIC_TYPES[0], VNIC_TYPES)
    _check_address("member option address", member.address)
    _between("member option protocol_port", member.protocol_port, 1, 65535)
    _between("member option weight", member.weight, 0, MAX_WEIGHT)
    if member.monitor_address is not None:
        _check_address("member option monitor_address", member.monitor_address)
    if member.monitor_port is not None:
        _between("member option monitor_port", member.monitor_port, 1, 65535)


def _check_address(option: str, value: str) -> None:
    reason = addresses.objection(value)
    if reason is not None:
        _refuse(option, value, reason, "Use a unicast address of a network the load balancer can reach.")


def check_healthmonitor(monitor: HealthMonitor) -> None:
    """Check the options of a health monitor. HTTP options of a monitor that is not HTTP say nothing.

    Raises:
        UnsupportedOption: an option, or a value of it, is not served.
    """
    _one_of("health monitor type", monitor.type, MONITOR_TYPES)
    _between("health monitor option delay", monitor.delay, 1, monitoring.MAX_SECONDS)
    _between("health monitor option timeout", monitor.timeout, 1, monitoring.MAX_SECONDS)
    _between("health monitor option max_retries", monitor.max_retries, 1, monitoring.MAX_RETRIES)
    _between("health monitor option max_retries_down", monitor.max_retries_down, 1, monitoring.MAX_RETRIES)
    if monitor.type is MonitorType.HTTP:
        monitoring.http_request(monitor)


def check_l7policy(policy: L7Policy) -> None:
    """Refuse: L7 policies are not served yet.

    Raises:
        UnsupportedOption: always.
    """
    _refuse("L7 policy action", policy.action, NOT_YET, "Give the listener a default pool instead.")


def check_l7rule(rule: L7Rule) -> None:
    """Refuse: L7 rules are not served yet.

    Raises:
        UnsupportedOption: always.
    """
    _refuse("L7 rule type", rule.type, NOT_YET, "Give the listener a default pool instead.")
