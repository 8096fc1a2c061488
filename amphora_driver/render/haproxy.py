# SPDX-License-Identifier: Apache-2.0
"""A load balancer as HAProxy's `defaults`, `frontend` and `backend` sections.

Invariant: `render` is a pure function.  An object that cannot be expressed is named in `Rendered.refused` and
is not in the text; everything else of the load balancer is.  What is left out never widens what is served: a
listener whose policies cannot be expressed is not served without them.  The same load balancer gives the same
bytes, in whatever order its children come, and a changed member changes its own lines only.

Names: a frontend is `<listener id>`, a backend `<pool id>:<listener id>` (one for each listener that uses the
pool), a server `<member id>`.  Server lines carry all of their keywords, because HAProxy's runtime `add
server` does not read `default-server`; only keywords that command takes (HAProxy 2.6 management guide, 9.3)
are used.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from operator import attrgetter
from typing import TypeVar

import jinja2
import msgspec

from amphora_driver.capabilities import monitoring, options
from amphora_driver.errors import ModelError, UnsupportedOption
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
from amphora_driver.render import quoting
from amphora_driver.render.quoting import Quoted

# Octavia's defaults, in milliseconds ([haproxy_amphora] timeout_*); it takes 0 for "the default", and so do
# we.
DEFAULT_TIMEOUT_CLIENT = 50_000
DEFAULT_TIMEOUT_CONNECT = 5_000
DEFAULT_TIMEOUT_MEMBER = 50_000

_BALANCE = {
    Algorithm.ROUND_ROBIN: "roundrobin",
    Algorithm.LEAST_CONNECTIONS: "leastconn",
    Algorithm.SOURCE_IP: "source",
}

# The keywords of a server line; all of them are taken by `add server` too.
_WORD = {
    word: quoting.token(word, "a keyword")
    for word in (
        "server",
        "weight",
        "id",
        "check",
        "inter",
        "fall",
        "rise",
        "addr",
        "port",
        "backup",
        "disabled",
    )
}
_REMEMBERED_SERVERS = 16_384

_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("amphora_agent", "templates"),
    undefined=jinja2.StrictUndefined,
    finalize=quoting.finalize,
    # The text is not HTML: HTML escaping would corrupt values and protect against nothing. `finalize`
    # protects.
    autoescape=False,  # noqa: S701
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    auto_reload=False,
)
_TEMPLATE = _ENVIRONMENT.get_template("haproxy.cfg.j2")


class Rendered(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome.

    Attributes:
        text: the sections; None when nothing is to be served (no enabled listener, or all is disabled).
        refused: one error for each object that is not in the text although it is recorded; `object_id` is
            always set.
    """

    text: str | None
    refused: tuple[ModelError, ...]


class _Frontend(msgspec.Struct, frozen=True, kw_only=True):
    name: Quoted
    http: bool
    endpoints: tuple[Quoted, ...]
    maxconn: int | None
    timeout_client: Quoted
    inspect_delay: Quoted | None
    default_backend: Quoted | None


class _Request(msgspec.Struct, frozen=True, kw_only=True):
    method: Quoted
    path: Quoted
    version: Quoted
    host: Quoted | None
    expected: Quoted


class _Monitor(msgspec.Struct, frozen=True, kw_only=True):
    enabled: bool
    check: Quoted
    timeout: Quoted
    http: _Request | None


class _Service(msgspec.Struct, frozen=True, kw_only=True):
    """What all backends of one pool have in common."""

    id: Quoted
    http: bool
    balance: Quoted
    consistent: bool
    monitor: _Monitor | None
    servers: tuple[Quoted, ...]


class _Backend(msgspec.Struct, frozen=True, kw_only=True):
    name: Quoted
    http: bool
    balance: Quoted
    consistent: bool
    timeout_connect: Quoted
    timeout_server: Quoted
    monitor: _Monitor | None
    servers: tuple[Quoted, ...]


Refusals = list[ModelError]
_Child = TypeVar("_Child", Listener, Pool, Member)
_Made = TypeVar("_Made")


def render(load_balancer: LoadBalancer) -> Rendered:
    """Render a load balancer.

    Args:
        load_balancer: the complete tree. Children that are being deleted are not in it.

    Returns:
        The text and what could not be part of it. Nothing is raised for a bad value: one object must not take
        the others down.
    """
    refused: Refusals = []
    _attempt(partial(options.check_loadbalancer, load_balancer), load_balancer.id, refused)
    addresses = [
        vip.address
        for vip in load_balancer.vips
        if _attempt(partial(_vip, vip.address, load_balancer.id), load_balancer.id, refused)
    ]
    services = _services(load_balancer.pools, refused)
    known = {pool.id for pool in load_balancer.pools}
    listeners = _listeners(load_balancer.listeners, known, services, refused)

    frontends: list[_Frontend] = []
    backends: list[_Backend] = []
    if load_balancer.admin_state_up and addresses:
        for listener in listeners:
            service = services.get(listener.default_pool_id) if listener.default_pool_id else None
            made = _attempt(partial(_sections, listener, addresses, service), listener.id, refused)
            if made is not None:
                frontend, backend = made
                frontends.append(frontend)
                backends.extend([backend] if backend else [])
    text = _TEMPLATE.render(frontends=frontends, backends=backends) if frontends else None
    return Rendered(text=text, refused=tuple(refused))


def _attempt(make: Callable[[], _Made], object_id: str, refused: Refusals) -> _Made | None:
    """Make something, or note why it cannot be and return None."""
    try:
        return make()
    except ModelError as error:
        if error.object_id is None:
            error.object_id = object_id
        refused.append(error)
    except UnsupportedOption as error:
        refused.append(ModelError(error.wanted, error.happened, error.remedy, object_id=object_id))
    return None


def _once(children: Iterable[_Child], refused: Refusals) -> list[_Child]:
    """Order children by id; refuse a second one of the same id, as HAProxy would with the whole file."""
    result: list[_Child] = []
    for child in sorted(children, key=attrgetter("id")):
        if result and result[-1].id == child.id:
            refused.append(_model_error(child.id, "another object has the same id"))
        else:
            result.append(child)
    return result


def _model_error(object_id: str, reason: str, remedy: str = "") -> ModelError:
    return ModelError(f"render {object_id}", reason, remedy, object_id=object_id)


def _vip(address: str, object_id: str) -> Quoted:
    return quoting.address(address, "the VIP address", object_id)


# -- pools ----------------------------------------------------------------------------------


def _services(pools: Iterable[Pool], refused: Refusals) -> dict[str, _Service]:
    """What each enabled pool is made of, by pool id. Disabled pools are checked too, then left out."""
    services: dict[str, _Service] = {}
    for pool in _once(pools, refused):
        # A refused monitor leaves its pool served without checks: members are taken to be up, as without a
        # monitor.
        wanted = pool.healthmonitor
        monitor = _attempt(partial(_monitor, wanted), wanted.id, refused) if wanted is not None else None
        monitor = monitor if monitor is not None and monitor.enabled else None
        servers = _servers(pool, monitor, refused)
        service = _attempt(partial(_service, pool, monitor, servers), pool.id, refused)
        if service is not None and pool.admin_state_up:
            services[pool.id] = service
    return services


def _service(pool: Pool, monitor: _Monitor | None, servers: tuple[Quoted, ...]) -> _Service:
    options.check_pool(pool)
    return _Service(
        id=quoting.identifier(pool.id, "the pool's id", pool.id),
        http=pool.protocol is PoolProtocol.HTTP,
        balance=quoting.token(_BALANCE[pool.lb_algorithm], "the algorithm", pool.id),
        # Without it a change of one member moves most clients, and `add server` is refused (management guide
        # 9.3).
        consistent=pool.lb_algorithm is Algorithm.SOURCE_IP,
        monitor=monitor,
        servers=servers,
    )


def _servers(pool: Pool, monitor: _Monitor | None, refused: Refusals) -> tuple[Quoted, ...]:
    hashed = pool.lb_algorithm is Algorithm.SOURCE_IP
    taken: set[int] = set()
    check = monitor.check if monitor else None
    servers = []
    for member in _once(pool.members, refused):
        hash_id = _hash_id(member.id, taken) if hashed else None
        server = _attempt(partial(_server, member, check, hash_id), member.id, refused)
        if server is not None:
            servers.append(server)
    return tuple(servers)


def _hash_id(member_id: str, taken: set[int]) -> int:
    """The number by which consistent hashing knows a server.

    HAProxy hashes the server's number, which by default is its place in the backend (manual: `hash-type`):
    then a removed member would move the clients of all that follow it at the next reload, and two amphorae
    with different histories would disagree. Derived from the id it is the same everywhere and always.
    """
    number = zlib.crc32(member_id.encode(errors="replace")) & 0x7FFFFFFF or 1
    while number in taken:
        number = number % 0x7FFFFFFF + 1
    taken.add(number)
    return number


@lru_cache(maxsize=_REMEMBERED_SERVERS)
def _server(member: Member, check: Quoted | None, hash_id: int | None) -> Quoted:
    """A member's `server` line (manual section 5.2), remembered: most members are the same as last time."""
    options.check_member(member)
    words: list[Quoted | int] = [
        _WORD["server"],
        quoting.identifier(member.id, "the member's id", member.id),
        quoting.endpoint(member.address, member.protocol_port, "the member's address", member.id),
        _WORD["weight"],
        quoting.integer(member.weight, "the weight", low=0, high=options.MAX_WEIGHT, object_id=member.id),
    ]
    if hash_id is not None:
        words += [_WORD["id"], hash_id]
    if check is not None:
        words.append(check)
        if member.monitor_address is not None:
            words += [
                _WORD["addr"],
                quoting.address(member.monitor_address, "the monitor address", member.id),
            ]
        if member.monitor_port is not None:
            words += [_WORD["port"], quoting.port(member.monitor_port, "the monitor port", member.id)]
    if member.backup:
        words.append(_WORD["backup"])
    if not member.admin_state_up:
        words.append(_WORD["disabled"])
    return quoting.words(words)


def _monitor(monitor: HealthMonitor) -> _Monitor:
    options.check_healthmonitor(monitor)
    retries = partial(quoting.integer, low=1, high=monitoring.MAX_RETRIES, object_id=monitor.id)
    check: list[Quoted | int] = [
        _WORD["check"],
        _WORD["inter"],
        quoting.seconds(monitor.delay, "the delay", monitor.id),
        _WORD["fall"],
        retries(monitor.max_retries_down, "max_retries_down"),
        _WORD["rise"],
        retries(monitor.max_retries, "max_retries"),
    ]
    return _Monitor(
        enabled=monitor.admin_state_up,
        check=quoting.words(check),
        timeout=quoting.seconds(monitor.timeout, "the timeout", monitor.id),
        http=_request(monitor) if monitor.type is MonitorType.HTTP else None,
    )


def _request(monitor: HealthMonitor) -> _Request:
    """What an HTTP check sends; of its words only the value of `hdr` is a log-format (`http-check send`)."""
    asked = monitoring.http_request(monitor)
    return _Request(
        method=quoting.token(asked.method, "the HTTP method", monitor.id),
        path=quoting.text(asked.path, "the URL path", monitor.id, flag_position=True),
        version=quoting.token(asked.version, "the HTTP version", monitor.id),
        host=None if asked.host is None else quoting.log_format(asked.host, "the domain name", monitor.id),
        expected=quoting.text(asked.expected, "the expected codes", monitor.id, flag_position=True),
    )


# -- listeners ------------------------------------------------------------------------------


def _listeners(
    listeners: Iterable[Listener], known: set[str], services: dict[str, _Service], refused: Refusals
) -> list[Listener]:
    """The enabled listeners that can be served. Every listener is checked, disabled or not."""
    served: list[Listener] = []
    ports: set[int] = set()
    for listener in _once(listeners, refused):
        check = partial(_check_listener, listener, known, services)
        sound = _attempt(check, listener.id, refused) is not None
        sound = _policies(listener, refused) and sound
        if not sound or not listener.admin_state_up:
            continue
        if listener.protocol_port in ports:
            refused.append(_model_error(listener.id, f"another listener has port {listener.protocol_port}"))
            continue
        ports.add(listener.protocol_port)
        served.append(listener)
    return served


def _check_listener(listener: Listener, known: set[str], services: dict[str, _Service]) -> bool:
    options.check_listener(listener)
    pool_id = listener.default_pool_id
    if pool_id is None:
        return True
    if pool_id not in known:
        raise _model_error(listener.id, f"its default pool {pool_id!r} is not recorded", "Set another default pool.")
    service = services.get(pool_id)
    if listener.protocol is ListenerProtocol.HTTP and service is not None and not service.http:
        # HAProxy refuses the whole file for it (manual: `mode`); the other way round it upgrades the
        # connection.
        raise _model_error(listener.id, "an HTTP listener needs an HTTP pool", "Set another default pool.")
    return True


def _policies(listener: Listener, refused: Refusals) -> bool:
    """Note what cannot be expressed of a listener's policies.

    Returns:
        Whether the listener can be served: not without an enabled policy, which may be what keeps people out.
    """
    sound = True
    for policy in listener.l7policies:
        for rule in policy.rules:
            _attempt(partial(_check_rule, rule), rule.id, refused)
        if _attempt(partial(_check_policy, policy), policy.id, refused) is None and policy.admin_state_up:
            sound = False
    if not sound:
        refused.append(_model_error(listener.id, "one of its L7 policies cannot be expressed", "Remove the policy."))
    return sound


def _check_policy(policy: L7Policy) -> bool:
    options.check_l7policy(policy)
    return True


def _check_rule(rule: L7Rule) -> bool:
    options.check_l7rule(rule)
    return True


def _sections(
    listener: Listener, addresses: Iterable[str], service: _Service | None
) -> tuple[_Frontend, _Backend | None]:
    """A listener's frontend, and the backend behind it if it has a pool that serves.

    Without one, HAProxy answers 503 in HTTP mode and closes the connection in TCP mode.
    """
    name = quoting.identifier(listener.id, "the listener's id", listener.id)
    millis = partial(quoting.milliseconds, object_id=listener.id)
    backend = None
    if service is not None:
        backend = _Backend(
            name=quoting.backend_name(service.id, name),
            http=service.http,
            balance=service.balance,
            consistent=service.consistent,
            timeout_connect=millis(listener.timeout_member_connect or DEFAULT_TIMEOUT_CONNECT, "the connect timeout"),
            timeout_server=millis(listener.timeout_member_data or DEFAULT_TIMEOUT_MEMBER, "the member timeout"),
            monitor=service.monitor,
            servers=service.servers,
        )
    limit, inspect = listener.connection_limit, listener.timeout_tcp_inspect
    frontend = _Frontend(
        name=name,
        http=listener.protocol is ListenerProtocol.HTTP,
        endpoints=tuple(
            quoting.endpoint(address, listener.protocol_port, "the VIP address", listener.id) for address in addresses
        ),
        maxconn=None if limit == -1 else quoting.integer(limit, "the connection limit", low=1, object_id=listener.id),
        timeout_client=millis(listener.timeout_client_data or DEFAULT_TIMEOUT_CLIENT, "the client timeout"),
        inspect_delay=millis(inspect, "the inspection timeout") if inspect else None,
        default_backend=backend.name if backend else None,
    )
    return frontend, backend
