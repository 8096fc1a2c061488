# SPDX-License-Identifier: Apache-2.0
"""Networks of a serving amphora: routes of answers, several VIPs, and changes under traffic."""

from __future__ import annotations

import itertools
import socket
import subprocess
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest
from amphora_lab import FIXED, FIXED6, MAC, VIP, VIP6, Client, eventually, ip
from configuration_text import CHECK, LISTENER, POOL, listener, text
from member_network import MemberNetwork

from amphora_agent.network.namespace import Namespace

pytestmark = pytest.mark.root
FAR, FAR6 = "192.0.2.77", "2001:db8:2::77"
MEMBER = str(uuid.uuid5(uuid.NAMESPACE_DNS, "on another network"))
ROUTES = [{"destination": "0.0.0.0/0", "gateway": "198.51.100.1"}, {"destination": "::/0", "gateway": "2001:db8:1::1"}]


@pytest.fixture
def second(network):
    made = MemberNetwork(network)
    yield made
    made.close()


def eth1(*vips, **more):
    addresses = [f"{FIXED}/24", f"{FIXED6}/64"]
    wanted = {"mac": MAC, "name": "eth1", "mtu": 1500, "addresses": addresses, "routes": ROUTES, **more}
    return {**wanted, "vips": list(vips or (f"{VIP}/32", f"{VIP6}/128"))}


def answers(amphora, source: str, vip: str, port: int = 80) -> bool:
    """Return whether a client with this address receives an answer."""

    def ask() -> bool:
        with socket.socket(socket.AF_INET6 if ":" in source else socket.AF_INET) as opened:
            opened.settimeout(1)
            opened.bind((source, 0))
            try:
                opened.connect((vip, port))
                opened.sendall(b"GET / HTTP/1.0\r\n\r\n")
                return b" 200 " in opened.recv(100)
            except OSError:
                return False

    return amphora.network.thread("cl").run(ask)


@pytest.fixture
def far_client(network):
    """A client behind the VIP's gateway, with addresses of the members' network."""
    client = network.name("cl")
    made = [
        f"{FAR}/32 dev lo",
        f"{FAR6}/128 dev lo nodad",
        "198.51.100.1/24 dev eth0",
        "2001:db8:1::1/64 dev eth0 nodad",
    ]
    ip(*(f"-n {client} addr add {each}" for each in made))
    yield
    for each in made:
        ip(f"-n {client} addr del {each.removesuffix(' nodad')}")


def test_answers_leave_by_the_vips_network(amphora, second, far_client):
    """The main table would send answers to the members' network, which has the client's address."""
    second.plug()
    wanted = text(listener(["m1"]))
    assert amphora.push(1, wanted, interfaces=[eth1(), second.interface()])[0] == 200
    eventually(lambda: answers(amphora, FAR, VIP) and answers(amphora, FAR6, VIP6), "both VIPs answer the client")
    # Without the rules, the client receives no answer.
    inner = f"/proc/{amphora.init()}/root/run/netns/amphora-haproxy"

    def fails_without_rule(family: str, source: str, vip: str) -> bool:
        """Remove the rule on each call, because a restarted agent repairs the network once."""
        command = ["nsenter", f"--net={inner}", "ip", family, "rule", "del", "from", vip, "lookup", "1"]
        subprocess.run(command, check=False, capture_output=True)
        return not answers(amphora, source, vip)

    eventually(lambda: fails_without_rule("-4", FAR, VIP), "the client receives no answer without the rule")
    eventually(lambda: fails_without_rule("-6", FAR6, VIP6), "the client receives no answer without the rule")
    assert amphora.push(1, wanted, interfaces=[eth1(), second.interface()])[0] == 200
    assert answers(amphora, FAR, VIP)
    assert answers(amphora, FAR6, VIP6)


def test_several_vips_of_both_families(amphora):
    vips = [f"198.51.100.{n}" for n in (5, 6, 7)] + [f"2001:db8:1::{n}" for n in (5, 6)]
    binds = "".join(f"    bind {f'[{vip}]' if ':' in vip else vip}:8080\n" for vip in vips)
    wanted = text(listener(["m1"]).replace("    default_backend", f"{binds}    default_backend", 1))

    def push(generation: int, served):
        interface = eth1(*(f"{vip}/{128 if ':' in vip else 32}" for vip in served))
        return amphora.push(generation, wanted, interfaces=[interface])[0]

    def served():
        sources = {vip: "2001:db8:1::20" if ":" in vip else "198.51.100.20" for vip in vips}
        return {vip for vip in vips if answers(amphora, sources[vip], vip, 8080)}

    assert push(1, vips) == 200
    eventually(lambda: served() == {*vips}, "all VIPs are served")
    # The removal of one VIP does not affect the others.
    for number, gone in enumerate((vips[0], vips[3], vips[1]), start=2):
        left = [vip for vip in vips if vip != gone]
        assert push(number, left) == 200
        assert served() == {*left}
    assert push(9, vips) == 200
    assert served() == {*vips}
    rules = amphora.call("GET", "/v2/diagnostics")[1]["routing"]["rules"]
    assert len(rules) == len(vips)


def with_second(*members: str, other: bool) -> str:
    """Return a listener with these members and, if wanted, a member on the other network."""
    line = f"    server {MEMBER} 192.0.2.110:80 weight 1 {CHECK}\n" if other else ""
    return text(listener(members) + line)


def test_networks_are_added_and_removed_under_traffic(amphora, second):
    """One push changes a network and its member: no request fails, and removed objects are gone."""
    second.start("far")
    amphora.push(1, with_second("m1", other=False))
    with Client(amphora.network) as client:
        client.hears("m1")
        for generation in range(2, 8, 2):
            second.plug()
            status, answer = amphora.push(
                generation, with_second("m1", other=True), interfaces=[eth1(), second.interface()]
            )
            assert status == 200, answer
            client.hears("far")
            status, answer = amphora.push(generation + 1, with_second("m1", other=False), interfaces=[eth1()])
            assert status == 200, answer
            second.unplug()
            client.hears("m1")
    assert client.failures == []
    found = amphora.call("GET", "/v2/diagnostics")[1]
    assert [one["name"] for one in found["interfaces"]] == ["eth1"]
    assert {route["interface"] for route in found["routing"]["routes"]} == {"eth1"}
    assert f"{POOL}:{LISTENER}" in found["haproxy.cfg"]


def test_a_restarted_agent_ignores_a_detached_network(amphora, second):
    """The controller detaches a port without a push when no member needs it."""
    second.start("far")
    second.plug()
    wanted = with_second("m1", other=True)
    assert amphora.push(1, wanted, interfaces=[eth1(), second.interface()])[0] == 200
    second.unplug()
    amphora.power_off()
    amphora.network.unplug()
    amphora.network.plug()
    amphora.start()
    eventually(amphora.answers, "the agent answers")
    eventually(lambda: answers(amphora, "198.51.100.20", VIP), "the amphora serves again")


def test_vip_and_members_on_one_network_with_a_smaller_mtu(amphora):
    assert amphora.push(1, text(listener(["m1"])), interfaces=[eth1(mtu=1500)])[0] == 200
    with Client(amphora.network) as client:
        client.hears("m1")
        status, answer = amphora.push(2, text(listener(["m1"])), interfaces=[eth1(mtu=1400)])
        assert (status, answer["how"]) == (200, "unchanged"), answer
        client.hears("m1")
    assert client.failures == []
    assert amphora.call("GET", "/v2/diagnostics")[1]["interfaces"][0]["mtu"] == 1400


class AddressMonitor:
    """Measures absences of an address from the kernel's notifications."""

    def __init__(self, amphora) -> None:
        path = Path(f"/proc/{amphora.init()}/root/run/netns/amphora-haproxy")
        self._inner = Namespace(path)
        self._heard = self._inner.run(self._listen)
        self._ending = threading.Event()
        self.changes: list[tuple[float, bool]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @staticmethod
    def _listen() -> socket.socket:
        opened = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
        opened.bind((0, 0x10))
        opened.settimeout(0.1)
        return opened

    def _run(self) -> None:
        """RTM_NEWADDR is 20, RTM_DELADDR 21 (linux/rtnetlink.h)."""
        while not self._ending.is_set():
            with suppress(TimeoutError):
                data = self._heard.recv(65536)
                if socket.inet_aton(VIP) in data:
                    self.changes.append((time.monotonic(), data[4] == 20))

    def longest(self) -> float:
        """Return the longest absence in seconds."""
        gaps = [0.0]
        for (left, here), (back, again) in itertools.pairwise(self.changes):
            if again and not here:
                gaps.append(back - left)
        return max(gaps)

    def close(self) -> None:
        self._ending.set()
        self._thread.join(5)
        self._heard.close()
        self._inner.close()


@pytest.mark.quiet
def test_an_amphora_keeps_its_vips_when_its_pair_ends(amphora):
    """keepalived removes the VIPs when it ends, and the agent adds them at once."""
    advert = 0.2
    vrrp = {
        "interface": "eth1",
        "router_id": 1,
        "priority": 254,
        "advert_interval": advert,
        "local": {"name": amphora.id, "address": FIXED},
        "peers": [],
    }
    wanted = text(listener(["m1"]))
    assert amphora.push(1, wanted, interfaces=[eth1()])[0] == 200
    presence = AddressMonitor(amphora)
    try:
        with Client(amphora.network) as client:
            client.hears("m1")
            status, answer = amphora.push(2, wanted, interfaces=[eth1()], vrrp=vrrp)
            assert status == 200, answer
            eventually(lambda: len(presence.changes) >= 2 and presence.changes[-1][1], "keepalived has the VIP")
            began = presence.longest()
            client.hears("m1")
            presence.changes.clear()
            status, answer = amphora.push(3, wanted, interfaces=[eth1()])
            assert status == 200, answer
            eventually(lambda: len(presence.changes) >= 2 and presence.changes[-1][1], "the agent has the VIP")
            client.hears("m1")
    finally:
        presence.close()
    assert client.failures == []
    # keepalived starts as backup and waits for three advertisements; the agent does not wait.
    # Two more seconds are the tolerance on a busy machine.
    assert began < 4 * advert + 2
    assert presence.longest() < 1
    assert len(amphora.call("GET", "/v2/diagnostics")[1]["routing"]["rules"]) == 2
