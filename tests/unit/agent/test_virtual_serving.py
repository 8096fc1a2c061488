# SPDX-License-Identifier: Apache-2.0
"""What the checker is asked in the course of a change, and when it is not asked."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest
from test_agent_firewall import bundle, vrrp
from test_virtual_rules import member, server

from amphora_agent.apply.udp_update import VirtualServing
from amphora_agent.errors import VirtualServersError

NONE = bundle()
ONE = replace(NONE, virtual_servers=(server(member(1)),))
TWO = replace(NONE, virtual_servers=(server(member(1), member(2)),))


class Asked:
    """A checker that records what it is asked."""

    def __init__(self) -> None:
        self.asked, self.broken = [], False

    def check_servers(self, servers):
        self.asked.append(("check", len(servers)))

    def serve(self, servers, *, paired=False):
        self.asked.append(("serve", [len(one.members) for one in servers], paired))
        if self.broken:
            raise VirtualServersError("serve", "it is broken")

    def find_drift(self, servers, *, paired=False):
        self.asked.append(("differs", len(servers), paired))
        return ["its rules"] if self.broken else []

    def told(self):
        found, self.asked = self.asked, []
        return found


def serving():
    checker = Asked()
    return checker, VirtualServing(checker)


def test_who_begins_looks_first_and_then_nobody_is_asked():
    checker, one = serving()
    one.bring_about(ONE)
    assert checker.told() == [("differs", 1, False), ("serve", [1], False)]
    for _ in range(2):
        one.check(ONE)
        one.bring_about(ONE)
    assert checker.told() == []
    one.check(TWO)
    one.check(TWO)
    one.bring_about(TWO)
    assert checker.told() == [("check", 1), ("serve", [2], False)]
    one.doubt()
    one.bring_about(TWO)
    assert checker.told() == [("differs", 1, False), ("serve", [2], False)]
    one.bring_about(replace(TWO, vrrp=vrrp()))
    assert checker.told() == [("serve", [2], True)]
    one.bring_about(NONE)
    assert checker.told() == [("serve", [], False)]


def test_what_failed_is_put_back_and_what_cannot_be_is_asked_for_again():
    checker, one = serving()
    one.bring_about(ONE)
    checker.broken = True
    with pytest.raises(VirtualServersError):
        one.bring_about(TWO)
    one.go_back(ONE, TWO)
    checker.broken = False
    checker.told()
    one.bring_about(ONE)
    assert checker.told() == [("differs", 1, False), ("serve", [1], False)]
    one.bring_about(TWO)
    one.go_back(ONE, TWO)
    assert checker.told() == [("serve", [2], False), ("serve", [1], False)]
    # Nothing was begun, or there is nothing to go back to.
    one.go_back(ONE, TWO)
    assert checker.told() == []
    other, fresh = serving()
    fresh.go_back(NONE, replace(NONE, load_balancer_id=uuid.UUID(int=9)))
    assert other.told() == []
    fresh.go_back(None, ONE)
    assert ("serve", [], False) in other.told()


def test_a_listener_that_was_refused_leaves_nobody_behind():
    """Who was asked whether it could be served has been started for that."""
    checker, one = serving()
    one.bring_about(NONE)
    checker.told()
    one.check(ONE)
    one.go_back(NONE, ONE)
    assert checker.told() == [("check", 1), ("serve", [], False)]
    one.go_back(NONE, replace(NONE, generation=7))
    assert checker.told() == []
    one.bring_about(ONE)
    checker.told()
    one.check(TWO)
    one.go_back(ONE, TWO)
    assert checker.told() == [("check", 1)]


def test_differences_are_those_of_the_checker():
    checker, one = serving()
    assert one.differences(ONE) == []
    checker.broken = True
    assert one.differences(ONE) == ["its rules"]
    assert checker.told() == [("differs", 1, False)] * 2
