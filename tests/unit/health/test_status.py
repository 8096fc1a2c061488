# SPDX-License-Identifier: Apache-2.0
"""Operating statuses that follow from the reports of amphorae, without a database."""

from __future__ import annotations

import msgspec
import pytest

from amphora_driver.health.status import Report, operating_statuses
from amphora_driver.model.enums import (
    Kind,
    L7Action,
    L7Compare,
    L7RuleType,
    ListenerProtocol,
    MonitorType,
    Operating,
    PoolProtocol,
)
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

MEMBERS = tuple(Member(id=f"m{n}", pool_id="p1", address=f"192.0.2.{n}", protocol_port=80) for n in (1, 2))
MONITOR = HealthMonitor(id="h1", pool_id="p1", type=MonitorType.TCP, delay=5, timeout=3, max_retries=2)
POOL = Pool(id="p1", loadbalancer_id="b", protocol=PoolProtocol.HTTP, members=MEMBERS, healthmonitor=MONITOR)
LISTENER = Listener(
    id="l1", loadbalancer_id="b", protocol=ListenerProtocol.HTTP, protocol_port=80, default_pool_id="p1"
)
VIP = Vip(address="198.51.100.5", subnet_id="s", network_id="n", port_id="p")
LB = LoadBalancer(id="b", project_id="x", vip=VIP, listeners=(LISTENER,), pools=(POOL,))
OFF = {"admin_state_up": False}
RULE = L7Rule(id="r", l7policy_id="y", type=L7RuleType.PATH, compare_type=L7Compare.EQUAL_TO, value="/")
POLICY = L7Policy(
    id="y", listener_id="l1", action=L7Action.REDIRECT_TO_POOL, position=1, redirect_pool_id="p1", rules=(RULE,)
)


def routed(policy) -> LoadBalancer:
    """Only this policy refers to the pool."""
    return change(LB, listeners=(change(LISTENER, default_pool_id=None, l7policies=(policy,)),))


def report(m1="UP", m2="UP", listener="OPEN", amphora="a1", behind=("l1",)) -> Report:
    words = {key: word for key, word in {"m1": m1, "m2": m2}.items() if word is not None}
    document = {
        "generation": 8,
        "listeners": {} if listener is None else {key: {"status": listener} for key in behind},
        "pools": {f"p1:{key}": {"status": "UP", "members": words} for key in behind},
    }
    return change(msgspec.json.decode(msgspec.json.encode(document), type=Report), amphora_id=amphora)


def statuses(load_balancer: LoadBalancer, *reports: Report) -> dict[str, str]:
    found = operating_statuses(load_balancer, reports)
    assert all(entry.reason for entry in found.values())
    return {object_id: str(entry.status) for object_id, entry in found.items()}


@pytest.mark.parametrize(
    ("word", "member", "above"),
    [
        ("UP", "ONLINE", "ONLINE"),
        ("UP 1/3", "ONLINE", "ONLINE"),
        ("DOWN", "ERROR", "DEGRADED"),
        ("DOWN 1/2", "ERROR", "DEGRADED"),
        ("DOWN (agent)", "ERROR", "DEGRADED"),
        ("DRAIN", "DRAINING", "ONLINE"),
        ("MAINT", "OFFLINE", "ONLINE"),
        ("MAINT (via p/s)", "OFFLINE", "ONLINE"),
        ("no check", "NO_MONITOR", "ONLINE"),
        ("RESTARTING", None, "ONLINE"),
        ("", None, "ONLINE"),
        (None, None, "ONLINE"),
    ],
)
def test_the_status_of_each_member_state(word, member, above):
    found = statuses(LB, report(m1=word))
    assert found.get("m1") == member
    assert found["m2"] == "ONLINE"
    assert (found["p1"], found["b"]) == (above, above)
    assert (found["l1"], found["h1"]) == ("ONLINE", "ONLINE")


def test_all_members_down():
    found = statuses(LB, report("DOWN", "DOWN"))
    assert (found["p1"], found["l1"], found["b"]) == ("ERROR", "ONLINE", "ERROR")


def test_a_pool_is_not_down_while_a_member_is_unknown():
    assert statuses(LB, report("DOWN", None))["p1"] == "DEGRADED"


def test_disabled_members_do_not_count():
    pool = change(POOL, members=(MEMBERS[0], change(MEMBERS[1], **OFF)))
    found = statuses(change(LB, pools=(pool,)), report("DOWN", "MAINT"))
    assert (found["m2"], found["p1"], found["b"]) == ("OFFLINE", "ERROR", "ERROR")


@pytest.mark.parametrize(
    ("word", "listener", "above"),
    [("OPEN", "ONLINE", "ONLINE"), ("FULL", "DEGRADED", "DEGRADED"), ("WAITING", None, None), (None, None, None)],
)
def test_the_status_of_each_listener_state(word, listener, above):
    found = statuses(LB, report(listener=word))
    assert found.get("l1") == listener
    assert found.get("b") == above


def test_one_full_listener_of_two_amphorae():
    assert statuses(LB, report(listener="OPEN", amphora="a1"), report(listener="FULL", amphora="a2"))["b"] == "DEGRADED"


@pytest.mark.parametrize(
    ("one", "other", "member"),
    [
        ("UP", "UP", "ONLINE"),
        ("DOWN", "DOWN", "ERROR"),
        ("UP", "DOWN", "DEGRADED"),
        ("DRAIN", "DOWN", "DEGRADED"),
        ("no check", "DOWN", "DEGRADED"),
        ("MAINT", "DOWN", "ERROR"),
        ("MAINT", "UP", "ONLINE"),
        ("DRAIN", "UP", "ONLINE"),
        (None, "DOWN", "ERROR"),
        (None, None, None),
    ],
)
def test_the_status_of_two_amphorae(one, other, member):
    for first, second in ((one, other), (other, one)):
        found = statuses(LB, report(m1=first, amphora="a1"), report(m1=second, amphora="a2"))
        assert found.get("m1") == member
        assert found["p1"] == ("DEGRADED" if member in {"DEGRADED", "ERROR"} else "ONLINE")


def test_the_status_of_two_listeners_on_one_amphora():
    load_balancer = change(LB, listeners=(LISTENER, change(LISTENER, id="l2", protocol_port=81)))
    one, other = report("DOWN", "UP", behind=("l1",)), report("UP", "UP", behind=("l2",))
    both = change(one, pools={**one.pools, **other.pools}, listeners={**one.listeners, **other.listeners})
    assert statuses(load_balancer, both)["m1"] == "ONLINE"
    assert statuses(load_balancer, one, other)["m1"] == "ONLINE"


def test_without_reports_no_status_changes():
    assert statuses(LB) == {}
    assert statuses(LB, Report(generation=8, amphora_id="a1")) == {}
    assert statuses(LB, Report(generation=None)) == {}


def test_a_report_of_another_generation_sets_the_objects_it_names():
    other = change(POOL, id="p2", members=(change(MEMBERS[0], id="m9"),), healthmonitor=None)
    load_balancer = change(
        LB, listeners=(LISTENER, change(LISTENER, id="l2", default_pool_id="p2")), pools=(POOL, other)
    )
    found = statuses(load_balancer, report("DOWN", "UP"))
    assert {"l2", "p2", "m9"}.isdisjoint(found)
    assert found["m1"] == "ERROR"


def test_reports_of_unknown_objects_are_ignored():
    assert set(statuses(change(LB, listeners=(), pools=()), report())) == {"b"}


def test_a_load_balancer_without_children():
    empty = change(LB, listeners=(), pools=())
    assert statuses(empty, Report(generation=1)) == {"b": "ONLINE"}
    assert statuses(empty) == {}


def test_disabled_load_balancer():
    assert set(statuses(change(LB, **OFF), report("DOWN", "DOWN")).values()) == {"OFFLINE"}
    assert statuses(change(LB, **OFF))["b"] == "OFFLINE"


def test_disabled_listener():
    found = statuses(change(LB, listeners=(change(LISTENER, **OFF),)), Report(generation=8))
    assert found == {"l1": "OFFLINE", "p1": "OFFLINE", "m1": "OFFLINE", "m2": "OFFLINE", "h1": "ONLINE", "b": "ONLINE"}


def test_disabled_pool():
    found = statuses(change(LB, pools=(change(POOL, **OFF),)), report("DOWN", "DOWN"))
    assert found == {"l1": "ONLINE", "p1": "OFFLINE", "m1": "OFFLINE", "m2": "OFFLINE", "h1": "OFFLINE", "b": "ONLINE"}


def test_disabled_monitor():
    pool = change(POOL, healthmonitor=change(MONITOR, **OFF))
    assert statuses(change(LB, pools=(pool,)), report("no check", "no check"))["h1"] == "OFFLINE"


def test_unused_pool():
    alone = change(LB, listeners=(change(LISTENER, default_pool_id=None),))
    assert statuses(alone)["m1"] == "OFFLINE"
    without = change(alone, pools=(change(POOL, healthmonitor=None),))
    assert statuses(without) == {"p1": "OFFLINE", "m1": "NO_MONITOR", "m2": "NO_MONITOR"}


def test_a_pool_used_by_a_policy_is_used():
    load_balancer = routed(POLICY)
    found = statuses(load_balancer, report())
    assert {name: found[name] for name in ("p1", "y", "r")} == {"p1": "ONLINE", "y": "ONLINE", "r": "ONLINE"}


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        (change(POLICY, **OFF), {"p1": "OFFLINE", "y": "OFFLINE", "r": "OFFLINE"}),
        (change(POLICY, rules=(change(RULE, **OFF),)), {"p1": "OFFLINE", "y": "ONLINE", "r": "OFFLINE"}),
        (change(POLICY, rules=()), {"p1": "OFFLINE", "y": "ONLINE"}),
    ],
)
def test_a_policy_that_never_matches_uses_no_pool(policy, wanted):
    found = statuses(routed(policy), report())
    assert {name: found.get(name) for name in ("p1", "y", "r")} == {"r": None, **wanted}


def test_policies_of_an_unknown_listener_are_unknown():
    assert not {"y", "r"} & statuses(routed(POLICY), report(listener=None)).keys()
    off = change(LB, listeners=(change(routed(POLICY).listeners[0], **OFF),))
    assert {name: statuses(off, report())[name] for name in ("y", "r")} == {"y": "OFFLINE", "r": "OFFLINE"}


def test_a_pool_behind_two_listeners_and_a_policy():
    """One of the backends reports a member down first: the pool has the best reported status."""
    one = change(LISTENER, id="l2", protocol_port=81)
    both = change(LB, listeners=(routed(POLICY).listeners[0], one))
    seen = report(behind=("l1", "l2"))
    mixed = change(seen, pools={**seen.pools, "p1:l2": change(seen.pools["p1:l2"], members={"m1": "DOWN", "m2": "UP"})})
    found = statuses(both, mixed)
    assert {name: found[name] for name in ("m1", "p1", "b")} == {"m1": "ONLINE", "p1": "ONLINE", "b": "ONLINE"}


def test_a_listener_of_metrics_has_no_pool_and_is_online():
    metrics = Listener(id="l3", loadbalancer_id="b", protocol=ListenerProtocol.PROMETHEUS, protocol_port=8404)
    found = statuses(change(LB, listeners=(LISTENER, metrics)), report(behind=("l1", "l3")))
    assert (found["l3"], found["b"]) == ("ONLINE", "ONLINE")
    alone = change(LB, listeners=(metrics,), pools=())
    document = change(report(behind=("l3",)), pools={})
    assert statuses(alone, document) == {"l3": "ONLINE", "b": "ONLINE"}


def test_empty_pool():
    assert statuses(change(LB, pools=(change(POOL, members=()),)), report(None, None))["p1"] == "ONLINE"


def test_each_status_has_a_reason_and_a_kind():
    found = operating_statuses(LB, [report("DOWN 1/2", "UP", amphora="a7")])
    assert found["m1"].reason == "DOWN 1/2 reported by amphora a7"
    assert found["p1"].reason == "1 of 2 enabled members are down"
    assert found["b"].reason == "pool p1: 1 of 2 enabled members are down"
    assert found["b"].status is Operating.DEGRADED
    assert {object_id: entry.kind for object_id, entry in found.items()} == {
        "b": Kind.LOAD_BALANCER,
        "l1": Kind.LISTENER,
        "p1": Kind.POOL,
        "m1": Kind.MEMBER,
        "m2": Kind.MEMBER,
        "h1": Kind.HEALTH_MONITOR,
    }


# A UDP listener and its pool: amphorae report the same states as for HAProxy, under the same keys.
VIRTUAL = change(
    LB,
    listeners=(change(LISTENER, protocol=ListenerProtocol.UDP),),
    pools=(change(POOL, protocol=PoolProtocol.UDP, healthmonitor=change(MONITOR, type=MonitorType.UDP_CONNECT)),),
)


def behind(**more) -> LoadBalancer:
    return change(VIRTUAL, pools=(change(VIRTUAL.pools[0], **more),))


def first_member(**more) -> LoadBalancer:
    return behind(members=(change(MEMBERS[0], **more), MEMBERS[1]))


@pytest.mark.parametrize(
    ("tree", "words", "wanted"),
    [
        (VIRTUAL, ("UP", "UP"), {"m1": "ONLINE", "p1": "ONLINE", "l1": "ONLINE", "h1": "ONLINE", "b": "ONLINE"}),
        (VIRTUAL, ("DOWN", "UP"), {"m1": "ERROR", "m2": "ONLINE", "p1": "DEGRADED", "l1": "ONLINE", "b": "DEGRADED"}),
        (VIRTUAL, ("DOWN", "DOWN"), {"p1": "ERROR", "l1": "ONLINE", "b": "ERROR"}),
        (behind(healthmonitor=None), ("no check", "no check"), {"m1": "NO_MONITOR", "p1": "ONLINE", "b": "ONLINE"}),
        (behind(healthmonitor=change(MONITOR, **OFF)), ("no check", "no check"), {"m1": "NO_MONITOR", "h1": "OFFLINE"}),
        (first_member(weight=0), ("DRAIN", "UP"), {"m1": "DRAINING", "p1": "ONLINE"}),
        (first_member(weight=0), ("DOWN", "UP"), {"m1": "ERROR", "p1": "DEGRADED"}),
        (first_member(**OFF), ("MAINT", "UP"), {"m1": "OFFLINE", "p1": "ONLINE", "b": "ONLINE"}),
        (first_member(**OFF), ("MAINT", "DOWN"), {"m1": "OFFLINE", "p1": "ERROR", "b": "ERROR"}),
        # An unused backup has the state of its checks.
        (first_member(backup=True), ("UP", "UP"), {"m1": "ONLINE", "p1": "ONLINE"}),
        (first_member(backup=True), ("DOWN", "UP"), {"m1": "ERROR", "p1": "DEGRADED"}),
        (behind(members=()), (None, None), {"p1": "ONLINE", "l1": "ONLINE", "b": "ONLINE"}),
    ],
)
def test_the_status_of_udp_listeners_and_members(tree, words, wanted):
    found = statuses(tree, report(*words))
    assert {one: found.get(one) for one in wanted} == wanted


def test_an_unreported_disabled_udp_listener_is_offline():
    tree = change(VIRTUAL, listeners=(change(VIRTUAL.listeners[0], **OFF),))
    found = statuses(tree, Report(generation=8))
    assert found == dict.fromkeys(("l1", "p1", "m1", "m2"), "OFFLINE") | {"h1": "ONLINE", "b": "ONLINE"}


def test_an_unreported_disabled_udp_pool_is_offline():
    said = report(listener="OPEN")
    found = statuses(behind(**OFF), change(said, pools={}))
    assert (found["l1"], found["p1"], found["m1"], found["h1"], found["b"]) == (
        "ONLINE",
        "OFFLINE",
        "OFFLINE",
        "OFFLINE",
        "ONLINE",
    )


def test_a_partial_report_does_not_lower_a_missing_udp_pool():
    """A large report comes in parts; an object missing in one part is unknown, not down."""
    whole = report("DOWN", "UP")
    one, other = change(whole, pools={}), change(whole, listeners={})
    assert statuses(VIRTUAL, one, other) == statuses(VIRTUAL, whole)
    assert "m1" not in statuses(VIRTUAL, one)
