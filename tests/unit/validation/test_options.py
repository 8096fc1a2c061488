# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from amphora_driver.errors import UnsupportedOption
from amphora_driver.model.enums import (
    Algorithm,
    ClientAuthentication,
    ListenerProtocol,
    MonitorType,
    PersistenceType,
    PoolProtocol,
)
from amphora_driver.model.loadbalancer import (
    HealthMonitor,
    Listener,
    LoadBalancer,
    Member,
    Pool,
    SessionPersistence,
    Vip,
)
from amphora_driver.validation import options
from amphora_driver.validation.health_monitors import parse_expected_codes

TLS_DEFAULTS = {
    "tls_versions": ("TLSv1.2", "TLSv1.3"),
    "tls_ciphers": "TLS_AES_256_GCM_SHA384",
    "alpn_protocols": ("h2", "http/1.1"),
}
CERTIFICATE = {"default_tls_container_ref": "r"}
NONE, MANDATORY = ClientAuthentication.NONE, ClientAuthentication.MANDATORY


def listener(**changes) -> Listener:
    values = {"id": "l", "loadbalancer_id": "b", "protocol": ListenerProtocol.HTTP, "protocol_port": 80, **changes}
    return Listener(**values)


def terminated(**changes) -> Listener:
    return listener(**{"protocol": ListenerProtocol.TERMINATED_HTTPS, **CERTIFICATE, **changes})


def kept(kind: PersistenceType, **more) -> SessionPersistence:
    return SessionPersistence(type=kind, **more)


def pool(**changes) -> Pool:
    return Pool(**{"id": "p", "loadbalancer_id": "b", "protocol": PoolProtocol.HTTP, **changes})


def member(**changes) -> Member:
    return Member(**{"id": "m", "pool_id": "p", "address": "192.0.2.1", "protocol_port": 80, **changes})


def monitor(**changes) -> HealthMonitor:
    values = {"type": MonitorType.HTTP, "delay": 5, "timeout": 3, "max_retries": 3, **changes}
    return HealthMonitor(id="h", pool_id="p", **values)


def load_balancer(**changes) -> LoadBalancer:
    vip = Vip(address="198.51.100.5", subnet_id="s", network_id="n", port_id="p")
    return LoadBalancer(id="b", project_id="x", vip=vip, **changes)


def _on_a_plain_network(balancer):
    options.check_vip_options(balancer, "plain", frozenset({"compute_zone"}))


def test_options_of_the_network_backend_are_accepted():
    both = load_balancer(vip_sg_ids=("g",), vip_qos_policy_id="q")
    options.check_vip_options(both, "rich", frozenset(options.VIP_OPTIONS))
    _on_a_plain_network(load_balancer(vip_sg_ids=()))


@pytest.mark.parametrize(
    ("check", "wanted"),
    [
        (options.check_listener, listener()),
        (options.check_listener, listener(protocol=ListenerProtocol.TCP)),
        (options.check_listener, listener(protocol=ListenerProtocol.HTTPS, **TLS_DEFAULTS)),
        (options.check_listener, listener(client_authentication=NONE, insert_headers=(), **TLS_DEFAULTS)),
        (options.check_listener, listener(insert_headers=("X-Forwarded-For", "X-Real-IP"), tls_versions=())),
        (options.check_listener, listener(allowed_cidrs=("10.0.0.1/8", "2001:db8::/32", "192.0.2.1", "::/0"))),
        (options.check_listener, terminated(hsts_include_subdomains=True, hsts_preload=True)),
        (options.check_listener, listener(protocol=ListenerProtocol.PROMETHEUS)),
        (options.check_listener, listener(protocol=ListenerProtocol.PROMETHEUS, **CERTIFICATE, **TLS_DEFAULTS)),
        (options.check_listener, terminated(hsts_max_age=0, hsts_preload=True, insert_headers=("X-SSL-Client-CN",))),
        (options.check_listener, terminated(default_tls_container_ref=None, sni_container_refs=("r",))),
        (options.check_listener, terminated(client_authentication=MANDATORY, client_ca_tls_container_ref="c")),
        (options.check_listener, terminated(tls_versions=("TLSv1", "TLSv1.3"), tls_ciphers=None)),
        (options.check_listener, listener(allowed_cidrs=(), hsts_include_subdomains=False, hsts_preload=False)),
        (options.check_listener, listener(hsts_max_age=None, hsts_include_subdomains=True, hsts_preload=True)),
        (options.check_listener, listener(connection_limit=1, timeout_client_data=0, timeout_tcp_inspect=2073600000)),
        (options.check_pool, pool()),
        (options.check_pool, pool(tls_enabled=False, **TLS_DEFAULTS)),
        (options.check_pool, pool(protocol=PoolProtocol.HTTPS, lb_algorithm=Algorithm.SOURCE_IP)),
        (options.check_pool, pool(protocol=PoolProtocol.PROXY, lb_algorithm=Algorithm.SOURCE_IP_PORT)),
        (options.check_pool, pool(protocol=PoolProtocol.PROXYV2, tls_enabled=True, **TLS_DEFAULTS)),
        (options.check_pool, pool(tls_enabled=True, ca_tls_container_ref="a", crl_container_ref="c")),
        (options.check_pool, pool(tls_enabled=False, crl_container_ref="c", tls_versions=("TLSv1", "TLSv1.3"))),
        (options.check_pool, pool(session_persistence=kept(PersistenceType.HTTP_COOKIE))),
        (options.check_pool, pool(session_persistence=kept(PersistenceType.APP_COOKIE, cookie_name="it's$%#`|~"))),
        (
            options.check_pool,
            pool(protocol=PoolProtocol.TCP, session_persistence=kept(PersistenceType.SOURCE_IP)),
        ),
        (options.check_member, member()),
        (options.check_member, member(vnic_type="normal", weight=256, monitor_port=1, monitor_address="2001:db8::1")),
        (options.check_member, member(address="10.0.0.1", weight=0)),
        (options.check_healthmonitor, monitor()),
        (options.check_healthmonitor, monitor(type=MonitorType.TCP, url_path=None, expected_codes=None)),
        (options.check_healthmonitor, monitor(type=MonitorType.PING, url_path="no path")),
        (options.check_healthmonitor, monitor(type=MonitorType.TLS_HELLO)),
        (options.check_healthmonitor, monitor(type=MonitorType.HTTPS, url_path="/x", domain_name="a.b")),
        (options.check_healthmonitor, monitor(expected_codes="200,  202", http_version=1.0, http_method="CONNECT")),
        (options.check_healthmonitor, monitor(domain_name="a_b.example.com.", http_version=1.1)),
        (options.check_loadbalancer, load_balancer()),
        (options.check_loadbalancer, load_balancer(flavor={}, availability_zone={}, vip_sg_ids=())),
        (options.check_loadbalancer, load_balancer(flavor={"anything": "was judged before"})),
    ],
)
def test_supported_options_are_accepted(check, wanted):
    assert check(wanted) is None


@pytest.mark.parametrize(
    ("check", "wanted", "option", "value"),
    [
        (options.check_listener, listener(insert_headers=("X-A",)), "insert_headers", "X-A"),
        (options.check_listener, listener(insert_headers=("X-SSL-Issuer",)), "insert_headers", "X-SSL-Issuer"),
        (
            options.check_listener,
            listener(protocol=ListenerProtocol.TCP, insert_headers=("X-Real-IP",)),
            "insert_headers",
            "X-Real-IP",
        ),
        (options.check_listener, listener(allowed_cidrs=("10.0.0.0/33",)), "allowed_cidrs", "10.0.0.0/33"),
        (options.check_listener, listener(allowed_cidrs=("10.0.0.0/8\n",)), "allowed_cidrs", "10.0.0.0/8"),
        (options.check_listener, listener(allowed_cidrs=("fe80::%x/64",)), "allowed_cidrs", "fe80::%x/64"),
        (
            options.check_listener,
            listener(protocol=ListenerProtocol.PROMETHEUS, default_pool_id="p"),
            "default_pool_id",
            "p",
        ),
        (options.check_listener, terminated(default_tls_container_ref=None), "default_tls_container_ref", "None"),
        (options.check_listener, terminated(hsts_max_age=-1), "hsts_max_age", "-1"),
        (options.check_listener, terminated(client_authentication=MANDATORY), "client_authentication", "MANDATORY"),
        (options.check_listener, terminated(client_crl_container_ref="c"), "client_crl_container_ref", "c"),
        (options.check_listener, terminated(alpn_protocols=("h2", "spdy/3")), "alpn_protocols", "spdy/3"),
        (options.check_listener, terminated(tls_versions=("SSLv3", "TLSv1.2")), "tls_versions", "SSLv3"),
        (options.check_listener, terminated(tls_ciphers="AES\n"), "tls_ciphers", "AES"),
        (options.check_listener, listener(hsts_max_age=0), "hsts_max_age", "0"),
        (options.check_listener, listener(connection_limit=-2), "connection_limit", "-2"),
        (options.check_listener, listener(connection_limit=2**31), "connection_limit", "2147483648"),
        (options.check_listener, listener(timeout_member_data=-1), "timeout_member_data", "-1"),
        (options.check_pool, pool(tls_enabled=True, crl_container_ref="c"), "crl_container_ref", "c"),
        (options.check_pool, pool(tls_enabled=True, alpn_protocols=("h3",)), "alpn_protocols", "h3"),
        (options.check_pool, pool(tls_enabled=True, tls_versions=("TLSv1", "TLSv1.3")), "tls_versions", "TLSv1.1"),
        (
            options.check_pool,
            pool(protocol=PoolProtocol.HTTPS, session_persistence=kept(PersistenceType.HTTP_COOKIE)),
            "session_persistence",
            "HTTP_COOKIE",
        ),
        (options.check_pool, pool(session_persistence=kept(PersistenceType.APP_COOKIE)), "cookie_name", "None"),
        (
            options.check_pool,
            pool(session_persistence=kept(PersistenceType.APP_COOKIE, cookie_name="a;b")),
            "cookie_name",
            "a;b",
        ),
        (
            options.check_pool,
            pool(session_persistence=kept(PersistenceType.SOURCE_IP, persistence_timeout=5)),
            "persistence_timeout",
            "5",
        ),
        (options.check_member, member(vnic_type="macvtap"), "vnic_type", "macvtap"),
        (options.check_member, member(weight=257), "weight", "257"),
        (options.check_member, member(weight=True), "weight", "True"),
        (options.check_member, member(address="x\ny"), "address", "x"),
        (options.check_member, member(address="127.0.0.1"), "address", "127.0.0.1"),
        (options.check_member, member(address="169.254.169.254"), "address", "169.254.169.254"),
        (options.check_member, member(address="0.0.0.0"), "address", "0.0.0.0"),
        (options.check_member, member(address="255.255.255.255"), "address", "255.255.255.255"),
        (options.check_member, member(address="::1"), "address", "::1"),
        (options.check_member, member(address="::ffff:127.0.0.1"), "address", "::ffff:127.0.0.1"),
        (options.check_member, member(address="fe80::1%eth0"), "address", "fe80::1%eth0"),
        (options.check_member, member(monitor_address="::"), "monitor_address", "::"),
        (options.check_member, member(monitor_port=0), "monitor_port", "0"),
        (options.check_healthmonitor, monitor(delay=0), "delay", "0"),
        (options.check_healthmonitor, monitor(timeout=2147484), "timeout", "2147484"),
        (options.check_healthmonitor, monitor(max_retries=11), "max_retries", "11"),
        (options.check_healthmonitor, monitor(max_retries_down=0), "max_retries_down", "0"),
        (options.check_healthmonitor, monitor(http_method="get"), "http_method", "get"),
        (options.check_healthmonitor, monitor(url_path="x"), "url_path", "x"),
        (options.check_healthmonitor, monitor(url_path="/a b"), "url_path", "/a b"),
        (options.check_healthmonitor, monitor(url_path="/a\n"), "url_path", "/a"),
        (options.check_healthmonitor, monitor(url_path="/" + "a" * 255), "url_path", "/aaa"),
        (options.check_healthmonitor, monitor(domain_name="a.b\n"), "domain_name", "a.b"),
        (options.check_healthmonitor, monitor(domain_name="-a.b"), "domain_name", "-a.b"),
        (options.check_healthmonitor, monitor(type=MonitorType.TCP, domain_name="a b"), "domain_name", "a b"),
        (options.check_healthmonitor, monitor(domain_name="a..b"), "domain_name", "a..b"),
        (options.check_healthmonitor, monitor(http_version=2.0), "http_version", "2.0"),
        (options.check_loadbalancer, load_balancer(vip_sg_ids=("g", "")), "vip_sg_ids", "''"),
        (_on_a_plain_network, load_balancer(vip_sg_ids=("g",)), "vip_sg_ids", "the network backend plain"),
        (_on_a_plain_network, load_balancer(vip_qos_policy_id="q"), "vip_qos_policy_id", "q"),
    ],
)
def test_refused_by_name_and_value(check, wanted, option, value):
    with pytest.raises(UnsupportedOption) as caught:
        check(wanted)
    sentence = str(caught.value)
    assert option in sentence
    assert value in sentence
    assert "\n" not in sentence
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("text", "canonical"),
    [("200", "200"), ("200, 202", "200,202"), ("200-204", "200-204"), ("200,300-399 , 404", "200,300-399,404")],
)
def test_expected_codes_are_parsed(text, canonical):
    assert parse_expected_codes(text) == canonical


@pytest.mark.parametrize(
    "text", ["", ",", "200,", "20", "2000", "600", "099", "204-200", "200-", "200\n", "200|201", "²00", "200 201"]
)
def test_invalid_expected_codes_are_refused(text):
    with pytest.raises(UnsupportedOption):
        parse_expected_codes(text)
