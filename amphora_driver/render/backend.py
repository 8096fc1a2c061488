# SPDX-License-Identifier: Apache-2.0
"""A pool as `backend` sections, one for each listener that uses it.

Invariant: an error of a member or of the monitor does not remove the pool. A change of a member changes its own lines
only.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from operator import attrgetter
from typing import TypeVar

import msgspec

from amphora_driver.bounded_cache import Cache
from amphora_driver.errors import ModelError
from amphora_driver.model.enums import Algorithm, PersistenceType, PoolProtocol
from amphora_driver.model.loadbalancer import Listener, Member, Pool
from amphora_driver.render import health_monitor as monitors
from amphora_driver.render import quoting, render_errors, tls
from amphora_driver.render.effective_defaults import Defaults
from amphora_driver.render.health_monitor import Monitor
from amphora_driver.render.quoting import Quoted
from amphora_driver.render.server import hash_id, server, servers
from amphora_driver.render.session_persistence import Persistence, persistence
from amphora_driver.render.template import TEMPLATE
from amphora_driver.validation import options

_BALANCE = {
    Algorithm.ROUND_ROBIN: quoting.keywords("roundrobin"),
    Algorithm.LEAST_CONNECTIONS: quoting.keywords("leastconn"),
    Algorithm.SOURCE_IP: quoting.keywords("source"),
    Algorithm.SOURCE_IP_PORT: quoting.keywords("hash var(txn.client)"),
}
_HASHING = (Algorithm.SOURCE_IP, Algorithm.SOURCE_IP_PORT)
HTTP_TUNNEL = quoting.milliseconds(3_600_000, "the tunnel timeout")
"""The time-out of upgraded connections and tunnels through HTTP."""

_HTTP, _TCP = quoting.keywords("http"), quoting.keywords("tcp")
_PROXY = {PoolProtocol.PROXY: quoting.keywords("send-proxy"), PoolProtocol.PROXYV2: quoting.keywords("send-proxy-v2")}
# If the listener terminates TLS, the PROXY header (version 2) also contains the name from the client's certificate.
_PROXY_TLS = {**_PROXY, PoolProtocol.PROXYV2: quoting.keywords("send-proxy-v2-ssl-cn")}

_Child = TypeVar("_Child", Listener, Pool, Member)


class Route(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """The part of a backend that depends on the listener. The tunnel time-out is optional."""

    listener: Quoted
    http: bool
    tls: bool
    timeout_connect: Quoted
    timeout_server: Quoted
    timeout_tunnel: Quoted | None


class _Backend(msgspec.Struct, frozen=True, kw_only=True):
    """The values of the template."""

    name: Quoted
    mode: Quoted
    http: bool
    balance: Quoted
    hashing: bool
    by_port: bool
    persistence: Persistence | None
    secure: bool
    timeout_connect: Quoted
    timeout_server: Quoted
    timeout_tunnel: Quoted | None
    monitor: Monitor | None
    servers: Quoted


class ExaminedPool:
    """A pool after validation. A pool with an unsupported option of its own is not `sound`.

    Attributes:
        refused: the errors of the pool, its monitor and its members.
        pings: member id and address of each member that the agent has to ping.
    """

    def __init__(self, pool: Pool, failed: frozenset[str], settings: Defaults) -> None:
        self.pool = pool
        self._refused: list[ModelError] = []
        self._monitor = self._examine_monitor(failed)
        self._name: Quoted | None = None
        self._tls: Quoted | None = None
        self._persistence: Persistence | None = None
        self.files: tuple[tls.File, ...] = ()
        self.pings: tuple[tuple[str, str], ...] = ()
        self._lines = self._examine_members(failed)
        self.sound = render_errors.try_render(partial(self._examine_pool, settings), pool.id, self._refused) is not None
        self.refused = tuple(self._refused)
        self._texts: dict[Route, str] = {}

    @property
    def serves(self) -> bool:
        return self.sound and self.pool.admin_state_up

    def text(self, route: Route) -> str:
        found = self._texts.get(route)
        if found is None:
            if len(self._texts) > 2 * len(self._lines) + 16:
                self._texts.clear()
            found = self._texts[route] = TEMPLATE.backend(self._backend(route))
        return found

    def _examine_monitor(self, failed: frozenset[str]) -> Monitor | None:
        # If the health monitor of a pool is invalid, HAProxy serves the pool without health checks.
        wanted = self.pool.healthmonitor
        if wanted is None or wanted.id in failed:
            return None
        made = render_errors.try_render(lambda: (monitors.monitor(wanted, self.pool),), wanted.id, self._refused)
        return made[0] if made else None

    def _examine_members(self, failed: frozenset[str]) -> tuple[Quoted, ...]:
        monitor, refused = self._monitor, self._refused
        members = once(self.pool.members, refused)
        if failed:
            members = [member for member in members if member.id not in failed]
        if self.pool.lb_algorithm in _HASHING:
            taken: set[int] = set()
            numbers = [hash_id(member.id, taken) for member in members]
            found = [self._line(member, number) for member, number in zip(members, numbers, strict=True)]
        else:
            ordinary = zip(members, servers(members, monitor), strict=True)
            found = [line if line is not None else self._line(member, None) for member, line in ordinary]
        if monitor is not None and monitor.ping:
            self.pings = tuple(
                (member.id, member.monitor_address or member.address)
                for member, line in zip(members, found, strict=True)
                if line is not None
            )
        return tuple([line for line in found if line is not None])

    def _line(self, member: Member, number: int | None) -> Quoted | None:
        return render_errors.try_render(partial(server, member, self._monitor, number), member.id, self._refused)

    def _examine_pool(self, settings: Defaults) -> bool:
        options.check_pool(self.pool)
        quoting.identifier(self.pool.id, "the pool's id", self.pool.id)
        self._persistence = persistence(self.pool)
        self._name = monitors.verified_name(self.pool)
        made = tls.server(self.pool, settings, self._name)
        if made is not None:
            self._tls, self.files = made
        return True

    def _backend(self, route: Route) -> _Backend:
        pool, http = self.pool, mode_is_http(self.pool, listener_http=route.http)
        return _Backend(
            name=quoting.backend_name(quoting.identifier(pool.id, "the pool's id", pool.id), route.listener),
            mode=_HTTP if http else _TCP,
            http=http,
            balance=_BALANCE[pool.lb_algorithm],
            # Consistent hashing keeps most clients at their members when members change. With other hashing, HAProxy
            # refuses `add server` (management guide 9.3).
            hashing=pool.lb_algorithm in _HASHING,
            by_port=pool.lb_algorithm is Algorithm.SOURCE_IP_PORT,
            persistence=self._persistence,
            secure=route.tls,
            timeout_connect=route.timeout_connect,
            timeout_server=route.timeout_server,
            timeout_tunnel=route.timeout_tunnel or (HTTP_TUNNEL if http else None),
            monitor=self._monitor,
            servers=quoting.lines(self._lines, self._tail(route, http=http)),
        )

    def _tail(self, route: Route, *, http: bool) -> Quoted | None:
        proxy = (_PROXY_TLS if route.tls else _PROXY).get(self.pool.protocol)
        words = [proxy] if proxy else []
        if self._tls is not None:
            words += [self._tls, *tls.for_route(self.pool, self._name, http=http, behind_tls=route.tls)]
        return quoting.words(words) if words else None


def mode_is_http(pool: Pool, *, listener_http: bool) -> bool:
    """Return whether the backend is in HTTP mode. With the PROXY protocol, the listener decides."""
    return listener_http if pool.protocol in _PROXY else pool.protocol is PoolProtocol.HTTP


def needs_http(pool: Pool) -> bool:
    """Return whether the session persistence of the pool needs HTTP."""
    wanted = pool.session_persistence
    return wanted is not None and wanted.type is not PersistenceType.SOURCE_IP


# Maximum number of members in the cache, which need at most 100 MB.
_EXAMINED: Cache[ExaminedPool] = Cache(100_000)


def examined(pool: Pool, failed: frozenset[str], settings: Defaults) -> ExaminedPool:
    """Return a validated pool without its `failed` members and monitor, from the cache if possible."""
    key = (pool, failed, settings)
    found = _EXAMINED.get(key)
    if found is None:
        found = _EXAMINED.put(key, ExaminedPool(pool, failed, settings), len(pool.members) + 10)
    return found


def once(children: Iterable[_Child], refused: list[ModelError]) -> list[_Child]:
    """Order children by id. Refuse a repeated id, because HAProxy would refuse the file."""
    ordered = sorted(children, key=attrgetter("id"))
    if len({child.id for child in ordered}) == len(ordered):
        return ordered
    result: list[_Child] = []
    for child in ordered:
        if result and result[-1].id == child.id:
            refused.append(render_errors.refused_object(child.id, "another object has the same id"))
        else:
            result.append(child)
    return result
