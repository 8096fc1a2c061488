# SPDX-License-Identifier: Apache-2.0
"""Members are added and removed while a pool serves."""

from __future__ import annotations

import socket
import time
from collections import Counter

import pytest
from http_clients import VIPS, ask, serving, trusting
from peers import MEMBER, MEMBER6, WebServer
from served import MEMBER_ADDRESSES
from wanted import id_of, listener, load_balancer, member, monitor, pool

from amphora_driver.model.loadbalancer import Member

pytestmark = pytest.mark.root
MANY = 1000

# A busy machine delays answers to checks; these tests do not measure the delay.
LENIENT = {"timeout": 5, "max_retries_down": 5}
EVERY_RUN = {"HTTP", "SOURCE_IP persistence", "HTTP_COOKIE and SOURCE_IP", "PROXYV2", "TLS", "HTTPS monitor"}
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
    "HTTP monitor": {"monitor": monitor("HTTP", http_version=1.1, url_path="/check", **LENIENT)},
    "HTTPS monitor": {"monitor": monitor("HTTPS", **LENIENT), "tls_enabled": True},
    "TLS-HELLO monitor": {"monitor": monitor("TLS-HELLO", **LENIENT), "tls_enabled": True},
    "PING monitor": {"monitor": monitor("PING", **LENIENT)},
    "TCP monitor": {"monitor": monitor("TCP", **LENIENT)},
}


@pytest.mark.feature("member.batch", "member.address", "member.weight", "member.admin_state_up")
@pytest.mark.parametrize(
    "wanted",
    [pytest.param(POOLS[one], id=one, marks=() if one in EVERY_RUN else pytest.mark.extended) for one in POOLS],
)
def test_members_change_without_a_reload(served, tenant, wanted):
    """Members of each kind of pool are added, changed and removed under load; no request fails."""
    certificate = tenant.issue("member.internal")
    wanted = dict(wanted)
    if wanted.get("monitor") == "named":
        wanted["monitor"] = monitor("HTTP", domain_name="member.internal", http_version=1.1, **LENIENT)
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

    first = (member(a), member(b))
    push(*first)
    if states:
        served.until_states("pool", {"a": "UP", "b": "UP"})
    steps = (
        ((member(a), member(b), member(c)), {"a", "b", "c"}),
        ((member(a), member(c, weight=5)), {"a", "c"}),
        ((member(a, weight=0), member(c, weight=5)), {"c"}),
        ((member(a), member(c, admin_state_up=False)), {"a"}),
        ((member(b),), {"b"}),
    )
    with served.client.load(1) as load:
        for members, _ in steps:
            how = push(*members)
            # HAProxy removes only idle servers at run time. A persistent client keeps its server busy until a reload.
            assert how == "runtime" or (how == "reload" and wanted.get("persistence") == ("SOURCE_IP", None))
            load.goes_on(2)
    assert not load.failures, load.failures[:3]
    for members, names in ((first, {"a", "b"}), *steps[:2]):
        assert push(*members) == "runtime"
        if states:
            served.until_states("pool", dict.fromkeys(names, "UP"))
        found = set()
        for n in range(60):
            plain = n % 2
            found.add(
                served.client.fetch(
                    "/", port=80 if plain else 443, address=VIPS[n // 2 % 2], tls=None if plain else trusting()
                ).member
            )
            if found == names:
                break
        # With SOURCE_IP, both clients may have the same member.
        assert found <= names
        if wanted.get("algorithm") != "SOURCE_IP" and wanted.get("persistence") != ("SOURCE_IP", None):
            assert found == names


class WebServers(WebServer):
    """A web server that listens on all member addresses and on many ports: it serves as many members."""

    ports = range(20_000, 20_050)

    def start(self) -> None:
        super().start()
        self._others = [self._room.socket(self.address) for _ in self.ports]
        for port, other in zip(self.ports, self._others, strict=True):
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind((self.address, port))
            other.listen(self.backlog)
            self._spawn(self._accept, other)

    def stop(self) -> None:
        for other in self._others:
            other.shutdown(socket.SHUT_RDWR)
        super().stop()
        for other in self._others:
            other.close()

    close = stop

    def members(self) -> list[Member]:
        places = [(each.partition("/")[0], port) for each in MEMBER_ADDRESSES for port in self.ports]
        return [member(self, id=id_of("member", place), address=place[0], protocol_port=place[1]) for place in places]


@pytest.fixture
def web_servers(served):
    return served.start(WebServers(served.lab.members, "everywhere", "::"))


def backend_rows(served) -> dict[str, dict[str, str]]:
    backend = f"{id_of('pool', 'pool')}:{id_of('listener', 80)}"
    return {name: row for (proxy, name), row in served.statistics().items() if proxy == backend and name != "BACKEND"}


@pytest.mark.feature("member.batch", "member.protocol_port")
@pytest.mark.parametrize("algorithm", ["ROUND_ROBIN", "SOURCE_IP_PORT"])
def test_a_thousand_members_in_one_batch(served, web_servers, algorithm):
    """A thousand members are added, serve and are removed without a reload."""
    first, thousand = member(served.web()), web_servers.members()
    assert len(thousand) == MANY

    def push(*members):
        began = time.monotonic()
        pushed = served.push(load_balancer(listener(80), pool("pool", *members, algorithm=algorithm)))
        assert sorted(backend_rows(served)) == sorted(each.id for each in members)
        return pushed.how, time.monotonic() - began

    push(first)
    how, took = push(first, *thousand)
    assert (how, took < 10) == ("runtime", True), took
    connections = [served.client.connect(80, vip) for vip in VIPS]
    times = MANY + 1 if algorithm == "ROUND_ROBIN" else 20
    answers = Counter(ask(connections[n % 2]).member for n in range(times))
    if algorithm == "ROUND_ROBIN":
        assert answers == {"web": 1, "everywhere": MANY}
        assert {row["stot"] for row in backend_rows(served).values()} == {"1"}
    for connection in connections:
        connection.close()
    how, took = push(first)
    assert (how, took < 30) == ("runtime", True), took
    assert {served.client.fetch(address=vip).member for vip in VIPS} == {"web"}


@pytest.mark.feature("member.batch")
def test_a_thousand_members_of_a_new_pool(served, web_servers):
    served.push(load_balancer(listener(81, pool=None)))
    thousand = web_servers.members()
    began = time.monotonic()
    assert served.push(load_balancer(listener(80), pool("pool", *thousand))).how == "reload"
    assert time.monotonic() - began < 10
    assert sorted(backend_rows(served)) == sorted(each.id for each in thousand)
    connection = served.client.connect()
    assert [ask(connection).member for _ in range(40)] == ["everywhere"] * 40


@pytest.mark.feature("member.address")
def test_the_same_member_twice_is_refused_by_name(served):
    """`render` refuses a duplicate member id; HAProxy would refuse the complete configuration."""
    web, other = served.web(), served.web("other")
    served.push(
        load_balancer(listener(80), pool("pool", member(web), member(other, id=id_of("member", "web")))),
        refused=[id_of("member", "web")],
    )
    assert {served.client.fetch().status for _ in range(3)} == {200}
