# SPDX-License-Identifier: Apache-2.0
"""Servers that leave by request, and servers that vanish (plan.py)."""

import pytest
from cluster_data import NOW, STATISTICS_AGE, group, member, node, planned, pool, server, steps_of

from amphora_cluster.model import NodeState
from amphora_cluster.plan import NOT_SELECTED, NOT_SHOWN, WATCH_SECONDS


def leaving(state=NodeState.DRAINING, **changes):
    return node(state=state, leaving=True, **changes)


def test_a_leave_begins_with_weight_zero():
    result = planned(group(ports=(80, 81)), [server()], pool(member(), member(port=81)), [leaving()])
    assert steps_of(result) == [("drain", "s1", [(80, 0), (81, 0)])]
    assert result.nodes == (leaving(),)
    assert result.again_at == NOW + WATCH_SECONDS
    assert not result.complete


def test_only_members_with_a_weight_are_drained():
    members = pool(member(weight=0), member(port=81))
    assert steps_of(planned(group(ports=(80, 81)), [server()], members, [leaving()])) == [("drain", "s1", [(81, 0)])]


def test_a_drain_step_changes_the_weight_only():
    drifted = member(backup=True, monitor_port=5, name="s1:80")
    (step,) = planned(group(), [server()], pool(drifted), [leaving()]).steps
    (change,) = step.members
    assert (change.weight, change.backup, change.monitor_port, change.name) == (0, True, 5, "s1:80")


def test_the_drain_begins_when_octavia_has_confirmed_the_weight():
    pending = pool(member(weight=0, provisioning_status="PENDING_UPDATE"), changeable=False)
    assert planned(group(), [server()], pending, [leaving()]).nodes[0].drain_began_at is None
    result = planned(group(), [server()], pool(member(weight=0)), [leaving()])
    assert result.nodes[0].drain_began_at == NOW
    assert result.again_at == NOW + 30
    assert not result.steps


@pytest.mark.parametrize(
    ("seconds", "on_idle", "connections", "ends", "again"),
    [
        (29, True, None, False, 1),
        (30, True, None, True, 1),
        (0, True, 0, False, STATISTICS_AGE),
        (STATISTICS_AGE - 1, True, 0, False, 1),
        (STATISTICS_AGE, True, 0, True, 1),
        (STATISTICS_AGE, True, 1, False, 1),
        (STATISTICS_AGE, False, 0, False, 20),
        (29.5, True, 3, False, 0.5),
        (30, False, 99, True, 1),
    ],
)
def test_the_end_of_a_drain(seconds, on_idle, connections, ends, again):
    drained = leaving(drain_began_at=NOW - seconds)
    members = pool(member(weight=0), active_connections=connections)
    result = planned(group(drain_on_idle=on_idle), [server()], members, [drained])
    assert steps_of(result) == ([("leave", "s1", [(80, 0)])] if ends else [])
    assert result.nodes == (drained,)
    assert result.again_at == NOW + again
    assert not result.complete


@pytest.mark.parametrize("ahead", [1.0, 3600.0])
def test_a_drain_does_not_last_longer_after_the_clock_was_set_back(ahead):
    future = leaving(since=NOW + ahead, drain_began_at=NOW + ahead)
    result = planned(group(), [server()], pool(member(weight=0)), [future])
    assert result.nodes == (leaving(since=NOW, drain_began_at=NOW),)
    assert result.again_at == NOW + 30


def test_a_drain_of_zero_seconds_removes_at_once():
    result = planned(group(drain_seconds=0), [server()], pool(member()), [leaving()])
    assert steps_of(result) == [("leave", "s1", [(80, 1)])]


def test_a_weight_that_returned_restarts_the_drain():
    result = planned(group(), [server()], pool(member(weight=2)), [leaving(drain_began_at=NOW - 29)])
    assert steps_of(result) == [("drain", "s1", [(80, 0)])]
    assert result.nodes[0].drain_began_at is None


def test_a_removed_server_has_left_and_stays_out():
    result = planned(group(), [server()], pool(), [leaving(drain_began_at=NOW - 30)])
    assert result.nodes == (leaving(NodeState.LEFT, since=NOW),)
    assert result.complete
    later = planned(group(), [server()], pool(), result.nodes, NOW + 999)
    assert (later.nodes, later.steps) == (result.nodes, ())
    # The source does not show the server any more.
    assert not planned(group(), [], pool(), result.nodes).nodes


def test_a_waiting_server_leaves_at_once():
    assert planned(group(), [server(status="BUILD")], pool(), [leaving()]).nodes == (
        leaving(NodeState.LEFT, since=NOW),
    )


def test_an_interrupted_removal_continues():
    half = planned(group(ports=(80, 81)), [server()], pool(member(weight=0)), [leaving(drain_began_at=NOW - 31)])
    assert steps_of(half) == [("leave", "s1", [(80, 0)])]


def test_obsolete_members_are_drained_too():
    members = pool(member(), member(number=2, id="new"))
    result = planned(group(), [server(number=2)], members, [leaving()])
    assert steps_of(result) == [("drain", "s1", [(80, 0), (80, 0)])]


def test_members_of_a_server_that_left_are_removed_again():
    result = planned(group(), [server()], pool(member()), [leaving(NodeState.LEFT)])
    assert steps_of(result) == [("drain", "s1", [(80, 0)])]
    assert result.nodes == (leaving(since=NOW),)


def test_a_leave_that_takes_too_long_has_failed_and_continues():
    stuck = leaving(since=NOW - 330, drain_began_at=NOW - 329)
    members = pool(member(weight=0, provisioning_status="ERROR"))
    result = planned(group(), [server()], members, [stuck])
    reason = "The members were not drained and removed within 330 s: m-s1-80 in ERROR."
    assert result.nodes == (leaving(NodeState.FAILED, since=NOW, reason=reason, drain_began_at=NOW - 329),)
    assert steps_of(result) == [("leave", "s1", [(80, 0)])]
    assert result.again_at is None
    assert planned(group(), [server()], pool(), result.nodes).nodes[0].state is NodeState.LEFT


def test_a_leave_of_a_busy_load_balancer_fails_in_time():
    stuck = leaving(since=NOW - 330)
    result = planned(group(), [server()], pool(member(), changeable=False), [stuck])
    assert not result.steps
    assert result.nodes[0].state is NodeState.FAILED


def test_a_server_that_a_foreign_member_serves_has_not_left():
    foreign = member(tags=())
    result = planned(group(), [server()], pool(foreign), [leaving()])
    reason = (
        "The server still receives requests. "
        "Member m-s1-80 has address 192.0.2.1 and port 80, but not the tag of this group."
    )
    assert result.nodes == (leaving(NodeState.FAILED, since=NOW, reason=reason),)
    assert not result.steps
    assert planned(group(), [server()], pool(), result.nodes).nodes[0].state is NodeState.LEFT


def test_a_foreign_member_after_the_end_changes_nothing():
    left = leaving(NodeState.LEFT)
    assert planned(group(), [server()], pool(member(tags=())), [left]).nodes == (left,)


def test_a_join_request_ends_a_drain():
    joins = node(state=NodeState.WAITING, drain_began_at=NOW - 5)
    result = planned(group(), [server()], pool(member(weight=0, status="DRAINING")), [joins])
    assert steps_of(result) == [("repair", "s1", [(80, 1)])]
    assert (result.nodes[0].state, result.nodes[0].drain_began_at) == (NodeState.JOINING, None)


@pytest.mark.parametrize(("has_monitor", "status"), [(True, "ONLINE"), (False, "NO_MONITOR")])
def test_a_drained_server_joins_when_its_weight_is_confirmed(has_monitor, status):
    """Octavia still shows the status of the time before the drain."""
    joins = node(state=NodeState.WAITING)
    members = pool(member(weight=0, status=status), has_monitor=has_monitor)
    result = planned(group(), [server()], members, [joins])
    assert steps_of(result) == [("repair", "s1", [(80, 1)])]
    assert result.nodes[0].state is NodeState.JOINING
    pending = pool(member(status=status, provisioning_status="PENDING_UPDATE"), has_monitor=has_monitor)
    waiting = planned(group(), [server()], pending, result.nodes)
    assert waiting.nodes[0].state is NodeState.JOINING
    done = planned(group(), [server()], pool(member(status=status), has_monitor=has_monitor), waiting.nodes)
    assert done.nodes[0].state is NodeState.SERVING


@pytest.mark.parametrize("status", [None, "DELETED", "SOFT_DELETED"])
@pytest.mark.parametrize("known", [node(), node(state=NodeState.UNHEALTHY), leaving()])
def test_a_vanished_server_is_removed_at_once(status, known):
    servers = [server(status=status)] if status else []
    result = planned(group(), [*servers, server("s2", 2)], pool(member(), member("s2", 2)), [known, node("s2")])
    assert steps_of(result) == [("leave", "s1", [(80, 1)])]
    gone = next(one for one in result.nodes if one.server_id == "s1")
    assert (gone.state, gone.leaving) == (NodeState.DRAINING, known.leaving)
    assert result.again_at == NOW + WATCH_SECONDS
    after = planned(group(), [*servers, server("s2", 2)], pool(member("s2", 2)), result.nodes)
    assert after.nodes == (node("s2"),)
    assert after.complete


def test_a_server_that_is_not_selected_any_more_is_drained_and_forgotten():
    former = server(selected=False)
    first = planned(group(), [former], pool(member()), [node()])
    assert steps_of(first) == [("drain", "s1", [(80, 0)])]
    assert first.nodes == (node(state=NodeState.DRAINING, reason=NOT_SELECTED, since=NOW),)
    second = planned(group(), [former], pool(member(weight=0)), first.nodes)
    assert (second.steps, second.nodes[0].drain_began_at) == ((), NOW)
    third = planned(group(), [former], pool(member(weight=0)), second.nodes, NOW + 30)
    assert steps_of(third) == [("leave", "s1", [(80, 0)])]
    assert planned(group(), [former], pool(), third.nodes, NOW + 31).nodes == ()


def test_a_server_that_is_selected_again_serves():
    drained = node(state=NodeState.DRAINING, reason=NOT_SELECTED, drain_began_at=NOW)
    result = planned(group(), [server()], pool(member(weight=0)), [drained])
    assert steps_of(result) == [("repair", "s1", [(80, 1)])]
    assert result.nodes[0].drain_began_at is None


def test_members_of_a_server_without_record_are_removed():
    result = planned(group(), [], pool(member("ghost", 7), member("other", 8, tags=())))
    assert steps_of(result) == [("leave", "ghost", [(80, 1)])]
    assert not result.nodes
    assert not result.complete


def test_a_removal_of_a_vanished_server_fails_in_time():
    gone = node(state=NodeState.DRAINING, since=NOW - 330, reason=NOT_SHOWN)
    result = planned(group(), [], pool(member(provisioning_status="ERROR")), [gone])
    reason = f"{NOT_SHOWN} The members were not drained and removed within 330 s: m-s1-80 in ERROR."
    assert result.nodes == (node(state=NodeState.FAILED, since=NOW, reason=reason),)
    assert steps_of(result) == [("leave", "s1", [(80, 1)])]
    assert planned(group(), [], pool(member()), result.nodes, NOW + 1).nodes == result.nodes
    # It serves again if the source shows it, whatever the record says.
    assert planned(group(), [server()], pool(member()), result.nodes, NOW + 1).nodes == (node(since=NOW + 1),)


def test_a_server_that_the_source_shows_again_serves():
    gone = planned(group(), [], pool(member(), changeable=False), [node()]).nodes
    result = planned(group(), [server()], pool(member()), gone, NOW + 1)
    assert result.nodes == (node(since=NOW + 1),)
    joined = planned(group(), [server()], pool(), gone, NOW + 1)
    assert steps_of(joined) == [("join", "s1", [(80, 1)])]
    assert not joined.nodes[0].leaving


def test_a_leave_request_survives_a_gap_of_the_source():
    gone = planned(group(), [], pool(member(), changeable=False), [leaving()]).nodes
    assert steps_of(planned(group(), [server()], pool(member()), gone)) == [("drain", "s1", [(80, 0)])]


def test_two_groups_in_one_pool_do_not_see_each_other():
    members = pool(member(), member("s2", 2, tags=("amphora-cluster:h",)))
    assert steps_of(planned(group("g"), [], members)) == [("leave", "s1", [(80, 1)])]
    assert steps_of(planned(group("h"), [], members)) == [("leave", "s2", [(80, 1)])]


def test_deleted_members_do_not_count():
    result = planned(group(), [server()], pool(member(provisioning_status="DELETED")), [leaving()])
    assert result.nodes[0].state is NodeState.LEFT
