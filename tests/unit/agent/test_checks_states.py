# SPDX-License-Identifier: Apache-2.0
"""States of members: results of checks, changes of the wanted state, and texts."""

from __future__ import annotations

import json
from dataclasses import replace
from ipaddress import ip_address
from uuid import UUID

import pytest

from amphora_agent.l4.counters import Counters, MonotonicCounters
from amphora_agent.l4.model import Member, Monitor, VirtualServer
from amphora_agent.l4_checks import member_state
from amphora_agent.l4_checks.member_state import State

POOL, SERVER = str(UUID(int=1)), str(UUID(int=2))
UP = State(up=True, proven=True, against=0, since=1.0, reason="")
DOWN = replace(UP, up=False)
MONITOR = Monitor(str(UUID(int=3)), "TCP", 5, 3, 2, 3)


def member(number, **changes):
    known = Member(str(UUID(int=100 + number)), ip_address(f"192.0.2.{number}"), 53, 1, backup=False, enabled=True)
    return replace(known, **changes)


def server(*members, monitor=MONITOR, **changes):
    made = VirtualServer(
        SERVER, "UDP", 53, (ip_address("198.51.100.5"),), None, POOL, "ROUND_ROBIN", None, "hidden", monitor, members
    )
    return replace(made, **changes)


def key(one):
    return POOL, one.id


@pytest.mark.parametrize(
    ("begin", "checks", "rise", "fall", "ends"),
    [
        (UP, "", 2, 3, "up"),
        (UP, "bb", 2, 3, "up"),
        (UP, "bbb", 2, 3, "down"),
        (UP, "bbgbb", 2, 3, "up"),  # a good result resets the count
        (UP, "bbgbbb", 2, 3, "down"),
        (UP, "b", 2, 1, "down"),
        (DOWN, "g", 2, 3, "down"),
        (DOWN, "gg", 2, 3, "up"),
        (DOWN, "gbg", 2, 3, "down"),
        (DOWN, "g", 1, 3, "up"),
        (UP, "bbbgg", 2, 3, "up"),
        (member_state.initial_state(1.0, others=False), "b", 5, 5, "down"),  # the first check decides
        (member_state.initial_state(1.0, others=True), "g", 5, 5, "up"),
        (member_state.initial_state(1.0, others=True), "gbbbb", 5, 5, "up"),
        (member_state.initial_state(1.0, others=True), "gbbbbb", 5, 5, "down"),
    ],
)
def test_a_member_changes_after_the_configured_number_of_checks(begin, checks, rise, fall, ends):
    state = begin
    for moment, check in enumerate(checks):
        state = member_state.next_state(state, good=check == "g", reason=check, rise=rise, fall=fall, now=10.0 + moment)
    assert state.up == (ends == "up")
    if checks:
        assert state.proven
        assert state.reason == checks[-1]


def test_since_is_the_time_of_the_change():
    state = UP
    for now in (5.0, 6.0, 7.0, 8.0):
        state = member_state.next_state(state, good=False, reason="refused", rise=1, fall=3, now=now)
    assert (state.up, state.since) == (False, 7.0)


def test_member_states_survive_other_changes():
    one, two = member(1), member(2)
    known = {key(one): DOWN, key(two): UP}
    changes = (
        server(replace(one, weight=7), two),
        server(one, two, algorithm="SOURCE_IP"),
        server(one, two, monitor=replace(MONITOR, interval=1, type="PING")),
        server(one, two, member(3)),
    )
    for wanted in changes:
        found = member_state.carry_over(known, (server(one, two),), (wanted,), 9.0)
        assert found[key(one)] == DOWN
        assert found[key(two)] == UP


def test_a_new_member_waits_for_its_first_check_if_others_serve():
    one, new = member(1), member(2)
    found = member_state.carry_over({key(one): UP}, (server(one),), (server(one, new),), 9.0)
    assert member_state.member_health((server(one, new),), found) == {(SERVER, one.id): True, (SERVER, new.id): False}
    states = member_state.carry_over({key(one): DOWN}, (server(one),), (server(one, new),), 9.0)
    assert member_state.member_health((server(one, new),), states) == {
        (SERVER, one.id): False,
        (SERVER, new.id): True,
    }
    drained = replace(one, weight=0)
    found = member_state.carry_over({key(one): UP}, (server(one),), (server(drained, new),), 9.0)
    assert member_state.member_health((server(drained, new),), found)[SERVER, new.id]


def test_the_members_of_a_new_pool_serve_at_once():
    one, two = member(1), member(2)
    wanted = (server(one, two),)
    assert set(member_state.member_health(wanted, member_state.carry_over({}, (), wanted, 9.0)).values()) == {True}


def test_monitor_changes_leave_members_up():
    one, two = member(1), member(2)
    before = (server(one, two, monitor=None),)
    found = member_state.carry_over({}, before, (server(one, two),), 9.0)
    assert all(state.up and state.proven for state in found.values())
    assert member_state.member_health(before, {key(one): DOWN}) == {}


def test_an_enabled_member_is_checked_again():
    one, two = member(1), member(2)
    off = (server(one, replace(two, enabled=False)),)
    without = member_state.carry_over({key(one): UP, key(two): UP}, (server(one, two),), off, 9.0)
    assert set(without) == {key(one)}
    again = member_state.carry_over(without, off, (server(one, two),), 9.0)
    assert again[key(two)] == member_state.initial_state(9.0, others=True)


def test_listeners_that_share_a_pool_share_its_checks():
    one = member(1)
    both = (server(one), server(one, id=str(UUID(int=9)), port=54))
    assert len(member_state.checked_members(both)) == 1
    up = member_state.member_health(both, member_state.carry_over({}, (), both, 9.0))
    assert up == {(SERVER, one.id): True, (str(UUID(int=9)), one.id): True}


@pytest.mark.parametrize(
    ("changes", "state", "monitor", "word"),
    [
        ({}, UP, MONITOR, "UP"),
        ({}, DOWN, MONITOR, "DOWN"),
        ({"weight": 0}, UP, MONITOR, "DRAIN"),
        ({"weight": 0}, DOWN, MONITOR, "DOWN"),
        ({"enabled": False}, UP, MONITOR, "MAINT"),
        ({"enabled": False}, UP, None, "MAINT"),
        ({}, UP, None, "no check"),
        ({}, member_state.initial_state(1.0, others=False), MONITOR, "NOLB"),
        ({"backup": True}, UP, MONITOR, "UP"),
    ],
)
def test_texts_of_members(changes, state, monitor, word):
    one = member(1, **changes)
    assert member_state.member_status(server(one, monitor=monitor), one, {key(one): state}) == word


@pytest.mark.parametrize(
    ("members", "found", "word"),
    [
        ((), {}, "UP"),
        ((member(1),), {key(member(1)): DOWN}, "DOWN"),
        ((member(1), member(2)), {key(member(1)): DOWN, key(member(2)): UP}, "UP"),
        ((member(1, weight=0),), {key(member(1)): UP}, "DOWN"),
        ((member(1, enabled=False),), {}, "DOWN"),
    ],
)
def test_texts_of_pools(members, found, word):
    assert member_state.pool_status(server(*members), found) == word


def test_states_survive_a_restart():
    known = {key(member(1)): DOWN, key(member(2)): member_state.initial_state(3.0, others=True)}
    assert member_state.from_document(json.loads(member_state.to_json(known))) == known
    for wrong in ([["one"]], [[1, 2, {}]], 5, None):
        with pytest.raises((KeyError, TypeError, ValueError)):
            member_state.from_document(wrong)


# -- sums of kernel counters -------------------------------------------------------------------------------------------


def test_a_replaced_table_keeps_the_sums():
    sums = MonotonicCounters()
    assert not sums.update({"a": Counters(3, 10, 100, 1000, 1)})
    assert not sums.update({"a": Counters(2, 12, 120, 1200, 1)})
    assert sums.update({"a": Counters(1, 1, 5, 6, 0)})
    assert sums.totals("a") == Counters(1, 13, 125, 1206, 1)
    sums.update({})  # it is not wanted any more
    assert sums.totals("a") == Counters(0, 13, 125, 1206, 1)
    sums.update({"a": Counters(0, 1, 1, 1, 1)})
    assert sums.totals("a") == Counters(0, 14, 126, 1207, 2)


def test_sums_survive_a_restart():
    sums = MonotonicCounters()
    sums.update({"a": Counters(3, 10, 100, 1000, 1)})
    again = MonotonicCounters.from_document(json.loads(json.dumps(sums.to_document())))
    assert again.birth == sums.birth
    assert again.totals("a") == Counters(0, 10, 100, 1000, 1)
    again.update({"a": Counters(0, 2, 20, 200, 0)})
    assert again.totals("a").total_connections == 12


def test_the_number_of_former_sums_is_bounded():
    sums = MonotonicCounters()
    for number in range(600):
        sums.update({str(number): Counters(0, 1, 1, 1, 1)})
    assert len(sums.names) <= 501
    assert sums.totals("598").total_connections == 1
