# SPDX-License-Identifier: Apache-2.0
"""UDP listeners: real datagrams through a real agent, its checker and the kernel's nftables."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from amphora_lab import FIXED, FIXED6, VIP, eventually, get, ip
from configuration_text import listener
from configuration_text import text as frontends
from datagrams import (
    PORT,
    Clients,
    Stream,
    UdpMember,
    member,
    members_of,
    name_of,
    persistence,
    virtual_server,
)

from amphora_agent.l4_nftables import conntrack
from amphora_agent.network.namespace import Namespace

pytestmark = pytest.mark.root
PLACES = {name: f"198.51.100.{number}" for name, number in (("u1", 111), ("u2", 112), ("u3", 113))}
PLACES6 = {name: f"2001:db8:1::{number}" for name, number in (("s1", 111), ("s2", 112))}
ALL_MEMBERS = {**PLACES, **PLACES6}


class Udp:
    """Members u1 to u3 (IPv4), s1 and s2 (IPv6), clients, and pushes, for one test."""

    def __init__(self, lab) -> None:
        self.lab, self.amphora = lab, lab.amphora
        self._closing = contextlib.ExitStack()
        self.members = {name: self.start(name) for name in ALL_MEMBERS}
        self.clients = Clients(lab.network.thread("cl"))
        self._closing.callback(self.clients.close)

    def start(self, name: str, **more) -> UdpMember:
        made = UdpMember(self.lab.network.thread("mem"), name, ALL_MEMBERS[name], **more)
        self._closing.callback(made.close)
        return made

    def push(self, *servers, status: int = 200, text: str | None = None, **more):
        """Push listeners, and return the agent's answer."""
        key = {"virtual_servers": list(servers)} if servers else {}
        found, answer = self.amphora.push(next(self.lab.generations), text, **key, **more)
        assert found == status, answer
        return answer

    def serve(self, **weights):
        """Push one listener with these members, by weight."""
        return self.push(virtual_server(*(member(name, ALL_MEMBERS[name], weight=n) for name, n in weights.items())))

    def close(self) -> None:
        self._closing.close()


@pytest.fixture(scope="module", autouse=True)
def _nothing_left(lab):
    yield
    lab.amphora.push(next(lab.generations), None)


@pytest.fixture
def udp(lab):
    made = Udp(lab)
    yield made
    made.close()


def test_round_robin_follows_the_weights(udp):
    udp.serve(u1=1)  # replaces the configuration of earlier tests
    answer = udp.serve(u1=2, u2=1, u3=1)
    assert answer["how"] == "runtime"
    assert name_of("listener", PORT, "UDP") in answer["reason"]
    assert members_of(udp.clients.flows(40)) == {"u1": 20, "u2": 10, "u3": 10}
    flow = udp.clients.flow()
    assert len({flow.ask().member for _ in range(5)}) == 1, "a flow stays with its member"
    assert flow.ask().seen == FIXED, "members see the amphora"


def test_one_listener_serves_both_families(udp):
    udp.serve(u1=1, u2=1, s1=1, s2=1)
    assert members_of(udp.clients.flows(10)) == {"u1": 5, "u2": 5}
    assert members_of(udp.clients.flows(10, "2001:db8:1::20")) == {"s1": 5, "s2": 5}
    assert udp.clients.flow("2001:db8:1::20").ask().seen == FIXED6
    large = bytes(4000)
    for source in ("198.51.100.20", "2001:db8:1::20"):
        assert udp.clients.flow(source).ask(large).said == large, "a datagram larger than a packet arrives"
    udp.serve(u1=1)
    assert udp.clients.flow("2001:db8:1::20").refused(), "no member of this family"


def test_persistence_and_hashes(udp):
    all_members = [member(name, address) for name, address in ALL_MEMBERS.items()]
    udp.push(virtual_server(*all_members, persistence=persistence()))
    for source in ("198.51.100.20", "198.51.100.21", "2001:db8:1::21"):
        assert len(members_of(udp.clients.flows(8, source))) == 1
    udp.push(virtual_server(*all_members, persistence=persistence(24, 64)))
    assert len(members_of([udp.clients.flow(f"198.51.100.{n}") for n in (20, 21, 22)])) == 1
    udp.push(virtual_server(*all_members, algorithm="SOURCE_IP"))
    first = members_of(udp.clients.flows(8, "198.51.100.21"))
    assert len(first) == 1
    udp.push(virtual_server(*all_members, algorithm="SOURCE_IP_PORT"))
    flows = udp.clients.flows(60)
    found = members_of(flows)
    assert set(found) == set(PLACES)
    # The same address and port reach the same member without stored state.
    ports = [45000 + n for n in range(8)]
    before = [udp.clients.flow(own_port=port).ask().member for port in ports]
    udp.clients.close()
    udp.push()
    udp.push(virtual_server(*all_members, algorithm="SOURCE_IP_PORT"))
    assert [udp.clients.flow(own_port=port).ask().member for port in ports] == before


def test_member_changes_lose_no_datagram_of_other_members(udp):
    udp.serve(u1=1, u2=1)
    flows = udp.clients.flows(8)
    assert members_of(flows) == {"u1": 4, "u2": 4}
    with Stream(flows) as stream:
        for _ in range(5):
            assert "added" in udp.serve(u1=1, u2=1, u3=1)["reason"]
            udp.serve(u1=4, u2=1, u3=1)
            udp.serve(u1=1, u2=1)
    assert stream.asked > 100
    assert stream.lost == 0
    assert [len(members) for members in stream.members] == [1] * len(flows)


def test_a_removed_member_ends_its_own_flows_only(udp):
    udp.serve(u1=1, u2=1, u3=1)
    flows = udp.clients.flows(9)
    before = [flow.ask().member for flow in flows]
    udp.serve(u1=1, u2=1)
    after = [flow.ask().member for flow in flows]
    assert "u3" not in after
    assert [a for a, b in zip(after, before, strict=True) if b != "u3"] == [b for b in before if b != "u3"]
    disabled = [member("u1", PLACES["u1"], enabled=False), member("u2", PLACES["u2"])]
    udp.push(virtual_server(*disabled))
    assert members_of(flows) == {"u2": 9}


def test_a_member_that_drains_keeps_its_flows(udp):
    udp.serve(u1=1, u2=1)
    flows = udp.clients.flows(6)
    before = [flow.ask().member for flow in flows]
    assert {*before} == {"u1", "u2"}
    udp.serve(u1=0, u2=1)
    assert [flow.ask().member for flow in flows] == before
    assert members_of(udp.clients.flows(6)) == {"u2": 6}


def test_backup_members_serve_only_without_other_members(udp):
    backup = member("u3", PLACES["u3"], backup=True)
    udp.push(virtual_server(member("u1", PLACES["u1"]), backup))
    assert members_of(udp.clients.flows(6)) == {"u1": 6}
    udp.push(virtual_server(member("u1", PLACES["u1"], enabled=False), backup))
    assert members_of(udp.clients.flows(6)) == {"u3": 6}


def test_without_a_member_clients_are_refused(udp):
    udp.push(virtual_server())
    assert udp.clients.flow().refused()
    flow = udp.clients.flow("2001:db8:1::20")
    assert flow.refused()
    udp.serve(u1=1, s1=1)
    assert eventually(lambda: _answers(flow), "a client that was refused is served").member == "s1"


def _answers(flow):
    with contextlib.suppress(ConnectionRefusedError):
        return flow.ask(timeout=0.5)
    return None


@pytest.mark.parametrize("source", ["198.51.100.20", "2001:db8:1::20"])
def test_icmp_errors_of_a_member_reach_the_client(udp, source):
    """The amphora forwards ICMP errors about a flow to its client."""
    absent = "2001:db8:1::116" if ":" in source else "198.51.100.116"
    udp.push(virtual_server(member("absent", absent)))
    assert udp.clients.flow(source).refused()


def test_the_limit_of_connections(udp):
    udp.push(virtual_server(member("u1", PLACES["u1"]), connection_limit=3))
    flows = udp.clients.flows(3)
    assert members_of(flows) == {"u1": 3}
    late = udp.clients.flow()
    assert late.refused()
    assert members_of(flows) == {"u1": 3}, "existing flows continue"
    udp.push(virtual_server(member("u1", PLACES["u1"]), connection_limit=None))
    assert late.ask().member == "u1"


def test_forbidden_client_is_refused_and_existing_flows_continue(udp):
    flow = udp.clients.flow("198.51.100.22")
    udp.serve(u1=1, s1=1)
    assert flow.ask().member == "u1"
    allowed = [{"protocol": "udp", "port": PORT, "networks": ["198.51.100.20/32"]}]
    servers = [virtual_server(member("u1", PLACES["u1"]), member("s1", PLACES6["s1"]))]
    answer = udp.push(*servers, allowed=allowed)
    assert (answer["how"], answer["reason"]) == ("runtime", f"allowed clients of port {PORT} (UDP) changed")
    assert udp.clients.flow("198.51.100.20").ask().member == "u1"
    assert udp.clients.flow("198.51.100.22").refused()
    assert udp.clients.flow("2001:db8:1::20").refused()
    assert flow.ask().member == "u1"


def test_members_see_preserved_client_addresses(udp):
    network = udp.lab.network
    udp.push(virtual_server(member("u1", PLACES["u1"]), client_address="preserved"))
    # Members route answers through the amphora.
    ip(f"-n {network.name('mem')} route add 198.51.100.20/32 via {FIXED}")
    try:
        answer = udp.clients.flow(own_port=45123).ask()
        assert (answer.seen, answer.port) == ("198.51.100.20", 45123)
    finally:
        ip(f"-n {network.name('mem')} route del 198.51.100.20/32 via {FIXED}")


def test_the_amphora_is_no_router(udp):
    udp.serve(u1=1)
    network = udp.lab.network
    for via, target in ((FIXED, PLACES["u2"]), (FIXED6, PLACES6["s2"])):
        bits = 128 if ":" in target else 32
        ip(f"-n {network.name('cl')} route add {target}/{bits} via {via}")
        try:
            direct = udp.clients.flow("198.51.100.20" if bits == 32 else "2001:db8:1::20", target, 5353)
            assert direct.ask(timeout=0.3) is None
        finally:
            ip(f"-n {network.name('cl')} route del {target}/{bits} via {via}")
    assert (udp.members["u2"].datagrams, udp.members["s2"].datagrams) == (0, 0)


def test_an_unservable_listener_is_refused_by_name(udp):
    udp.serve(u1=1)
    listener = name_of("listener", PORT, "UDP")
    least = {"algorithm": "LEAST_CONNECTIONS", "persistence": persistence()}
    answer = udp.push(virtual_server(member("u2", PLACES["u2"]), **least), status=422)
    assert answer["object_id"] == listener
    assert "LEAST_CONNECTIONS" in answer["error"]["happened"]
    assert udp.clients.flow().ask().member == "u1"


def test_several_listeners_are_added_and_removed(udp):
    one = virtual_server(member("u1", PLACES["u1"]))
    two = virtual_server(member("u2", PLACES["u2"]), port=PORT + 1)
    udp.push(one, two)
    first, second = udp.clients.flow(), udp.clients.flow(port=PORT + 1)
    assert (first.ask().member, second.ask().member) == ("u1", "u2")
    assert "removed" in udp.push(two)["reason"]
    assert first.refused()
    assert second.ask().member == "u2"
    assert udp.push(two)["how"] == "unchanged"
    udp.push()
    assert second.refused()


def test_a_listener_serves_several_vips_of_one_family(udp):
    second = "198.51.100.6"
    interface = udp.amphora.bundle(0, None)["interfaces"][0]
    more = {**interface, "vips": [*interface["vips"], f"{second}/32"]}
    servers = [virtual_server(member("u1", PLACES["u1"]), addresses=(VIP, second))]
    udp.push(*servers, interfaces=[more])
    assert udp.clients.flow().ask().member == "u1"
    assert udp.clients.flow(vip=second).ask().member == "u1"
    assert udp.clients.flow("2001:db8:1::20").refused(), "the IPv6 VIP has no listener"


def test_connections_of_haproxy_are_not_tracked(udp):
    text = frontends(listener(["m1"]))
    udp.push(virtual_server(member("u1", PLACES["u1"])), text=text)
    assert udp.clients.flow().ask().member == "u1"
    inner = Namespace(Path(f"/proc/{udp.amphora.init()}/root/run/netns/amphora-haproxy"))
    with contextlib.closing(inner):
        before = inner.run(conntrack.count_flows, 0xFFFFFFFF).get(0, 0)
        for _ in range(30):
            assert udp.lab.network.thread("cl").run(get)[0] == 200
        assert inner.run(conntrack.count_flows, 0xFFFFFFFF).get(0, 0) < before + 30
