# SPDX-License-Identifier: Apache-2.0
"""A listener as a `frontend` section.

Invariant: a section contains all policies and client certificate checks of its listener, or there is no section. The
section does not contain allowed_cidrs: the firewall of the amphora enforces them (`render.bundle`) without a reload.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial

import msgspec

from amphora_driver.bounded_cache import Cache
from amphora_driver.errors import ModelError
from amphora_driver.model.enums import ListenerProtocol, PoolProtocol
from amphora_driver.model.loadbalancer import Listener
from amphora_driver.render import http_headers, l7, quoting, render_errors, tls
from amphora_driver.render.backend import ExaminedPool, Route, needs_http
from amphora_driver.render.effective_defaults import Defaults, TimeoutLimits
from amphora_driver.render.quoting import Quoted
from amphora_driver.render.template import TEMPLATE
from amphora_driver.validation import log_format, options

METRICS = quoting.keywords("amphora:metrics")
"""The backend that answers with metrics. The agent's part of the configuration defines it."""

_HTTP, _TCP = quoting.keywords("http"), quoting.keywords("tcp")
# Log-format variables that exist in HTTP mode only: those with an H in HAProxy's manual (section 8.2.6), and the status
# code.
_HTTP_ONLY = frozenset(
    ["CC", "CS", "HM", "HP", "HPO", "HQ", "HU", "HV", "ST", "TR", "Ta", "Ti", "Tq", "Tr", "r", "tr", "trg", "trl"]
)
_VARIABLE = re.compile(r"%%|%(?P<flags>\{[^}]*\})?(?P<name>[A-Za-z0-9]+)")
_UNREAD = "Check that each secret of the listener and its pools can be read, and set the reference again."


class PoolFacts(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """The facts about a pool that its listener depends on."""

    pool_id: str
    recorded: bool
    serves: bool = False
    protocol: PoolProtocol | None = None
    needs_http: bool = False


class ListenerContext(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """The inputs of a frontend besides its listener."""

    load_balancer_id: str
    project_id: str
    addresses: tuple[str, ...]
    settings: Defaults
    pools: tuple[PoolFacts, ...]
    limits: TimeoutLimits = TimeoutLimits()
    shared_tickets: bool = False


class _Frontend(msgspec.Struct, frozen=True, kw_only=True):
    """The values of the template."""

    name: Quoted
    mode: Quoted
    http: bool
    endpoints: tuple[Quoted, ...]
    tls: Quoted | None
    gaps: tuple[Quoted, ...]
    maxconn: int | None
    timeout_client: Quoted
    timeout_http_request: Quoted
    inspect_delay: Quoted | None
    log_format: Quoted | None
    forwarded_for: bool
    headers: tuple[Quoted, ...]
    hsts: Quoted | None
    metrics: bool
    default_backend: Quoted | None


class RenderedListener(msgspec.Struct, frozen=True, kw_only=True):
    """The section of a listener (None for a refused listener), its pools, and its errors."""

    text: str | None
    route: Route | None
    pools: tuple[str, ...]
    files: tuple[tls.File, ...]
    refused: tuple[ModelError, ...]


_FRONTENDS: Cache[RenderedListener] = Cache(20_000)


def frontend(listener: Listener, context: ListenerContext, failed: frozenset[str]) -> RenderedListener:
    """Return the section of a listener, from the cache if possible. Errors replace the section."""
    key = (listener, context, failed)
    found = _FRONTENDS.get(key)
    if found is None:
        weight = 1 + sum(1 + len(policy.rules) for policy in listener.l7policies)
        found = _FRONTENDS.put(key, _made(listener, context, failed), weight)
    return found


def pool_facts(pool_id: str, pools: dict[str, ExaminedPool | None], l4_pools: Mapping[str, PoolProtocol]) -> PoolFacts:
    """Return the facts about a pool of HAProxy (None if HAProxy refused the pool), or of UDP and SCTP."""
    found = pools.get(pool_id)
    if found is None:
        recorded = pool_id in pools or pool_id in l4_pools
        return PoolFacts(pool_id=pool_id, recorded=recorded, protocol=l4_pools.get(pool_id))
    return PoolFacts(
        pool_id=pool_id,
        recorded=True,
        serves=found.serves,
        protocol=found.pool.protocol if found.sound else None,
        needs_http=needs_http(found.pool),
    )


def named_pools(listener: Listener) -> list[str]:
    """Return the ids of the pools that a listener names, the default pool first, without duplicates."""
    named = (listener.default_pool_id, *(policy.redirect_pool_id for policy in listener.l7policies))
    return [pool_id for pool_id in dict.fromkeys(named) if pool_id is not None]


def _made(listener: Listener, context: ListenerContext, failed: frozenset[str]) -> RenderedListener:
    refused: list[ModelError] = []
    made = render_errors.try_render(partial(_frontend, listener, context), listener.id, refused)
    policies = _policies(listener, context, failed, refused)
    if made is None or policies is None:
        return RenderedListener(text=None, route=None, pools=(), files=(), refused=tuple(refused))
    section, files, route = made
    default = [listener.default_pool_id] if section.default_backend is not None and listener.default_pool_id else []
    return RenderedListener(
        text=TEMPLATE.frontend(section, policies.acls, policies.rules),
        route=route,
        pools=tuple(dict.fromkeys([*default, *policies.pools])),
        files=files,
        refused=tuple(refused),
    )


def _frontend(listener: Listener, context: ListenerContext) -> tuple[_Frontend, tuple[tls.File, ...], Route]:
    """Return the section without its policies. Raise UnsupportedOption or ModelError."""
    options.check_listener(listener)
    if listener.unread:
        raise render_errors.refused_object(listener.id, "Octavia could not return it", _UNREAD)
    settings, limits = context.settings, context.limits
    name = quoting.identifier(listener.id, "the listener's id", listener.id)
    millis = partial(quoting.milliseconds, object_id=listener.id)
    endpoint = partial(
        quoting.endpoint, port_number=listener.protocol_port, where="the VIP address", object_id=listener.id
    )
    shared = context.load_balancer_id if context.shared_tickets else None
    encryption = tls.bind(listener, settings, shared)
    default = _backend_of(listener, context, name, listener.default_pool_id) if listener.default_pool_id else None
    limit = settings.connection_limit if listener.connection_limit == -1 else listener.connection_limit
    metrics = listener.protocol is ListenerProtocol.PROMETHEUS
    inspect = listener.timeout_tcp_inspect
    client_data = limits.client_data.limit(listener.timeout_client_data or settings.timeout_client_data)
    member_connect = limits.member_connect.limit(listener.timeout_member_connect or settings.timeout_member_connect)
    member_data = limits.member_data.limit(listener.timeout_member_data or settings.timeout_member_data)
    section = _Frontend(
        name=name,
        mode=_HTTP if _reads_http(listener) else _TCP,
        http=_reads_http(listener),
        endpoints=tuple(endpoint(address) for address in context.addresses),
        tls=encryption.words if encryption else None,
        gaps=encryption.gaps if encryption else (),
        maxconn=None if limit is None else quoting.integer(limit, "the limit", low=1, object_id=listener.id),
        timeout_client=millis(client_data, "the client timeout"),
        timeout_http_request=millis(settings.timeout_http_request, "the request timeout"),
        inspect_delay=millis(inspect, "the inspection timeout") if inspect else None,
        log_format=_log_format(listener, context) if settings.connection_logging else None,
        forwarded_for=http_headers.appends_forwarded_for(listener),
        headers=http_headers.inserted_headers(listener),
        hsts=http_headers.strict_transport_security(listener),
        metrics=metrics,
        default_backend=METRICS if metrics else default,
    )
    tunnel = settings.timeout_tunnel
    route = Route(
        listener=name,
        http=section.http,
        tls=encryption is not None,
        timeout_connect=millis(member_connect, "connect timeout"),
        timeout_server=millis(member_data, "the member timeout"),
        timeout_tunnel=millis(tunnel, "the tunnel timeout") if tunnel else None,
    )
    return section, encryption.files if encryption else (), route


def _reads_http(listener: Listener) -> bool:
    return listener.protocol in options.READS_HTTP or listener.protocol is ListenerProtocol.PROMETHEUS


def _backend_of(listener: Listener, context: ListenerContext, name: Quoted, pool_id: str) -> Quoted | None:
    """Return the backend of a pool; None for status 503. Raise ModelError for an unusable pool."""
    found = next((one for one in context.pools if one.pool_id == pool_id), None)
    if found is None or not found.recorded:
        raise render_errors.refused_object(listener.id, f"its pool {pool_id!r} is not recorded", "Name another pool.")
    if found.protocol is not None and found.protocol not in options.BEHIND[listener.protocol]:
        # For some combinations of protocols, HAProxy refuses the whole configuration file (manual: `mode`). So the
        # driver refuses such a combination itself.
        reason = render_errors.protocol_mismatch(found.protocol, pool_id, listener)
        raise render_errors.refused_object(listener.id, reason, "Name another pool.")
    if found.needs_http and not _reads_http(listener) and found.protocol is not PoolProtocol.HTTP:
        reason = f"its pool {pool_id} keeps clients by a cookie, which a listener of {listener.protocol} does not see"
        raise render_errors.refused_object(listener.id, reason, "Use SOURCE_IP persistence.")
    return quoting.backend_name(quoting.identifier(pool_id, "the pool's id", pool_id), name) if found.serves else None


def _policies(
    listener: Listener, context: ListenerContext, failed: frozenset[str], refused: list[ModelError]
) -> l7.L7 | None:
    """Return the lines of a listener's policies; None if HAProxy cannot express an enabled policy.

    HAProxy then does not serve the listener, because that policy may restrict access.
    """
    enabled = [policy for policy in listener.l7policies if policy.admin_state_up]
    if not enabled:
        return l7.L7()
    if not _reads_http(listener):
        # L7 policies of a listener without HTTP are refused, because HAProxy would silently ignore them.
        refused.append(render_errors.policies_without_http(listener))
        return None
    culprits = {
        policy.id
        for policy in enabled
        if failed and (policy.id in failed or any(rule.id in failed and rule.admin_state_up for rule in policy.rules))
    }
    if not culprits:
        try:
            name = quoting.identifier(listener.id, "the listener's id", listener.id)
            return l7.policies(listener, partial(_backend_of, listener, context, name))
        except render_errors.REASONS as error:
            found = render_errors.as_refusal(error, listener.id)
            refused.append(found)
            if found.object_id == listener.id:
                return None
            culprits = {policy.id for policy in enabled if any(rule.id == found.object_id for rule in policy.rules)}
            reason = f"its rule {found.object_id} cannot be expressed"
            refused += [render_errors.refused_object(one, reason, "Change the rule.") for one in sorted(culprits)]
            culprits = culprits or {str(found.object_id)}
    reason = f"its L7 policy {min(culprits)} cannot be expressed"
    refused.append(render_errors.refused_object(listener.id, reason, "Change the policy, or disable it."))
    return None


def _log_format(listener: Listener, context: ListenerContext) -> Quoted:
    """Return the operator's format with ids. Without HTTP, the format has no variables of HTTP."""

    def without_http(found: re.Match[str]) -> str:
        if found["name"] == "tsc":
            return f"%{found['flags'] or ''}ts"
        return "-" if found["name"] in _HTTP_ONLY else found[0]

    ids = {"project_id": context.project_id, "lb_id": context.load_balancer_id}
    wanted = log_format.with_listener(context.settings.log_format)
    if not _reads_http(listener):
        wanted = _VARIABLE.sub(without_http, wanted)
    return quoting.text(log_format.insert_ids(wanted, ids), "the log format", listener.id)
