# SPDX-License-Identifier: Apache-2.0
"""Load balancers that together use every part of Octavia's template.

Invariant: each line of the feature matrix that reaches the template has one load balancer with the name of that line.
"""

from __future__ import annotations

import itertools
from typing import Any

from balancers import POOL2, TCP, TLS, balancer, listener, pool

M1 = {"id": "3e3b0000-0000-4000-8000-000000000001", "ip_address": "192.0.2.1"}
M2 = {"id": "3e3b0000-0000-4000-8000-000000000002", "ip_address": "2001:db8:2::2", "protocol_port": 8080}
HEADERS = (
    "X-Forwarded-For", "X-Forwarded-Port", "X-Forwarded-Proto", "X-SSL-Client-Verify", "X-SSL-Client-Has-Cert",
    "X-SSL-Client-DN", "X-SSL-Client-CN", "X-SSL-Issuer", "X-SSL-Client-SHA1", "X-SSL-Client-Not-Before",
    "X-SSL-Client-Not-After",
)  # fmt: skip
VALUES = {
    "CONTAINS": "a b",
    "ENDS_WITH": "x\\y",
    "EQUAL_TO": "'q' \"q\"",
    "REGEX": "^a\\d+ (b|c)$",
    "STARTS_WITH": "/ü",
}


def terminated(**more: Any) -> dict[str, Any]:
    return listener(id=TLS, protocol="TERMINATED_HTTPS", protocol_port=443, tls_certificate_id="one.test", **more)


def policy(*rules: dict[str, Any], action: str = "REJECT", **more: Any) -> dict[str, Any]:
    return {"id": "3a1e0000-0000-4000-8000-000000000001", "action": action, "rules": list(rules), **more}


def rule(kind: str, compare: str = "EQUAL_TO", **more: Any) -> dict[str, Any]:
    return {"type": kind, "compare_type": compare, "value": VALUES[compare], "invert": False, **more}


def monitored(**more: Any) -> dict[str, Any]:
    return balancer(listener(), pool(M1, {**M2, "monitor_address": "192.0.2.9", "monitor_port": 81}, monitor=more))


def cases() -> dict[str, dict[str, Any]]:
    """Return every load balancer by its name."""
    return {**_listeners(), **_terminated(), **_policies(), **_pools(), **_monitors()}


def _listeners() -> dict[str, dict[str, Any]]:
    protocols = {
        "HTTP": ("HTTP", "PROXY", "PROXYV2"),
        "HTTPS": ("HTTPS", "PROXY", "TCP"),
        "TCP": ("HTTP", "HTTPS", "TCP"),
    }
    found = {
        f"{kind} to {behind}": balancer(listener(protocol=kind), pool(M1, M2, protocol=behind))
        for kind, behinds in protocols.items()
        for behind in behinds
    }
    partner = {"id": "a0000000-0000-4000-8000-000000000002", "vrrp_ip": "198.51.100.11"}
    more: dict[str, dict[str, Any]] = {
        "connection_limit": {"connection_limit": 7},
        "timeouts": {"timeout_client_data": 1, "timeout_member_connect": 2, "timeout_member_data": 3},
        "timeout-tcp-inspect": {"timeout_tcp_inspect": 9},
        "insert_headers": {"insert_headers": dict.fromkeys(HEADERS[:3], "true")},
        "disabled": {"enabled": False},
    }
    found |= {name: balancer(listener(**each), pool(M1)) for name, each in more.items()}
    found["no default pool"] = balancer(listener(pool=None), pool(M1))
    found["no logging"] = balancer(listener(), pool(M1), connection_logging=False)
    found["PROMETHEUS"] = balancer(listener(protocol="PROMETHEUS", protocol_port=9100, pool=None))
    found["pair"] = balancer(listener(), pool(M1, persistence={"type": "SOURCE_IP"}), partners=[partner])
    found["several"] = balancer(
        listener(), listener(id=TCP, protocol="TCP", protocol_port=81), terminated(hsts_max_age=1), pool(M1)
    )
    found["IPv6 alone"] = {**balancer(listener(), pool(M2)), "vip": "2001:db8::5", "additional_vips": []}
    return found


def _terminated() -> dict[str, dict[str, Any]]:
    versions = ["SSLv3", "TLSv1", "TLSv1.1", "TLSv1.2", "TLSv1.3"]
    more: dict[str, dict[str, Any]] = {
        "sni": {"sni": ["two.test"]},
        "insert_headers": {"insert_headers": dict.fromkeys(HEADERS, "true")},
        "hsts": {"hsts_max_age": 31536000, "hsts_include_subdomains": True, "hsts_preload": True},
        "hsts short": {"hsts_max_age": 0},
        "alpn": {"alpn_protocols": ["h2", "http/1.1", "http/1.0"]},
        "ciphers": {"tls_ciphers": "ECDHE-RSA-AES128-GCM-SHA256:!aNULL:TLS_AES_256_GCM_SHA384:@SECLEVEL=1"},
        **{f"client {kind}": _clients(kind) for kind in ("NONE", "OPTIONAL", "MANDATORY")},
        **{
            f"versions {'+'.join(chosen)}": {"tls_versions": chosen}
            for chosen in (versions, versions[3:4], versions[4:])
        },
        "PROMETHEUS": {"protocol": "PROMETHEUS", "pool": None},
    }
    found = {f"TLS {name}": balancer({**terminated(), **each}, pool(M1)) for name, each in more.items()}
    encrypted: dict[str, dict[str, Any]] = {
        "plain": {},
        "ca": {"ca_tls_certificate_id": "ca"},
        "ca and crl": {"ca_tls_certificate_id": "ca", "crl_container_id": "crl"},
        "client": {"tls_certificate_id": "two.test"},
        "alpn": {"alpn_protocols": ["h2"]},
        "ciphers": {"tls_ciphers": "ECDHE-RSA-AES128-GCM-SHA256", "tls_versions": ["TLSv1.2"]},
    }
    monitor = {"type": "HTTPS", "http_method": "GET", "url_path": "/", "expected_codes": "200"}
    for name, each in encrypted.items():
        found[f"TLS to members {name}"] = balancer(terminated(), pool(M1, tls_enabled=True, monitor=monitor, **each))
    found["TLS and PROXYV2"] = balancer(terminated(), pool(M1, protocol="PROXYV2"))
    return found


def _clients(kind: str) -> dict[str, Any]:
    return {"client_authentication": kind, "client_ca_tls_certificate_id": "ca", "client_crl_container_id": "crl"}


def _policies() -> dict[str, dict[str, Any]]:
    to_url = {"action": "REDIRECT_TO_URL", "redirect_url": "https://x.test/a?b=1&c=%%20", "redirect_http_code": 302}
    to_prefix = {"action": "REDIRECT_PREFIX", "redirect_prefix": "https://x.test:8443/p"}
    rules = {
        f"{kind} {compare}": rule(kind, compare, **({"key": "Key-1"} if kind in ("HEADER", "COOKIE") else {}))
        for kind, compare in itertools.product(("HOST_NAME", "PATH", "HEADER", "COOKIE"), VALUES)
    }
    rules |= {f"FILE_TYPE {compare}": rule("FILE_TYPE", compare) for compare in ("EQUAL_TO", "REGEX")}
    rules["SSL_CONN_HAS_CERT"] = rule("SSL_CONN_HAS_CERT", value="True")
    rules["SSL_VERIFY_RESULT"] = rule("SSL_VERIFY_RESULT", value="0")
    rules["SSL_DN_FIELD"] = rule("SSL_DN_FIELD", key="CN", value="client one")
    found = {f"rule {name}": balancer(terminated(policies=[policy(each)]), pool(M1)) for name, each in rules.items()}
    inverted = policy(rule("PATH"), rule("COOKIE", "REGEX", key="a!$%*+.^_`|~-", invert=True))
    found["inverted"] = balancer(listener(policies=[inverted]), pool(M1))
    for name, action in {"url": to_url, "prefix": to_prefix}.items():
        for code in (None, 301, 308):
            wanted = policy(rule("PATH"), **{**action, "redirect_http_code": code})
            found[f"redirect {name} {code}"] = balancer(listener(policies=[wanted]), pool(M1))
    to_pool = policy(rule("PATH"), action="REDIRECT_TO_POOL", to_pool=POOL2)
    found["redirect pool"] = balancer(listener(policies=[to_pool]), pool(M1), pool(M2, id=POOL2))
    return found


def _pools() -> dict[str, dict[str, Any]]:
    found = {
        f"persistence {each['type']}": balancer(listener(), pool(M1, persistence=each))
        for each in ({"type": "SOURCE_IP"}, {"type": "HTTP_COOKIE"}, {"type": "APP_COOKIE", "cookie_name": "it$!~|"})
    }
    found["member"] = balancer(listener(), pool({**M1, "weight": 0, "backup": True, "enabled": False}, M2))
    found["empty"] = balancer(listener(), pool())
    return found


def _monitors() -> dict[str, dict[str, Any]]:
    asked = {"http_method": "HEAD", "url_path": "/a?b=c&d=%7E", "expected_codes": "200,202-204"}
    kinds: dict[str, dict[str, Any]] = {
        **{kind: {"type": kind} for kind in ("PING", "TCP", "TLS-HELLO")},
        **{kind: {"type": kind, **asked} for kind in ("HTTP", "HTTPS")},
        "HTTP 1.0": {"type": "HTTP", **asked, "http_version": 1.0},
        "HTTP 1.1": {"type": "HTTP", **asked, "http_version": 1.1, "domain_name": "www.x.test"},
        "disabled": {"type": "HTTP", **asked, "enabled": False},
    }
    return {f"monitor {name}": monitored(**each) for name, each in kinds.items()}
