# SPDX-License-Identifier: Apache-2.0
"""keepalived's configuration for a bundle."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_address, ip_interface
from pathlib import Path

import pytest
from test_agent_firewall import bundle

from amphora_agent.bundle import Interface, Partner, Vrrp, VrrpInstance
from amphora_agent.keepalived.configuration import render
from amphora_agent.keepalived.vrrp_state import stale_addresses

HERE, THERE = Partner("a", ip_address("198.51.100.11")), Partner("b", ip_address("198.51.100.12"))
HERE6, THERE6 = Partner("a", ip_address("2001:db8::11")), Partner("b", ip_address("2001:db8::12"))
VIP, VIP6 = ip_interface("198.51.100.5/32"), ip_interface("2001:db8::5/128")


def vrrp(local=HERE, peers=(THERE,), interval=0.2):
    return Vrrp("eth1", 7, 253, interval, local, peers)


def text(*vips, **more) -> str:
    return render(VrrpInstance(vrrp(**more), vips, 1500), Path("/run/health"), Path("/run/released"))


def block(rendered: str, name: str) -> list[str]:
    """The lines inside a block."""
    lines = [line.strip() for line in rendered.splitlines()]
    begin = lines.index(f"{name} {{")
    return lines[begin + 1 : lines.index("}", begin)]


def test_no_preemption_and_no_multicast():
    lines = [line.strip() for line in text(VIP).splitlines()]
    for wanted in (
        "state BACKUP",
        "nopreempt",
        "vrrp_version 3",
        "virtual_router_id 7",
        "priority 253",
        "interface eth1",
    ):
        assert wanted in lines
    assert "unicast_src_ip 198.51.100.11" in lines
    assert block(text(VIP), "unicast_peer") == ["198.51.100.12"]
    assert not {"virtual_server", "vrrp_script", "script_user", "notify"} & {
        line.split(" ")[0] for line in lines if line
    }


@pytest.mark.parametrize(
    ("local", "peers", "advertised", "excluded"),
    [(HERE, (THERE,), VIP, VIP6), (HERE6, (THERE6,), VIP6, VIP)],
)
def test_both_families_share_one_vrrp_instance(local, peers, advertised, excluded):
    rendered = text(VIP, VIP6, local=local, peers=peers)
    assert block(rendered, "virtual_ipaddress") == [f"{advertised} dev eth1"]
    assert block(rendered, "virtual_ipaddress_excluded") == [f"{excluded} dev eth1"]
    assert "virtual_ipaddress_excluded" not in text(advertised, local=local, peers=peers)


@pytest.mark.parametrize(("local", "fallback"), [(HERE, "127.0.0.1"), (HERE6, "::1")])
def test_without_a_partner_no_vrrp_packet_is_sent(local, fallback):
    assert block(text(VIP, VIP6, local=local, peers=()), "unicast_peer") == [fallback]


@pytest.mark.parametrize(
    ("seconds", "word"), [(1.0, "1.00"), (0.2, "0.20"), (0.05, "0.05"), (0.29, "0.29"), (40, "40.00")]
)
def test_intervals_have_two_decimals(seconds, word):
    assert f"    advert_int {word}\n" in text(VIP, interval=seconds)


def test_the_configuration_follows_the_bundle():
    interfaces = (
        Interface("02:00:00:00:00:01", "eth2", 9000, (), (), ()),
        Interface("02:00:00:00:00:02", "eth1", 1450, (), (VIP,), ()),
    )
    assert replace(bundle(), interfaces=interfaces).vrrp_instance is None
    assert replace(bundle(vrrp=vrrp()), interfaces=interfaces).vrrp_instance == VrrpInstance(vrrp(), (VIP,), 1450)
    assert replace(bundle(vrrp=vrrp()), interfaces=interfaces[:1]).vrrp_instance is None


def test_remains_of_a_dead_keepalived_are_removed():
    fixed = ip_interface("198.51.100.11/24"), ip_interface("198.51.100.12/32")
    mine = VrrpInstance(vrrp(), (VIP, VIP6), 1500, fixed)
    former, former6 = ip_interface("198.51.100.6/32"), ip_interface("2001:db8::6/128")
    assert stale_addresses(mine, (VIP, former, *fixed, VIP6, former6)) == [former, former6]
