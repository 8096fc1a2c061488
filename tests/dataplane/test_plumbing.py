# SPDX-License-Identifier: Apache-2.0
"""The agent's network configuration in a real namespace: add, remove, announce (`wire.py`)."""

from __future__ import annotations

import errno
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from amphora_lab import eventually, ip
from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError
from wire import (
    FIXED,
    FIXED6,
    PAIR,
    SECOND,
    SECOND6,
    VIP,
    VIP6,
    Tap,
    addresses,
    announced,
    bundle,
    came_up,
    comparable,
    eth1,
    eth2,
    hears_changes,
    interface,
    mac,
    rules,
    settled,
    table,
)

from amphora_agent.errors import InterfaceError
from amphora_agent.network import interfaces, links, nft_apply, sysctls
from amphora_agent.network.plumbing import Plumbing

pytestmark = pytest.mark.root


def test_removal_restores_the_empty_namespace(wire):
    """A removal includes links, addresses, routes of all tables, rules and nftables."""
    before = wire.everything()
    full = bundle(
        eth1(VIP, VIP6, SECOND, SECOND6),
        eth2(routes=(("203.0.113.0/24", "192.0.2.1"),)),
        allowed=((80, ["192.0.2.0/24"]),),
    )
    wire.change(full)
    assert rules(wire) == [
        ("198.51.100.5", "1"),
        ("198.51.100.6", "1"),
        ("2001:db8:1::5", "1"),
        ("2001:db8:1::6", "1"),
    ]
    assert table(wire, 1) == [
        "198.51.100.0/24 via None dev eth1",
        "2001:db8:1::/64 via None dev eth1",
        "default via 198.51.100.1 dev eth1",
        "default via 2001:db8:1::1 dev eth1",
    ]
    assert "192.0.2.0/24" in wire.everything()["nft"]
    wire.change(bundle(), full)
    assert wire.everything() == before
    # The agent can apply the same configuration again.
    wire.change(full, bundle())
    assert len(wire.everything()["link"]) == 3


def test_a_step_removes_its_objects_only(wire):
    full = bundle(eth1(VIP, VIP6, SECOND, SECOND6), eth2())
    wire.change(full)
    fewer = bundle(eth1(VIP, SECOND6, routes=(("::/0", "2001:db8:1::1"), ("203.0.113.0/24", "198.51.100.1"))), eth2())
    wire.change(fewer, full)
    assert rules(wire) == [("198.51.100.5", "1"), ("2001:db8:1::6", "1")]
    assert table(wire, 1) == [
        "198.51.100.0/24 via None dev eth1",
        "2001:db8:1::/64 via None dev eth1",
        "203.0.113.0/24 via 198.51.100.1 dev eth1",
        "default via 2001:db8:1::1 dev eth1",
    ]
    # Without a VIP, an interface has no routing table of its own.
    wire.change(bundle(interface(1, "eth1", FIXED, FIXED6), eth2()), fewer)
    assert rules(wire) == []
    assert table(wire, 1) == []


def test_correct_objects_are_not_changed(wire):
    """A restarted agent changes no correct object: the kernel sends no notification."""
    wanted = bundle(eth1(), eth2(), allowed=((80, ["192.0.2.0/24", "2001:db8::/32"]),))
    wire.change(wanted)
    eventually(lambda: settled(wire, wanted), "the network is as wanted")
    eventually(lambda: came_up(wire), "the kernel has announced that the links came up")
    listening = wire.inner.run(hears_changes)
    try:
        again = Plumbing(wire.inner)  # a restarted agent has no cached state
        try:
            assert not again.matches(wanted)
            wire.outside(again.prepare, wanted, wanted)
            wire.outside(again.commit, wanted)
            assert again.matches(wanted)
        finally:
            again.close()
        for each in listening:
            with pytest.raises(BlockingIOError):
                each.recv(65536)
    finally:
        for each in listening:
            each.close()


def test_a_push_without_network_changes_does_not_call_the_kernel(wire, monkeypatch):
    wanted = bundle(eth1(), allowed=((80, ["192.0.2.0/24"]),))
    wire.change(wanted)
    eventually(lambda: settled(wire, wanted), "the network is as wanted")
    for module, name in (
        (interfaces, "converge"),
        (nft_apply, "replace_table"),
        (nft_apply, "holds"),
    ):
        monkeypatch.setattr(module, name, None)
    for _ in range(3):
        wire.change(wanted, wanted)


DAMAGE = (
    "rule del from 198.51.100.5 lookup 1",
    "-6 rule del from 2001:db8:1::5 lookup 1",
    "rule add from 192.0.2.0/24 lookup 7 priority 50",
    "rule add fwmark 7 lookup 7 priority 50",
    "route del default table 1",
    "route del 198.51.100.0/24 table 1",
    "route replace default via 198.51.100.2 table 1",
    "-6 route del default table 1",
    "route add 203.0.113.0/24 via 198.51.100.1",
    "route add 203.0.113.0/24 via 198.51.100.1 table 9",
    "-6 route add 2001:db8:9::/48 via 2001:db8:1::1 metric 5",
    "addr del 198.51.100.11/24 dev eth1",
    "addr add 198.51.100.99/24 dev eth1",
    "link set eth1 mtu 1400",
    "link set eth1 down",
    "link set eth1 name other",
)


def test_manual_change_is_repaired(wire):
    wanted = bundle(eth1())
    wire.change(wanted)
    before = comparable(wire)
    for damage in DAMAGE:
        wire.ip(damage)
        assert comparable(wire) != before, damage
        wire.change(wanted, wanted)
        assert comparable(wire) == before, damage
    eventually(lambda: settled(wire, wanted), "the network is as wanted")


def test_a_gateway_is_replaced_without_a_gap(wire):
    first = bundle(eth1())
    wire.change(first)
    listening = wire.inner.run(hears_changes)
    try:
        wire.change(bundle(eth1(routes=(("0.0.0.0/0", "198.51.100.2"), ("::/0", "2001:db8:1::2")))), first)
        kinds = set()
        with suppress(BlockingIOError):
            while data := listening[0].recv(65536):
                kinds.add(int.from_bytes(data[4:6], "little"))
    finally:
        for each in listening:
            each.close()
    assert kinds == {24}  # RTM_NEWROUTE, and no RTM_DELROUTE (25)
    assert "default via 198.51.100.2 dev eth1" in table(wire, 1)


def test_a_removed_network_stays_until_haproxy_has_the_new_configuration(wire):
    """Its members are served until HAProxy has the new configuration."""
    both = bundle(eth1(), eth2())
    wire.change(both)
    fewer = bundle(eth1(SECOND))

    def names():
        return {link["ifname"] for link in wire.everything()["link"]}

    wire.outside(wire.plumbing.matches, fewer)
    wire.outside(wire.plumbing.prepare, fewer, both)
    assert names() == {"lo", "eth1", "eth2"}
    assert ("198.51.100.5", "1") in rules(wire)
    assert ("198.51.100.6", "1") in rules(wire)
    wire.outside(wire.plumbing.commit, fewer)
    assert names() == {"lo", "eth1"}
    assert rules(wire) == [("198.51.100.6", "1")]
    # The change fails later: the rollback restores the network.
    wire.outside(wire.plumbing.roll_back, both)
    assert names() == {"lo", "eth1", "eth2"}
    assert ("198.51.100.6", "1") not in rules(wire)


def test_two_interfaces_swap_names(wire):
    first = bundle(eth1(), eth2())
    wire.change(first)
    swapped = (interface(1, "eth2", FIXED, vips=(VIP,)), interface(2, "eth1", "192.0.2.11/24"))
    wire.change(bundle(*swapped), first)
    found = {link["ifname"]: link["address"] for link in wire.everything()["link"]}
    assert (found["eth1"], found["eth2"]) == (mac(2), mac(1))
    eventually(lambda: settled(wire, bundle(*swapped)), "the network is as wanted")


def test_a_kernel_that_renames_only_inactive_interfaces(wire):
    """Kernels before 6.2. The interface is up again after it is renamed."""

    class OlderKernel:
        def __init__(self, route):
            self._route = route

        def link(self, what, **words):
            up = any(link.index == words["index"] and link.up for link in links.list_links(self._route))
            if "ifname" in words and up:
                raise NetlinkError(errno.EBUSY)
            return self._route.link(what, **words)

    def rename() -> int:
        with IPRoute() as route:
            present = {link.mac: link for link in links.list_links(route)}
            return links.configure_links(OlderKernel(route), present, (interface(1, "other", FIXED),))

    wire.change(bundle(eth1()))
    assert wire.inner.run(rename) == 1
    assert [(link["ifname"], "UP" in link["flags"]) for link in wire.everything()["link"][1:]] == [("other", True)]


def test_mtu(wire):
    first = bundle(eth1(mtu=1400), eth2(mtu=1500))
    wire.change(first)
    wire.change(bundle(eth1(mtu=1450), eth2(mtu=1280)), first)
    assert {link["ifname"]: link["mtu"] for link in wire.everything()["link"] if link["ifname"] != "lo"} == {
        "eth1": 1450,
        "eth2": 1280,
    }


def test_every_vip_is_announced_once_when_it_is_added(wire):
    with Tap(wire) as tap:
        first = bundle(eth1())
        wire.change(first)
        assert tap.heard() == announced(VIP, VIP6)
        wire.change(first, first)
        more = bundle(eth1(VIP, VIP6, SECOND, SECOND6), eth2(), allowed=((80, []),))
        wire.change(more, first)
        assert tap.heard() == announced(SECOND, SECOND6)
        wire.ip(f"addr del {VIP} dev eth1")
        wire.change(more, more)
        assert tap.heard() == announced(VIP)
        wire.change(first, more)
        assert tap.heard() == []


def test_a_vip_is_announced_only_when_it_is_served(wire):
    """Until the commit, another amphora may serve the VIP, and this one refuses connections."""
    first = bundle(eth1())
    with Tap(wire) as tap:
        assert not wire.plumbing.matches(first)
        wire.outside(wire.plumbing.prepare, first, None)
        assert {VIP, VIP6} <= addresses(wire)
        assert tap.heard() == []
        again = Plumbing(wire.inner)  # the agent was killed before the announcement
        try:
            wire.outside(again.prepare, first, None)
            assert tap.heard() == []
            wire.outside(again.commit, first)
            assert tap.heard() == announced(VIP, VIP6)
        finally:
            again.close()


def test_the_agent_leaves_the_vips_of_a_pair_to_keepalived(wire):
    """The agent does not add, announce or remove the VIPs; it sets their rules and routes."""
    with Tap(wire) as tap:
        pair = bundle(eth1(), vrrp=PAIR)
        wire.change(pair)
        assert addresses(wire) == {FIXED, FIXED6}
        assert rules(wire) == [("198.51.100.5", "1"), ("2001:db8:1::5", "1")]
        assert len(table(wire, 1)) == 4
        wire.ip(f"addr add {VIP} dev eth1", f"addr add {VIP6} dev eth1 nodad")
        wire.change(bundle(eth1(mtu=1400), vrrp=PAIR), pair)
        assert addresses(wire) == {FIXED, FIXED6, VIP, VIP6}
        assert tap.heard() == []
        # keepalived removes a former VIP; the agent removes its rule.
        fewer = bundle(eth1(VIP), vrrp=PAIR)
        wire.change(fewer, pair)
        assert addresses(wire) == {FIXED, FIXED6, VIP, VIP6}
        assert rules(wire) == [("198.51.100.5", "1")]
        # The pair becomes a single amphora, and a pair again: a present VIP stays.
        alone = bundle(eth1(VIP))
        wire.change(alone, fewer)
        assert addresses(wire) == {FIXED, FIXED6, VIP}
        wire.change(fewer, alone)
        assert addresses(wire) == {FIXED, FIXED6, VIP}
        assert tap.heard() == []


def test_outgoing_connections_never_use_a_vip(wire):
    """Connections of both families use the fixed addresses, which members and partners know."""
    wire.change(bundle(eth1("198.51.100.5/32", "2001:db8:1::8000:5/128")))

    def source(to: str) -> str:
        with socket.socket(socket.AF_INET6 if ":" in to else socket.AF_INET, socket.SOCK_DGRAM) as opened:
            opened.connect((to, 9))
            return opened.getsockname()[0]

    # The first two targets share more leading bits with the VIP than with the fixed address.
    for to, fixed in (
        ("198.51.100.4", FIXED),
        ("2001:db8:1::8000:4", FIXED6),
        ("203.0.113.1", FIXED),
        ("2001:db8:9::1", FIXED6),
    ):
        assert wire.inner.run(source, to) == fixed.partition("/")[0]


def test_only_the_holder_answers_for_an_address_and_on_its_interface(wire):
    """Two networks share a switch: an ARP request on the wrong interface has no answer."""
    wire.change(bundle(eth1(), eth2()))
    ip(
        f"-n {wire.prefix}-peer addr add 198.51.100.20/24 dev far1",
        f"-n {wire.prefix}-peer addr add 192.0.2.20/24 dev far2",
    )

    def asked(number: int, sender: str, target: str) -> bool:
        return wire.spaces["peer"].run(_arp, f"far{number}", sender, target)

    assert asked(1, "198.51.100.20", "198.51.100.5")
    assert asked(2, "192.0.2.20", "192.0.2.11")
    assert not asked(2, "192.0.2.20", "198.51.100.5")
    assert not asked(1, "198.51.100.20", "192.0.2.11")


def _arp(interface: str, sender: str, target: str) -> bool:
    """Send an ARP request for an address (RFC 826), and return whether it is answered."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0806)) as link:
        link.bind((interface, 0x0806))
        link.settimeout(0.3)
        own = link.getsockname()[4]
        head = b"\xff" * 6 + own + b"\x08\x06" + bytes.fromhex("0001080006040001")
        link.send(head + own + socket.inet_aton(sender) + b"\0" * 6 + socket.inet_aton(target))
        deadline = time.monotonic() + 0.5
        with suppress(TimeoutError):
            while time.monotonic() < deadline:
                frame = link.recv(2048)
                if frame[20:22] == b"\0\x02" and frame[28:32] == socket.inet_aton(target):
                    return True
    return False


def test_settings_of_the_namespace(wire):
    def read(key: str) -> str:
        return " ".join(Path("/proc/sys/net", key).read_text().split())

    # The agent omits settings that the kernel does not have. This kernel has all of them.
    for key, wanted in {**sysctls._NEEDED, **sysctls._SETTINGS}.items():
        assert wire.inner.run(read, key) == wanted, key
    wire.change(bundle(eth1()))
    for key in ("ipv6/conf/eth1/accept_ra", "ipv6/conf/eth1/accept_redirects", "ipv4/conf/eth1/accept_redirects"):
        assert wire.inner.run(read, key) == "0", key


# -- failures -------------------------------------------------------------------------------------------------------


def test_a_missing_interface(wire):
    first = bundle(eth1())
    wire.change(first)
    wanted = bundle(eth1(), interface(9, "eth9", "192.0.2.9/24"), allowed=((80, []),))
    before = comparable(wire)
    with pytest.raises(InterfaceError, match=mac(9)):
        wire.change(wanted, first)
    wire.outside(wire.plumbing.roll_back, first)
    assert comparable(wire) == before
    # With `may_lack`, the agent serves without an interface that is gone, and `matches` reports the difference.
    wire.outside(wire.plumbing.prepare, wanted, wanted, may_lack=True)
    wire.outside(wire.plumbing.commit, wanted, may_lack=True)
    assert {link["ifname"] for link in wire.everything()["link"]} == {"lo", "eth1"}
    assert not wire.outside(wire.plumbing.matches, wanted)
    # The interface with the VIPs must exist.
    with pytest.raises(InterfaceError, match=mac(9)):
        wire.outside(wire.plumbing.prepare, bundle(interface(9, "eth1", FIXED, vips=(VIP,))), None, may_lack=True)


def test_a_kernel_error_is_reported_and_rolled_back(wire):
    first = bundle(eth1())
    wire.change(first)
    before = comparable(wire)
    wrong = bundle(eth1(VIP, SECOND, routes=(("203.0.113.0/24", "192.0.2.1"),)), allowed=((80, []),))
    with pytest.raises(InterfaceError, match="kernel refused"):
        wire.change(wrong, first)
    wire.outside(wire.plumbing.roll_back, first)
    assert comparable(wire) == before


def test_describing(wire):
    wire.change(bundle(eth1(), allowed=((80, ["192.0.2.0/24"]),)))
    ip(f"-n {wire.prefix}-peer addr add 198.51.100.1/24 dev far1")
    with wire.inner.run(socket.socket, socket.AF_INET, socket.SOCK_DGRAM) as opened:
        opened.sendto(b"", ("198.51.100.1", 9))
    found = interfaces.describe(wire.inner)
    assert [(one["name"], {*one["addresses"]}, one["routes"]) for one in found] == [
        (
            "eth1",
            {FIXED, FIXED6, VIP, VIP6},
            [
                {"destination": "0.0.0.0/0", "gateway": "198.51.100.1"},
                {"destination": "::/0", "gateway": "2001:db8:1::1"},
            ],
        )
    ]
    routing = interfaces.describe_routing(wire.inner)
    assert routing["rules"] == [
        {"priority": 100, "from": "198.51.100.5/32", "table": 1},
        {"priority": 100, "from": "2001:db8:1::5/128", "table": 1},
    ]
    assert {"table": 1, "destination": "198.51.100.0/24", "gateway": None, "interface": "eth1"} in routing["routes"]
    assert len([one for one in routing["routes"] if one["table"] == 1]) == 4
    eventually(
        lambda: any(
            (one["address"], one["interface"], one["state"]) == ("198.51.100.1", "eth1", "reachable")
            for one in interfaces.describe_neighbours(wire.inner)
        ),
        "the neighbour is known",
    )
    assert "counter packets 0" in wire.inner.run(nft_apply.list_table, counters=True)


def forwards(wire) -> bool:
    files = ("/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv6/conf/all/forwarding")
    return wire.inner.run(lambda: [Path(file).read_text().strip() for file in files]) == ["1", "1"]


def test_forwarding_is_closed_before_rules_exist(wire, monkeypatch):
    """The rules exist before forwarding is on. Without a VIP, forwarding stays off."""
    real, seen = sysctls.set_forwarding, []

    def noted(*, wanted):
        rules = subprocess.run(["nft", "list", "ruleset"], check=True, capture_output=True, text=True).stdout
        seen.append((wanted, "hook forward" in rules))
        real(wanted=wanted)

    monkeypatch.setattr(sysctls, "set_forwarding", noted)
    wanted = bundle(eth1())
    forwarding = replace(wanted, virtual_servers=(object(),))
    wire.outside(wire.plumbing.commit, forwarding)
    assert seen == [(True, True)]
    assert forwards(wire)
    wire.outside(wire.plumbing.commit, wanted)
    assert seen[1:] == [(False, True)]
    assert not forwards(wire)
    nowhere = replace(bundle(interface(1, "eth1", FIXED, FIXED6)), virtual_servers=(object(),))
    wire.change(nowhere, wanted)
    assert not forwards(wire)
    assert wire.outside(wire.plumbing.matches, nowhere)
    assert wire.outside(wire.plumbing.find_drift, nowhere) == []
    # Another program enables forwarding: the next change and the drift check see it.
    wire.inner.run(real, wanted=True)
    assert not wire.outside(wire.plumbing.matches, nowhere)
    assert [kind for kind, _ in wire.outside(wire.plumbing.find_drift, nowhere)] == ["firewall"]
