# SPDX-License-Identifier: Apache-2.0
"""Load balancers with an expected text beside this file (`<name>.cfg`)."""

from __future__ import annotations

from amphora_driver.model.enums import (
    Algorithm,
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
    Profile,
    SessionPersistence,
    Vip,
)

LB = "1b000000-0000-4000-8000-000000000000"


def listener_id(number: int) -> str:
    return f"11500000-0000-4000-8000-{number:012d}"


def pool_id(number: int) -> str:
    return f"b0010000-0000-4000-8000-{number:012d}"


def member_id(number: int) -> str:
    return f"3e3b0000-0000-4000-8000-{number:012d}"


def vip(address: str = "198.51.100.5") -> Vip:
    return Vip(address=address, subnet_id="subnet", network_id="network", port_id="port")


def listener(number: int = 1, protocol: str = "HTTP", port: int = 80, pool: int | None = 1, **more) -> Listener:
    return Listener(
        id=listener_id(number),
        loadbalancer_id=LB,
        protocol=ListenerProtocol(protocol),
        protocol_port=port,
        default_pool_id=None if pool is None else pool_id(pool),
        **more,
    )


def pool(number: int = 1, protocol: str = "HTTP", members=(), monitor=None, **more) -> Pool:
    return Pool(
        id=pool_id(number),
        loadbalancer_id=LB,
        protocol=PoolProtocol(protocol),
        members=tuple(members),
        healthmonitor=monitor,
        **more,
    )


def member(number: int, address: str = "", **more) -> Member:
    address = address or f"192.0.2.{number}"
    more.setdefault("protocol_port", 8080)
    return Member(id=member_id(number), pool_id=pool_id(1), address=address, **more)


def monitor(kind: str = "HTTP", **more) -> HealthMonitor:
    more = {"delay": 5, "timeout": 3, "max_retries": 2, "max_retries_down": 3, **more}
    return HealthMonitor(id="4ea17400-0000-4000-8000-000000000001", pool_id=pool_id(1), type=MonitorType(kind), **more)


def balancer(listeners=(), pools=(), **more) -> LoadBalancer:
    more.setdefault("vip", vip())
    more.setdefault("project_id", "project")
    return LoadBalancer(id=LB, listeners=tuple(listeners), pools=tuple(pools), **more)


def policy(number: int, action: str, rule: tuple[str, str, str], **more) -> L7Policy:
    policy_id = f"90110000-0000-4000-8000-{number:012d}"
    kind, compare, value = rule
    rules = (
        L7Rule(
            id=f"3a1e0000-0000-4000-8000-{number:012d}",
            l7policy_id=policy_id,
            type=L7RuleType(kind),
            compare_type=L7Compare(compare),
            value=value,
        ),
    )
    return L7Policy(
        id=policy_id, listener_id=listener_id(1), action=L7Action(action), position=number, rules=rules, **more
    )


def kept(kind: str, cookie: str | None = None) -> SessionPersistence:
    return SessionPersistence(type=PersistenceType(kind), cookie_name=cookie)


def certificate(name: str) -> str:
    return f"https://keys.example.org/v1/containers/{name}"


TLS = {"protocol": "TERMINATED_HTTPS", "port": 443, "default_tls_container_ref": certificate("default")}
OWN = {"tls_enabled": True, "ca_tls_container_ref": certificate("members")}

CASES: dict[str, LoadBalancer] = {
    "http": balancer([listener()], [pool(members=[member(1), member(2)])]),
    "http_monitor": balancer(
        [listener()],
        [
            pool(
                monitor=monitor(
                    http_method="HEAD",
                    url_path="/health?q='\"#$HOME\\%[x]",
                    expected_codes="200, 202-204",
                    http_version=1.1,
                    domain_name="www.example.com",
                ),
                members=[
                    member(1, weight=10),
                    member(2, weight=0),
                    member(3, backup=True),
                    member(4, admin_state_up=False),
                    member(5, monitor_address="192.0.2.99", monitor_port=9000),
                    member(6, "2001:db8:0:0::6", monitor_address="2001:DB8::99"),
                ],
            )
        ],
    ),
    "http_monitor_defaults": balancer([listener()], [pool(monitor=monitor(), members=[member(1)])]),
    "monitor_disabled": balancer(
        [listener()],
        [pool(monitor=monitor(admin_state_up=False), members=[member(1, monitor_port=9000)])],
    ),
    "tcp": balancer(
        [
            listener(
                protocol="TCP",
                port=5432,
                connection_limit=200,
                timeout_client_data=1000,
                timeout_member_connect=2000,
                timeout_member_data=3000,
                timeout_tcp_inspect=4000,
            )
        ],
        [
            pool(
                protocol="TCP",
                lb_algorithm=Algorithm.LEAST_CONNECTIONS,
                monitor=monitor("TCP"),
                members=[member(1), member(2)],
            )
        ],
    ),
    "source_ip": balancer(
        [listener()],
        [pool(lb_algorithm=Algorithm.SOURCE_IP, members=[member(1), member(2), member(3)])],
    ),
    "https_pass_through": balancer(
        [listener(protocol="HTTPS", port=443)],
        [pool(protocol="HTTPS", monitor=monitor("TCP"), members=[member(1, protocol_port=443)])],
    ),
    "dual_stack": balancer(
        [listener()],
        [pool(members=[member(1), member(2, "2001:db8::2")])],
        vip=vip("2001:db8:0::5"),
        additional_vips=(vip("198.51.100.6"),),
    ),
    "shared_pool": balancer(
        [listener(1), listener(2, port=8080, timeout_member_data=1000), listener(3, "TCP", port=9090)],
        [pool(monitor=monitor("TCP"), members=[member(1)])],
    ),
    "switched_off": balancer(
        [
            listener(1, admin_state_up=False),
            listener(2, port=81, pool=2),
            listener(3, port=82, pool=None),
            listener(4, "TCP", port=83, pool=None),
        ],
        [pool(1, members=[member(1)]), pool(2, members=[member(2)], admin_state_up=False)],
    ),
    "empty_pool": balancer([listener()], [pool(monitor=monitor())]),
    "headers": balancer(
        [
            listener(
                insert_headers=(
                    "X-Forwarded-For",
                    "X-Forwarded-IP",
                    "X-Forwarded-Port",
                    "X-Forwarded-Proto",
                    "X-Client-IP",
                    "X-Real-IP",
                )
            )
        ],
        [pool(protocol="PROXY", members=[member(1)])],
    ),
    "allowed_cidrs": balancer(
        [
            listener(allowed_cidrs=("198.51.100.7/24", "2001:db8::/32", "192.0.2.1/32")),
            listener(2, "TCP", 81, allowed_cidrs=tuple(f"10.0.{n}.0/24" for n in range(101))),
            listener(3, "PROMETHEUS", 9000, None, allowed_cidrs=("::/0",)),
        ],
        [pool(members=[member(1)])],
    ),
    "tls": balancer(
        [
            listener(
                **TLS,
                sni_container_refs=(certificate("b"), certificate("a"), certificate("default")),
                client_authentication=ClientAuthentication.OPTIONAL,
                client_ca_tls_container_ref=certificate("clients"),
                client_crl_container_ref=certificate("revoked"),
                tls_versions=("TLSv1.3", "TLSv1.2"),
                tls_ciphers="TLS_AES_256_GCM_SHA384:!aNULL:ECDHE-RSA-AES128-GCM-SHA256:ECDHE+AES:@STRENGTH",
                alpn_protocols=("h2", "http/1.1", "http/1.0"),
                hsts_max_age=31536000,
                hsts_include_subdomains=True,
                hsts_preload=True,
                insert_headers=(
                    "X-Forwarded-Proto",
                    "X-SSL-Client-CN",
                    "X-SSL-Client-DN",
                    "X-SSL-Client-Has-Cert",
                    "X-SSL-Client-Not-After",
                    "X-SSL-Client-Not-Before",
                    "X-SSL-Client-SHA1",
                    "X-SSL-Client-Verify",
                    "X-SSL-Issuer",
                ),
            ),
        ],
        [pool(members=[member(1)])],
    ),
    "tls_sni_only": balancer(
        [
            listener(
                protocol="TERMINATED_HTTPS",
                port=443,
                sni_container_refs=(certificate("b"), certificate("a")),
                client_authentication=ClientAuthentication.MANDATORY,
                client_ca_tls_container_ref=certificate("clients"),
            ),
        ],
        [pool(members=[member(1)])],
    ),
    "tls_versions": balancer(
        [
            listener(1, tls_versions=("TLSv1", "TLSv1.1"), **TLS),
            listener(2, tls_versions=("TLSv1.1", "TLSv1.3"), **{**TLS, "port": 444}),
            listener(3, tls_versions=("TLSv1.3",), tls_ciphers="TLS_AES_128_GCM_SHA256", **{**TLS, "port": 445}),
            listener(4, tls_versions=("TLSv1.2",), tls_ciphers="ECDHE-RSA-AES128-SHA", **{**TLS, "port": 446}),
            listener(5, tls_ciphers="TLS_AES_128_GCM_SHA256", **{**TLS, "port": 447}),
        ],
        [pool(members=[member(1)])],
    ),
    "re_encryption": balancer(
        [listener(1, **TLS), listener(2), listener(3, "TCP", 81), listener(4, "HTTP", 82, 2)],
        [
            pool(
                **OWN,
                crl_container_ref=certificate("revoked-members"),
                tls_container_ref=certificate("client"),
                tls_versions=("TLSv1.2",),
                tls_ciphers="ECDHE+AESGCM:!aNULL",
                alpn_protocols=("h2", "http/1.1"),
                monitor=monitor("HTTPS", domain_name="members.example.com.", http_version=1.1),
                members=[
                    member(1),
                    member(2, monitor_port=9000),
                    member(3, monitor_address="192.0.2.99"),
                    member(4, "2001:db8::4"),
                ],
            ),
            pool(2, tls_enabled=True, monitor=monitor("TCP"), members=[member(5)]),
        ],
    ),
    "monitors": balancer(
        [listener(number, "TCP", 80 + number, number) for number in range(1, 8)],
        [
            pool(1, "TCP", monitor=monitor("PING"), members=[member(1), member(2, monitor_address="2001:db8::2")]),
            pool(2, "HTTPS", monitor=monitor("TLS-HELLO"), members=[member(3), member(4, monitor_port=1)]),
            pool(3, "HTTPS", monitor=monitor("HTTPS", domain_name="a.example.com"), members=[member(5)]),
            pool(4, "PROXY", monitor=monitor("TCP"), members=[member(6), member(7, monitor_port=1)]),
            pool(5, "PROXYV2", monitor=monitor("HTTP", http_version=1.1), members=[member(8)]),
            pool(6, "TCP", **OWN, monitor=monitor("HTTP"), members=[member(9), member(10, monitor_port=1)]),
            pool(7, "PROXY", **OWN, monitor=monitor("TLS-HELLO"), members=[member(11), member(12, monitor_port=1)]),
        ],
    ),
    "proxy": balancer(
        [listener(1, **TLS), listener(2), listener(3, "TCP", 81), listener(4, "HTTPS", 82)],
        [pool(protocol="PROXYV2", members=[member(1)])],
    ),
    "persistence": balancer(
        [
            listener(1, **TLS),
            listener(2),
            listener(3, port=81, pool=2),
            listener(4, "TCP", 82, 3),
            listener(5, port=83, pool=4),
        ],
        [
            pool(1, session_persistence=kept("HTTP_COOKIE"), members=[member(1), member(2)]),
            pool(2, session_persistence=kept("APP_COOKIE", "it's$%#`|~"), members=[member(3)]),
            pool(3, "TCP", session_persistence=kept("SOURCE_IP"), members=[member(4)]),
            pool(4, session_persistence=kept("SOURCE_IP"), lb_algorithm=Algorithm.SOURCE_IP, members=[member(5)]),
        ],
    ),
    "source_ip_port": balancer(
        [listener(1), listener(2, "TCP", 81, 2)],
        [
            pool(1, lb_algorithm=Algorithm.SOURCE_IP_PORT, members=[member(1), member(2)]),
            pool(2, "TCP", lb_algorithm=Algorithm.SOURCE_IP_PORT, members=[member(3)]),
        ],
    ),
    "prometheus": balancer(
        [
            listener(1, "PROMETHEUS", 9000, None, connection_limit=5),
            listener(2, pool=None, **{**TLS, "protocol": "PROMETHEUS"}),
        ]
    ),
    "profile": balancer(
        [listener(1), listener(2, "TCP", 81, timeout_client_data=1, connection_limit=7), listener(3, pool=1, **TLS)],
        [pool(members=[member(1)])],
        profile=Profile(
            timeout_client_data=11_000,
            timeout_member_connect=12_000,
            timeout_member_data=13_000,
            timeout_tunnel=14_000,
            timeout_http_request=15_000,
            connection_limit=16,
            tls_minimum_version="TLSv1.3",
            tls_ciphers="TLS_AES_128_GCM_SHA256",
            connection_logging=True,
        ),
    ),
    "log_format": balancer(
        [listener(1), listener(2, "TCP", 81)],
        [pool(members=[member(1)])],
        project_id="100%[src] '\"",
        profile=Profile(
            connection_logging=True, log_format="{{project_id}} {{ lb_id }} %{+Q}r %rc '%HM' %Tr %ST %tsc %% x"
        ),
    ),
    "l7": balancer(
        [
            listener(
                l7policies=(
                    policy(1, "REDIRECT_TO_POOL", ("PATH", "STARTS_WITH", "/a b"), redirect_pool_id=pool_id(2)),
                    policy(2, "REJECT", ("HOST_NAME", "EQUAL_TO", "evil.example.com")),
                    policy(3, "REDIRECT_TO_URL", ("FILE_TYPE", "EQUAL_TO", "jpg"), redirect_url="https://x/?a=1&b='2'"),
                    policy(4, "REDIRECT_TO_POOL", ("PATH", "EQUAL_TO", "/off"), redirect_pool_id=pool_id(3)),
                ),
                insert_headers=("X-Forwarded-For", "X-Forwarded-Port"),
            ),
        ],
        [
            pool(1, members=[member(1)]),
            pool(2, members=[member(2)]),
            pool(3, members=[member(3)], admin_state_up=False),
        ],
    ),
}
