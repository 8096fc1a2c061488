# SPDX-License-Identifier: Apache-2.0
"""The comparison of nftables rules with the kernel's list, whose format depends on the version of nft."""

import ipaddress
import re

import pytest

from amphora_agent.network import nft_apply
from amphora_agent.network.firewall import Port, Restrictions, VrrpPeers, render
from amphora_agent.network.libnftables import NftError

_LOCAL, _PEER = ipaddress.ip_address("2001:db8::5"), ipaddress.ip_address("2001:db8::6")
# Output of nft 1.1.3 of Debian 13.
_DEBIAN_13 = (
    ("tcp flags 0x2 / 0x1,0x2,0x4,0x10 goto", "tcp flags & (0x1 | 0x2 | 0x4 | 0x10) == 0x2 goto"),
    ("tcp flags 0x2,0x10 / 0x2,0x10 tcp option", "tcp flags & (0x2 | 0x10) == 0x2 | 0x10 tcp option"),
)


@pytest.fixture
def wanted():
    text = render(Restrictions(vrrp_peers=VrrpPeers(_LOCAL, (_PEER,), 1500)))
    assert all(ours in text for ours, _ in _DEBIAN_13)
    return text


def test_flags_in_the_format_of_debian_13_are_parsed(wanted, monkeypatch):
    listed = wanted
    for ours, theirs in _DEBIAN_13:
        listed = listed.replace(ours, theirs)
    monkeypatch.setattr(nft_apply, "list_table", lambda: listed)
    assert nft_apply.holds(wanted)


@pytest.mark.parametrize(("old", "new"), [("== 0x2 goto", "== 0x4 goto"), ("(0x2 | 0x10)", "(0x2 | 0x8)")])
def test_different_flags_are_a_difference(wanted, monkeypatch, old, new):
    listed = wanted
    for ours, theirs in _DEBIAN_13:
        listed = listed.replace(ours, theirs)
    assert old in listed
    monkeypatch.setattr(nft_apply, "list_table", lambda: listed.replace(old, new))
    assert not nft_apply.holds(wanted)


def of(*networks):
    nets = tuple(map(ipaddress.ip_network, networks))
    first = tuple((int(one.network_address), int(one.broadcast_address)) for one in nets)
    return render(Restrictions((Port(80, first, ()),)))


def test_sets_are_created_before_their_rules_and_deleted_with_them():
    one, other = of("10.0.0.0/8"), of("192.0.2.0/24")
    (old,), (new,) = (re.findall(r"set (\S+)", text) for text in (one, other))
    sets, rules = nft_apply.plan_transactions(one, other)
    assert re.findall(r"set (\S+)", sets) == [new]
    assert "chain" not in sets
    assert rules.startswith("flush table inet amphora\ndelete chain inet amphora arriving\n")
    assert f"ip saddr != @{new}" in rules
    assert rules.endswith(f"delete set inet amphora {old}\n")
    assert nft_apply.plan_transactions("", one)[1].startswith("table inet amphora {"), "nothing is deleted"
    (rules,) = nft_apply.plan_transactions(one, one.replace("counter ", ""))
    assert "set " not in rules, "the set is there"


@pytest.mark.parametrize(
    ("held", "wanted"),
    [
        (of("10.0.0.0/8"), ""),
        (of("10.0.0.0/8").replace("elements = { 10.0.0.0/8 }", "elements = { 10.0.0.0/9 }"), of("10.0.0.0/8")),
        (of("10.0.0.0/8").replace("\tchain arriving", "\tcounter mine {\n\t}\n\n\tchain arriving"), of("10.0.0.0/8")),
    ],
    ids=["no rules wanted", "another content", "unknown content"],
)
def test_a_manual_change_replaces_the_table(held, wanted):
    (order,) = nft_apply.plan_transactions(held, wanted)
    assert order == f"table inet amphora\ndelete table inet amphora\n{wanted}"


def test_the_order_of_sets_is_ignored(monkeypatch):
    first, second = (of(net).partition("\tset ")[2].partition("\tchain")[0] for net in ("10.0.0.0/8", "192.0.2.0/24"))
    text = of("10.0.0.0/8").replace(f"\tset {first}", f"\tset {first}\tset {second}")
    listed = text.replace(f"\tset {first}\tset {second}", f"\tset {second}\tset {first}")
    assert listed != text
    monkeypatch.setattr(nft_apply, "list_table", lambda: listed)
    assert nft_apply.holds(text)
    monkeypatch.setattr(nft_apply, "list_table", lambda: listed.replace("192.0.2.0/24", "192.0.3.0/24"))
    assert not nft_apply.holds(text)


def test_a_refused_increment_replaces_the_table(monkeypatch):
    held, wanted = of("10.0.0.0/8"), of("192.0.2.0/24")
    given = []

    def run(commands, _flags=0):
        given.append(commands)
        if commands.startswith("flush"):
            raise NftError("busy")
        return ""

    monkeypatch.setattr(nft_apply, "list_table", lambda: held)
    monkeypatch.setattr(nft_apply.libnftables, "run_commands", run)
    assert nft_apply.replace_table(wanted)
    assert given[-1] == f"table inet amphora\ndelete table inet amphora\n{wanted}"
    assert len(given) == 3
