# SPDX-License-Identifier: Apache-2.0
"""UDP and SCTP listeners as the virtual servers of a bundle (docs/reference/agent-api.md).

Invariant: `Made.refused` names each object that no amphora can serve, and the list contains all other objects. An
omission never admits more clients. The same load balancer gives the same list in any order of its children.

A listener without a serving pool has no members, and its clients get an ICMP error at once.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping
from functools import partial

import msgspec

from amphora_driver.errors import ModelError
from amphora_driver.model.enums import Algorithm, MonitorType
from amphora_driver.model.loadbalancer import HealthMonitor, Listener, LoadBalancer, Member, Pool, Vip
from amphora_driver.render import render_errors
from amphora_driver.render.backend import once
from amphora_driver.render.effective_defaults import DEFAULTS, LOG_FORMAT, Defaults, effective_defaults
from amphora_driver.validation import addresses, health_monitors, log_format, options
from amphora_driver.validation import udp as capabilities

_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
HIDDEN, PRESERVED = "hidden", "preserved"
"""Members see the address of the amphora (the default), or the address of the client."""
FLOW_FORMAT = (
    "{{ project_id }} {{ lb_id }} %f %ci %cp %t - - %B %U - - %b %s %Tt %ts %[protocol] %[packets_out] %[packets_in]"
)
"""The fields of Octavia's flow log for a TCP listener, and three more (`amphora_agent.l4_flow_log`)."""
LONGEST_FORMAT = 2048


class VirtualPersistence(msgspec.Struct, frozen=True, kw_only=True):
    """The seconds for which a client stays on its member, and the prefix that identifies the client."""

    timeout: int
    prefix_v4: int
    prefix_v6: int


class VirtualMonitor(msgspec.Struct, frozen=True, kw_only=True):
    """The checks of members, with times in seconds. The fields of HTTP are None or empty for other types."""

    id: str
    type: str
    interval: int
    timeout: int
    rise: int
    fall: int
    method: str | None = None
    path: str | None = None
    codes: tuple[str, ...] = ()
    host: str | None = None
    version: str | None = None


class VirtualMember(msgspec.Struct, frozen=True, kw_only=True):
    """One member. Without `check_address` and `check_port`, the check uses its own address and port."""

    id: str
    address: str
    port: int
    weight: int
    backup: bool
    enabled: bool
    check_address: str | None
    check_port: int | None


class VirtualServer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One listener with its pool. Without `log_format` the amphora does not log its flows."""

    id: str
    protocol: str
    port: int
    addresses: tuple[str, ...]
    connection_limit: int | None
    pool_id: str | None
    algorithm: str
    persistence: VirtualPersistence | None
    client_address: str
    monitor: VirtualMonitor | None
    members: tuple[VirtualMember, ...]
    log_format: str | None = None


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """The virtual servers, and one error for each recorded object that is not among them."""

    servers: tuple[VirtualServer, ...] = ()
    refused: tuple[ModelError, ...] = ()


class _Behind(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a pool that is equal for all its listeners."""

    pool_id: str | None
    algorithm: Algorithm
    persistence: VirtualPersistence | None
    monitor: VirtualMonitor | None
    members: tuple[VirtualMember, ...]


def virtual_servers(
    load_balancer: LoadBalancer, *, failed: Collection[str] = (), defaults: Defaults = DEFAULTS
) -> Made:
    """Return the virtual servers of a load balancer.

    Args:
        failed: ids of objects that amphorae refused. The result omits them, and `refused` does not repeat them.
    """
    listeners = [one for one in load_balancer.listeners if one.uses_l4]
    pools = [one for one in load_balancer.pools if one.uses_l4]
    refused: list[ModelError] = []
    behind: dict[str, _Behind | None] = {}
    for pool in once(pools, refused):
        # A member needs the address family of a VIP only if its pool is the default pool of a listener.
        met = load_balancer.vips if load_balancer.is_default_pool(pool) else None
        examine = partial(_behind, pool, met, failed, refused)
        behind[pool.id] = render_errors.try_render(examine, pool.id, refused) if pool.id not in failed else None
    vips = tuple(dict.fromkeys(_known(load_balancer.vips)))
    chosen = effective_defaults(load_balancer.profile, defaults)
    servers: list[VirtualServer] = []
    taken: set[tuple[str, int]] = set()
    for listener in once(listeners, refused):
        if listener.id in failed:
            continue
        serve = partial(_server, listener, load_balancer, vips, behind, chosen)
        made = render_errors.try_render(serve, listener.id, refused)
        if made is None or not (listener.admin_state_up and load_balancer.admin_state_up and vips):
            continue
        if (made.protocol, made.port) in taken:
            refused.append(render_errors.refused_object(listener.id, f"another listener has port {made.port}"))
            continue
        taken.add((made.protocol, made.port))
        servers.append(made)
    return Made(servers=tuple(servers), refused=tuple(refused))


def _check_id(object_id: str) -> None:
    """Raise ModelError for a text that is no UUID, because an agent refuses such a bundle."""
    if not _ID.fullmatch(object_id):
        shown = ascii(object_id[:80])
        raise ModelError(f"serve {shown}", "it is no id", object_id=object_id)


def _known(vips: tuple[Vip, ...]) -> Iterator[str]:
    """Yield the VIPs in canonical form. `render.haproxy` refuses an invalid VIP."""
    for vip in vips:
        with contextlib.suppress(ValueError):
            yield str(addresses.parse_address(vip.address))


def _server(
    listener: Listener,
    load_balancer: LoadBalancer,
    vips: tuple[str, ...],
    behind: Mapping[str, _Behind | None],
    chosen: Defaults,
) -> VirtualServer:
    """Return one listener, also a disabled one.

    Raise UnsupportedOption for an option, and ModelError for an unusable pool or enabled L7 policies.
    """
    _check_id(listener.id)
    options.check_listener(listener)
    if any(policy.admin_state_up for policy in listener.l7policies):
        raise render_errors.policies_without_http(listener)
    pool = _pool_of(listener, load_balancer)
    found = behind.get(pool.id) if pool is not None and pool.admin_state_up else None
    found = found or _Behind(pool_id=None, algorithm=Algorithm.ROUND_ROBIN, persistence=None, monitor=None, members=())
    return VirtualServer(
        id=listener.id,
        protocol=listener.protocol.value,
        port=listener.protocol_port,
        addresses=vips,
        connection_limit=chosen.connection_limit if listener.connection_limit == -1 else listener.connection_limit,
        pool_id=found.pool_id,
        algorithm=found.algorithm.value,
        persistence=found.persistence,
        client_address=PRESERVED if load_balancer.profile.client_address == PRESERVED else HIDDEN,
        monitor=found.monitor,
        members=found.members,
        log_format=_log_format(listener, load_balancer, chosen) if chosen.connection_logging else None,
    )


def _log_format(listener: Listener, load_balancer: LoadBalancer, chosen: Defaults) -> str:
    """Return the format of the flow log: the operator's format, or else `FLOW_FORMAT`."""
    wanted = FLOW_FORMAT if chosen.log_format == LOG_FORMAT else chosen.log_format
    made = log_format.insert_ids(
        log_format.with_listener(wanted), {"project_id": load_balancer.project_id, "lb_id": load_balancer.id}
    )
    if not made.isprintable() or not 1 <= len(made) <= LONGEST_FORMAT:
        reason = f"the log format is no line of up to {LONGEST_FORMAT} characters"
        raise render_errors.refused_object(listener.id, reason, "Change the flavor key 'log_format', or the option.")
    return made


def _pool_of(listener: Listener, load_balancer: LoadBalancer) -> Pool | None:
    if listener.default_pool_id is None:
        return None
    pool = load_balancer.pool(listener.default_pool_id)
    if pool is None:
        reason = f"its pool {listener.default_pool_id[:80]!a} is not recorded"
        raise render_errors.refused_object(listener.id, reason, "Name another pool.")
    if pool.protocol not in options.BEHIND[listener.protocol]:
        reason = render_errors.protocol_mismatch(pool.protocol, pool.id, listener)
        raise render_errors.refused_object(listener.id, reason, "Name another pool.")
    return pool


def _behind(pool: Pool, vips: tuple[Vip, ...] | None, failed: Collection[str], refused: list[ModelError]) -> _Behind:
    """Return a pool without invalid children, and add errors to `refused`. An unused pool has no VIPs."""
    kept = pool.session_persistence
    wanted = [one for one in once(pool.members, refused) if one.id not in failed]
    members = [render_errors.try_render(partial(_member, one, pool, vips), one.id, refused) for one in wanted]
    monitor = pool.healthmonitor
    checked = None
    if monitor is not None and monitor.id not in failed:
        # A pool with an invalid health monitor is served without health checks, as HAProxy also does for its pools.
        checked = render_errors.try_render(lambda: (_monitor(monitor, pool),), monitor.id, refused)
    _check_id(pool.id)
    options.check_pool(pool)
    capabilities.check_l4_algorithm(pool)
    persistence = None
    if kept is not None:
        prefixes = capabilities.parse_granularity(kept.persistence_granularity)
        seconds = capabilities.persistence_timeout(kept)
        persistence = VirtualPersistence(timeout=seconds, prefix_v4=prefixes.v4, prefix_v6=prefixes.v6)
    return _Behind(
        pool_id=pool.id,
        algorithm=pool.lb_algorithm,
        persistence=persistence,
        monitor=checked[0] if checked else None,
        members=tuple(one for one in members if one is not None),
    )


def _member(member: Member, pool: Pool, vips: tuple[Vip, ...] | None) -> VirtualMember:
    _check_id(member.id)
    options.check_member(member)
    if vips is not None:
        capabilities.check_address_families(msgspec.structs.replace(pool, members=(member,)), vips)
    at = member.monitor_address
    return VirtualMember(
        id=member.id,
        address=str(addresses.parse_address(member.address)),
        port=member.protocol_port,
        weight=member.weight,
        backup=member.backup,
        enabled=member.admin_state_up,
        check_address=None if at is None else str(addresses.parse_address(at)),
        check_port=member.monitor_port,
    )


def _monitor(monitor: HealthMonitor, pool: Pool) -> VirtualMonitor | None:
    """Return a pool's monitor; None for a disabled monitor, after the same validation."""
    _check_id(monitor.id)
    asked = health_monitors.parse_monitor(monitor)
    capabilities.check_monitor_type(pool)
    if not monitor.admin_state_up:
        return None
    made = VirtualMonitor(
        id=monitor.id,
        type=monitor.type.value,
        interval=monitor.delay,
        timeout=monitor.timeout,
        rise=monitor.max_retries,
        fall=monitor.max_retries_down,
    )
    if asked is None or monitor.type is not MonitorType.HTTP:
        return made
    return msgspec.structs.replace(
        made,
        method=asked.method,
        path=asked.path,
        codes=tuple(asked.expected.split(",")),
        host=None if asked.host is None else asked.host.removesuffix("."),
        version=asked.version.removeprefix("HTTP/"),
    )
