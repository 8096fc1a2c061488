# SPDX-License-Identifier: Apache-2.0
"""What the kernel holds is compared by how nft lists it, and versions of nft list it differently."""

import ipaddress

import pytest

from amphora_agent.network import nftables
from amphora_agent.network.firewall import Pair, Restrictions, render

_LOCAL, _PEER = ipaddress.ip_address("2001:db8::5"), ipaddress.ip_address("2001:db8::6")
# Taken from nft 1.1.3 of Debian 13.
_DEBIAN_13 = (
    ("tcp flags 0x2 / 0x1,0x2,0x4,0x10 goto", "tcp flags & (0x1 | 0x2 | 0x4 | 0x10) == 0x2 goto"),
    ("tcp flags 0x2,0x10 / 0x2,0x10 tcp option", "tcp flags & (0x2 | 0x10) == 0x2 | 0x10 tcp option"),
)


@pytest.fixture
def wanted():
    text = render(Restrictions(pair=Pair(_LOCAL, (_PEER,), 1500)))
    assert all(ours in text for ours, _ in _DEBIAN_13)
    return text


def test_flags_as_debian_13_lists_them(wanted, monkeypatch):
    listed = wanted
    for ours, theirs in _DEBIAN_13:
        listed = listed.replace(ours, theirs)
    monkeypatch.setattr(nftables, "current", lambda: listed)
    assert nftables.same(wanted)


@pytest.mark.parametrize(("old", "new"), [("== 0x2 goto", "== 0x4 goto"), ("(0x2 | 0x10)", "(0x2 | 0x8)")])
def test_other_flags_are_noticed(wanted, monkeypatch, old, new):
    listed = wanted
    for ours, theirs in _DEBIAN_13:
        listed = listed.replace(ours, theirs)
    assert old in listed
    monkeypatch.setattr(nftables, "current", lambda: listed.replace(old, new))
    assert not nftables.same(wanted)
