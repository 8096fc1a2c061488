# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import difflib

import msgspec
import pytest

from amphora_driver.errors import ModelError
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
from amphora_driver.model.vocabulary import Algorithm, ListenerProtocol, MonitorType, PersistenceType, PoolProtocol
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
POLICY = L7Policy(
    id="y1",
    listener_id="l1",
    action="REJECT",
    position=1,
    rules=(L7Rule(id="r1", l7policy_id="y1", type="PATH", compare_type="EQUAL_TO", value="/"),),
)


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
def test_nothing_to_serve(load_balancer):
    assert render(load_balancer).text is None
    assert render(load_balancer).refused == ()


@pytest.mark.parametrize(
    ("load_balancer", "object_id", "named"),
    [
        (with_listener(protocol=ListenerProtocol.UDP), "l1", "UDP"),
        (with_listener(protocol=ListenerProtocol.SCTP), "l1", "SCTP"),
        (with_listener(protocol=ListenerProtocol.PROMETHEUS), "l1", "PROMETHEUS"),
        (with_listener(protocol=ListenerProtocol.TERMINATED_HTTPS), "l1", "TERMINATED_HTTPS"),
        (with_listener(allowed_cidrs=("192.0.2.0/24",)), "l1", "allowed_cidrs"),
        (with_listener(insert_headers={"X-Forwarded-For": "true"}), "l1", "X-Forwarded-For"),
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
        (with_member(vnic_type="direct"), "m1", "vnic_type"),
        (with_member(monitor_address="0.0.0.0"), "m1", "monitor_address"),
        (with_member(id="m2"), "m2", "same id"),
        (with_member(id="m\n1"), "m\n1", "identifier"),
        (with_monitor(type=MonitorType.PING), "h1", "PING"),
        (with_monitor(type=MonitorType.TLS_HELLO), "h1", "TLS-HELLO"),
        (with_monitor(delay=0), "h1", "delay"),
        (with_monitor(type=MonitorType.HTTP, url_path="/a b"), "h1", "url_path"),
        (change(LB, vip_qos_policy_id="q"), "b", "vip_qos_policy_id"),
        (change(LB, flavor={"loadbalancer_topology": "ACTIVE_STANDBY"}), "b", "loadbalancer_topology"),
        (change(LB, additional_vips=(change(VIP, address="::%x"),)), "b", "address"),
    ],
)
def test_one_bad_object_does_not_take_the_others_down(load_balancer, object_id, named):
    rendered = render(load_balancer)
    (error,) = rendered.refused
    assert error.object_id == object_id
    assert named in str(error)
    assert "frontend l1\n" in rendered.text or "frontend l2\n" in rendered.text
    assert "server m3 192.0.2.3:80" in rendered.text


@pytest.mark.parametrize(
    "changes",
    [
        {"protocol": PoolProtocol.PROXY},
        {"protocol": PoolProtocol.UDP},
        {"tls_enabled": True},
        {"lb_algorithm": Algorithm.SOURCE_IP_PORT},
        {"session_persistence": SessionPersistence(type=PersistenceType.SOURCE_IP)},
    ],
)
def test_a_refused_pool_is_not_used(changes):
    rendered = render(with_pool(**changes))
    assert [error.object_id for error in rendered.refused] == ["p1"]
    assert "frontend l1" in rendered.text
    assert "default_backend" not in rendered.text
    assert "\nbackend" not in rendered.text


def test_a_listener_is_not_served_without_its_policies():
    rendered = render(with_listener(l7policies=(POLICY,)))
    assert [error.object_id for error in rendered.refused] == ["r1", "y1", "l1"]
    assert "frontend l1" not in rendered.text
    assert "frontend l2" in rendered.text


def test_a_disabled_policy_keeps_nobody_out():
    rendered = render(with_listener(l7policies=(change(POLICY, admin_state_up=False),)))
    assert [error.object_id for error in rendered.refused] == ["r1", "y1"]
    assert "frontend l1" in rendered.text


def test_an_http_listener_needs_an_http_pool():
    assert "l1" in refused(with_pool(protocol=PoolProtocol.TCP))


def test_without_any_good_vip_there_is_nothing():
    rendered = render(change(LB, vip=change(VIP, address="x")))
    assert rendered.text is None
    assert [error.object_id for error in rendered.refused] == ["b"]


def test_a_refused_monitor_leaves_the_pool_without_checks():
    assert " check " not in render(with_monitor(type=MonitorType.PING)).text


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
def test_a_changed_member_changes_its_own_lines_only(changes, line):
    before, after = render(LB).text.splitlines(), render(with_member(**changes)).text.splitlines()
    assert after.count(f"    {line}") == 2
    touched = [d for d in difflib.ndiff(before, after) if d[0] in "+-"]
    assert all(" server m1 " in d for d in touched)
    assert len(touched) == (0 if not changes else 4)


def test_a_removed_member_removes_its_own_lines_only():
    pool = change(POOL, lb_algorithm=Algorithm.SOURCE_IP)
    before = render(change(LB, pools=(pool,))).text.splitlines()
    after = render(change(LB, pools=(change(pool, members=MEMBERS[1:]),))).text.splitlines()
    assert [line for line in before if " server m1 " not in line] == after


def test_the_order_of_children_does_not_matter():
    turned = change(LB, listeners=(OTHER, LISTENER), pools=(change(POOL, members=MEMBERS[::-1]),))
    assert render(turned).text == render(LB).text


def test_names_are_never_printed():
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


def test_zero_timeouts_are_the_defaults():
    zeros = dict.fromkeys(
        ("timeout_client_data", "timeout_member_connect", "timeout_member_data", "timeout_tcp_inspect"), 0
    )
    assert render(with_listener(**zeros)).text == render(LB).text
