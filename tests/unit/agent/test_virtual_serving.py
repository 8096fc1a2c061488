# SPDX-License-Identifier: Apache-2.0
"""What the checker, and the keepalived of IPVS, are asked in the course of a change, and when nobody is asked."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace

import pytest
from test_agent_firewall import bundle, vrrp
from test_virtual_rules import member, server

from amphora_agent.apply.udp_update import VirtualServing
from amphora_agent.errors import VirtualServersError

NONE = bundle()
ONE = replace(NONE, virtual_servers=(server(member(1)),))
TWO = replace(NONE, virtual_servers=(server(member(1), member(2)),))


@dataclass(frozen=True)
class Said:
    engine: str


class Both:
    """A checker and a keepalived that note what they are asked."""

    def __init__(self, engine="nftables") -> None:
        self.engine, self.asked, self.broken, self.touched = engine, [], False, []

    def check(self, servers):
        self.asked.append(("check", len(servers)))

    def serve(self, servers, *, paired=False):
        self.asked.append(("serve", [len(one.members) for one in servers], paired))
        if self.broken:
            raise VirtualServersError("serve", "it is broken")
        return Said(self.engine)

    def differs(self, servers, *, paired=False):
        self.asked.append(("differs", len(servers), paired))
        return self.touched

    def told(self):
        found, self.asked = self.asked, []
        return found


class Keepalived:
    def __init__(self, both) -> None:
        self._asked = both

    def __getattr__(self, name):
        def noted(*given):
            self._asked.asked.append((name, *(len(one.virtual_servers) for one in given)))
            return "its file" if name == "difference" else None

        return noted


def serving(engine="nftables"):
    both = Both(engine)
    return both, VirtualServing(both, Keepalived(both))


def test_who_begins_looks_first_and_then_nobody_is_asked():
    both, one = serving()
    one.bring_about(ONE)
    assert both.told() == [("differs", 1, False), ("serve", [1], False), ("stop",)]
    for _ in range(2):
        one.check(ONE)
        one.bring_about(ONE)
    assert both.told() == []
    one.check(TWO)
    one.check(TWO)
    one.bring_about(TWO)
    assert both.told() == [("check", 1), ("serve", [2], False)]
    one.doubt()
    one.bring_about(TWO)
    assert both.told() == [("differs", 1, False), ("serve", [2], False)]
    one.bring_about(replace(TWO, vrrp=vrrp()))
    assert both.told() == [("serve", [2], True)]
    one.bring_about(NONE)
    assert both.told() == [("serve", [], False)]


def test_what_failed_is_put_back_and_what_cannot_be_is_asked_for_again():
    both, one = serving()
    one.bring_about(ONE)
    both.broken = True
    with pytest.raises(VirtualServersError):
        one.bring_about(TWO)
    one.go_back(ONE, TWO)
    both.broken = False
    both.told()
    one.bring_about(ONE)
    assert both.told() == [("differs", 1, False), ("serve", [1], False)]
    one.bring_about(TWO)
    one.go_back(ONE, TWO)
    assert both.told() == [("serve", [2], False), ("serve", [1], False)]
    # Nothing was begun, or there is nothing to go back to.
    one.go_back(ONE, TWO)
    assert both.told() == []
    other, fresh = serving()
    fresh.go_back(NONE, replace(NONE, load_balancer_id=uuid.UUID(int=9)))
    assert other.told() == []
    fresh.go_back(None, ONE)
    assert ("serve", [], False) in other.told()


def test_a_listener_that_was_refused_leaves_nobody_behind():
    """Who was asked whether it could be served has been started for that."""
    both, one = serving()
    one.bring_about(NONE)
    both.told()
    one.check(ONE)
    one.go_back(NONE, ONE)
    assert both.told() == [("check", 1), ("serve", [], False)]
    one.go_back(NONE, replace(NONE, generation=7))
    assert both.told() == []
    one.bring_about(ONE)
    both.told()
    one.check(TWO)
    one.go_back(ONE, TWO)
    assert both.told() == [("check", 1)]


def test_with_ipvs_the_keepalived_of_its_own_is_told_last_and_ends_first():
    both, one = serving("lvs")
    one.bring_about(ONE)
    assert both.told() == [("differs", 1, False), ("serve", [1], False), ("bring_about", 1)]
    one.check(TWO)
    one.bring_about(TWO)
    assert both.told() == [("check", 1), ("check", 1), ("serve", [2], False), ("bring_about", 1)]
    assert one.differences(TWO) == ["its file"]
    both.told()
    one.doubt()
    both.touched = ["somebody's hand"]
    one.bring_about(TWO)
    assert both.told()[-2:] == [("bring_about", 1), ("renew",)]
    one.bring_about(NONE)
    assert both.told() == [("bring_about", 0), ("serve", [], False)]
