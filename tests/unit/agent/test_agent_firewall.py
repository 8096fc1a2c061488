# SPDX-License-Identifier: Apache-2.0
"""Allowed CIDRs of the firewall: data and nftables rules."""

from __future__ import annotations

import ipaddress
import random
import re
import uuid
from dataclasses import replace

import pytest

from amphora_agent.bundle import AllowedSources, Bundle, Interface, Limits, Partner, Vrrp
from amphora_agent.network.firewall import (
    UNRESTRICTED,
    Port,
    Restrictions,
    VrrpPeers,
    describe_change,
    intersect,
    render,
    restrictions_of,
)

LOCAL, PEER, PEER6 = "198.51.100.11", "198.51.100.12", "2001:db8:1::12"


def bundle(allowed=None, vrrp=None):
    """Restrictions of one protocol: networks by port."""
    return Bundle(
        amphora_id=uuid.UUID(int=1),
        load_balancer_id=uuid.UUID(int=2),
        generation=1,
        haproxy=None,
        files=(),
        pings={},
        limits=Limits(None, None),
        interfaces=(),
        allowed=tuple(
            AllowedSources(port, tuple(map(ipaddress.ip_network, nets))) for port, nets in (allowed or {}).items()
        ),
        vrrp=vrrp,
    )


def vrrp(local=LOCAL, *peers):
    named = [Partner(f"n{number}", ipaddress.ip_address(each)) for number, each in enumerate((local, *peers))]
    return Vrrp("eth1", 1, 254, 1.0, named[0], tuple(named[1:]))


def of(**allowed):
    """Restrictions: of(p80=["192.0.2.0/24"])."""
    return restrictions_of(bundle({int(name[1:]): networks for name, networks in allowed.items()}))


def named(text):
    """The rules without the suffixes of set names."""
    return re.sub(r"(-ipv[46])-[0-9a-f]{8}\b", r"\1", text)


def rules(restrictions):
    """The rules after those that every table has, and the elements of sets by name."""
    text = named(render(restrictions))
    beginning = text.partition("chain beginning {")[2].partition("\t}\n")[0]
    found = [line.strip() for line in beginning.splitlines() if line.strip()]
    assert found[:2] == ['iif "lo" ip daddr 127.0.0.0/8 accept', 'iif "lo" ip6 daddr ::1 accept']
    sets = {part.split()[0]: part.partition("elements = { ")[2].partition(" }")[0] for part in text.split("\tset ")[1:]}
    return found[2:], sets


REFUSE = "counter reject with tcp reset"


@pytest.mark.parametrize(
    ("networks", "wanted", "sets"),
    [
        (
            ["192.0.2.0/24"],
            [f"tcp dport 80 ip saddr != @port-80-ipv4 {REFUSE}", f"meta nfproto 10 tcp dport 80 {REFUSE}"],
            {"port-80-ipv4": "192.0.2.0/24"},
        ),
        (
            ["2001:db8::/32", "2001:db9::1/128"],
            [f"meta nfproto 2 tcp dport 80 {REFUSE}", f"tcp dport 80 ip6 saddr != @port-80-ipv6 {REFUSE}"],
            {"port-80-ipv6": "2001:db8::/32, 2001:db9::1"},
        ),
        # "All addresses" of one family does not include the other family.
        (["0.0.0.0/0"], [f"meta nfproto 10 tcp dport 80 {REFUSE}"], {}),
        (["::/0"], [f"meta nfproto 2 tcp dport 80 {REFUSE}"], {}),
        (["0.0.0.0/1", "128.0.0.0/1", "::/0"], [], {}),
        ([], [f"meta nfproto 2 tcp dport 80 {REFUSE}", f"meta nfproto 10 tcp dport 80 {REFUSE}"], {}),
        # Adjacent and overlapping networks become one range, or one network if possible.
        (
            ["10.0.0.0/24", "10.0.0.0/8", "::/0"],
            [f"tcp dport 80 ip saddr != @port-80-ipv4 {REFUSE}"],
            {"port-80-ipv4": "10.0.0.0/8"},
        ),
        (
            ["10.0.2.0/24", "10.0.1.0/24", "10.0.4.0/25", "10.0.4.128/25", "192.0.2.7/32", "::/0"],
            [f"tcp dport 80 ip saddr != @port-80-ipv4 {REFUSE}"],
            {"port-80-ipv4": "10.0.1.0-10.0.2.255, 10.0.4.0/24, 192.0.2.7"},
        ),
        (
            ["0.0.0.0/0", "::ffff:192.0.2.0/120"],
            [f"tcp dport 80 ip6 saddr != @port-80-ipv6 {REFUSE}"],
            {"port-80-ipv6": "::ffff:192.0.2.0/120"},
        ),
    ],
)
def test_the_rules_of_a_port_are_rendered(networks, wanted, sets):
    assert rules(of(p80=networks)) == (wanted, sets)


def test_set_elements_are_reported_by_set_name():
    """The rules change to another set that exists already."""
    one, same, other = (
        set(re.findall(r"@(\S+)", render(of(p80=networks))))
        for networks in (["10.0.0.0/8"], ["10.0.0.0/9", "10.128.0.0/9"], ["10.0.0.0/9"])
    )
    assert one == same
    assert not one & other


def test_no_restrictions_need_no_table():
    assert restrictions_of(bundle()) == UNRESTRICTED
    assert render(UNRESTRICTED) == ""


def test_ports_are_sorted():
    one, other = of(p80=["192.0.2.0/24"], p443=[]), of(p443=[], p80=["192.0.2.0/24"])
    assert one == other
    assert render(one) == render(other)


@pytest.mark.parametrize("forwarding", [False, True])
def test_fragments_are_reassembled_first_and_tcp_is_not_tracked(forwarding):
    wanted = replace(of(p80=["192.0.2.0/24"]), forwards=forwarding)
    assert chain(wanted, "arriving")[1:3] == ["ct state 0x1 counter", "exthdr frag 1 counter drop"]
    kept_out = ["meta l4proto != { 1, 17, 58, 132 } notrack"] if forwarding else ["notrack"]
    assert chain(wanted, "untracked")[1:] == kept_out
    assert chain(wanted, "untracked-own")[1 : 1 + len(kept_out)] == kept_out
    assert render(wanted).count("chain untracked {") == 1


def test_partners_are_permitted():
    alone, pair = (restrictions_of(bundle(vrrp=each)) for each in (vrrp(), vrrp(LOCAL, PEER)))
    ours = f"ip daddr {LOCAL} tcp dport 1025"
    assert rules(pair)[0] == [f"{ours} ip saddr {{ {LOCAL}, {PEER} }} accept", f"{ours} {REFUSE}"]
    assert rules(alone)[0] == [f"{ours} ip saddr {LOCAL} accept", f"{ours} {REFUSE}"]
    assert f"meta l4proto 112 ip saddr {PEER} accept\n\t\tmeta l4proto 112 counter drop" in render(pair)
    assert "accept\n\t\tmeta l4proto 112 counter drop" not in render(alone)
    assert "meta l4proto 112 counter drop" in render(alone)
    six = render(restrictions_of(bundle(vrrp=vrrp("2001:db8:1::11", "2001:db8:1::13", PEER6))))
    assert "meta l4proto 112 ip6 saddr { 2001:db8:1::12, 2001:db8:1::13 } accept" in six
    assert " ip saddr" not in six


def test_segments_fit_into_a_tunnel_of_ipv6():
    """1500 bytes less 70 of the tunnel's headers, and 40 or 60 of IP and TCP."""
    interface = Interface("02:00:00:00:00:01", "eth1", 1500, (), (), ())
    six, four = (
        render(restrictions_of(replace(bundle(vrrp=vrrp(local)), interfaces=(interface,))))
        for local in ("2001:db8:1::11", LOCAL)
    )
    for flags in ("0x2 / 0x2,0x10", "0x2,0x10 / 0x2,0x10"):  # segments of clients, and segments of the amphora
        rule = f"tcp flags {flags} tcp option maxseg size set"
        assert f"meta nfproto 2 {rule} 1390\n\t\tmeta nfproto 10 {rule} 1370\n" in six
    assert "maxseg" not in four


def test_a_listener_on_the_vrrp_port_does_not_block_the_partner():
    found, _ = rules(restrictions_of(bundle({1025: ["192.0.2.0/24"]}, vrrp(LOCAL, PEER))))
    accept = next(number for number, rule in enumerate(found) if PEER in rule)
    assert accept < next(number for number, rule in enumerate(found) if "@port-1025-ipv4" in rule)


@pytest.mark.parametrize(
    ("one", "other", "wanted"),
    [
        (UNRESTRICTED, UNRESTRICTED, UNRESTRICTED),
        (UNRESTRICTED, of(p80=["10.0.0.0/8"]), of(p80=["10.0.0.0/8"])),
        (of(p80=["10.0.0.0/8"]), UNRESTRICTED, of(p80=["10.0.0.0/8"])),
        (of(p80=["10.0.0.0/8"]), of(p81=[]), of(p80=["10.0.0.0/8"], p81=[])),
        (of(p80=["10.0.0.0/8"]), of(p80=["10.1.0.0/16", "11.0.0.0/8"]), of(p80=["10.1.0.0/16"])),
        (of(p80=["10.0.0.0/8"]), of(p80=["11.0.0.0/8"]), of(p80=[])),
        (
            of(p80=["10.0.0.0/8", "::/0"]),
            of(p80=["0.0.0.0/0", "2001:db8::/32"]),
            of(p80=["10.0.0.0/8", "2001:db8::/32"]),
        ),
        (
            Restrictions(),
            Restrictions((), VrrpPeers(ipaddress.ip_address(LOCAL), ())),
            Restrictions((), VrrpPeers(ipaddress.ip_address(LOCAL), ())),
        ),
        (
            Restrictions((), VrrpPeers(ipaddress.ip_address(LOCAL), ())),
            Restrictions(),
            Restrictions((), VrrpPeers(ipaddress.ip_address(LOCAL), ())),
        ),
    ],
)
def test_during_a_change_only_clients_of_both_rule_sets_are_permitted(one, other, wanted):
    assert intersect(one, other) == wanted


def test_merged_rules_permit_the_intersection():
    source = random.Random(7)

    def some():
        networks = [
            f"10.0.{source.randrange(8)}.{source.randrange(0, 256, 32)}/{source.choice((27, 28, 32))}"
            for _ in range(20)
        ]
        return networks, of(p80=networks)

    def admits(restrictions, address):
        return any(first <= address <= last for first, last in restrictions.ports[0].ipv4)

    for _ in range(50):
        (_, one), (_, other) = some(), some()
        both = intersect(one, other)
        for _ in range(200):
            address = int(ipaddress.ip_address(f"10.0.{source.randrange(8)}.{source.randrange(256)}"))
            assert admits(both, address) == (admits(one, address) and admits(other, address))


@pytest.mark.parametrize(
    ("one", "other", "wanted"),
    [
        (UNRESTRICTED, UNRESTRICTED, ""),
        (of(p80=["10.0.0.0/8"]), of(p80=["10.0.0.0/9", "10.128.0.0/9"]), ""),
        (UNRESTRICTED, of(p80=[]), "allowed clients of port 80 changed"),
        (of(p80=[], p81=[], p82=[]), of(p81=[]), "allowed clients of port 80 changed, and 1 more"),
    ],
)
def test_changes_are_described(one, other, wanted):
    assert describe_change(one, other) == wanted


def test_a_thousand_networks_are_a_thousand_elements():
    networks = [f"10.{n // 256}.{n % 256}.0/25" for n in range(1000)]
    made = of(p80=networks)
    assert isinstance(made.ports[0], Port)
    assert rules(made)[1]["port-80-ipv4"].split(", ") == networks


# -- UDP and SCTP ---------------------------------------------------------------------------------------------------


def other(allowed, servers=(), vips=()):
    """The virtual servers of a bundle, from (protocol, port, networks)."""
    eth1 = Interface("02:00:00:00:00:01", "eth1", 1500, (), tuple(map(ipaddress.ip_interface, vips)), ())
    return restrictions_of(
        replace(
            bundle(),
            interfaces=(eth1,),
            virtual_servers=servers,
            allowed=tuple(
                AllowedSources(port, tuple(map(ipaddress.ip_network, nets)), protocol)
                for protocol, port, nets in allowed
            ),
        )
    )


def chain(restrictions, name):
    text = named(render(restrictions)).partition(f"chain {name} {{")[2].partition("}\n")[0]
    return [line.strip() for line in text.splitlines() if line.strip()]


def test_flows_are_filtered_at_their_start_before_the_choice_of_a_member():
    found = other([("udp", 53, ["192.0.2.0/24"]), ("sctp", 53, []), ("tcp", 53, ["::/0"])])
    head, *entering = chain(found, "entering")
    assert head == "type nat hook prerouting priority -101; policy accept;"
    assert entering == [
        "meta nfproto 2 sctp dport 53 goto refusing",
        "meta nfproto 10 sctp dport 53 goto refusing",
        "udp dport 53 ip saddr != @udp-53-ipv4 goto refusing",
        "meta nfproto 10 udp dport 53 goto refusing",
    ]
    assert chain(found, "beginning")[2:] == [f"meta nfproto 2 tcp dport 53 {REFUSE}"]
    assert rules(found)[1] == {"udp-53-ipv4": "192.0.2.0/24"}


def test_ports_of_two_protocols_are_separate():
    udp, tcp = other([("udp", 53, ["192.0.2.0/24"])]), other([("tcp", 53, ["192.0.2.0/24"])])
    both = intersect(udp, tcp)
    assert {(port.protocol, port.ipv4) for port in both.ports} == {
        ("tcp", udp.ports[0].ipv4),
        ("udp", udp.ports[0].ipv4),
    }
    assert describe_change(UNRESTRICTED, udp) == "allowed clients of port 53 (UDP) changed"
    assert describe_change(udp, both) == "allowed clients of port 53 changed"


def test_a_forwarding_amphora_does_not_route():
    server = object()
    forwards = other([], (server,), ("198.51.100.5/32", "2001:db8:1::5/128", "198.51.100.4/32"))
    head, *rest = chain(forwards, "forwarding")
    assert head == "type filter hook forward priority 200; policy drop;"
    assert rest == ["meta mark 0x0000616d accept"]
    alone = other([], (), ("198.51.100.5/32",))
    assert alone == UNRESTRICTED
    assert render(alone) == ""
    # While one of the two tables forwards, other packets are dropped.
    assert intersect(forwards, UNRESTRICTED).forwards
    assert intersect(UNRESTRICTED, forwards).forwards
