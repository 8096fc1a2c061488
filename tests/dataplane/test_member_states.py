# SPDX-License-Identifier: Apache-2.0
"""Members: requests and checks by state and address."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from amphora_lab import eventually
from http_clients import VIPS, ask, serving
from peers import MEMBER, MEMBER6
from wanted import id_of, listener, load_balancer, member, monitor, pool

pytestmark = pytest.mark.root


def asked(served, times: int = 6, **more) -> Counter[str]:
    """Return the number of answers of each member to requests to both VIPs."""
    return Counter(served.client.fetch("/", address=VIPS[n % 2], **more).member for n in range(times))


@pytest.mark.feature("member.weight")
def test_weight_zero_drains(served):
    """Weight 0 stops new connections. Open connections continue, and HAProxy does not reload."""
    stays, goes = served.echo("stays"), served.echo("goes", MEMBER6)

    def push(weight: int):
        members = [member(stays), member(goes, weight=weight)]
        return served.push(load_balancer(listener(80, protocol="TCP"), pool("pool", *members, protocol="TCP")))

    push(1)
    opened = {}
    while "goes" not in opened:
        connection = served.client.connect()
        opened[connection.recv(100).decode().strip()] = connection
    assert push(0).how == "runtime"
    assert {served.client.connect(80, VIPS[n % 2]).recv(100) for n in range(6)} == {b"stays\n"}
    opened["goes"].sendall(b"still here")
    assert opened["goes"].recv(100) == b"still here"
    assert push(1).how == "runtime"
    assert {served.client.connect().recv(100) for _ in range(4)} == {b"stays\n", b"goes\n"}


@pytest.mark.feature("member.weight")
@pytest.mark.parametrize("protocol", ["HTTP", "TCP"])
def test_no_member_serves_when_all_are_drained(served, protocol):
    peer = served.web() if protocol == "HTTP" else served.echo()
    parts = listener(80, protocol=protocol), pool("pool", member(peer, weight=0), protocol=protocol)
    served.push(load_balancer(*parts))
    for vip in VIPS:
        if protocol == "HTTP":
            assert served.client.fetch(address=vip).status == 503
        else:
            assert served.client.connect(80, vip).recv(100) == b""
    assert peer.connections == 0


@pytest.mark.quiet
@pytest.mark.parametrize("algorithm", ["ROUND_ROBIN", "LEAST_CONNECTIONS"])
@pytest.mark.parametrize("protocol", ["HTTP", "TCP"])
def test_unmonitored_dead_member_delays_no_client(served, protocol, algorithm):
    """HAProxy redispatches a refused connection at once, not after three retries of one second each."""
    start = served.web if protocol == "HTTP" else served.echo
    alive, dead = start("alive"), start("dead")
    dead.stop()
    members = pool("pool", member(alive), member(dead), protocol=protocol, lb_algorithm=algorithm)
    served.push(load_balancer(listener(80, protocol=protocol), members))
    for vip in VIPS * 3:
        begin = time.monotonic()
        if protocol == "HTTP":
            assert served.client.fetch(address=vip).status == 200
        else:
            assert served.client.connect(80, vip).recv(100) == b"alive\n"
        assert time.monotonic() - begin < 0.9


@pytest.mark.feature("member.admin_state_up")
@pytest.mark.parametrize("watched", [False, True])
def test_a_disabled_member_receives_no_request_and_no_check(served, watched):
    """After the member is enabled, it receives both without a reload."""
    on, off = served.web("on"), served.web("off", MEMBER6)

    def push(*, up: bool, **more):
        members = [member(on), member(off, admin_state_up=up)]
        watching = monitor("HTTP", url_path="/check") if watched else None
        return served.push(load_balancer(listener(80, **more), pool("pool", *members, monitor=watching))).how

    push(up=False)
    assert served.status(id_of("member", "off")) == {"MAINT"}
    assert asked(served) == {"on": 6}
    if watched:
        on.hears("/check", 2)
    assert off.connections == 0
    assert push(up=True) == "runtime"
    if watched:
        served.until_states("pool", {"on": "UP", "off": "UP"})
        off.hears("/check")
    assert asked(served) == {"on": 3, "off": 3}
    assert push(up=False) == "runtime"
    before = len(off.requests)
    assert asked(served) == {"on": 6}
    assert push(up=False, timeout_client_data=49_000) == "reload"
    assert asked(served) == {"on": 6}
    if watched:
        on.hears("/check", len(on.asked("/check")) + 2)
    assert len(off.requests) == before


@pytest.mark.feature("member.backup")
def test_backup_members_serve_without_other_members(served):
    """All backup members serve, and only when no other member is up."""
    peers = {
        name: served.web(name, (MEMBER, MEMBER6)[n % 2]) for n, name in enumerate(("a", "b", "spare 1", "spare 2"))
    }
    members = [member(peer, backup=name.startswith("spare")) for name, peer in peers.items()]
    served.push(load_balancer(listener(80), pool("pool", *members, monitor=monitor("HTTP", url_path="/check"))))

    def only(*up: str) -> dict[str, str]:
        for name, peer in peers.items():
            if name not in up and peer._listening is not None:
                peer.stop()
            elif name in up and peer._listening is None:
                peer.start()
        served.until_states("pool", {name: "UP" if name in up else "DOWN" for name in peers})
        return asked(served, 4)

    assert only(*peers) == {"a": 2, "b": 2}
    assert only("b", "spare 1", "spare 2") == {"b": 4}
    assert only("spare 1", "spare 2") == {"spare 1": 2, "spare 2": 2}
    assert only("spare 2") == {"spare 2": 4}
    assert only("a", "spare 2") == {"a": 4}


@pytest.mark.feature("member.backup", "member.admin_state_up", "member.weight")
def test_backup_members_serve_when_the_others_are_disabled(served):
    a, spare = served.web("a"), served.web("spare")

    def push(**more):
        served.push(load_balancer(listener(80), pool("pool", member(a, **more), member(spare, backup=True))))
        return asked(served, 4)

    assert push() == {"a": 4}
    assert push(admin_state_up=False) == {"spare": 4}
    assert push(weight=0) == {"spare": 4}
    assert push() == {"a": 4}


# -- addresses of checks -------------------------------------------------------------------------------------------


@pytest.mark.feature("member.monitor_address", "member.monitor_port")
@pytest.mark.parametrize(("address", "elsewhere"), [(MEMBER, MEMBER6), (MEMBER6, MEMBER), (MEMBER, "198.51.100.111")])
def test_checks_use_the_monitor_address_and_port(served, address, elsewhere):
    """Checks use the monitor address, the monitor port, or both. Requests go to the member."""
    web = served.web("web", address)
    by_port = served.web("port", address)
    by_address = served.web("address", elsewhere, port=web.port)
    by_both = served.web("both", elsewhere)
    places = {
        "port": {"monitor_port": by_port.port},
        "address": {"monitor_address": elsewhere},
        "both": {"monitor_address": elsewhere, "monitor_port": by_both.port},
    }
    parts = []
    for port, (name, place) in enumerate(places.items(), 80):
        watched = monitor("HTTP", url_path=f"/check-{name}")
        target = member(web, id=id_of("member", name), **place)
        parts += [listener(port, pool=name), pool(name, target, monitor=watched)]
    served.push(load_balancer(*parts))
    checkers = {"port": by_port, "address": by_address, "both": by_both}
    for port, (name, checker) in enumerate(checkers.items(), 80):
        checker.hears(f"/check-{name}")
        served.until_states(name, {name: "UP"}, port=port)
        assert served.client.fetch("/", port=port).member == "web"
    for port, (name, checker) in enumerate(checkers.items(), 80):
        checker.stop()
        served.until_states(name, {name: "DOWN"}, port=port)
        assert served.client.fetch("/", port=port).status == 503
    assert {seen.target for seen in web.requests} == {"/"}
    assert all(seen.target.startswith("/check") for checker in checkers.values() for seen in checker.requests)


@pytest.mark.feature("member.monitor_port", "pool.tls_enabled", "pool.protocol.PROXY")
@pytest.mark.parametrize(("protocol", "tls"), [("HTTP", True), ("PROXY", False), ("PROXYV2", True)])
def test_a_check_of_another_port_uses_no_tls_or_proxy_header(served, tenant, protocol, tls):
    """TLS and PROXY headers apply to checks of the traffic's port only, whether or not it is explicit."""
    certificate = tenant.issue("www.example.com")
    proxied = protocol != "HTTP"
    web = served.web(tls=serving(certificate) if tls else None, proxied=proxied)
    health = served.web("health")
    targets = {
        "elsewhere": member(web, id=id_of("member", "elsewhere"), monitor_port=health.port),
        "said": member(web, id=id_of("member", "said"), monitor_port=web.port),
        "unsaid": member(web, id=id_of("member", "unsaid")),
    }
    parts = []
    for port, (name, target) in enumerate(targets.items(), 80):
        watched = monitor("HTTP", url_path=f"/check-{name}")
        parts += [listener(port, pool=name), pool(name, target, protocol=protocol, tls_enabled=tls, monitor=watched)]
    served.push(load_balancer(*parts))
    for port, name in enumerate(targets, 80):
        served.until_states(name, {name: "UP"}, port=port)
        seen = served.client.fetch("/", port=port).seen
        assert (seen.member, seen.tls is not None, seen.proxied is not None) == ("web", tls, proxied)
    assert {seen.target for seen in health.requests} == {"/check-elsewhere"}
    assert {seen.target for seen in web.requests} == {"/", "/check-said", "/check-unsaid"}


# -- families ------------------------------------------------------------------------------------------------------


@pytest.mark.feature("member.address", "lb.vip_address")
def test_vips_of_both_families_reach_members_of_both_families(served):
    peers = [served.web("four", MEMBER), served.web("six", MEMBER6)]
    served.push(load_balancer(listener(80), pool("pool", *map(member, peers), monitor=monitor("TCP"))))
    served.until_states("pool", {"four": "UP", "six": "UP"})
    for vip in VIPS:
        connection = served.client.connect(80, vip)
        assert Counter(ask(connection).member for _ in range(4)) == {"four": 2, "six": 2}
    for peer in peers:
        assert all((":" in seen.peer[0]) == (peer.name == "six") for seen in peer.requests)


@pytest.mark.feature("member.address")
def test_a_member_of_several_pools_is_checked_in_each(served):
    web = served.web()
    watched = [monitor("HTTP", id=id_of("monitor", name), url_path=f"/{name}") for name in ("a", "b")]
    served.push(
        load_balancer(
            listener(80, pool="a"),
            listener(81, pool="b"),
            pool("a", member(web), monitor=watched[0]),
            pool("b", member(web, id=id_of("member", "again")), monitor=watched[1]),
        )
    )
    for path in ("/a", "/b"):
        web.hears(path)
    eventually(lambda: served.states("a", "web") == {"web": "UP"}, "the member is up in the first pool")
    served.until_states("b", {"again": "UP"}, port=81)
