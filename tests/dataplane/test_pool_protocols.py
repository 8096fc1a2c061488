# SPDX-License-Identifier: Apache-2.0
"""Pools of each protocol behind each compatible listener: the data that members receive."""

from __future__ import annotations

import pytest
from http_clients import CLIENT, CLIENT6, OTHER, OTHER6, VIPS, ask, ended, serving, trusting
from msgspec.structs import replace
from peers import MEMBER, MEMBER6
from pki import Authority
from wanted import VIP, VIP6, listener, load_balancer, member, monitor, pool

pytestmark = pytest.mark.root

# Octavia's matrix: the listeners that a pool of each protocol can have.
LISTENERS = {
    "HTTP": ("HTTP", "TERMINATED_HTTPS", "TCP"),
    "HTTPS": ("HTTPS", "TCP"),
    "TCP": ("TCP", "HTTPS"),
    "PROXY": ("HTTP", "TERMINATED_HTTPS", "TCP", "HTTPS"),
    "PROXYV2": ("HTTP", "TERMINATED_HTTPS", "TCP", "HTTPS"),
}
PORTS = {"HTTP": 80, "TERMINATED_HTTPS": 443, "TCP": 81, "HTTPS": 444}
VERSIONS = {"PROXY": 1, "PROXYV2": 2}
SOURCES = {VIP: CLIENT, VIP6: CLIENT6}


def terminated(port: int = 443, **more):
    return listener(port, protocol="TERMINATED_HTTPS", default_tls_container_ref="cert", **more)


def front(protocol: str, pool_name: str):
    if protocol == "TERMINATED_HTTPS":
        return terminated(pool=pool_name)
    return listener(PORTS[protocol], protocol=protocol, pool=pool_name)


@pytest.mark.feature("pool.protocol.HTTP", "pool.protocol.HTTPS", "pool.protocol.TCP")
@pytest.mark.feature("pool.protocol.PROXY", "pool.protocol.PROXYV2")
@pytest.mark.parametrize("protocol", LISTENERS)
@pytest.mark.parametrize("address", [MEMBER, MEMBER6])
@pytest.mark.feature("member.address", "member.protocol_port")
def test_a_pool_behind_every_listener(served, tenant, protocol, address):
    """The member receives the request and the client's address, for clients and members of both families."""
    certificate = tenant.issue("www.example.com")
    parts, peers = [], {}
    for front_protocol in LISTENERS[protocol]:
        # The member decrypts if the listener does not.
        tls = serving(certificate) if front_protocol == "HTTPS" or protocol == "HTTPS" else None
        peer = peers[front_protocol] = served.web(
            f"behind {front_protocol}", address, tls=tls, proxied=protocol in VERSIONS
        )
        parts += [front(front_protocol, front_protocol), pool(front_protocol, member(peer), protocol=protocol)]
    served.push(load_balancer(*parts), {"cert": certificate.pem})
    for front_protocol, peer in peers.items():
        encrypts = front_protocol in ("HTTPS", "TERMINATED_HTTPS") or protocol == "HTTPS"
        for vip in VIPS:
            port = PORTS[front_protocol]
            if encrypts:
                connection = served.client.tls(port, vip, tls=trusting(tenant))
            else:
                connection = served.client.connect(port, vip)
            seen = ask(connection, "/a?b", method="POST", body=b"word").seen
            assert (seen.member, seen.method, seen.target, seen.body) == (peer.name, "POST", "/a?b", "word")
            assert seen.tls is None if peer._tls is None else seen.tls is not None
            if protocol not in VERSIONS:
                assert seen.proxied is None
                continue
            assert seen.proxied.version == VERSIONS[protocol]
            assert seen.proxied.source == list(connection.getsockname()[:2])
            assert seen.proxied.source[0] == SOURCES[vip]
            assert seen.proxied.destination == [vip, port]
            told = protocol == "PROXYV2" and front_protocol == "TERMINATED_HTTPS"
            assert ("ssl" in seen.proxied.extensions) == told


@pytest.mark.feature("pool.protocol.PROXYV2", "listener.client_authentication")
def test_a_member_receives_the_clients_certificate_name(served, tenant):
    clients = Authority("clients")
    tree = load_balancer(
        terminated(client_authentication="OPTIONAL", client_ca_tls_container_ref="clients"),
        pool("pool", member(served.web(proxied=True)), protocol="PROXYV2"),
    )
    served.push(tree, {"cert": tenant.issue("www.example.com").pem, "clients": clients.pem})
    for certificate in (clients.issue("ada"), None):
        tls = trusting(tenant, certificate=certificate)
        told = served.client.fetch(port=443, tls=tls).seen.proxied.extensions["ssl"]
        # Flags and verdict come first (proxy-protocol.txt, 2.2.6): 1 is TLS, 6 a certificate.
        assert ord(told[0]) == (7 if certificate else 1)
        assert ("ada" in told) == (certificate is not None)
        assert "TLSv1.3" in told


@pytest.mark.feature("pool.protocol.PROXY", "pool.protocol.PROXYV2")
@pytest.mark.parametrize("protocol", VERSIONS)
def test_clients_do_not_share_member_connections(served, protocol):
    """HAProxy reuses connections to members only for the same client."""
    web = served.web(proxied=True)
    served.push(load_balancer(listener(80), pool("pool", member(web), protocol=protocol)))
    clients = [(VIP, CLIENT), (VIP, OTHER), (VIP6, CLIENT6), (VIP6, OTHER6)] * 2
    connections = [served.client.connect(80, vip, source=source) for vip, source in clients]
    for _ in range(3):
        for connection in connections:
            assert ask(connection).seen.proxied.source == list(connection.getsockname()[:2])
    for vip, source in clients:
        assert served.client.fetch(address=vip, source=source).seen.proxied.source[0] == source


@pytest.mark.feature("pool.protocol.PROXY", "pool.protocol.PROXYV2", "pool.tls_enabled")
@pytest.mark.parametrize("protocol", VERSIONS)
def test_the_header_goes_before_encryption(served, tenant, protocol):
    certificate = tenant.issue("www.example.com")
    web = served.web(proxied=True, tls=serving(certificate))
    served.push(
        load_balancer(listener(80), terminated(), pool("pool", member(web), protocol=protocol, tls_enabled=True)),
        {"cert": certificate.pem},
    )
    for port, tls in ((80, None), (443, trusting(tenant))):
        seen = served.client.fetch(port=port, address=VIP6, tls=tls).seen
        assert (seen.proxied.source[0], seen.tls is None) == (CLIENT6, False)


# -- shared and disabled pools -------------------------------------------------------------------------------------


@pytest.mark.feature("pool.protocol.HTTP", "pool.admin_state_up")
def test_listeners_share_a_pool(served, tenant):
    """Each listener keeps its settings. A disabled pool is disabled for all its listeners."""
    web = served.web()
    secrets = {"cert": tenant.issue("www.example.com").pem}

    def push(**more):
        fronts = listener(80, insert_headers=("X-Forwarded-Port",)), listener(81, protocol="TCP"), terminated()
        served.push(load_balancer(*fronts, listener(82), pool("pool", member(web), **more)), secrets)

    def statuses():
        tls = trusting(tenant)
        return [served.client.fetch(port=port, tls=tls if port == 443 else None).status for port in (80, 81, 443, 82)]

    push()
    for _ in range(2):
        assert statuses() == [200] * 4
        assert served.client.fetch(port=80).seen.values("X-Forwarded-Port") == ["80"]
        assert served.client.fetch(port=82).seen.values("X-Forwarded-Port") == []
        before = len(web.requests)
        push(admin_state_up=False)
        for port, tls in ((80, None), (443, trusting(tenant)), (82, None)):
            for vip in VIPS:
                assert served.client.fetch(port=port, address=vip, tls=tls).status == 503
        for vip in VIPS:
            assert ended(served.client.connect(81, vip)) < 5
        assert len(web.requests) == before
        push()


@pytest.mark.feature("pool.admin_state_up")
def test_a_disabled_tcp_pool(served):
    """HAProxy closes new connections to a disabled pool, and serves the other pool."""
    echo = served.echo()

    def push(*, on: bool):
        served.push(
            load_balancer(
                listener(80, protocol="TCP"),
                listener(81, protocol="TCP", pool="other"),
                pool("pool", member(echo), protocol="TCP", admin_state_up=on),
                pool("other", member(echo), protocol="TCP"),
            )
        )

    push(on=True)
    assert served.client.connect(80).recv(100) == b"echo\n"
    push(on=False)
    for vip in VIPS:
        connection = served.client.connect(80, vip)
        assert connection.recv(100) == b""
        assert served.client.connect(81, vip).recv(100) == b"echo\n"
    push(on=True)
    assert served.client.connect(80).recv(100) == b"echo\n"


@pytest.mark.feature(
    "pool.name", "member.name", "healthmonitor.name", "listener.name", "lb.name", "lb.description", "member.subnet_id"
)
def test_a_renamed_object_changes_no_configuration(served):
    """HAProxy's configuration contains ids and no names."""
    web = served.web()

    def tree(**names):
        described = {"description": names.get("name")}
        members = pool("pool", member(web, subnet_id="any", **names), monitor=monitor("TCP", delay=60, **names))
        return load_balancer(listener(80, **names), replace(members, **names), **names, **described)

    served.push(tree())
    for name in ("new", 'a "name"\n of #{many} words', ""):
        assert served.push(tree(name=name)).how == "unchanged"
        assert served.client.fetch().member == "web"
