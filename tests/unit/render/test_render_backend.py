# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import msgspec
import pytest

from amphora_driver.model.enums import Algorithm, ListenerProtocol, MonitorType, PersistenceType, PoolProtocol
from amphora_driver.model.loadbalancer import (
    HealthMonitor,
    Listener,
    LoadBalancer,
    Member,
    Pool,
    SessionPersistence,
    Vip,
)
from amphora_driver.render.haproxy import render

VIP = Vip(address="198.51.100.5", subnet_id="s", network_id="n", port_id="p")
LISTENER = Listener(
    id="l1", loadbalancer_id="b", protocol=ListenerProtocol.HTTP, protocol_port=80, default_pool_id="p1"
)
TERMINATED = msgspec.structs.replace(
    LISTENER, protocol=ListenerProtocol.TERMINATED_HTTPS, default_tls_container_ref="default"
)
TCP = msgspec.structs.replace(LISTENER, protocol=ListenerProtocol.TCP)
PACE = "check inter 5s fall 3 rise 2"
BY_ADDRESS = r'%[bc_dst,regsub("^(.*:.*)$","[\\1]")]:%[bc_dst_port]'
VERSIONS = "ssl-min-ver TLSv1.2 ssl-max-ver TLSv1.3"


def monitor(kind: str, **more) -> HealthMonitor:
    return HealthMonitor(id="h1", pool_id="p1", type=MonitorType(kind), delay=5, timeout=3, max_retries=2, **more)


def tree(monitor=None, listener=LISTENER, member=None, protocol="HTTP", **changes) -> LoadBalancer:
    served = Member(id="m1", pool_id="p1", address="192.0.2.1", protocol_port=80, **(member or {}))
    pool = Pool(
        id="p1",
        loadbalancer_id="b",
        protocol=PoolProtocol(protocol),
        healthmonitor=monitor,
        members=(served,),
        **changes,
    )
    return LoadBalancer(id="b", project_id="x", vip=VIP, listeners=(listener,), pools=(pool,))


def backend(*args, **changes) -> list[str]:
    rendered = render(tree(*args, **changes))
    assert rendered.refused == ()
    return [line.strip() for line in rendered.text.split("\n\n")[-1].splitlines()]


def server(*args, **changes) -> str:
    (line,) = (line for line in backend(*args, **changes) if line.startswith("server "))
    return line.removeprefix("server m1 192.0.2.1:80 weight 1 ")


# -- algorithms and persistence ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        (Algorithm.ROUND_ROBIN, ["balance roundrobin"]),
        (Algorithm.LEAST_CONNECTIONS, ["balance leastconn"]),
        (Algorithm.SOURCE_IP, ["balance source", "hash-type consistent"]),
        (Algorithm.SOURCE_IP_PORT, ["balance hash var(txn.client)", "hash-type consistent"]),
    ],
)
def test_algorithms_are_rendered(algorithm, says):
    found = backend(lb_algorithm=algorithm)
    assert [line for line in found if line.startswith(("balance", "hash-type"))] == says
    assert (" id " in found[-1]) is (len(says) == 2)


@pytest.mark.parametrize(("listener", "word"), [(LISTENER, "http-request"), (TCP, "tcp-request content")])
def test_source_ip_port_includes_the_source_port(listener, word):
    found = backend(None, listener, lb_algorithm=Algorithm.SOURCE_IP_PORT, protocol="PROXY")
    assert f"{word} set-var-fmt(txn.client) %[src]:%[src_port]" in found


def kept(kind: str, name: str | None = None) -> SessionPersistence:
    return SessionPersistence(type=PersistenceType(kind), cookie_name=name)


@pytest.mark.parametrize(
    ("listener", "wanted", "says"),
    [
        (
            LISTENER,
            kept("SOURCE_IP"),
            ["stick-table type ipv6 size 100k expire 24h peers amphora", "stick on src"],
        ),
        (
            LISTENER,
            kept("HTTP_COOKIE"),
            [
                "cookie 'SRV' insert indirect nocache dynamic httponly attr SameSite=Lax",
                "dynamic-cookie-key p1",
            ],
        ),
        (
            TERMINATED,
            kept("HTTP_COOKIE"),
            [
                "cookie 'SRV' insert indirect nocache dynamic httponly attr SameSite=Lax secure",
                "dynamic-cookie-key p1",
            ],
        ),
        (
            LISTENER,
            kept("APP_COOKIE", "it's"),
            [
                "stick-table type binary len 20 size 100k expire 24h peers amphora",
                "stick match 'req.cook(\"it'\\''s\"),sha1'",
                "stick store-response 'res.cook(\"it'\\''s\"),sha1'",
            ],
        ),
    ],
)
def test_persistence_is_rendered(listener, wanted, says):
    found = backend(None, listener, session_persistence=wanted)
    assert [line for line in found if line.startswith(("stick", "cookie", "dynamic-cookie"))] == says
    assert found[-1] == "server m1 192.0.2.1:80 weight 1"


# -- encryption towards members ---------------------------------------------------------------------------------------

NAMED = monitor("HTTPS", domain_name="m.example.com")
CA = {"tls_enabled": True, "ca_tls_container_ref": "ca"}


@pytest.mark.parametrize(
    ("listener", "watch", "changes", "says"),
    [
        (LISTENER, None, {"tls_enabled": True}, f"ssl verify none {VERSIONS}"),
        (TERMINATED, None, {"tls_enabled": True}, f"ssl verify none {VERSIONS} sni ssl_fc_sni"),
        (LISTENER, None, CA, f"ssl verify required ca-file tls/p1/ca.pem {VERSIONS}"),
        # The client's SNI has no effect on the verified name.
        (TERMINATED, None, CA, f"ssl verify required ca-file tls/p1/ca.pem {VERSIONS}"),
        (
            TERMINATED,
            None,
            {**CA, "crl_container_ref": "crl", "tls_container_ref": "own"},
            f"ssl crt tls/p1/client.pem verify required ca-file tls/p1/ca.pem crl-file tls/p1/crl.pem {VERSIONS}",
        ),
        (LISTENER, None, {"tls_enabled": True, "alpn_protocols": ("h2",)}, f"ssl verify none {VERSIONS} alpn h2"),
        (TCP, None, {"tls_enabled": True, "alpn_protocols": ("h2",), "protocol": "TCP"}, f"ssl verify none {VERSIONS}"),
        (
            LISTENER,
            None,
            {"tls_enabled": True, "tls_versions": ("TLSv1.1", "TLSv1.2"), "tls_ciphers": "CHACHA20:AES"},
            "ssl verify none ssl-min-ver TLSv1.1 ssl-max-ver TLSv1.2 ciphers CHACHA20:AES:@SECLEVEL=0",
        ),
        (LISTENER, None, {"tls_enabled": True, "protocol": "PROXYV2"}, f"send-proxy-v2 ssl verify none {VERSIONS}"),
        (LISTENER, None, {"tls_container_ref": "own", "alpn_protocols": ("h2",)}, "server m1 192.0.2.1:80 weight 1"),
    ],
)
def test_encryption_to_members_is_rendered(listener, watch, changes, says):
    assert server(watch, listener, **changes) == says


def test_members_are_verified_against_the_name_of_the_monitor():
    name = "sni str(m.example.com) verifyhost m.example.com"
    for listener in (LISTENER, TERMINATED):
        said = server(NAMED, listener, **CA)
        assert said == (
            f"{PACE} check-ssl check-sni m.example.com port 80 "
            f"ssl verify required ca-file tls/p1/ca.pem {name} {VERSIONS}"
        )


@pytest.mark.parametrize("off", [{"admin_state_up": False}, {"url_path": "no path"}])
def test_checks_run_without_client_requests(off):
    rendered = render(tree(msgspec.structs.replace(NAMED, **off), **CA))
    assert "sni str(m.example.com) verifyhost m.example.com" in rendered.text
    assert " check " not in rendered.text


def test_a_name_that_cannot_be_verified_disables_the_pool():
    rendered = render(tree(monitor("HTTPS", domain_name="a b"), **CA))
    assert {error.object_id for error in rendered.refused} == {"h1", "p1"}
    assert "backend" not in rendered.text


def test_the_files_of_a_pool_are_listed():
    rendered = render(tree(**CA, crl_container_ref="crl", tls_container_ref="own"))
    assert {(file.name, file.secret.purpose.value, file.secret.ref) for file in rendered.files} == {
        ("tls/p1/client.pem", "certificate", "own"),
        ("tls/p1/ca.pem", "ca", "ca"),
        ("tls/p1/crl.pem", "crl", "crl"),
    }
    assert render(tree(ca_tls_container_ref="ca")).files == ()


# -- checks -----------------------------------------------------------------------------------------------------------

TLS = {"tls_enabled": True}
HERE, ELSEWHERE, AWAY = {}, {"monitor_port": 9}, {"monitor_address": "192.0.2.99"}
PROXY = {"protocol": "PROXY"}


@pytest.mark.parametrize(
    ("kind", "changes", "member", "says"),
    [
        ("TCP", {}, HERE, PACE),
        ("TCP", {}, ELSEWHERE, f"{PACE} port 9"),
        ("TCP", {}, AWAY, f"{PACE} addr 192.0.2.99"),
        ("HTTP", {}, HERE, PACE),
        ("HTTPS", {}, HERE, f"{PACE} check-ssl verify none"),
        ("TLS-HELLO", {}, ELSEWHERE, f"{PACE} check-ssl verify none port 9"),
        # In an encrypting pool, an HTTP check uses TLS except at another port. A TCP check only connects.
        ("TCP", TLS, HERE, f"{PACE} port 80"),
        ("TCP", TLS, AWAY, f"{PACE} addr 192.0.2.99 port 80"),
        ("HTTP", TLS, HERE, f"{PACE} check-ssl port 80"),
        ("HTTP", TLS, ELSEWHERE, f"{PACE} port 9"),
        ("HTTPS", TLS, ELSEWHERE, f"{PACE} check-ssl port 9"),
        ("TLS-HELLO", TLS, HERE, f"{PACE} check-ssl port 80"),
        # The PROXY protocol is for the traffic port only.
        ("TCP", PROXY, HERE, f"{PACE} check-send-proxy port 80"),
        ("TCP", PROXY, AWAY, f"{PACE} check-send-proxy addr 192.0.2.99 port 80"),
        ("TCP", PROXY, {"monitor_port": 80}, f"{PACE} check-send-proxy port 80"),
        ("HTTP", PROXY, ELSEWHERE, f"{PACE} port 9"),
        ("HTTPS", PROXY, HERE, f"{PACE} check-ssl verify none check-send-proxy port 80"),
        ("TLS-HELLO", {**PROXY, **TLS}, HERE, f"{PACE} check-ssl check-send-proxy port 80"),
        ("PING", {}, HERE, f"{PACE} addr 127.0.0.1 port 9101"),
        ("PING", {**PROXY, **TLS}, ELSEWHERE, f"{PACE} addr 127.0.0.1 port 9101"),
    ],
)
def test_checks_are_rendered(kind, changes, member, says):
    said = server(monitor(kind), member=member, **changes)
    tail = f" ssl verify none {VERSIONS}" if "tls_enabled" in changes else ""
    tail = (" send-proxy" if "protocol" in changes else "") + tail
    assert said == says + tail


def test_only_http_checks_over_tls_use_alpn():
    h2 = {"tls_enabled": True, "alpn_protocols": ("h2", "http/1.1")}
    assert " check-alpn h2,http/1.1 " in server(monitor("HTTP"), **h2)
    assert " check-alpn " not in server(monitor("TLS-HELLO"), **h2)
    assert " check-alpn " not in server(monitor("HTTPS"), alpn_protocols=("h2",))


def test_a_check_sends_the_name_of_the_monitor():
    assert server(monitor("HTTPS", domain_name="a.b.")) == f"{PACE} check-ssl verify none check-sni a.b"


@pytest.mark.parametrize(
    ("kind", "changes", "send"),
    [
        ("HTTP", {}, "http-check send meth GET uri '/' ver HTTP/1.0"),
        ("HTTPS", {"http_method": "PATCH"}, "http-check send meth PATCH uri '/' ver HTTP/1.0"),
        (
            "HTTP",
            {"http_version": 1.1, "domain_name": "a.b"},
            "http-check send meth GET uri '/' ver HTTP/1.1 hdr Host 'a.b'",
        ),
        # HTTP/1.1 requires a Host header: the member's address, IPv6 in brackets.
        (
            "HTTP",
            {"http_version": 1.1},
            f"http-check send meth GET uri '/' ver HTTP/1.1 hdr Host '{BY_ADDRESS}'",
        ),
        ("PING", {"url_path": "/x", "domain_name": "a.b"}, "http-check send meth GET uri-lf '/ping/%[srv_name]'"),
    ],
)
def test_check_requests_are_rendered(kind, changes, send):
    found = backend(monitor(kind, **changes))
    assert [line for line in found if line.startswith("http-check send")] == [send]
    assert "option httpchk" in found


@pytest.mark.parametrize("kind", ["TCP", "TLS-HELLO"])
def test_other_check_types_send_no_http_request(kind):
    assert not [line for line in backend(monitor(kind, url_path="/x")) if "http" in line and "mode" not in line]


def test_ping_checks_are_not_haproxy_checks():
    rendered = render(tree(monitor("PING")))
    assert rendered.pings == (("m1", "192.0.2.1"),)
    assert render(tree(monitor("PING"), member={"monitor_address": "2001:db8::9"})).pings == (("m1", "2001:db8::9"),)
    assert render(tree(monitor("TCP"))).pings == ()
    assert render(tree(monitor("PING"), member={"weight": 257})).pings == ()
    assert render(tree(monitor("PING", admin_state_up=False))).pings == ()
    assert render(tree(monitor("PING")), failed=["m1"]).pings == ()
    assert render(tree(monitor("PING")), failed=["h1"]).pings == ()


@pytest.mark.parametrize(
    ("member", "says"),
    [
        ({"weight": 0}, "server m1 192.0.2.1:80 weight 0"),
        ({"weight": 256, "backup": True}, "server m1 192.0.2.1:80 weight 256 backup"),
        ({"admin_state_up": False}, "server m1 192.0.2.1:80 weight 1 disabled"),
        ({"vnic_type": "normal"}, "server m1 192.0.2.1:80 weight 1"),
    ],
)
def test_members_are_rendered(member, says):
    assert backend(member=member)[-1] == says
