# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import difflib

import msgspec
import pytest

from amphora_driver.errors import ModelError
from amphora_driver.model.enums import (
    Algorithm,
    L7Action,
    L7Compare,
    L7RuleType,
    ListenerProtocol,
    MonitorType,
    PersistenceType,
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
    SessionPersistence,
    Vip,
)
from amphora_driver.render import backend, frontend
from amphora_driver.render.haproxy import render

change = msgspec.structs.replace

MEMBERS = tuple(Member(id=f"m{n}", pool_id="p1", address=f"192.0.2.{n}", protocol_port=80) for n in (1, 2, 3))
MONITOR = HealthMonitor(id="h1", pool_id="p1", type=MonitorType.TCP, delay=5, timeout=3, max_retries=2)
POOL = Pool(id="p1", loadbalancer_id="b", protocol=PoolProtocol.HTTP, members=MEMBERS, healthmonitor=MONITOR)
LISTENER = Listener(
    id="l1", loadbalancer_id="b", protocol=ListenerProtocol.HTTP, protocol_port=80, default_pool_id="p1"
)
OTHER = change(LISTENER, id="l2", protocol_port=81)
VIP = Vip(address="198.51.100.5", subnet_id="s", network_id="n", port_id="p")
LB = LoadBalancer(id="b", project_id="x", vip=VIP, listeners=(LISTENER, OTHER), pools=(POOL,))
RULE = L7Rule(id="r1", l7policy_id="y1", type=L7RuleType.PATH, compare_type=L7Compare.EQUAL_TO, value="/")
POLICY = L7Policy(id="y1", listener_id="l1", action=L7Action.REJECT, position=1, rules=(RULE,))
BAD_RULE = change(RULE, value="x\ny")
ELSEWHERE = change(
    POLICY,
    id="y2",
    position=2,
    action=L7Action.REDIRECT_TO_POOL,
    redirect_pool_id="p2",
    rules=(change(RULE, id="r2", l7policy_id="y2"),),
)
OTHER_POOL = change(POOL, id="p2", members=(), healthmonitor=None)


def with_listener(**changes) -> LoadBalancer:
    return change(LB, listeners=(change(LISTENER, **changes), OTHER))


def with_pool(**changes) -> LoadBalancer:
    return change(LB, pools=(change(POOL, **changes),))


def with_member(**changes) -> LoadBalancer:
    return with_pool(members=(change(MEMBERS[0], **changes), *MEMBERS[1:]))


def with_monitor(**changes) -> LoadBalancer:
    return with_pool(healthmonitor=change(MONITOR, **changes))


def refused(load_balancer: LoadBalancer) -> dict[str, str]:
    rendered = render(load_balancer)
    assert all(isinstance(error, ModelError) and error.object_id for error in rendered.refused)
    return {error.object_id: str(error) for error in rendered.refused}


@pytest.mark.parametrize(
    "load_balancer",
    [
        change(LB, listeners=()),
        change(LB, admin_state_up=False),
        change(LB, listeners=(change(LISTENER, admin_state_up=False),)),
    ],
)
def test_a_load_balancer_without_enabled_listeners_renders_nothing(load_balancer):
    assert render(load_balancer).text is None
    assert render(load_balancer).refused == ()


@pytest.mark.parametrize(
    ("load_balancer", "object_id", "named"),
    [
        (with_listener(protocol=ListenerProtocol.PROMETHEUS), "l1", "default_pool_id"),
        (with_listener(protocol=ListenerProtocol.TERMINATED_HTTPS), "l1", "default_tls_container_ref"),
        (with_listener(allowed_cidrs=("192.0.2.0/240",)), "l1", "allowed_cidrs"),
        (with_listener(insert_headers=("X-Mine",)), "l1", "X-Mine"),
        (with_listener(hsts_max_age=1), "l1", "hsts_max_age"),
        (with_listener(default_pool_id="p9"), "l1", "p9"),
        (with_listener(protocol_port=81), "l2", "81"),
        (with_listener(protocol_port=0), "l1", "protocol_port"),
        (with_listener(connection_limit=0), "l1", "connection_limit"),
        (with_listener(id="l 1"), "l 1", "identifier"),
        (with_listener(id="l2"), "l2", "same id"),
        (with_member(address="host"), "m1", "host"),
        (with_member(address="127.0.0.1"), "m1", "loopback"),
        (with_member(weight=257), "m1", "257"),
        (with_member(vnic_type="macvtap"), "m1", "vnic_type"),
        (with_member(monitor_address="0.0.0.0"), "m1", "monitor_address"),
        (with_member(id="m2"), "m2", "same id"),
        (with_member(id="m\n1"), "m\n1", "identifier"),
        (with_monitor(type=MonitorType.UDP_CONNECT), "h1", "UDP-CONNECT"),
        (with_monitor(type=MonitorType.SCTP), "h1", "SCTP"),
        (with_monitor(delay=0), "h1", "delay"),
        (with_monitor(type=MonitorType.HTTP, url_path="/a b"), "h1", "url_path"),
        (change(LB, vip_sg_ids=("",)), "b", "vip_sg_ids"),
        (change(LB, additional_vips=(change(VIP, address="::%x"),)), "b", "address"),
    ],
)
def test_an_invalid_object_does_not_affect_others(load_balancer, object_id, named):
    rendered = render(load_balancer)
    (error,) = rendered.refused
    assert error.object_id == object_id
    assert named in str(error)
    assert "frontend l1\n" in rendered.text or "frontend l2\n" in rendered.text
    assert "server m3 192.0.2.3:80" in rendered.text


@pytest.mark.parametrize(
    "changes",
    [
        {"tls_enabled": True, "tls_versions": ("TLSv1", "TLSv1.3")},
        {"tls_enabled": True, "crl_container_ref": "c"},
        {"tls_enabled": True, "tls_ciphers": "a b"},
        {"session_persistence": SessionPersistence(type=PersistenceType.APP_COOKIE)},
    ],
)
def test_a_refused_pool_is_not_used(changes):
    rendered = render(with_pool(**changes))
    assert [error.object_id for error in rendered.refused] == ["p1"]
    assert "frontend l1" in rendered.text
    assert "default_backend" not in rendered.text
    assert "\nbackend" not in rendered.text


def test_a_listener_with_an_invalid_policy_is_not_served():
    rendered = render(with_listener(l7policies=(change(POLICY, rules=(BAD_RULE,)),)))
    assert [error.object_id for error in rendered.refused] == ["r1", "y1", "l1"]
    assert "frontend l1" not in rendered.text
    assert "frontend l2" in rendered.text


@pytest.mark.parametrize(
    "policy", [change(POLICY, admin_state_up=False), change(POLICY, rules=(change(BAD_RULE, admin_state_up=False),))]
)
def test_disabled_objects_reject_no_request(policy):
    rendered = render(with_listener(l7policies=(change(policy, rules=(change(BAD_RULE, admin_state_up=False),)),)))
    assert rendered.refused == ()
    assert "frontend l1" in rendered.text


def test_a_policy_with_an_unknown_pool_disables_its_listener():
    rendered = render(with_listener(l7policies=(ELSEWHERE,)))
    assert [error.object_id for error in rendered.refused] == ["y2", "l1"]
    assert "frontend l1" not in rendered.text


def test_every_used_pool_has_one_backend():
    again = change(ELSEWHERE, id="y3", redirect_pool_id="p1", rules=(change(RULE, id="r3", l7policy_id="y3"),))
    tree = with_listener(l7policies=(POLICY, ELSEWHERE, again))
    text = render(change(tree, pools=(POOL, OTHER_POOL))).text
    assert [line for line in text.splitlines() if line.startswith("backend")] == [
        "backend p1:l1",
        "backend p2:l1",
        "backend p1:l2",
    ]


@pytest.mark.parametrize(
    ("failed", "gone", "left", "listed"),
    [
        ({"m1"}, [" m1 "], [" m2 ", "backend p1:l1"], []),
        ({"h1"}, [" check "], [" m1 ", "backend p1:l1"], []),
        ({"p1"}, ["backend", " m1 "], ["frontend l1", "frontend l2"], []),
        ({"l1"}, ["frontend l1", ":l1"], ["frontend l2", "backend p1:l2"], []),
        ({"y1"}, ["frontend l1", ":l1"], ["frontend l2"], ["l1"]),
        ({"r1"}, ["frontend l1", ":l1"], ["frontend l2"], ["l1"]),
        ({"y1", "l1"}, ["frontend l1"], ["frontend l2"], []),
        ({"nobody"}, [], ["frontend l1", " m1 "], []),
    ],
)
def test_invalid_objects_are_omitted_and_open_no_port(failed, gone, left, listed):
    tree = with_listener(l7policies=(POLICY,))
    rendered = render(tree, failed=failed)
    assert [error.object_id for error in rendered.refused] == listed
    assert not [words for words in gone if words in rendered.text]
    assert not [words for words in left if words not in rendered.text]
    assert render(tree).refused == ()  # the cache has no entry for it


def test_disabled_failed_policy_rejects_no_request():
    tree = with_listener(l7policies=(change(POLICY, admin_state_up=False),))
    assert render(tree, failed=["y1", "r1"]).text == render(LB).text


@pytest.mark.parametrize("protocol", [PoolProtocol.TCP, PoolProtocol.UDP, PoolProtocol.SCTP])
def test_an_http_listener_needs_an_http_pool(protocol):
    assert str(protocol) in refused(with_pool(protocol=protocol))["l1"]


@pytest.mark.parametrize("protocol", [ListenerProtocol.UDP, ListenerProtocol.SCTP])
def test_udp_and_sctp_are_not_in_the_haproxy_configuration(protocol):
    virtual = change(OTHER, protocol=protocol, default_pool_id="p2")
    pool = change(POOL, id="p2", protocol=PoolProtocol(protocol.value), healthmonitor=None)
    rendered = render(change(LB, listeners=(LISTENER, virtual), pools=(POOL, pool)))
    assert rendered == render(change(LB, listeners=(LISTENER,)))
    alone = render(change(LB, listeners=(virtual,), pools=(pool,)))
    assert (alone.text, alone.refused) == (None, ())


def test_udp_and_tcp_ports_do_not_conflict():
    same = change(OTHER, protocol=ListenerProtocol.UDP, protocol_port=80, default_pool_id=None)
    assert refused(change(LB, listeners=(LISTENER, same))) == {}


def test_a_tcp_listener_with_an_invalid_policy_is_not_served():
    said = refused(with_listener(protocol=ListenerProtocol.TCP, default_pool_id=None, l7policies=(POLICY,)))
    assert "L7 policies, which need HTTP, on a listener of TCP" in said["l1"]
    assert (
        refused(
            with_listener(
                protocol=ListenerProtocol.TCP, default_pool_id=None, l7policies=(change(POLICY, admin_state_up=False),)
            )
        )
        == {}
    )


def test_a_load_balancer_without_a_valid_vip_renders_nothing():
    rendered = render(change(LB, vip=change(VIP, address="x")))
    assert rendered.text is None
    assert [error.object_id for error in rendered.refused] == ["b"]


def test_an_invalid_monitor_leaves_the_pool_without_checks():
    assert " check " not in render(with_monitor(type=MonitorType.SCTP)).text


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "server m1 192.0.2.1:80 weight 1 check inter 5s fall 3 rise 2"),
        ({"weight": 0}, "server m1 192.0.2.1:80 weight 0 check inter 5s fall 3 rise 2"),
        ({"backup": True}, "server m1 192.0.2.1:80 weight 1 check inter 5s fall 3 rise 2 backup"),
        ({"admin_state_up": False}, "server m1 192.0.2.1:80 weight 1 check inter 5s fall 3 rise 2 disabled"),
        ({"monitor_port": 9}, "server m1 192.0.2.1:80 weight 1 check inter 5s fall 3 rise 2 port 9"),
        (
            {"monitor_address": "2001:db8::1"},
            "server m1 192.0.2.1:80 weight 1 check inter 5s fall 3 rise 2 addr [2001:db8::1]",
        ),
        ({"address": "2001:db8::1"}, "server m1 [2001:db8::1]:80 weight 1 check inter 5s fall 3 rise 2"),
    ],
)
def test_a_changed_member_changes_only_its_lines(changes, line):
    before, after = render(LB).text.splitlines(), render(with_member(**changes)).text.splitlines()
    assert after.count(f"    {line}") == 2
    touched = [d for d in difflib.ndiff(before, after) if d[0] in "+-"]
    assert all(" server m1 " in d for d in touched)
    assert len(touched) == (0 if not changes else 4)


def test_a_removed_member_removes_only_its_lines():
    pool = change(POOL, lb_algorithm=Algorithm.SOURCE_IP)
    before = render(change(LB, pools=(pool,))).text.splitlines()
    after = render(change(LB, pools=(change(pool, members=MEMBERS[1:]),))).text.splitlines()
    assert [line for line in before if " server m1 " not in line] == after


def test_the_order_of_children_does_not_matter():
    turned = change(LB, listeners=(OTHER, LISTENER), pools=(change(POOL, members=MEMBERS[::-1]),))
    assert render(turned).text == render(LB).text


def test_user_names_of_objects_are_not_rendered():
    named = change(
        LB,
        name="EVIL",
        description="EVIL",
        listeners=(change(LISTENER, name="EVIL"),),
        pools=(
            change(
                POOL,
                name="EVIL",
                members=(change(MEMBERS[0], name="EVIL"),),
                healthmonitor=change(MONITOR, name="EVIL"),
            ),
        ),
    )
    assert "EVIL" not in render(named).text


def test_zero_timeouts_become_the_defaults():
    zeros = dict.fromkeys(
        ("timeout_client_data", "timeout_member_connect", "timeout_member_data", "timeout_tcp_inspect"), 0
    )
    assert render(with_listener(**zeros)).text == render(LB).text


def test_the_cache_does_not_change_the_result():
    for tree in (LB, with_member(weight=9), with_listener(insert_headers=("X-Real-IP",)), LB):
        warm = render(tree)
        for cache in (backend._EXAMINED, frontend._FRONTENDS):
            cache.clear()
        cold = render(tree)
        assert (warm.text, warm.files, warm.pings) == (cold.text, cold.files, cold.pings)
