# SPDX-License-Identifier: Apache-2.0
"""The connection tunnel after a hand-over: nftables rules, and the kernel's list of connections."""

from __future__ import annotations

import sys
from ipaddress import ip_address, ip_interface

import pytest

from amphora_agent.bundle import Partner, Vrrp, VrrpInstance
from amphora_agent.network.connection_tunnel import Connection, _endpoint, guard_rules, redirect_rules
from amphora_agent.network.tunnel_answers import answer_rules

VIP, VIP6 = ip_interface("198.51.100.5/32"), ip_interface("2001:db8::5/128")
HERE, THERE = Partner("a", ip_address("198.51.100.11")), Partner("b", ip_address("198.51.100.12"))
MAC = "02:00:00:00:5e:0b"
HERE6, THERE6 = Partner("a", ip_address("2001:db8::11")), Partner("b", ip_address("2001:db8::12"))


def pair(*vips, local=HERE, peer=THERE) -> VrrpInstance:
    return VrrpInstance(Vrrp("eth1", 1, 254, 1.0, local, (peer,)), vips, 1500)


def test_unknown_connections_are_redirected_and_new_ones_stay():
    lines = [line.strip() for line in redirect_rules(pair(VIP), (), MAC).splitlines()]
    flow = "ip saddr . tcp sport . ip daddr . tcp dport"
    vip = "ip daddr { 198.51.100.5 }"
    known = f"{vip} meta l4proto tcp {flow} @own4 accept"
    begins = f"{vip} tcp flags & (syn | ack) == syn update @begun4 {{ {flow} }} accept"
    goes_on = f"{vip} meta l4proto tcp {flow} @begun4 add @own4 {{ {flow} }} accept"
    goes = (
        f'{vip} meta l4proto tcp ether saddr set 0a:00:00:00:00:02 ether daddr set 0a:00:00:00:00:01 fwd to "handover0"'
    )
    assert lines.index(known) < lines.index(begins) < lines.index(goes_on) < lines.index(goes)
    assert not [line for line in lines if "ip6" in line or "own6" in line or "begun6" in line]


def test_both_ends_learn_the_path_mtu():
    text = redirect_rules(pair(VIP, VIP6), (), MAC)
    there = 'ether daddr set 0a:00:00:00:00:01 dup to "handover0"'
    assert f"ip daddr {{ 198.51.100.5 }} icmp type destination-unreachable icmp code 4 {there}" in text
    assert f"ip6 daddr {{ 2001:db8::5 }} icmpv6 type packet-too-big {there}" in text


def test_answers_return_with_the_address_of_the_new_holder():
    lines = [line.strip() for line in redirect_rules(pair(VIP, VIP6), (), MAC).splitlines()]
    arrives = lines.index('type filter hook ingress device "handover0" priority 0; policy accept;')
    sent_on = f'meta l4proto tcp ether saddr set {MAC} fwd to "eth1"'
    assert lines[arrives + 1] == f"ip saddr {{ 198.51.100.5 }} {sent_on}"
    assert lines[arrives + 2] == f"ip6 saddr {{ 2001:db8::5 }} {sent_on}"


def test_answers_take_the_path_of_the_packets():
    """A new holder that forwards no answers does not mark packets, and their answers leave directly."""
    lines = [line.strip() for line in answer_rules(pair(VIP)).splitlines()]
    flow, reverse = "ip saddr . tcp sport . ip daddr . tcp dport", "ip daddr . tcp dport . ip saddr . tcp sport"
    to_vip = "ip daddr { 198.51.100.5 } meta l4proto tcp"
    head = 'type filter hook {} device "{}" priority {}; policy accept;'
    tunnelled = f"ether saddr 0a:00:00:00:00:02 {to_vip} update @answered4 {{ {flow} }}"
    assert lines[lines.index(head.format("ingress", "handover0", 0)) + 1] == tunnelled
    assert lines[lines.index(head.format("ingress", "eth1", -1)) + 1] == f"{to_vip} delete @answered4 {{ {flow} }}"
    leaves = f'ip saddr {{ 198.51.100.5 }} {reverse} @answered4 fwd to "handover0"'
    assert lines[lines.index(head.format("egress", "eth1", 0)) + 1] == leaves
    assert "ip6" not in " ".join(lines)


def test_own_connections_are_known_from_the_start():
    own = [
        Connection(ip_address("192.0.2.7"), 4711, VIP.ip, 80),
        Connection(ip_address("2001:db8:7::7"), 4712, VIP6.ip, 443),
    ]
    text = redirect_rules(pair(VIP, VIP6), own, MAC)
    assert "elements = { 192.0.2.7 . 4711 . 198.51.100.5 . 80 }" in text
    assert "elements = { 2001:db8:7::7 . 4712 . 2001:db8::5 . 443 }" in text


@pytest.mark.parametrize(
    ("local", "peer", "rule"),
    [(HERE, THERE, "ip saddr 198.51.100.12"), (HERE6, THERE6, "ip6 saddr 2001:db8::12")],
)
def test_only_the_partner_uses_the_tunnel(local, peer, rule):
    lines = [line.strip() for line in guard_rules(pair(VIP, local=local, peer=peer)).splitlines()]
    assert lines[lines.index(f"udp dport 4789 {rule} accept") + 1] == "udp dport 4789 drop"


@pytest.mark.skipif(sys.byteorder != "little", reason="the kernel prints 32-bit words in host byte order")
@pytest.mark.parametrize(
    ("text", "address", "port"),
    [
        ("056433C6:0050", "198.51.100.5", 80),
        ("B80D0120000000000000000005000000:01BB", "2001:db8::5", 443),
    ],
)
def test_addresses_are_parsed_in_host_byte_order(text, address, port):
    assert _endpoint(text) == (ip_address(address), port)
