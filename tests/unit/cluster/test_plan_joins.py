# SPDX-License-Identifier: Apache-2.0
"""Servers that join, serve, fail and recover (plan.py)."""

import pytest
from cluster_data import NOW, address, group, member, node, planned, pool, server, steps_of

from amphora_cluster.model import MemberChange, NodeState, WeightKind
from amphora_cluster.model import Weight as MemberWeight
from amphora_cluster.plan import NOT_SHOWN, WATCH_SECONDS


def test_an_active_server_joins_with_all_properties():
    template = {"monitor_port": 8080, "backup": True, "weight": MemberWeight(number=7)}
    result = planned(group(template=template), [server()])
    (step,) = result.steps
    assert (step.kind.value, step.server_id) == ("join", "s1")
    assert step.members == (
        MemberChange(
            member_id=None,
            name="s1",
            address="192.0.2.1",
            port=80,
            weight=7,
            subnet_id="subnet-1",
            monitor_port=8080,
            backup=True,
        ),
    )
    assert result.nodes == (
        node(state=NodeState.JOINING, since=NOW, reason="Octavia has not created the members yet."),
    )
    assert result.again_at == NOW + WATCH_SECONDS
    assert not result.complete


def test_a_server_has_a_member_for_each_port():
    result = planned(group(ports=(80, 443, 80)), [server()], pool(member(port=443)), [node(state=NodeState.JOINING)])
    assert steps_of(result) == [("join", "s1", [(80, 1)])]
    assert result.nodes[0].state is NodeState.JOINING


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"status": "BUILD"}, "The server is in status BUILD."),
        ({"addresses": ()}, "The server has no fixed IPv4 address."),
        ({"addresses": (address(1, "other"),)}, "The server has no fixed IPv4 address in subnet subnet-1."),
    ],
)
def test_a_server_waits(changes, reason):
    result = planned(group(), [server(**changes)])
    assert not result.steps
    assert result.nodes == (node(state=NodeState.WAITING, since=NOW, reason=reason),)
    assert result.again_at == NOW + 300
    assert not result.complete
    late = planned(group(), [server(**changes)], nodes=result.nodes, now=NOW + 300)
    assert late.nodes == (node(state=NodeState.FAILED, since=NOW + 300, reason=reason),)
    assert late.complete
    assert late.again_at is None


def test_a_server_that_nova_could_not_build_fails_at_once():
    result = planned(group(), [server(status="ERROR")])
    assert result.nodes == (node(state=NodeState.FAILED, since=NOW, reason="The server is in status ERROR."),)


def test_a_failed_server_joins_when_it_is_active():
    failed = node(state=NodeState.FAILED, reason="The server is in status BUILD.")
    result = planned(group(), [server()], nodes=[failed])
    assert steps_of(result) == [("join", "s1", [(80, 1)])]
    assert result.nodes[0].state is NodeState.FAILED
    after = planned(group(), [server()], pool(member()), result.nodes)
    assert after.nodes == (node(since=NOW),)


def test_nothing_changes_while_the_load_balancer_is_busy():
    result = planned(group(), [server()], pool(changeable=False))
    assert not result.steps
    assert not result.complete
    assert (result.nodes[0].state, result.nodes[0].reason) == (
        NodeState.WAITING,
        "The load balancer accepts no changes now.",
    )
    # A batch that Octavia refused: the time of the first attempt counts.
    joining = node(state=NodeState.JOINING, since=NOW - 20)
    (kept,) = planned(group(), [server()], pool(changeable=False), [joining]).nodes
    assert (kept.state, kept.since) == (NodeState.JOINING, NOW - 20)


@pytest.mark.parametrize(
    ("has_monitor", "status", "provisioning", "weight", "state"),
    [
        (True, "ONLINE", "ACTIVE", 1, NodeState.SERVING),
        (True, "NO_MONITOR", "ACTIVE", 1, NodeState.JOINING),
        (True, "OFFLINE", "ACTIVE", 1, NodeState.JOINING),
        (True, "ERROR", "ACTIVE", 1, NodeState.JOINING),
        (True, "DRAINING", "ACTIVE", 1, NodeState.JOINING),
        (True, "DRAINING", "ACTIVE", 0, NodeState.SERVING),
        (False, "NO_MONITOR", "ACTIVE", 1, NodeState.SERVING),
        (False, "NO_MONITOR", "PENDING_CREATE", 1, NodeState.JOINING),
        (False, "ERROR", "ACTIVE", 1, NodeState.JOINING),
    ],
)
def test_a_join_ends_by_the_operating_status(has_monitor, status, provisioning, weight, state):
    template = {"weight": MemberWeight(number=weight)}
    present = member(status=status, provisioning_status=provisioning, weight=weight)
    result = planned(
        group(template=template),
        [server()],
        pool(present, has_monitor=has_monitor),
        [node(state=NodeState.JOINING)],
    )
    assert result.nodes[0].state is state
    assert result.complete is (state is NodeState.SERVING)


def test_a_join_fails_after_its_time_and_recovers():
    joining = node(state=NodeState.JOINING, since=NOW - 300)
    result = planned(group(), [server()], pool(member(status="ERROR")), [joining])
    assert not result.steps
    reason = "Member m-s1-80 (192.0.2.1 port 80) is in operating status ERROR."
    assert result.nodes == (node(state=NodeState.FAILED, since=NOW, reason=reason),)
    assert result.complete
    again = planned(group(), [server()], pool(member(status="ERROR")), result.nodes, NOW + 900)
    assert again.nodes == result.nodes
    assert planned(group(), [server()], pool(member()), result.nodes, NOW + 901).nodes == (node(since=NOW + 901),)


def test_a_member_that_octavia_never_creates_fails_the_join():
    joining = node(state=NodeState.JOINING, since=NOW - 300)
    result = planned(group(), [server()], pool(), [joining])
    assert result.nodes[0].state is NodeState.FAILED
    # The next passes continue to try.
    assert steps_of(result) == [("join", "s1", [(80, 1)])]


@pytest.mark.parametrize("status", ["SHUTOFF", "ERROR", "REBOOT", "PAUSED"])
def test_a_serving_server_stays_whatever_its_status(status):
    result = planned(group(), [server(status=status)], pool(member()), [node()])
    assert not result.steps
    assert result.nodes == (node(),)


def test_a_serving_server_without_a_known_address_stays():
    result = planned(group(), [server(addresses=())], pool(member(weight=9)), [node()])
    assert not result.steps
    assert result.nodes == (node(),)


def test_an_unhealthy_server_has_time_and_reason():
    members = pool(member(status="ERROR"), member(port=81))
    result = planned(group(ports=(80, 81)), [server()], members, [node()])
    reason = "Member m-s1-80 (192.0.2.1 port 80) is in operating status ERROR."
    assert result.nodes == (node(state=NodeState.UNHEALTHY, since=NOW, reason=reason),)
    assert result.complete
    later = planned(group(ports=(80, 81)), [server()], members, result.nodes, NOW + 60)
    assert later.nodes == result.nodes
    healthy = pool(member(), member(port=81))
    assert planned(group(ports=(80, 81)), [server()], healthy, later.nodes, NOW + 61).nodes == (node(since=NOW + 61),)


@pytest.mark.parametrize("status", ["OFFLINE", "NO_MONITOR", "DRAINING"])
@pytest.mark.parametrize("state", [NodeState.SERVING, NodeState.UNHEALTHY])
def test_a_passing_status_does_not_change_a_known_state(status, state):
    known = node(state=state, reason="" if state is NodeState.SERVING else "why")
    assert planned(group(), [server()], pool(member(status=status)), [known]).nodes == (known,)


def test_members_of_a_lost_record_count_as_joining():
    result = planned(group(), [server("s1"), server("s2", 2)], pool(member(), member("s2", 2, status="ERROR")))
    assert [one.state for one in result.nodes] == [NodeState.SERVING, NodeState.JOINING]
    assert not result.steps


@pytest.mark.parametrize(
    "drift",
    [
        {"weight": 3},
        {"weight": 0, "operating_status": "DRAINING"},
        {"monitor_port": 1},
        {"backup": True},
        {"name": "x"},
    ],
)
def test_drift_is_repaired(drift):
    drifted = member(**drift)
    result = planned(group(), [server()], pool(drifted), [node()])
    (step,) = result.steps
    assert (step.kind.value, step.server_id) == ("repair", "s1")
    (change,) = step.members
    assert (change.member_id, change.name, change.weight) == (drifted.id, "s1", 1)
    assert (change.monitor_port, change.backup) == (None, False)
    assert result.nodes[0].state is NodeState.SERVING


def test_what_octavia_cannot_change_is_no_drift():
    foreign_spelling = member(address="2001:DB8:0::1", subnet_id=None)
    made = group(template={"family": 6})
    one = server(addresses=(address(1), address(1).__class__(ip="2001:db8::1", family=6, subnet_id="subnet-1")))
    result = planned(made, [one], pool(foreign_spelling), [node()])
    assert not result.steps


def test_a_new_address_joins_before_the_old_one_leaves():
    moved = server(number=2)
    first = planned(group(), [moved], pool(member()), [node()])
    assert steps_of(first) == [("join", "s1", [(80, 1)])]
    assert first.steps[0].members[0].address == "192.0.2.2"
    assert first.nodes == (node(),)
    new = member(number=2, status="NO_MONITOR", id="new")
    second = planned(group(), [moved], pool(member(), new), first.nodes)
    assert not second.steps
    online = member(number=2, id="new")
    third = planned(group(), [moved], pool(member(), online), second.nodes)
    assert [(step.kind.value, [one.member_id for one in step.members]) for step in third.steps] == [
        ("leave", ["m-s1-80"])
    ]
    assert third.nodes == (node(),)


def test_a_useless_old_member_leaves_before_the_new_one_serves():
    new = member(number=2, status="ERROR", id="new")
    result = planned(group(), [server(number=2)], pool(member(status="ERROR"), new), [node()])
    assert [(step.kind.value, [one.member_id for one in step.members]) for step in result.steps] == [
        ("leave", ["m-s1-80"])
    ]
    assert result.nodes[0].state is NodeState.UNHEALTHY


def test_a_useless_old_member_stays_until_all_new_ones_exist():
    new = member(number=2, id="new")
    result = planned(group(ports=(80, 81)), [server(number=2)], pool(member(status="ERROR"), new), [node()])
    assert steps_of(result) == [("join", "s1", [(81, 1)])]


def test_a_changed_port_replaces_the_member():
    first = planned(group(ports=(81,)), [server()], pool(member()), [node()])
    assert steps_of(first) == [("join", "s1", [(81, 1)])]
    second = planned(group(ports=(81,)), [server()], pool(member(), member(port=81)), first.nodes)
    assert steps_of(second) == [("leave", "s1", [(80, 1)])]


def test_an_address_that_another_server_got_belongs_to_this_server():
    # s1 had 192.0.2.1; s2 has it now.
    result = planned(
        group(), [server("s1", 5), server("s2", 1)], pool(member()), [node(), node("s2", NodeState.WAITING)]
    )
    assert steps_of(result) == [("join", "s1", [(80, 1)]), ("repair", "s2", [(80, 1)])]
    assert result.steps[1].members[0].name == "s2"


def test_two_servers_with_one_address():
    servers = [server("young", 1, created_at=2.0), server("old", 1, created_at=1.0)]
    result = planned(group(), servers)
    assert steps_of(result) == [("join", "old", [(80, 1)])]
    states = {one.server_id: (one.state, one.reason) for one in result.nodes}
    assert states["young"] == (NodeState.FAILED, "Server old has the same address 192.0.2.1 and port 80.")
    # The present member decides.
    result = planned(group(), servers, pool(member("young")), [node("young")])
    assert not result.steps
    states = {one.server_id: one.state for one in result.nodes}
    assert states == {"young": NodeState.SERVING, "old": NodeState.FAILED}


@pytest.mark.parametrize("tags", [(), ("other",), ("amphora-cluster:other",), ("amphora-cluster:gg",)])
def test_a_foreign_member_with_the_address_is_not_touched(tags):
    foreign = member(tags=tags, weight=5)
    result = planned(group(ports=(80, 81)), [server(), server("s2", 2)], pool(foreign, member("s2", 2)), [node("s2")])
    assert steps_of(result) == [("join", "s2", [(81, 1)])]
    reason = "Member m-s1-80 has address 192.0.2.1 and port 80, but not the tag of this group."
    assert result.nodes[0] == node(state=NodeState.FAILED, since=NOW, reason=reason)


def test_a_member_without_its_tag_is_foreign():
    lost = member(tags=())
    result = planned(group(ports=(80, 81)), [server()], pool(lost, member(port=81, weight=2)), [node()])
    assert steps_of(result) == [("repair", "s1", [(81, 1)])]
    assert result.nodes[0].state is NodeState.FAILED


def test_weight_of_the_flavor():
    template = {"weight": MemberWeight(kind=WeightKind.VCPUS)}
    result = planned(group(template=template), [server(vcpus=4)])
    assert steps_of(result) == [("join", "s1", [(80, 4)])]


def test_a_named_server_may_appear_later():
    waiting = node(state=NodeState.WAITING, reason=NOT_SHOWN)
    result = planned(group(), nodes=[waiting])
    assert result.nodes == (waiting,)
    assert steps_of(planned(group(), [server()], nodes=[waiting])) == [("join", "s1", [(80, 1)])]
    late = planned(group(), nodes=[waiting], now=NOW + 290)
    assert late.nodes == (node(state=NodeState.FAILED, since=NOW + 290, reason=NOT_SHOWN),)
    assert not planned(group(), nodes=late.nodes, now=NOW + 291).nodes


def test_a_server_that_vanished_while_it_waited_is_forgotten():
    waiting = node(state=NodeState.WAITING, reason="The server is in status BUILD.")
    assert not planned(group(), nodes=[waiting]).nodes


def test_a_server_without_change_needs_no_step():
    servers = [server("s1", 1), server("s2", 2)]
    result = planned(group(), servers, pool(member(), member("s2", 2)), [node(), node("s2")])
    assert result == result.__class__(steps=(), nodes=(node(), node("s2")), again_at=None, complete=True)
