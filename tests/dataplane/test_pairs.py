# SPDX-License-Identifier: Apache-2.0
"""A pair with VIPs: the VIP holder, the outage at a takeover, and the state that survives.

Outages are measured with an advertisement interval of 0.2 s ("fast"), where the limit is one second. A takeover after
a crash takes three intervals and a fraction (RFC 9568, 6.1). Tests in which the VIPs must stay use a longer interval:
after 0.6 s without advertisements, a fast node takes the VIPs, and every connection is reset, as designed.
`benchmarks/failover.py` prints a table of events and intervals.

One pair serves all tests; each test begins with a repaired pair.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing

import pytest
from amphora_lab import eventually
from pair_lab import FAST, MEDIUM, USUAL, VIP, VIP6, Pair, plain
from peers import MEMBER6, EchoServer
from wanted import listener, load_balancer, member, pool, vip

from amphora_driver.render.bundle import BundlePartner

# A standby takes over after 0.6 s without advertisements, and the tests measure outages.
pytestmark = [pytest.mark.root, pytest.mark.quiet]

HEALED = 2.0
"""Seconds until the pair has one holder again and serves clients."""


def test_the_vips_are_up_without_a_listener(booted):
    pair = booted
    for node in pair.nodes:
        eventually(node.answers, "the agent answers")
    pair.push(load_balancer())
    holder = pair.settled()
    for address in (VIP, VIP6):
        eventually(lambda address=address: pair.pings(address), f"{address} answers")
    assert [node.health() for node in pair.nodes] == ["0", "0"]
    # The first listener does not move the VIPs, nor does the removal of the last one.
    for tree in (plain(pair), load_balancer(), plain(pair)):
        pair.push(tree)
        assert pair.holder is holder
        assert pair.pings()
    assert pair.client.fetch().status == 200
    assert pair.client.fetch(address=VIP6).status == 200


def test_exactly_one_node_has_both_vips(pair):
    assert {VIP, VIP6} <= set(pair.holder.addresses())
    assert not {VIP, VIP6} & set(pair.standby.addresses())
    for node in pair.nodes:
        said = node.call("GET", "/v2/info")[1]["holds_vip"]
        assert said is node.holds()


def _balancer(web, echo, **more):
    """Return a load balancer with HTTP at port 80 and long TCP connections at port 81."""
    return load_balancer(
        listener(80),
        listener(81, protocol="TCP", pool="tcp"),
        pool("pool", member(web)),
        pool("tcp", member(echo), protocol="TCP"),
        **more,
    )


def test_a_hand_over_keeps_open_connections(pair):
    """The VIPs move, and open connections continue over the new holder to the former one."""
    with closing(EchoServer(pair.members, "echo")) as echo:
        tree = _balancer(pair.peers[0], echo)
        pair.advert = MEDIUM
        pair.push(tree)
        pair.steady()
        holder, standby = pair.holder, pair.standby
        open_ones, later = _hand_over(pair, VIP, VIP6)
        assert standby.call("GET", "/v2/vrrp")[1]["connections"] >= len(later)
        pair.push(tree)  # a push does not change the tunnel
        _talk((*open_ones, *later), 10)
        _kill_agents(pair)
        _talk((*open_ones, *later), 10, 200_000)
        assert holder.call("GET", "/v2/vrrp")[1]["draining"] > 0
        _ended(holder, open_ones)
        _talk(later, 10)
        assert pair.holder is standby
        assert "amphora_handover" in standby.inside("nft", "list", "tables")
        pair.push(tree, to=[standby], peers=())
        eventually(
            lambda: "amphora_handover" not in standby.inside("nft", "list", "tables"),
            "the rules of the hand-over are removed",
        )
        eventually(lambda: "handover0" not in standby.inside("ip", "link"), "the other end of the tunnel is removed")
        assert {VIP, VIP6} <= set(standby.addresses())  # the VIPs are now on one interface
        _close(later)
        pair.push(tree)
        pair.settled()


def test_an_ordinary_move_resets_idle_connections(pair):
    """A release without a drain resets the connection of a client that waits for data."""
    with closing(EchoServer(pair.members, "echo")) as echo:
        pair.push(_balancer(pair.peers[0], echo))
        pair.calm()
        holder, standby = pair.holder, pair.standby
        idle = _greeted(pair, (VIP, VIP6))
        status, answer = holder.call("POST", "/v2/vrrp/release", {"drain": 0})
        assert (status, answer["connections"]) == (200, 0), answer
        for each in idle:
            each.settimeout(HEALED)
            with pytest.raises(ConnectionResetError):
                each.recv(1)
        eventually(lambda: standby.holds(pair.vip), "the partner has the VIPs")
        assert not any(f" {each}/" in holder.inside("ip", "-o", "addr") for each in (VIP, VIP6))


def _hand_over(pair, *vips):
    """Hand the VIPs over with open connections, open new ones, and return both."""
    holder, standby = pair.holder, pair.standby
    open_ones = _greeted(pair, vips)
    with pair.poll() as polling:
        assert standby.call("POST", "/v2/vrrp/expect", {"seconds": 30})[0] == 200
        status, answer = holder.call("POST", "/v2/vrrp/release", {"drain": 20})
        assert (status, answer["holds_vip"]) == (200, False), answer
        eventually(lambda: standby.holds(pair.vip), "the partner has the VIPs", 5.0)
        _talk(open_ones, 10, 200_000)
        for each in vips:  # until the announcement, clients connect to the former holder
            eventually(lambda v=each: pair.network.neighbour("cl", v) == standby.where.mac, "clients go to the partner")
        later = _greeted(pair, vips)
    assert polling.failed == []
    eventually(  # the connections of the polling client end soon
        lambda: holder.call("GET", "/v2/vrrp")[1]["connections"] == len(open_ones), "the holder counts its connections"
    )
    return open_ones, later


def _ended(holder, connections):
    _close(connections)
    eventually(lambda: holder.call("GET", "/v2/vrrp")[1]["draining"] is None, "the last connection has ended")
    eventually(lambda: "handover0" not in holder.inside("ip", "link"), "the tunnel is removed")


def _close(connections):
    for each in connections:
        each.close()


def _greeted(pair, vips):
    made = [pair.client.connect(81, address) for address in vips]
    for each in made:
        assert each.recv(100) == b"echo\n"
    return made


def _talk(connections, *sizes):
    for each in connections:
        for size in sizes:
            said, heard = os.urandom(size), b""
            each.sendall(said)
            while len(heard) < size:
                data = each.recv(65536)
                assert data, "the connection was closed"
                heard += data
            assert heard == said


def takes_over(pair: Pair, break_it, bound: float = 1.0):
    """Break the holder under load; assert that its partner takes the VIPs within this outage (seconds)."""
    holder, standby = pair.holder, pair.standby
    with pair.poll() as polling:
        break_it(holder)
        eventually(lambda: standby.holds(pair.vip), "the standby has the VIPs", 10 * pair.advert + 5)
        eventually(pair.serves, "the pair serves")
    assert polling.outage < bound, polling.failed
    return polling


@pytest.mark.parametrize(
    "programs", [pytest.param(("haproxy",), marks=pytest.mark.extended), ("haproxy", "keepalived")]
)
def test_killed_processes(pair, programs):
    holder = pair.holder
    takes_over(pair, lambda node: node.kill(*programs))
    # The former holder restarts and does not take the VIPs back.
    eventually(holder.is_well, "the former holder is healthy again")
    assert pair.settled(HEALED) is not holder


@pytest.mark.parametrize("which", ["both", pytest.param("child", marks=pytest.mark.extended)])
def test_a_killed_keepalived_alone(pair, which):
    """The VIPs stay until the standby has them. The restarted keepalived removes them without an outage."""
    third = "198.51.100.6"
    pair.push(plain(pair, additional_vips=(vip(VIP6), vip(third))))
    holder, standby = pair.settled(), pair.standby
    eventually(lambda: holder.holds(third), "the new VIP is up")
    with pair.poll(interval=0.02) as near, pair.poll(interval=0.02, place="far") as far:
        # The child first: after the death of its parent, the child ends in order and removes the VIPs.
        for pid in reversed(holder.processes("keepalived")[slice(None) if which == "both" else slice(1, 2)]):
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: not holder.is_well(), "the holder is not healthy")
        pair.push(plain(pair))  # the push removes the third VIP, and does not start keepalived earlier
        eventually(lambda: not holder.holds(third), "the third VIP is removed")
        eventually(standby.holds, "the standby has the VIPs")
        eventually(holder.is_well, "keepalived is started again")
        eventually(lambda: not holder.holds(), "the former holder has released the VIPs")
        for short in ("cl", "rt"):
            assert pair.network.neighbour(short, VIP) == standby.where.mac
    assert pair.holder is standby
    for polling in (near, far):
        _only_cut(polling)


def _only_cut(polling) -> None:
    """Assert that at most three requests failed, all of them in the moment in which the VIPs moved."""
    assert len(polling.failed) <= 3, polling.failed
    if polling.failed:
        last_began, first_ended = max(f[0] for f in polling.failed), min(f[0] + f[1] for f in polling.failed)
        assert last_began <= first_ended, polling.failed


def test_a_killed_parent_of_keepalived(pair):
    """The child ends in order when its parent dies: it removes the VIPs and informs the partner."""
    holder = pair.holder
    takes_over(pair, lambda node: os.kill(node.processes("keepalived")[0], signal.SIGKILL), bound=0.5)
    assert pair.settled(HEALED) is not holder


def test_frozen_haproxy(pair):
    """The kernel still accepts connections; only a request shows that HAProxy is frozen."""
    holder = pair.holder
    takes_over(pair, lambda node: node.send("haproxy", signal.SIGSTOP))
    assert holder.health() == "1"
    holder.send("haproxy", signal.SIGCONT)
    eventually(lambda: holder.health() == "0", "HAProxy answers again")
    assert pair.settled(HEALED) is not holder


def test_busy_machine(pair):
    """A HAProxy that waits for a processor is not frozen."""
    holder = pair.holder
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(8)]
    try:
        with pair.poll(time_limit=5.0) as polling:
            for number in range(3):
                pair.push(plain(pair, name=f"reload {number}"))
                pair.push(load_balancer(*plain(pair).listeners, listener(81 + number), *plain(pair).pools))
                eventually(lambda: len(pair.holders()) == 1, "one holder")
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    assert pair.holder is holder
    assert polling.failed == []


def test_frozen_amphora(pair):
    holder = pair.holder
    takes_over(pair, lambda node: node.everything(signal.SIGSTOP))
    holder.everything(signal.SIGCONT)
    # Both nodes had the VIPs; the node of higher priority keeps them.
    pair.settled(HEALED)
    eventually(pair.serves, "the pair serves", 2 * HEALED)  # each attempt may take half a second


def test_power_cut(pair):
    """The returning amphora serves from its disk as standby."""
    holder = pair.holder

    def cut(node):
        node.everything(signal.SIGKILL)
        pair.network.cut(node.where)

    takes_over(pair, cut)
    pair.reboot(holder)
    eventually(holder.answers, "the agent answers")
    eventually(holder.is_well, "the former holder is healthy again")
    assert pair.settled(HEALED) is not holder


def test_cut_cable(pair):
    holder = pair.holder
    takes_over(pair, lambda node: pair.network.cut(node.where))
    pair.network.mend(holder.where)
    pair.settled(HEALED)
    with pair.poll() as polling:
        eventually(pair.serves, "the pair serves")
    assert polling.failed == []


@pytest.mark.parametrize("silent", [False, True], ids=["heard", "silent"])
def test_partition(pair, silent):
    """Both nodes have the VIPs during a partition. After it, one releases them, and clients use the other.

    `silent` drops all advertisements of the node that releases. Its last one can also be lost without `silent`: it
    waits for the partner's link-layer address for at most three seconds.
    """
    first, second = pair.nodes  # of higher and lower priority
    if pair.holder is not first:
        pair.holder.kill("haproxy")
        eventually(first.holds, "the first node has the VIPs")
        pair.calm()
    if silent:
        second.inside("nft", "add table inet mute; add chain inet mute out { type filter hook output priority 0; }")
        second.inside("nft", "add rule inet mute out meta l4proto vrrp drop")
    with pair.poll(interval=0.02) as near, pair.poll(interval=0.02, place="far") as far:
        pair.network.part(first.where, second.where)
        eventually(second.holds, "both nodes have the VIPs")
        for short in ("cl", "rt"):
            eventually(lambda s=short: pair.network.neighbour(s, VIP) == second.where.mac, "clients use node 2")
        assert pair.holders() == [first, second]
        pair.network.part(first.where, second.where, apart=False)
        healed = time.monotonic()
        assert pair.settled(HEALED) is first
        eventually(lambda: time.monotonic() > healed + HEALED + 0.5, "clients have sent requests for some time")
    second.inside("nft", "destroy table inet mute")
    for polling in (near, far):
        assert all(began < healed + HEALED for began, _, _ in polling.failed), polling.failed


def test_a_vip_is_added(pair):
    """keepalived reloads its file without an outage, and adds the VIP."""
    third = "198.51.100.6"
    holder = pair.holder
    with pair.poll() as polling:
        pair.push(plain(pair, additional_vips=(vip(VIP6), vip(third))))
        eventually(lambda: holder.holds(third), "the new VIP is up")
        assert pair.holder is holder
        pair.push(plain(pair))
        eventually(lambda: not holder.holds(third), "the new VIP is removed")
        assert pair.holder is holder
    assert polling.failed == []


def test_a_restarted_agent_does_not_move_the_vips(pair):
    holder = pair.holder
    with pair.poll() as polling:
        holder.supervisor(op="dismiss", name="haproxy")  # as if the agent had died before it stopped HAProxy
        _kill_agents(pair)
        eventually(lambda: holder.status("haproxy")["wanted"], "HAProxy is wanted again")
    assert polling.failed == []
    assert pair.holder is holder
    takes_over(pair, lambda node: node.kill("haproxy"))


def _kill_agents(pair):
    starts = {node: node.status("amphora-agent")["starts"] for node in pair.nodes}
    for node in pair.nodes:
        node.supervisor(op="signal", name="amphora-agent", signal=int(signal.SIGKILL))
    for node in pair.nodes:
        eventually(lambda n=node: n.status("amphora-agent")["starts"] > starts[n], "the agent is started again")
        eventually(node.answers, "the agent answers")


def test_a_change_that_keepalived_refuses(pair):
    """keepalived continues with its former configuration."""
    holder = pair.holder
    refused = {"local": {"name": "other", "address": "2001:db8:1::11"}, "peers": []}
    status, answer = _push_vrrp(pair, holder, refused)
    assert status == 500, answer
    assert "keepalived" in answer["error"]["wanted"]
    assert holder.holds()
    assert pair.serves()


def _push_vrrp(pair, node, changes):
    """Push a bundle that no controller makes: IPv4 VIPs only, and a partner with IPv6 advertisements."""
    interface = {
        "mac": node.where.mac,
        "name": "eth1",
        "mtu": 1500,
        "addresses": [f"{node.where.fixed}/24", f"{node.where.fixed6}/64"],
        "vips": [f"{VIP}/32"],
        "routes": [],
    }
    vrrp = {"interface": "eth1", "router_id": 1, "priority": 254, "advert_interval": FAST, **changes}
    return node.push(next(pair.generations), None, interfaces=[interface], vrrp=vrrp)


def test_release_with_two_partners(pair):
    """During a replacement, the next holder is unknown: the agent refuses a release with a drain."""
    coming = BundlePartner(name="coming", address="198.51.100.99")
    known = {
        node.id: (*(pair._partner(other) for other in pair.nodes if other is not node), coming) for node in pair.nodes
    }
    for node in pair.nodes:
        pair.push(plain(pair), to=[node], peers=known[node.id])
    holder, standby = pair.holder, pair.standby
    status, answer = holder.call("POST", "/v2/vrrp/release", {"drain": 20})
    assert status == 409, answer
    assert "2 partners" in answer["error"]["happened"]
    assert holder.holds()
    status, answer = holder.call("POST", "/v2/vrrp/release", {"drain": 0})
    assert (status, answer["holds_vip"]) == (200, False), answer
    eventually(standby.holds, "the remaining partner has the VIPs", HEALED)
    assert pair.client.fetch().status == 200


def test_release_by_a_former_owner(pair):
    status, answer = pair.standby.call("POST", "/v2/vrrp/release", {})
    assert (status, answer["error"]["happened"]) == (409, "this amphora does not have them")
    assert pair.standby.call("POST", "/v2/vrrp/expect", {"seconds": -1})[0] == 400


@pytest.mark.parametrize(
    "dual", [pytest.param(False, id="alone", marks=pytest.mark.extended), pytest.param(True, id="dual")]
)
def test_nodes_with_ipv6_advertisements(pair, dual):
    """The nodes take over, and hand over with open connections. Packets fit into the tunnel."""
    vips = (VIP6, VIP) if dual else (VIP6,)
    pair.speak_ipv6(alone=not dual)
    pair.advert = MEDIUM
    with closing(pair.web("six", MEMBER6)) as web, closing(EchoServer(pair.members, "echo", MEMBER6)) as echo:
        pair.peers.remove(web)
        pair.push(_balancer(web, echo, vip=vip(VIP6), additional_vips=tuple(map(vip, vips[1:]))))
        if not dual:
            eventually(lambda: not any(node.holds(VIP) for node in pair.nodes), "the IPv4 instance is removed")
        pair.steady()
        takes_over(pair, lambda node: node.kill("haproxy"))
        pair.steady()
        holder = pair.holder
        open_ones, later = _hand_over(pair, *vips)
        assert pair.holder is not holder
        _ended(holder, open_ones)
        _talk(later, 200_000)
        _close(later)


def test_usual_interval(pair):
    pair.advert = USUAL
    pair.push(plain(pair))
    pair.steady()
    takes_over(pair, lambda node: node.everything(signal.SIGKILL), bound=4.0)
