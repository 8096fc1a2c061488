# SPDX-License-Identifier: Apache-2.0
"""Health monitors as keywords of `server` lines and as `http-check` lines.

Invariant: a check of the traffic port uses the protocol of the traffic (TLS with the same verification, the PROXY
protocol). A check of another port is plain, unless the type of the monitor requires TLS. All keywords are explicit,
because HAProxy's defaults depend on `addr` and `port`, and no runtime command sets `no-check-ssl`.
"""

from __future__ import annotations

import msgspec

from amphora_driver.model.enums import MonitorType, PoolProtocol
from amphora_driver.model.loadbalancer import HealthMonitor, Pool
from amphora_driver.render import quoting
from amphora_driver.render.quoting import Quoted
from amphora_driver.validation import health_monitors, udp

RESPONDER_PORT = 9101
"""The port of the responder, which pings a member: `GET /ping/<member id>`."""

_CHECK, _INTER, _FALL, _RISE = (quoting.keywords(word) for word in ("check", "inter", "fall", "rise"))
_CHECK_SSL = quoting.keywords("check-ssl")
_VERIFY_NONE = quoting.keywords("verify none")
_CHECK_SNI = quoting.keywords("check-sni")
_CHECK_ALPN = quoting.keywords("check-alpn")
_CHECK_PROXY = quoting.keywords("check-send-proxy")
_RESPONDER = quoting.words([quoting.keywords("addr 127.0.0.1 port"), RESPONDER_PORT])
_PROXIES = (PoolProtocol.PROXY, PoolProtocol.PROXYV2)
# HTTP/1.1 requires a Host header. Without a domain name, the Host header contains the member's address (in brackets for
# IPv6) and port.
_BY_ADDRESS = quoting.text(r'%[bc_dst,regsub("^(.*:.*)$","[\\1]")]:%[bc_dst_port]', "the Host header")
_PING = quoting.text("/ping/%[srv_name]", "the path of a ping")


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """The request of an HTTP check. `host` is a log-format, `path` is a log-format only for a ping."""

    method: Quoted
    path: Quoted
    version: Quoted | None = None
    host: Quoted | None = None
    expected: Quoted


class Monitor(msgspec.Struct, frozen=True, kw_only=True):
    """An enabled monitor.

    Attributes:
        check: keywords of a server for checks of its traffic port.
        elsewhere: keywords of a server for checks of another port.
        explicit_port: whether the line names the traffic port, so that HAProxy uses no default.
        ping: whether HAProxy asks the responder instead of the member.
    """

    check: Quoted
    elsewhere: Quoted
    explicit_port: bool
    ping: bool
    timeout: Quoted
    http: Request | None


def verified_name(pool: Pool) -> Quoted | None:
    """Return the host name that members of a TLS pool must have in their certificate: that of the monitor.

    The name applies also while the monitor is disabled. Raise UnsupportedOption for a value that is no host name.
    """
    if not pool.tls_enabled or pool.healthmonitor is None:
        return None
    name = health_monitors.parse_domain_name(pool.healthmonitor)
    return None if name is None else quoting.host_name(name.removesuffix("."), "the domain name", pool.healthmonitor.id)


def monitor(wanted: HealthMonitor, pool: Pool) -> Monitor | None:
    """Return the monitor of a pool; None for a disabled monitor, after the same validation.

    Raise UnsupportedOption for an unsupported option, and QuotingError for a value outside HAProxy's syntax.
    """
    asked = health_monitors.parse_monitor(wanted)
    udp.check_monitor_type(pool)
    interval = quoting.seconds(wanted.delay, "the delay", wanted.id)
    pace = (_CHECK, _INTER, interval, _FALL, wanted.max_retries_down, _RISE, wanted.max_retries)
    timeout = quoting.seconds(wanted.timeout, "the timeout", wanted.id)
    request = _request(wanted, asked)
    if not wanted.admin_state_up:
        return None
    if wanted.type is MonitorType.PING:
        words = quoting.words([*pace, _RESPONDER])
        return Monitor(check=words, elsewhere=words, explicit_port=False, ping=True, timeout=timeout, http=request)
    demanded = wanted.type in health_monitors.SPEAK_TLS
    here = demanded or (pool.tls_enabled and wanted.type is MonitorType.HTTP)
    proxy = [_CHECK_PROXY] if pool.protocol in _PROXIES else []
    check = quoting.words([*pace, *(_encryption(wanted, pool) if here else []), *proxy])
    plain = not proxy and here is demanded
    return Monitor(
        check=check,
        elsewhere=check if plain else quoting.words([*pace, *(_encryption(wanted, pool) if demanded else [])]),
        explicit_port=pool.tls_enabled or bool(proxy),
        ping=False,
        timeout=timeout,
        http=request,
    )


def _encryption(wanted: HealthMonitor, pool: Pool) -> list[Quoted]:
    words = [_CHECK_SSL]
    if not pool.tls_enabled:
        words.append(_VERIFY_NONE)
    name = health_monitors.parse_domain_name(wanted)
    if name is not None:
        words += [_CHECK_SNI, quoting.host_name(name.removesuffix("."), "the domain name", wanted.id)]
    if pool.tls_enabled and pool.alpn_protocols and wanted.type is not MonitorType.TLS_HELLO:
        words += [_CHECK_ALPN, quoting.keywords(",".join(pool.alpn_protocols))]
    return words


def _request(wanted: HealthMonitor, asked: health_monitors.HTTPRequest | None) -> Request | None:
    if wanted.type is MonitorType.PING:
        return Request(method=quoting.keywords("GET"), path=_PING, expected=quoting.keywords("200"))
    if asked is None:
        return None
    host = None
    if asked.host is not None:
        host = quoting.log_format(asked.host, "the domain name", wanted.id)
    elif asked.version == health_monitors.VERSIONS[1.1]:
        host = _BY_ADDRESS
    return Request(
        method=quoting.token(asked.method, "the HTTP method", wanted.id),
        path=quoting.text(asked.path, "the URL path", wanted.id, flag_position=True),
        version=quoting.token(asked.version, "the HTTP version", wanted.id),
        host=host,
        expected=quoting.text(asked.expected, "the expected codes", wanted.id, flag_position=True),
    )
