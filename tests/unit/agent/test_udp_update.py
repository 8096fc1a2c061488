# SPDX-License-Identifier: Apache-2.0
"""Calls from the agent to the checker during a change."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest
from test_agent_firewall import bundle, vrrp
from test_udp_rules import member, server

from amphora_agent.apply.udp_update import UdpUpdate
from amphora_agent.errors import VirtualServersError

NONE = bundle()
ONE = replace(NONE, virtual_servers=(server(member(1)),))
TWO = replace(NONE, virtual_servers=(server(member(1), member(2)),))


class Asked:
    """A checker that records its requests."""

    def __init__(self) -> None:
        self.asked, self.broken = [], False

    def check_servers(self, servers):
        self.asked.append(("check", len(servers)))

    def serve(self, servers, *, paired=False):
        self.asked.append(("serve", [len(one.members) for one in servers], paired))
        if self.broken:
            raise VirtualServersError("serve", "the checker is broken")

    def find_drift(self, servers, *, paired=False):
        self.asked.append(("differs", len(servers), paired))
        return ["its rules"] if self.broken else []

    def told(self):
        found, self.asked = self.asked, []
        return found


def serving():
    checker = Asked()
    return checker, UdpUpdate(checker)


def test_a_starting_process_reads_the_state_first():
    checker, one = serving()
    one.apply(ONE)
    assert checker.told() == [("differs", 1, False), ("serve", [1], False)]
    for _ in range(2):
        one.validate(ONE)
        one.apply(ONE)
    assert checker.told() == []
    one.validate(TWO)
    one.validate(TWO)
    one.apply(TWO)
    assert checker.told() == [("check", 1), ("serve", [2], False)]
    one.invalidate()
    one.apply(TWO)
    assert checker.told() == [("differs", 1, False), ("serve", [2], False)]
    one.apply(replace(TWO, vrrp=vrrp()))
    assert checker.told() == [("serve", [2], True)]
    one.apply(NONE)
    assert checker.told() == [("serve", [], False)]


def test_a_failed_update_is_rolled_back_or_repeated():
    checker, one = serving()
    one.apply(ONE)
    checker.broken = True
    with pytest.raises(VirtualServersError):
        one.apply(TWO)
    one.roll_back(ONE, TWO)
    checker.broken = False
    checker.told()
    one.apply(ONE)
    assert checker.told() == [("differs", 1, False), ("serve", [1], False)]
    one.apply(TWO)
    one.roll_back(ONE, TWO)
    assert checker.told() == [("serve", [2], False), ("serve", [1], False)]
    # No change was begun, or no earlier state exists for a rollback.
    one.roll_back(ONE, TWO)
    assert checker.told() == []
    other, fresh = serving()
    fresh.roll_back(NONE, replace(NONE, load_balancer_id=uuid.UUID(int=9)))
    assert other.told() == []
    fresh.roll_back(None, ONE)
    assert ("serve", [], False) in other.told()


def test_refused_listener_leaves_no_process():
    """A check request starts the checker."""
    checker, one = serving()
    one.apply(NONE)
    checker.told()
    one.validate(ONE)
    one.roll_back(NONE, ONE)
    assert checker.told() == [("check", 1), ("serve", [], False)]
    one.roll_back(NONE, replace(NONE, generation=7))
    assert checker.told() == []
    one.apply(ONE)
    checker.told()
    one.validate(TWO)
    one.roll_back(ONE, TWO)
    assert checker.told() == [("check", 1)]


def test_drift_is_that_of_the_checker():
    checker, one = serving()
    assert one.differences(ONE) == []
    checker.broken = True
    assert one.differences(ONE) == ["its rules"]
    assert checker.told() == [("differs", 1, False)] * 2
