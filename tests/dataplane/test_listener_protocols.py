# SPDX-License-Identifier: Apache-2.0
"""Listeners of each protocol on every address of the load balancer, and disabled listeners."""

from __future__ import annotations

import ssl

import pytest
from http_clients import VIPS, ask, ask_h2, ended, serving, trusting, upgrade
from peers import MEMBER, MEMBER6
from wanted import VIP, VIP6, id_of, listener, load_balancer, member, policy, pool, rule, vip

pytestmark = pytest.mark.root


@pytest.mark.feature("listener.protocol.HTTP", "pool.protocol.HTTP", "lb.vip_address", "lb.additional_vips")
@pytest.mark.parametrize("vip", VIPS)
@pytest.mark.parametrize("address", [MEMBER, MEMBER6])
def test_http(served, vip, address):
    web = served.web(address=address)
    served.push(load_balancer(listener(80), pool("pool", member(web))))
    seen = served.client.fetch("/a?b=c", address=vip, method="POST", headers=[("X-Odd", "one")], body=b"word").seen
    assert (seen.member, seen.method, seen.target, seen.body) == ("web", "POST", "/a?b=c", "word")
    assert seen.values("Host") == ["www.example.com"]
    assert seen.values("X-Odd") == ["one"]
    assert (":" in seen.peer[0]) == (":" in address)


@pytest.mark.feature("listener.protocol.HTTP")
def test_http_keeps_connections_and_serves_old_clients(served):
    web = served.web()
    served.push(load_balancer(listener(80), pool("pool", member(web))))
    connection = served.client.connect()
    assert [ask(connection, path).seen.target for path in ("/1", "/2")] == ["/1", "/2"]
    old = served.client.fetch("/3", version="1.0", host=None)
    assert old.seen.target == "/3"
    assert old.header("Connection") in ("close", None)


@pytest.mark.feature("listener.protocol.TCP", "pool.protocol.TCP", "listener.protocol_port")
@pytest.mark.parametrize("vip", VIPS)
@pytest.mark.parametrize("port", [1, 5432, 65535])
def test_tcp(served, vip, port):
    echo = served.echo(address=MEMBER6 if vip == VIP6 else MEMBER)
    served.push(load_balancer(listener(port, protocol="TCP"), pool("pool", member(echo), protocol="TCP")))
    connection = served.client.connect(port, vip)
    lines = connection.makefile("rwb", buffering=0)
    assert lines.readline() == b"echo\n"
    lines.write(b"\0\xff not text\n")
    assert lines.readline() == b"\0\xff not text\n"
    assert echo.connections == 1


@pytest.mark.feature("listener.protocol.HTTPS", "pool.protocol.HTTPS")
@pytest.mark.parametrize("vip", VIPS)
def test_https_passes_through(served, tenant, vip):
    """The client receives the member's certificate, and the member receives the client's."""
    certificate, client = tenant.issue("www.example.com"), tenant.issue("client")
    web = served.web(tls=serving(certificate, clients=tenant, alpn=("h2", "http/1.1")))
    served.push(load_balancer(listener(443, protocol="HTTPS"), pool("pool", member(web), protocol="HTTPS")))
    tls = trusting(tenant, certificate=client, alpn=("h2",))
    connection = served.client.tls(443, vip, tls=tls)
    assert connection.getpeercert(binary_form=True) == certificate.der
    seen = ask_h2(connection, "/x").seen
    assert (seen.version, seen.tls.sni, seen.tls.client) == ("HTTP/2", "www.example.com", "CN=client")


@pytest.mark.feature("listener.protocol.TERMINATED_HTTPS", "listener.default_tls_container_ref")
@pytest.mark.parametrize("vip", VIPS)
def test_terminated_https(served, tenant, vip):
    certificate = tenant.issue("www.example.com")
    web = served.web()
    tree = load_balancer(
        listener(443, protocol="TERMINATED_HTTPS", default_tls_container_ref="cert"), pool("pool", member(web))
    )
    served.push(tree, {"cert": certificate.pem})
    connection = served.client.tls(443, vip, tls=trusting(tenant))
    assert connection.getpeercert(binary_form=True) == certificate.der
    seen = ask(connection, "/x").seen
    assert (seen.target, seen.tls) == ("/x", None)
    assert served.client.refused(443, vip) or served.client.fetch(port=443, address=vip).status in (301, 302, 400)
    assert [each.target for each in web.requests] == ["/x"]


@pytest.mark.feature("lb.additional_vips", "lb.vip_address")
def test_only_configured_addresses_answer(served):
    web = served.web()
    parts = (listener(80), pool("pool", member(web)))
    for addresses in ((VIP,), (VIP6,), (VIP6, VIP), (VIP, "198.51.100.6")):
        first, *others = map(vip, addresses)
        served.push(load_balancer(*parts, vip=first, additional_vips=tuple(others)))
        for address in addresses:
            assert served.client.fetch(address=address).member == "web"
        for address in {*VIPS, "198.51.100.6"} - {*addresses}:
            with pytest.raises(OSError):
                served.client.connect(80, address, timeout=0.2)


@pytest.mark.feature("listener.admin_state_up")
def test_a_disabled_listener(served):
    web = served.web()
    members = pool("pool", member(web))
    served.push(load_balancer(listener(80), listener(81), members))
    assert [served.client.fetch(port=port).status for port in (80, 81)] == [200, 200]
    served.push(load_balancer(listener(80, admin_state_up=False), listener(81), members))
    with pytest.raises(ConnectionRefusedError):
        served.client.connect(80)
    assert served.client.fetch(port=81).status == 200
    served.push(load_balancer(listener(80), listener(81), members))
    assert served.client.fetch(port=80).status == 200


@pytest.mark.feature("lb.admin_state_up")
def test_a_disabled_load_balancer(served):
    web = served.web()
    parts = (listener(80), listener(81, protocol="TCP", pool="raw"), pool("pool", member(web)))
    raw = pool("raw", member(served.echo()), protocol="TCP")
    served.push(load_balancer(*parts, raw))
    open_connection = served.client.connect(81)
    assert open_connection.recv(100) == b"echo\n"
    served.push(load_balancer(*parts, raw, admin_state_up=False))
    for port in (80, 81):
        for address in VIPS:
            with pytest.raises(ConnectionRefusedError):
                served.client.connect(port, address)
    assert ended(open_connection) < 5  # a disabled listener closes existing connections
    served.push(load_balancer(*parts, raw))
    assert served.client.fetch().member == "web"


@pytest.mark.feature("listener.protocol.HTTP", "listener.protocol.TCP", "listener.protocol.TERMINATED_HTTPS")
def test_a_listener_without_a_pool_answers_503_or_closes(served, tenant):
    tree = load_balancer(
        listener(80, pool=None),
        listener(81, protocol="TCP", pool=None),
        listener(443, protocol="TERMINATED_HTTPS", pool=None, default_tls_container_ref="cert"),
    )
    served.push(tree, {"cert": tenant.issue("www.example.com").pem})
    assert served.client.fetch().status == 503
    assert served.client.fetch(port=443, tls=trusting(tenant)).status == 503
    assert ended(served.client.connect(81)) < 5


@pytest.mark.feature("listener.protocol.HTTP", "listener.protocol.TERMINATED_HTTPS")
@pytest.mark.parametrize("tls", [False, True])
def test_an_upgraded_connection_carries_anything(served, tenant, tls):
    served.push(
        load_balancer(
            listener(80),
            listener(443, protocol="TERMINATED_HTTPS", default_tls_container_ref="cert"),
            pool("pool", member(served.web())),
        ),
        {"cert": tenant.issue("www.example.com").pem},
    )
    connection = served.client.tls(443, tls=trusting(tenant)) if tls else served.client.connect(80)
    reply = upgrade(connection, "/chat")
    assert (reply.status, reply.header("Upgrade")) == (101, "websocket")
    for word in (b"\x81\x05hello", b"\0\xff\0"):
        connection.sendall(word)
        assert connection.recv(100) == word


@pytest.mark.feature("listener.protocol.HTTP", "l7policy.action.REDIRECT_TO_PREFIX")
@pytest.mark.parametrize("vip", VIPS)
def test_http_is_redirected_to_https(served, tenant, vip):
    """A policy on port 80 redirects, and keeps the path and the query."""
    web = served.web()
    everything = rule("PATH", "STARTS_WITH", "/")
    redirect = policy("REDIRECT_PREFIX", 1, everything, redirect_prefix="https://www.example.com")
    tree = load_balancer(
        listener(80, redirect, pool=None),
        listener(443, protocol="TERMINATED_HTTPS", default_tls_container_ref="cert"),
        pool("pool", member(web)),
    )
    served.push(tree, {"cert": tenant.issue("www.example.com").pem})
    reply = served.client.fetch("/a/b?c=d&e='f'", address=vip)
    assert (reply.status, reply.header("Location")) == (302, "https://www.example.com/a/b?c=d&e='f'")
    assert web.requests == []
    assert (
        served.client.fetch("/a/b?c=d&e='f'", port=443, address=vip, tls=trusting(tenant)).seen.target
        == "/a/b?c=d&e='f'"
    )


def test_plain_clients_of_a_tls_listener_are_refused(served):
    served.push(load_balancer(listener(80), pool("pool", member(served.web()))))
    with pytest.raises((ssl.SSLError, ConnectionError)):
        served.client.tls(80)


def test_the_agent_reports_listener_ids(served):
    pushed = served.push(load_balancer(listener(80), listener(81), pool("pool", member(served.web()))))
    assert pushed.answer["loaded"]["listeners"] == sorted([id_of("listener", 80), id_of("listener", 81)])
