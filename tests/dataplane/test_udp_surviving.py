# SPDX-License-Identifier: Apache-2.0
"""UDP listeners survive a crash of the agent, manual changes, a reboot, and a takeover."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest
from amphora_lab import VIP, VIP6, alive, eventually, ip
from configuration_text import listener, text
from datagrams import PORT, Clients, Stream, UdpMember, member, members_of, persistence, virtual_server
from faults import arm, held_at, push_quietly
from pair_lab import FAST, Pair
from test_drift import INTERVAL, Audited

from amphora_agent.failpoints import Point

pytestmark = pytest.mark.root
PLACES = {"u1": "198.51.100.121", "u2": "198.51.100.122", "u3": "198.51.100.123"}
SERVERS = [virtual_server(*(member(name, address) for name, address in PLACES.items()))]


@contextlib.contextmanager
def meeting(network):
    """Run members and clients on a network."""
    with contextlib.ExitStack() as closing:
        for name, address in PLACES.items():
            ip(f"-n {network.name('mem')} addr replace {address}/24 dev eth0")
            closing.callback(UdpMember(network.thread("mem"), name, address).close)
        yield closing.enter_context(contextlib.closing(Clients(network.thread("cl"))))


@pytest.fixture(scope="module")
def machine(network, authority, tmp_path_factory):
    network.plug()
    made = Audited(network, tmp_path_factory.mktemp("udp"), authority, audit=INTERVAL)
    try:
        made.start()
        eventually(made.answers, "the agent answers")
        yield made
    finally:
        made.power_off()
        network.unplug()


@pytest.fixture
def audited(machine):
    with meeting(machine.network) as clients:
        machine.clients = clients
        push(machine, SERVERS)
        eventually(lambda: not machine.drift()["unrepaired"], "no drift of an earlier test is left")
        yield machine


def push(amphora, servers, haproxy=None):
    state = amphora.call("GET", "/v2/bundle")[1]
    status, answer = amphora.push((state["generation"] or 0) + 1, haproxy, virtual_servers=servers)
    assert status == 200, answer
    return answer


def test_killed_agent_interrupts_no_request(audited):
    flows = audited.clients.flows(6)
    assert members_of(flows) == dict.fromkeys(PLACES, 2)
    with Stream(flows) as stream:
        agent = audited.agent_pid()
        os.kill(agent, signal.SIGKILL)
        eventually(lambda: not alive(agent), "the agent is dead")
        eventually(audited.answers, "the agent answers")
        push(audited, [virtual_server(*(member(name, PLACES[name]) for name in PLACES), connection_limit=1000)])
    assert stream.asked > 20
    assert stream.lost == 0
    assert [len(members) for members in stream.members] == [1] * len(flows)


BY_HAND = {
    "rule": "nft add rule inet amphora_virtual forward drop",
    "element": "nft flush map inet amphora_virtual targets-4",
    "table": "nft delete table inet amphora_virtual",
    "chain": "nft add chain inet amphora_virtual mine { type filter hook forward priority 1 ; policy drop ; }",
}


@pytest.mark.parametrize("case", list(BY_HAND))
def test_manually_changed_rules_are_repaired(audited, case):
    before = audited.counted("forwarding")
    audited.inside(BY_HAND[case])
    audited.mends("forwarding", before)
    assert members_of(audited.clients.flows(6)) == dict.fromkeys(PLACES, 2)


@pytest.mark.parametrize("setting", ["net.ipv4.ip_forward=0", "net.ipv6.conf.all.forwarding=0"])
def test_manually_changed_settings_are_repaired(audited, setting):
    before = audited.counted("firewall")
    audited.inside(f"sysctl -w {setting}")
    audited.mends("firewall", before)
    assert members_of(audited.clients.flows(3)) == dict.fromkeys(PLACES, 1)


def test_changes_of_udp_and_of_haproxy_are_independent(audited):
    """A push that HAProxy refuses does not change UDP; a UDP change does not affect HAProxy."""
    answer = push(audited, SERVERS, text(listener(["m1"])))
    flows = audited.clients.flows(3)
    assert members_of(flows) == dict.fromkeys(PLACES, 1)
    one = virtual_server(member("u1", PLACES["u1"]))
    generation = answer["generation"]
    refused = text(listener(["m1"], extra="    balance nonsense\n"))
    assert audited.push(generation + 1, refused, virtual_servers=[one])[0] == 422
    assert members_of(flows) == dict.fromkeys(PLACES, 1)
    answer = push(audited, [one], text(listener(["m1"])))
    assert answer["how"] == "runtime"
    assert "removed" in answer["reason"]
    assert members_of(flows) == {"u1": 3}


def test_rules_apply_before_forwarding(audited):
    """A flow that begins without rules would never end, also if HAProxy does not change."""
    haproxy = text(listener(["m1"]))
    generation = push(audited, [], haproxy)["generation"]
    allowed = [{"protocol": "udp", "port": PORT, "networks": ["198.51.100.99/32"]}]
    wanted = audited.bundle(generation + 1, haproxy, virtual_servers=SERVERS, allowed=allowed)
    with held_at(audited, Point.PLUGGED, wanted) as answer:
        rules = audited.said("nft list ruleset")
        assert "hook forward" in rules
        assert f"udp dport {PORT}" in rules
        assert "table inet amphora_virtual" not in rules
    assert answer.result(60)[0] == 200
    assert audited.clients.flow().refused()


def test_a_refused_listener_does_not_change_the_others(audited):
    haproxy = text(listener(["m1"]))
    generation = push(audited, [], haproxy)["generation"]
    before = audited.counted("forwarding")
    eventually(
        lambda: audited.status("amphora-checker") is None or not audited.status("amphora-checker")["wanted"],
        "the checker is not wanted",
    )
    least = {"algorithm": "LEAST_CONNECTIONS", "persistence": persistence()}
    wrong = [virtual_server(member("u1", PLACES["u1"]), **least)]
    assert audited.push(generation + 1, haproxy, virtual_servers=wrong)[0] == 422
    assert not audited.status("amphora-checker")["wanted"]
    audited.looks()
    assert audited.counted("forwarding") == before
    assert push(audited, [], haproxy)["how"] == "unchanged"


def test_after_a_reboot_the_confirmed_generation_is_served(audited):
    audited.power_off()
    audited.network.unplug()
    audited.network.plug()
    audited.start()
    eventually(audited.answers, "the agent answers")
    flow = audited.clients.flow()

    def served():
        with contextlib.suppress(ConnectionRefusedError, OSError):
            return flow.ask(timeout=0.5)
        return None

    assert eventually(served, "UDP is served again").member in PLACES


@pytest.mark.parametrize("point", [Point.RESERVED, Point.LOADED])
def test_an_agent_killed_during_a_change_serves_the_confirmed_generation(audited, point):
    """The agent dies before it changes the virtual servers, or before it confirms the change."""
    flows = audited.clients.flows(3)
    assert members_of(flows) == dict.fromkeys(PLACES, 1)
    before = audited.call("GET", "/v2/bundle")[1]["generation"]
    arm(audited, point, "die")
    push_quietly(audited, before + 1, None, virtual_servers=[virtual_server(member("u1", PLACES["u1"]))])
    eventually(audited.answers, "the agent answers")
    eventually(lambda: members_of(audited.clients.flows(3)) == dict.fromkeys(PLACES, 1), "all members serve again")
    assert audited.call("GET", "/v2/bundle")[1]["generation"] == before


def test_answers_leave_by_the_vips_network(booted):
    """Answers leave by the VIP's network, also if another network contains the client's address."""
    pair: Pair = booted
    for node in pair.nodes:
        eventually(node.answers, "the agent answers")
    with meeting(pair.network), contextlib.closing(Clients(pair.network.thread("far"))) as far:
        _push(pair, SERVERS)
        holder = pair.settled()
        flow = far.flow("192.0.2.20")
        assert eventually(lambda: _member(flow), "UDP is served") in PLACES
        # This route of the main table has no gateway that forwards.
        holder.inside("ip", "route", "add", "192.0.2.0/24", "via", PLACES["u1"])
        holder.inside("ip", "-6", "route", "add", "2001:db8:2::/64", "via", "2001:db8:1::121")
        assert holder.inside("ip", "route", "get", "192.0.2.20").split()[2] == PLACES["u1"]
        assert flow.ask() is not None
        assert all(each.ask() is not None for each in far.flows(3, "192.0.2.20"))


def test_flows_keep_their_member_after_a_takeover(booted):
    """The VIPs move, and each flow keeps its member: both amphorae use the same hash."""
    pair: Pair = booted
    for node in pair.nodes:
        eventually(node.answers, "the agent answers")
    with meeting(pair.network) as clients:
        _push(pair, SERVERS)
        holder = pair.settled()
        flows = clients.flows(30)
        before = [eventually(lambda flow=flow: _member(flow), "UDP is served") for flow in flows]
        assert {*before} == {*PLACES}
        holder.call("POST", "/v2/vrrp/release", {})
        eventually(lambda: pair.holders() and pair.holders() != [holder], "the partner has the VIPs")
        after = [eventually(lambda flow=flow: _member(flow), "UDP is served") for flow in flows]
        assert after == before


def _member(flow):
    with contextlib.suppress(ConnectionRefusedError, OSError):
        answer = flow.ask(timeout=0.5)
        return answer and answer.member
    return None


def _push(pair: Pair, servers) -> None:
    """Push a bundle without HAProxy."""
    generation = next(pair.generations)
    for node in pair.nodes:
        where = node.where
        interface = {
            "mac": where.mac,
            "name": "eth1",
            "mtu": 1500,
            "addresses": [f"{where.fixed}/24", f"{where.fixed6}/64"],
            "vips": [f"{VIP}/32", f"{VIP6}/128"],
            "routes": [
                {"destination": "0.0.0.0/0", "gateway": "198.51.100.1"},
                {"destination": "::/0", "gateway": "2001:db8:1::1"},
            ],
        }
        vrrp = {
            "interface": "eth1",
            "router_id": 1,
            "priority": where.priority,
            "advert_interval": FAST,
            "local": {"name": node.id, "address": where.fixed},
            "peers": [{"name": one.id, "address": one.where.fixed} for one in pair.nodes if one is not node],
        }
        status, answer = node.push(generation, None, interfaces=[interface], vrrp=vrrp, virtual_servers=servers)
        assert status == 200, answer
