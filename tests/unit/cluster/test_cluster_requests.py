# SPDX-License-Identifier: Apache-2.0
"""The effect of requests on nodes, and the outcome of requests (requests.py)."""

import random

import msgspec
import pytest
from cluster_data import NOW, group, moment, node, server

from amphora_cluster.model import Criterion, NodeState, Request, RequestKind
from amphora_cluster.plan import NOT_SHOWN
from amphora_cluster.requests import NO_ID, NO_LOAD, apply_request, awaits_recovery, serving
from amphora_cluster.requests import outcome as group_outcome

JOIN_TIMEOUT = 60
SERVERS = tuple(server(f"s{number}", number, created_at=float(number)) for number in range(1, 5))


def request(kind, *servers, count=0, criterion=Criterion.OLDEST):
    return Request(
        id="r",
        group_id="g",
        kind=RequestKind(kind),
        servers=servers,
        count=count,
        criterion=criterion,
        created_at=NOW,
    )


def applied(made, nodes=(), servers=SERVERS, **changes):
    return apply_request(group(**changes), made, tuple(servers), tuple(nodes), NOW, random.Random(1))


def outcome(made, nodes, now):
    return group_outcome(group(join_timeout=JOIN_TIMEOUT), made, nodes, moment(now))


def loaded(**load):
    """The servers with metadata about their load."""
    return [msgspec.structs.replace(one, metadata={"load": load[one.id]} if one.id in load else {}) for one in SERVERS]


def all_serve(*but):
    changed = {one.server_id: one for one in but}
    return tuple(changed.get(one.id, node(one.id)) for one in SERVERS)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, node(state=NodeState.WAITING, since=NOW)),
        (node(), None),
        (node(state=NodeState.UNHEALTHY, reason="x"), None),
        (node(state=NodeState.JOINING), None),
        (node(state=NodeState.WAITING), None),
        (node(state=NodeState.FAILED, reason="x"), node(state=NodeState.WAITING, since=NOW)),
        (
            node(state=NodeState.DRAINING, leaving=True, drain_began_at=1.0),
            node(state=NodeState.WAITING, since=NOW),
        ),
        (node(state=NodeState.LEFT, leaving=True), node(state=NodeState.WAITING, since=NOW)),
        (node(state=NodeState.FAILED, leaving=True), node(state=NodeState.WAITING, since=NOW)),
    ],
)
def test_join(before, after):
    result = applied(request("join", "s1"), [before] if before else [])
    assert result.nodes == ((after,) if after else ())
    assert result.request == request("join", "s1")


def test_a_join_may_name_a_server_of_the_future():
    result = applied(request("join", "new"))
    assert result.nodes == (node("new", NodeState.WAITING, since=NOW, reason=NOT_SHOWN),)


def test_the_number_of_expected_servers_is_limited(monkeypatch):
    monkeypatch.setattr("amphora_cluster.requests.MOST_EXPECTED", 2)
    waiting = (node("w1", NodeState.WAITING, reason=NOT_SHOWN), node("w2", NodeState.WAITING, reason="boots"))
    assert "would have to show 2 more servers" in applied(request("join", "n1", "n2"), waiting).request.refusal
    assert not applied(request("join", "n1", "s1", "w1", "w2"), waiting).request.refusal


LEAVING = node(state=NodeState.DRAINING, since=NOW, leaving=True)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, LEAVING),
        (node(), LEAVING),
        (node(state=NodeState.WAITING, reason="x"), LEAVING),
        (node(state=NodeState.FAILED, reason="x"), LEAVING),
        (node(state=NodeState.DRAINING, leaving=True, drain_began_at=5.0), None),
        (node(state=NodeState.DRAINING, reason=NOT_SHOWN), LEAVING),
        (node(state=NodeState.LEFT, leaving=True), None),
        (
            node(state=NodeState.FAILED, leaving=True, reason="x", drain_began_at=5.0),
            node(state=NodeState.DRAINING, since=NOW, leaving=True, drain_began_at=5.0),
        ),
    ],
)
def test_leave(before, after):
    assert applied(request("leave", "s1"), [before] if before else []).nodes == ((after,) if after else ())


UNKNOWN = "0a000000-0000-4000-8000-00000000000f"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (UNKNOWN, ""),
        (UNKNOWN.upper(), ""),
        # The server with this name may serve. Its owner would delete it after the answer.
        ("web-1", NO_ID),
        (UNKNOWN[:-1], NO_ID),
    ],
)
def test_a_leave_of_an_unknown_server_succeeds_for_an_id_only(name, reason):
    result = applied(request("leave", name))
    assert not result.nodes
    ended = outcome(result.request, (), NOW + 1)
    assert (ended.outcome, ended.ended_at) == ({name.lower(): reason}, NOW + 1)


@pytest.mark.parametrize("kind", ["join", "leave", "sync"])
def test_an_id_in_upper_case_names_the_same_server(kind):
    left = (node(state=NodeState.LEFT, leaving=True),)
    result = applied(request(kind, "S1", "s1"), left if kind == "join" else all_serve())
    assert result.request.servers == ("s1",)
    assert [one.server_id for one in result.nodes] == ([] if kind == "sync" else ["s1"])


def test_a_choice_without_numbers_says_so():
    made = request("leave", count=1, criterion=Criterion.LEAST_LOADED)
    assert [(one.server_id, one.reason) for one in applied(made, all_serve()).nodes] == [("s1", NO_LOAD)]
    assert [one.reason for one in applied(made, all_serve(), loaded(s1="1")).nodes] == [NO_LOAD], "another key"
    known = applied(made, all_serve(), loaded(s3="1"), load_metadata="load").nodes
    assert [(one.server_id, one.reason) for one in known] == [("s3", "")]
    named = request("leave", "s1", criterion=Criterion.LEAST_LOADED)
    assert [one.reason for one in applied(named, all_serve()).nodes] == [""]


@pytest.mark.parametrize(
    ("minimum", "names", "refused"),
    [
        (0, ("s1", "s2", "s3", "s4"), False),
        (3, ("s1",), False),
        (3, ("s1", "s1"), False),
        (3, ("s1", "s2"), True),
        (4, ("s1",), True),
        (9, ("unknown",), False),
    ],
)
def test_the_minimum_is_kept(minimum, names, refused):
    result = applied(request("leave", *names), all_serve(), minimum=minimum)
    assert bool(result.request.refusal) is refused
    assert bool(result.nodes) is (not refused and "unknown" not in names)
    if refused:
        assert result.request.ended_at == NOW
        assert result.request.outcome == dict.fromkeys(names, result.request.refusal)
        assert outcome(result.request, all_serve(), NOW + 9) == result.request


def test_a_server_that_does_not_serve_can_leave_below_the_minimum():
    nodes = all_serve(node("s1", NodeState.UNHEALTHY), node("s2", NodeState.JOINING))
    assert applied(request("leave", "s1", "s2"), nodes, minimum=3).nodes
    assert applied(request("leave", "s1", "s3"), nodes, minimum=2).request.refusal == (
        "1 of 2 serving servers would stay. The minimum of the group is 2."
    )


def test_a_draining_server_does_not_count():
    assert serving(all_serve(node("s1", NodeState.SERVING, leaving=True))) == 3


@pytest.mark.parametrize(
    ("count", "criterion", "nodes", "chosen"),
    [
        (1, Criterion.OLDEST, all_serve(), ("s1",)),
        (2, Criterion.YOUNGEST, all_serve(), ("s4", "s3")),
        (2, Criterion.LEAST_LOADED, all_serve(), ("s3", "s2")),
        (9, Criterion.OLDEST, all_serve(), ("s1", "s2", "s3", "s4")),
        (2, Criterion.OLDEST, all_serve(node("s3", NodeState.UNHEALTHY, reason="x")), ("s3", "s1")),
        (
            2,
            Criterion.OLDEST,
            all_serve(node("s2", NodeState.UNHEALTHY), node("s3", NodeState.FAILED)),
            ("s3", "s2"),
        ),
        (1, Criterion.OLDEST, all_serve(node("s1", NodeState.LEFT, leaving=True)), ("s2",)),
        (1, Criterion.OLDEST, (), ("s1",)),
    ],
)
def test_servers_of_a_count_that_leave(count, criterion, nodes, chosen):
    servers = loaded(s1="9", s2=" 5.25", s3="0", s4="7")
    result = applied(request("leave", count=count, criterion=criterion), nodes, servers, load_metadata="load")
    assert result.request.servers == chosen
    assert {one.server_id for one in result.nodes} == set(chosen)


@pytest.mark.parametrize("text", ["", "-1", "nan", "inf", "1e3", "\u0663", "1,5", "9" * 400, "low"])
def test_a_load_that_is_no_number_is_chosen_last(text):
    made = request("leave", count=1, criterion=Criterion.LEAST_LOADED)
    result = applied(made, all_serve(), loaded(s1=text, s4="1000"), load_metadata="load")
    assert result.request.servers == ("s4",)


def test_servers_of_a_count_that_join():
    nodes = all_serve(node("s2", NodeState.LEFT, leaving=True), node("s4", NodeState.DRAINING, leaving=True))
    assert applied(request("join", count=1), nodes).request.servers == ("s2",)
    assert applied(request("join", count=3), nodes).request.servers == ("s2", "s4")


def test_random_servers_are_different_ones():
    chosen = applied(request("leave", count=3, criterion=Criterion.RANDOM), all_serve()).request.servers
    assert len(set(chosen)) == 3


@pytest.mark.parametrize(
    ("made", "nodes", "servers", "reason"),
    [
        (request("leave"), all_serve(), SERVERS, "The request names neither servers nor a count."),
        (request("join", count=-1), all_serve(), SERVERS, "The request names neither servers nor a count."),
        (request("join", count=1), all_serve(), SERVERS, "The group has no server that can join."),
        (request("leave", count=1), (), (), "The group has no server that can leave."),
        (request("leave", count=1), (), (server(status="DELETED"),), "The group has no server that can leave."),
    ],
)
def test_refused_requests(made, nodes, servers, reason):
    result = applied(made, nodes, servers)
    assert not result.nodes
    assert (result.request.refusal, result.request.ended_at) == (reason, NOW)


@pytest.mark.parametrize(
    ("kind", "state", "expected"),
    [
        ("join", node(state=NodeState.WAITING, reason="boots"), None),
        ("join", node(state=NodeState.JOINING, reason="soon"), None),
        ("join", node(), ""),
        ("join", node(state=NodeState.FAILED, reason="why"), "why"),
        ("join", node(state=NodeState.UNHEALTHY, reason="booting"), None),
        ("join", node(state=NodeState.DRAINING, leaving=True), "A later request removed the server."),
        ("join", node(state=NodeState.DRAINING, reason=NOT_SHOWN), None),
        ("join", None, NOT_SHOWN),
        ("leave", node(state=NodeState.DRAINING, leaving=True), None),
        ("leave", node(state=NodeState.LEFT, leaving=True), ""),
        ("leave", None, ""),
        ("leave", node(state=NodeState.FAILED, leaving=True, reason="why"), "why"),
        ("leave", node(), "A later request joined the server again."),
        ("sync", node(), ""),
        ("sync", node(state=NodeState.LEFT, leaving=True), ""),
        ("sync", node(state=NodeState.DRAINING, leaving=True), None),
        ("sync", node(state=NodeState.UNHEALTHY, reason="why"), "why"),
        ("sync", None, ""),
    ],
)
def test_the_outcome_of_one_server(kind, state, expected):
    ended = outcome(request(kind, "s1"), (state,) if state else (), NOW + 1)
    assert ended.outcome == ({} if expected is None else {"s1": expected})
    assert ended.ended_at == (None if expected is None else NOW + 1)


@pytest.mark.parametrize(
    ("after", "reason", "expected"),
    [
        (JOIN_TIMEOUT - 1, "booting", None),
        (JOIN_TIMEOUT, "booting", "booting"),
        (JOIN_TIMEOUT + 1, "", ""),
    ],
)
def test_a_join_awaits_the_recovery_of_an_unhealthy_server_until_the_time_out(after, reason, expected):
    """The time-out counts from the request: the server may have become unhealthy long before."""
    found = (node(state=NodeState.UNHEALTHY if reason else NodeState.SERVING, since=NOW - 1000, reason=reason),)
    ended = outcome(request("join", "s1"), found, NOW + after)
    assert ended.outcome == ({} if expected is None else {"s1": expected})
    assert awaits_recovery(ended, found) is (expected is None)


def test_only_an_open_join_awaits_the_recovery_of_its_servers():
    found = (node("s1", NodeState.UNHEALTHY, reason="x"), node("s2", NodeState.JOINING))
    assert awaits_recovery(request("join", "s1", "s2"), found)
    assert not awaits_recovery(request("join", "s2"), found)
    assert not awaits_recovery(request("sync", "s1"), found)
    assert not awaits_recovery(msgspec.structs.replace(request("join", "s1", "s2"), outcome={"s1": "x"}), found)


def test_a_failed_server_does_not_delay_the_others():
    made = request("join", "s1", "s2", "s3")
    nodes = (
        node("s1", NodeState.FAILED, reason="why"),
        node("s2", NodeState.JOINING),
        node("s3"),
    )
    half = outcome(made, nodes, NOW + 1)
    assert (half.outcome, half.ended_at) == ({"s1": "why", "s3": ""}, None)
    # A known outcome stays.
    nodes = (node("s1"), node("s2"), node("s3", NodeState.FAILED, reason="later"))
    assert outcome(half, nodes, NOW + 2).outcome == {"s1": "why", "s2": "", "s3": ""}


def test_a_sync_covers_the_nodes_of_the_group():
    nodes = (node("s1"), node("s2", NodeState.FAILED, reason="why"))
    result = applied(request("sync"), nodes, SERVERS[:1])
    assert (result.nodes, result.request.servers) == ((), ("s1", "s2"))
    assert outcome(result.request, nodes, NOW + 1).outcome == {"s1": "", "s2": "why"}
    empty = applied(request("sync"), servers=())
    assert outcome(empty.request, (), NOW + 1).ended_at == NOW + 1


def test_a_sync_covers_servers_that_the_source_shows_for_the_first_time():
    result = applied(request("sync"), [node("s1")], SERVERS[:2])
    assert result.request.servers == ("s1", "s2")
    joining = (node("s1"), node("s2", NodeState.JOINING))
    assert outcome(result.request, joining, NOW + 1).ended_at is None
