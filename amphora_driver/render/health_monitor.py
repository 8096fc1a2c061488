# SPDX-License-Identifier: Apache-2.0
"""How members are checked.

Invariant: a check of the port that takes the traffic speaks there what the traffic speaks (TLS with the same
verification, the PROXY protocol); a check of another port speaks plainly, unless the monitor's type says TLS.
Everything is said explicitly: HAProxy's own guesses depend on `addr` and `port`, and the words that would stop them
(`no-check-ssl`) cannot be given at run time.
"""

from __future__ import annotations

import msgspec

from amphora_driver.model.enums import MonitorType, PoolProtocol
from amphora_driver.model.loadbalancer import HealthMonitor, Pool
from amphora_driver.render import quoting
from amphora_driver.render.quoting import Quoted
from amphora_driver.validation import health_monitors, udp

RESPONDER_PORT = 9101
"""Where the agent of an amphora answers for its members' ICMP echo: `GET /ping/<member id>`."""

_CHECK, _INTER, _FALL, _RISE = (quoting.keywords(word) for word in ("check", "inter", "fall", "rise"))
_CHECK_SSL = quoting.keywords("check-ssl")
_VERIFY_NONE = quoting.keywords("verify none")
_CHECK_SNI = quoting.keywords("check-sni")
_CHECK_ALPN = quoting.keywords("check-alpn")
_CHECK_PROXY = quoting.keywords("check-send-proxy")
_RESPONDER = quoting.words([quoting.keywords("addr 127.0.0.1 port"), RESPONDER_PORT])
_PROXIES = (PoolProtocol.PROXY, PoolProtocol.PROXYV2)
# HTTP/1.1 demands a Host. Without a name the member is asked by its address, IPv6 in brackets.
_BY_ADDRESS = quoting.text(r'%[bc_dst,regsub("^(.*:.*)$","[\\1]")]:%[bc_dst_port]', "the Host header")
_PING = quoting.text("/ping/%[srv_name]", "the path of a ping")


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What an HTTP check sends; `host` is a log-format, and `path` if it is the one of a ping."""

    method: Quoted
    path: Quoted
    version: Quoted | None
    host: Quoted | None
    expected: Quoted


class Monitor(msgspec.Struct, frozen=True, kw_only=True):
    """A monitor that is switched on.

    Attributes:
        check: words of a server whose checks go where its traffic goes.
        elsewhere: words of a server that is checked at another port.
        explicit_port: whether the port has to be given although it is the traffic's, so that HAProxy guesses nothing.
        ping: whether the agent's responder is asked instead of the member.
    """

    check: Quoted
    elsewhere: Quoted
    explicit_port: bool
    ping: bool
    timeout: Quoted
    http: Request | None


def verified_name(pool: Pool) -> Quoted | None:
    """The name that members of an encrypting pool have to prove: the one its monitor asks for.

    It holds whether or not the monitor is switched on, or served at all.

    Raises:
        UnsupportedOption: it is no name; then members cannot be verified as was wanted.
    """
    if not pool.tls_enabled or pool.healthmonitor is None:
        return None
    name = health_monitors.parse_domain_name(pool.healthmonitor)
    return None if name is None else quoting.host_name(name.removesuffix("."), "the domain name", pool.healthmonitor.id)


def monitor(wanted: HealthMonitor, pool: Pool) -> Monitor | None:
    """A pool's monitor; None if it is switched off. It is checked in any case.

    Raises:
        UnsupportedOption: an option of it is not served.
        QuotingError: HAProxy has no way to write a value of it.
    """
    asked = health_monitors.parse_monitor(wanted)
    udp.check_monitor_type(pool)
    pace: list[Quoted | int] = [
        _CHECK,
        _INTER,
        quoting.seconds(wanted.delay, "the delay", wanted.id),
        _FALL,
        wanted.max_retries_down,
        _RISE,
        wanted.max_retries,
    ]
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
    """What an HTTP check sends; of its words only the value of `hdr` is a log-format (`http-check send`)."""
    if wanted.type is MonitorType.PING:
        return Request(
            method=quoting.token("GET", "the method"),
            path=_PING,
            version=None,
            host=None,
            expected=quoting.token("200", "the expected codes"),
        )
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
