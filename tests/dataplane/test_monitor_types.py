# SPDX-License-Identifier: Apache-2.0
"""Health monitors: the condition for a healthy member with each type."""

from __future__ import annotations

import pytest
from amphora_lab import eventually
from http_clients import VIPS, serving, trusting
from peers import MEMBER, MEMBER6, Answer
from wanted import id_of, listener, load_balancer, member, monitor, pool

pytestmark = pytest.mark.root

ABSENT = {MEMBER: "198.51.100.99", MEMBER6: "2001:db8:1::99"}
ALL = {"web", "sick", "tls web", "tls echo", "echo", "silent", "closed", "absent"}
ALIVE = {
    "TCP": {"web", "sick", "tls web", "tls echo", "echo", "silent"},
    "HTTP": {"web"},
    "HTTPS": {"tls web"},
    "TLS-HELLO": {"tls web", "tls echo"},
    "PING": ALL - {"absent"},
}


def sick(seen) -> Answer:
    return Answer(status=500 if seen.target == "/check" else 200)


@pytest.mark.feature("healthmonitor.type.HTTP", "healthmonitor.type.HTTPS", "healthmonitor.type.TCP")
@pytest.mark.feature("healthmonitor.type.TLS-HELLO", "healthmonitor.type.PING")
@pytest.mark.parametrize("kind", ALIVE)
@pytest.mark.parametrize("address", [MEMBER, MEMBER6])
def test_each_monitor_type_finds_the_healthy_members(served, tenant, kind, address):
    """Requests reach exactly the healthy members."""
    tls = serving(tenant.issue("member.internal"))
    peers = {
        "web": served.web("web", address),
        "sick": served.web("sick", address, answer=sick),
        "tls web": served.web("tls web", address, tls=tls),
        "tls echo": served.echo("tls echo", address, tls=tls),
        "echo": served.echo("echo", address),
        "silent": served.silent("silent", address),
        "closed": served.web("closed", address),
    }
    peers["closed"].stop()
    absent = member(peers["web"], id=id_of("member", "absent"), address=ABSENT[address])
    members = [*map(member, peers.values()), absent]
    served.push(
        load_balancer(
            listener(80, protocol="TCP"),
            pool("pool", *members, protocol="TCP", monitor=monitor(kind, url_path="/check", timeout=1)),
        )
    )
    alive = ALIVE[kind]
    served.until_states("pool", {name: "UP" if name in alive else "DOWN" for name in ALL})
    if kind == "PING":
        assert not any(peer.connections for peer in peers.values())
        return
    # A TCP check ends before the member accepts (HAProxy resets the connection at once).
    for name in ALL - {"closed", "absent"} if kind != "TCP" else ():
        peers[name].until(lambda peer=peers[name]: peer.connections, f"{name} is checked")
    for n in range(2 * len(alive)):
        connection = served.client.connect(80, VIPS[n % 2])
        # A request for members that wait for data.
        connection.sendall(b"GET /client HTTP/1.0\r\n\r\n")
    visited = {name for name in ("web", "sick") if name in alive}
    for name in visited:
        peers[name].hears("/client", 2)
    if kind == "TCP":
        eventually(lambda: b"/client" in peers["silent"].heard, "the silent member receives the request")
    assert not peers["sick"].asked("/client") or "sick" in alive


@pytest.mark.feature("healthmonitor.type.PING", "member.monitor_address")
def test_the_ping_goes_to_the_monitor_address(served):
    """PING monitors use the monitor address, also for a member that is added at run time."""
    web = served.web()
    there = member(web, id=id_of("member", "there"), monitor_address="2001:db8:1::111")
    gone = member(web, id=id_of("member", "gone"), protocol_port=web.port + 1, monitor_address=ABSENT[MEMBER6])
    odd = member(web, id=id_of("member", "odd"), address=ABSENT[MEMBER], monitor_address=MEMBER, monitor_port=1)

    def push(*members):
        return served.push(load_balancer(listener(80), pool("pool", *members, monitor=monitor("PING")))).how

    push(there, gone)
    served.until_states("pool", {"there": "UP", "gone": "DOWN"})
    assert push(there, gone, odd) == "runtime"
    served.until_states("pool", {"there": "UP", "gone": "DOWN", "odd": "UP"})
    assert push(there) == "runtime"
    assert served.client.fetch().member == "web"


@pytest.mark.feature("healthmonitor.type.HTTP", "healthmonitor.type.TCP", "healthmonitor.type.TLS-HELLO")
@pytest.mark.parametrize("protocol", ["PROXY", "PROXYV2"])
@pytest.mark.parametrize(("kind", "tls"), [("HTTP", False), ("TCP", False), ("HTTPS", True), ("TLS-HELLO", True)])
def test_checks_of_proxy_pools(served, tenant, protocol, kind, tls):
    """Checks of PROXY pools begin with the PROXY header, as requests do."""
    certificate = tenant.issue("member.internal")
    members = [
        served.web(name, address, proxied=True, tls=serving(certificate) if tls else None)
        for name, address in (("four", MEMBER), ("six", MEMBER6))
    ]
    served.push(
        load_balancer(
            listener(80),
            listener(443, protocol="TERMINATED_HTTPS", default_tls_container_ref="cert"),
            pool(
                "pool",
                *map(member, members),
                protocol=protocol,
                tls_enabled=tls,
                monitor=monitor(kind, url_path="/check"),
            ),
        ),
        {"cert": certificate.pem},
    )
    for port in (80, 443):
        served.until_states("pool", {"four": "UP", "six": "UP"}, port=port)
        tls = trusting() if port == 443 else None
        assert {served.client.fetch(port=port, tls=tls).member for _ in range(2)} == {"four", "six"}
    if kind in ("HTTP", "HTTPS"):
        for peer in members:
            assert all(seen.proxied is not None for seen in peer.hears("/check", 2))


@pytest.mark.feature("healthmonitor.admin_state_up")
def test_a_disabled_monitor_has_no_status(served):
    """A disabled monitor checks no member, and its members have no state."""
    web = served.web()
    dead = served.web("dead", MEMBER6)
    dead.stop()

    def push(watched):
        served.push(load_balancer(listener(80), pool("pool", member(web), member(dead), monitor=watched)))

    for off in (monitor("HTTP", url_path="/check", admin_state_up=False), None):
        push(off)
        assert served.states("pool", "web", "dead") == {"web": "no check", "dead": "no check"}
        before = len(web.asked("/check"))
        push(monitor("HTTP", url_path="/check"))
        served.until_states("pool", {"web": "UP", "dead": "DOWN"})
        web.hears("/check", before + 1)
        assert {served.client.fetch().member for _ in range(4)} == {"web"}
    push(None)
    assert served.states("pool", "web", "dead") == {"web": "no check", "dead": "no check"}
