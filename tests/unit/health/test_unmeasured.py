# SPDX-License-Identifier: Apache-2.0
"""Operating statuses set by a confirmation, and those that wait for a measurement."""

from __future__ import annotations

import msgspec
import pytest

from amphora_driver.health.initial_status import initial_statuses
from amphora_driver.health.status import ListenerReport, PoolReport, Report, operating_statuses
from amphora_driver.model.enums import L7Action, L7Compare, L7RuleType, ListenerProtocol, MonitorType, PoolProtocol
from amphora_driver.model.loadbalancer import (
    HealthMonitor,
    L7Policy,
    L7Rule,
    Listener,
    LoadBalancer,
    Member,
    Pool,
    Vip,
)

change = msgspec.structs.replace

OFF = {"admin_state_up": False}
MEMBERS = tuple(Member(id=f"m{n}", pool_id="p", address=f"192.0.2.{n}", protocol_port=80) for n in (1, 2))
MONITOR = HealthMonitor(id="h", pool_id="p", type=MonitorType.TCP, delay=5, timeout=3, max_retries=2)
POOL = Pool(id="p", loadbalancer_id="b", protocol=PoolProtocol.HTTP, members=MEMBERS)
RULE = L7Rule(id="r", l7policy_id="y", type=L7RuleType.PATH, compare_type=L7Compare.EQUAL_TO, value="/")
POLICY = L7Policy(id="y", listener_id="l", action=L7Action.REJECT, position=1, rules=(RULE,))
LISTENER = Listener(
    id="l",
    loadbalancer_id="b",
    protocol=ListenerProtocol.HTTP,
    protocol_port=80,
    default_pool_id="p",
    l7policies=(POLICY,),
)
VIP = Vip(address="198.51.100.5", subnet_id="s", network_id="n", port_id="p")
LB = LoadBalancer(id="b", project_id="x", vip=VIP, listeners=(LISTENER,), pools=(POOL,))

ON, OFFLINE, NONE, DRAINING = "ONLINE", "OFFLINE", "NO_MONITOR", "DRAINING"
SERVED = {"y": ON, "r": ON, "p": ON, "m1": NONE, "m2": NONE}
BEGUN = {"l": ON, "b": ON}


def pool(**more) -> LoadBalancer:
    return change(LB, pools=(change(POOL, **more),))


def front(**more) -> LoadBalancer:
    return change(LB, listeners=(change(LISTENER, **more),))


def checked(*members, **more) -> LoadBalancer:
    return pool(healthmonitor=change(MONITOR, **more), members=members or MEMBERS)


CASES = {
    "without a monitor": (LB, (), SERVED, BEGUN),
    "a monitor measures pool and members": (checked(), (), {"y": ON, "r": ON, "h": ON}, {**BEGUN, "p": ON}),
    "a disabled monitor measures nothing": (checked(**OFF), (), {**SERVED, "h": OFFLINE}, BEGUN),
    "a monitor without members": (
        pool(healthmonitor=MONITOR, members=()),
        (),
        {"y": ON, "r": ON, "p": ON, "h": ON},
        BEGUN,
    ),
    "a disabled member is not measured": (
        checked(change(MEMBERS[0], **OFF), change(MEMBERS[1], **OFF)),
        (),
        {"y": ON, "r": ON, "p": ON, "h": ON, "m1": OFFLINE, "m2": OFFLINE},
        BEGUN,
    ),
    "weight 0": (
        pool(members=(change(MEMBERS[0], weight=0), change(MEMBERS[1], **OFF))),
        (),
        {**SERVED, "m1": DRAINING, "m2": OFFLINE},
        BEGUN,
    ),
    "weight 0, but checked": (
        checked(change(MEMBERS[0], weight=0)),
        (),
        {"y": ON, "r": ON, "h": ON},
        {**BEGUN, "p": ON},
    ),
    "no listener": (
        change(LB, listeners=()),
        (),
        {"p": OFFLINE, "m1": NONE, "m2": NONE},
        {"b": ON},
    ),
    "no listener, but a monitor": (
        change(checked(), listeners=()),
        (),
        {"p": OFFLINE, "h": ON, "m1": OFFLINE, "m2": OFFLINE},
        {"b": ON},
    ),
    "a policy uses the pool": (
        front(default_pool_id=None, l7policies=(change(POLICY, redirect_pool_id="p"),)),
        (),
        SERVED,
        BEGUN,
    ),
    "a disabled policy": (
        front(l7policies=(change(POLICY, **OFF),)),
        (),
        {**SERVED, "y": OFFLINE, "r": OFFLINE},
        BEGUN,
    ),
    "a disabled rule": (
        front(l7policies=(change(POLICY, rules=(change(RULE, **OFF),)),)),
        (),
        {**SERVED, "r": OFFLINE},
        BEGUN,
    ),
    "a disabled pool": (
        pool(**OFF, healthmonitor=MONITOR),
        (),
        {"y": ON, "r": ON, "p": OFFLINE, "h": OFFLINE, "m1": OFFLINE, "m2": OFFLINE},
        BEGUN,
    ),
    "a disabled listener": (
        front(**OFF),
        (),
        {"l": OFFLINE, "y": OFFLINE, "r": OFFLINE, "p": OFFLINE, "m1": NONE, "m2": NONE},
        {"b": ON},
    ),
    "a disabled load balancer": (
        change(checked(), **OFF),
        (),
        dict.fromkeys(("b", "l", "y", "r", "p", "h", "m1", "m2"), OFFLINE),
        {},
    ),
    "the listener failed": (LB, ("l",), {}, {}),
    "a rule failed": (LB, ("r", "y", "l"), {}, {}),
    "the pool failed": (LB, ("p",), {"y": ON, "r": ON}, BEGUN),
    "the monitor failed": (checked(), ("h",), {"y": ON, "r": ON}, BEGUN),
    "a member failed": (LB, ("m1",), {**SERVED, "m1": None}, BEGUN),
    "one of two listeners failed": (
        change(LB, listeners=(change(LISTENER, l7policies=()), change(LISTENER, id="l2", l7policies=()))),
        ("l2",),
        {"p": ON, "m1": NONE, "m2": NONE},
        BEGUN,
    ),
}


@pytest.mark.parametrize(("tree", "failed", "certain", "first"), CASES.values(), ids=CASES)
def test_statuses_that_follow_from_a_confirmation(tree, failed, certain, first):
    found = initial_statuses(tree, failed)
    assert {one: str(known.status) for one, known in found.certain.items()} == {
        one: status for one, status in certain.items() if status
    }
    assert {one: str(known.status) for one, known in found.first.items()} == first
    assert all(known.reason and "check" not in known.reason for known in found.certain.values())


@pytest.mark.parametrize(("tree", "failed"), [case[:2] for case in CASES.values()], ids=CASES)
@pytest.mark.parametrize("word", ["OPEN", "FULL"])
@pytest.mark.parametrize("checks", ["UP", "DOWN", "UP 1/2"])
def test_no_report_contradicts_a_confirmed_status(tree, failed, word, checks):
    lost = [one for one in ("l", "p") if one in failed]
    listeners = {one.id: ListenerReport(word) for one in tree.listeners if one.admin_state_up and one.id not in lost}
    monitored = any(one.healthmonitor and one.healthmonitor.admin_state_up for one in tree.pools)
    members = {
        one.id: checks if monitored else "no check"
        for back in tree.pools
        for one in back.members
        if one.admin_state_up and one.id not in failed
    }
    pools = {} if "p" in lost or not listeners else {"p:l": PoolReport("UP", members)}
    said = operating_statuses(tree, [Report(listeners=listeners, pools=pools, amphora_id="a")])
    for object_id, known in initial_statuses(tree, failed).certain.items():
        assert said[object_id].status is known.status
