# SPDX-License-Identifier: Apache-2.0
"""Load balancers for hostile values; their numbers allow a thousand in one configuration.

Each has a neighbour: a listener and a pool that never change and must always be served.
"""

from __future__ import annotations

import msgspec

from amphora_driver.model.enums import (
    ClientAuthentication,
    L7Action,
    L7Compare,
    L7RuleType,
    ListenerProtocol,
    MonitorType,
    PersistenceType,
    PoolProtocol,
)
from amphora_driver.model.loadbalancer import (
    HealthMonitor,
    L7Policy,
    L7Rule,
    Listener,
    LoadBalancer,
    Member,
    Pool,
    SessionPersistence,
    Vip,
)

change = msgspec.structs.replace
REF = "https://keys.example.com/v1/secrets/"


def member(n: int, **more) -> Member:
    return Member(**{"id": f"m{n}", "pool_id": f"p{n}", "address": "192.0.2.1", "protocol_port": 80} | more)


def monitor(n: int, **more) -> HealthMonitor:
    numbers = {"delay": 5, "timeout": 3, "max_retries": 2}
    asks = {"url_path": "/", "domain_name": "www.example.com", "http_version": 1.1, "expected_codes": "200"}
    return HealthMonitor(**{"id": f"h{n}", "pool_id": f"p{n}", "type": MonitorType.HTTP} | numbers | asks | more)


def pool(n: int, **more) -> Pool:
    own = {"id": f"p{n}", "loadbalancer_id": f"b{n}", "protocol": PoolProtocol.HTTP}
    return Pool(**own | {"members": (member(n),), "healthmonitor": monitor(n)} | more)


def encrypted_pool(n: int, **more) -> Pool:
    secrets = {"tls_container_ref": f"{REF}pool", "ca_tls_container_ref": f"{REF}ca", "crl_container_ref": f"{REF}crl"}
    words = {"tls_versions": ("TLSv1.2", "TLSv1.3"), "tls_ciphers": "ECDHE-RSA-AES256-GCM-SHA384"}
    return pool(n, **{"tls_enabled": True, "alpn_protocols": ("http/1.1",)} | secrets | words | more)


def sticky_pool(n: int, **persistence) -> Pool:
    kind = {"type": PersistenceType.APP_COOKIE, "cookie_name": "session"}
    return pool(n, session_persistence=SessionPersistence(**kind | persistence))


def rule(n: int, **more) -> L7Rule:
    asks = {"type": L7RuleType.PATH, "compare_type": L7Compare.STARTS_WITH, "value": "/x"}
    return L7Rule(**{"id": f"r{n}", "l7policy_id": f"y{n}"} | asks | more)


def policy(n: int, **more) -> L7Policy:
    own = {"id": f"y{n}", "listener_id": f"l{n}", "action": L7Action.REJECT, "position": 1}
    return L7Policy(**own | {"rules": (rule(n),)} | more)


def listener(n: int, **more) -> Listener:
    own = {"id": f"l{n}", "loadbalancer_id": f"b{n}", "protocol": ListenerProtocol.HTTP, "protocol_port": 2 * n + 1}
    return Listener(**own | {"default_pool_id": f"p{n}"} | more)


def secure_listener(n: int, **more) -> Listener:
    client = {"client_ca_tls_container_ref": f"{REF}ca", "client_crl_container_ref": f"{REF}crl"}
    words = {"tls_versions": ("TLSv1.2", "TLSv1.3"), "tls_ciphers": "ECDHE-RSA-AES256-GCM-SHA384"}
    own = {
        "protocol": ListenerProtocol.TERMINATED_HTTPS,
        "default_tls_container_ref": f"{REF}default",
        "sni_container_refs": (f"{REF}sni",),
        "client_authentication": ClientAuthentication.MANDATORY,
        "alpn_protocols": ("h2", "http/1.1"),
    }
    return listener(n, **own | client | words | more)


def vip(**more) -> Vip:
    return Vip(**{"address": "198.51.100.5", "subnet_id": "s", "network_id": "n", "port_id": "p"} | more)


def balancer(n: int, *, front: Listener | None = None, back: Pool | None = None, **more) -> LoadBalancer:
    neighbour = listener(n, id=f"k{n}", protocol_port=2 * n + 2, default_pool_id=f"q{n}")
    serves = pool(n, id=f"q{n}", members=(member(n, id=f"n{n}", pool_id=f"q{n}"),), healthmonitor=None)
    own = {"id": f"b{n}", "project_id": "project", "vip": vip()}
    return LoadBalancer(
        **own | {"listeners": (front or listener(n), neighbour), "pools": (back or pool(n), serves)} | more
    )


def with_rule(n: int, kind: L7RuleType, compare: L7Compare, **more) -> LoadBalancer:
    """Return a load balancer with one L7 rule.

    Regular expressions are in redirects, where they are rendered unchanged; see `render.l7`.
    """
    certificate = kind.value.startswith("SSL_")
    plain = L7Action.REDIRECT_TO_URL if compare is L7Compare.REGEX else L7Action.REJECT
    action = more.pop("action", plain)
    asks = policy(n, rules=(rule(n, type=kind, compare_type=compare, **more),), action=action, redirect_url="/there")
    return balancer(n, front=(secure_listener if certificate else listener)(n, l7policies=(asks,)))


def with_policy(n: int, **more) -> LoadBalancer:
    return balancer(n, front=listener(n, l7policies=(policy(n, **more),)))
