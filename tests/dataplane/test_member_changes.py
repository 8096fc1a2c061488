# SPDX-License-Identifier: Apache-2.0
"""Members that come and go while a pool serves."""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from contextlib import contextmanager

import pytest
from peers import MEMBER, MEMBER6
from visitors import VIPS, ask, serving, trusting
from wanted import VIP, VIP6, id_of, listener, load_balancer, member, monitor, pool

pytestmark = pytest.mark.root
MANY = 1000

POOLS = {
    "HTTP": {},
    "LEAST_CONNECTIONS": {"algorithm": "LEAST_CONNECTIONS"},
    "SOURCE_IP": {"algorithm": "SOURCE_IP"},
    "SOURCE_IP_PORT": {"algorithm": "SOURCE_IP_PORT"},
    "HTTP_COOKIE": {"persistence": ("HTTP_COOKIE", None)},
    "APP_COOKIE": {"persistence": ("APP_COOKIE", "session")},
    "SOURCE_IP persistence": {"persistence": ("SOURCE_IP", None)},
    "HTTP_COOKIE and SOURCE_IP": {"persistence": ("HTTP_COOKIE", None), "algorithm": "SOURCE_IP"},
    "PROXY": {"protocol": "PROXY"},
    "PROXYV2": {"protocol": "PROXYV2"},
    "TLS": {"tls_enabled": True, "ca_tls_container_ref": "ca", "alpn_protocols": ("h2",), "monitor": "named"},
    "HTTP monitor": {"monitor": monitor("HTTP", http_version=1.1, url_path="/check")},
    "HTTPS monitor": {"monitor": monitor("HTTPS"), "tls_enabled": True},
    "TLS-HELLO monitor": {"monitor": monitor("TLS-HELLO"), "tls_enabled": True},
    "PING monitor": {"monitor": monitor("PING")},
    "TCP monitor": {"monitor": monitor("TCP")},
}


@pytest.mark.feature("member.batch", "member.address", "member.weight", "member.admin_state_up")
@pytest.mark.parametrize("wanted", POOLS.values(), ids=POOLS)
def test_members_change_without_a_reload(served, tenant, wanted):
    """Whatever the pool: one is added, changed, and taken away while requests go on, and none of them fails."""
    certificate = tenant.issue("member.internal")
    wanted = dict(wanted)
    if wanted.get("monitor") == "named":
        wanted["monitor"] = monitor("HTTP", domain_name="member.internal", http_version=1.1)
    tls = serving(certificate, alpn=("h2", "http/1.1")) if wanted.get("tls_enabled") else None
    proxied = "PROXY" in wanted.get("protocol", "")
    a, b, c = (
        served.web(name, address, tls=tls, proxied=proxied)
        for name, address in (("a", MEMBER), ("b", MEMBER6), ("c", MEMBER))
    )
    states = {"status": "UP"} if "monitor" in wanted else {}

    def push(*members):
        fronts = listener(80), listener(443, protocol="TERMINATED_HTTPS", default_tls_container_ref="cert")
        tree = load_balancer(*fronts, pool("pool", *members, **wanted))
        return served.push(tree, {"cert": certificate.pem, "ca": tenant.pem}).how

    push(member(a), member(b))
    if states:
        served.until_states("pool", {"a": "UP", "b": "UP"})
    steps = (
        ((member(a), member(b), member(c)), {"a", "b", "c"}),
        ((member(a), member(c, weight=5)), {"a", "c"}),
        ((member(a, weight=0), member(c, weight=5)), {"c"}),
        ((member(a), member(c, admin_state_up=False)), {"a"}),
        ((member(b),), {"b"}),
    )
    with served.visitor.load(1) as load:
        for members, _ in steps:
            assert push(*members) == "runtime"
            load.goes_on(2)
    assert not load.failures, load.failures[:3]
    for members, names in steps[:2]:
        assert push(*members) == "runtime"
        if states:
            served.until_states("pool", dict.fromkeys(names, "UP"))
        found = set()
        for n in range(60):
            plain = n % 2
            found.add(
                served.visitor.fetch(
                    "/", port=80 if plain else 443, address=VIPS[n // 2 % 2], tls=None if plain else trusting()
                ).member
            )
            if found == names:
                break
        # Where the client's address decides, two clients may well have the same member.
        assert found <= names
        if wanted.get("algorithm") != "SOURCE_IP" and wanted.get("persistence") != ("SOURCE_IP", None):
            assert found == names


@contextmanager
def any_port(served, *peers):
    """Many ports of the members' host lead to these peers (in their families)."""
    mem = served.lab.network.name("mem")
    rules = "\n".join(
        f"add rule ip{'6' if ':' in peer.address else ''} many in tcp dport 20000-29999 redirect to :{peer.port}"
        for peer in peers
    )
    tables = "".join(
        f"add table {family} many\nadd chain {family} many in {{ type nat hook prerouting priority -100; }}\n"
        for family in ("ip", "ip6")
    )
    nft = ["ip", "netns", "exec", mem, "nft"]
    subprocess.run([*nft, "-f", "-"], input=tables + rules, text=True, check=True)
    try:
        yield
    finally:
        subprocess.run([*nft, "-f", "-"], input="delete table ip many\ndelete table ip6 many", text=True, check=True)


@pytest.mark.feature("member.batch", "member.protocol_port")
@pytest.mark.parametrize("algorithm", ["ROUND_ROBIN", "SOURCE_IP_PORT"])
def test_a_thousand_members_in_one_batch(served, algorithm):
    """All of them are there, all of them are served, without a reload; and they go as they came."""
    four, six = served.web("four"), served.web("six", MEMBER6)
    ids = [id_of("member", n) for n in range(MANY)]
    thousand = [member(six if n % 2 else four, id=made, protocol_port=20_000 + n) for n, made in enumerate(ids)]

    def push(*members):
        began = time.monotonic()
        pushed = served.push(load_balancer(listener(80), pool("pool", *members, algorithm=algorithm)))
        return pushed.how, time.monotonic() - began

    with any_port(served, four, six):
        push(member(four))
        how, took = push(member(four), *thousand)
        assert (how, took < 5) == ("runtime", True), took
        backend = f"{id_of('pool', 'pool')}:{id_of('listener', 80)}"
        there = {name for proxy, name in served.statistics() if proxy == backend}
        assert there == {*ids, id_of("member", "four"), "BACKEND"}
        if algorithm == "ROUND_ROBIN":
            connections = [served.visitor.connect(80, vip) for vip in VIPS]
            answers = Counter(ask(connections[n % 2]).member for n in range(MANY + 1))
            assert answers == {"four": MANY // 2 + 1, "six": MANY // 2}
            served_by = {name: row["stot"] for (proxy, name), row in served.statistics().items() if proxy == backend}
            assert {served_by[name] for name in ids} == {"1"}
        else:
            served.visitor.fetch(address=VIP6)
        how, took = push(member(four))
        assert (how, took < 10) == ("runtime", True), took
        assert served.visitor.fetch(address=VIP).member == "four"


@pytest.mark.feature("member.batch")
def test_a_thousand_members_of_a_new_pool(served):
    four, six = served.web("four"), served.web("six", MEMBER6)
    thousand = [member(six if n % 2 else four, id=id_of("member", n), protocol_port=20_000 + n) for n in range(MANY)]
    served.push(load_balancer(listener(81, pool=None)))
    with any_port(served, four, six):
        began = time.monotonic()
        assert served.push(load_balancer(listener(80), pool("pool", *thousand))).how == "reload"
        assert time.monotonic() - began < 5
        connection = served.visitor.connect()
        assert Counter(ask(connection).member for _ in range(20)) == {"four": 10, "six": 10}


@pytest.mark.feature("member.address")
def test_the_same_member_twice_is_refused_by_name(served):
    """One id is one member; HAProxy would refuse all of it."""
    web, other = served.web(), served.web("other")
    served.push(
        load_balancer(listener(80), pool("pool", member(web), member(other, id=id_of("member", "web")))),
        refused=[id_of("member", "web")],
    )
    assert {served.visitor.fetch().status for _ in range(3)} == {200}
