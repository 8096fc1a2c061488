# SPDX-License-Identifier: Apache-2.0
"""Differences between the recorded objects and Octavia's objects."""

import msgspec
import pytest

from amphora_driver.model.enums import Algorithm, L7Action, ListenerProtocol, PoolProtocol
from amphora_driver.model.loadbalancer import L7Policy, Listener, LoadBalancer, Member, Pool, Vip
from amphora_driver.provider_agent.octavia_audit import describe_differences, without_objects

VIP = Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1")
LISTENER = Listener(
    id="li", loadbalancer_id="lb", protocol=ListenerProtocol.HTTP, protocol_port=80, default_pool_id="po"
)
MEMBER = Member(id="me", pool_id="po", address="192.0.2.1", protocol_port=80, weight=1)
POOL = Pool(
    id="po",
    loadbalancer_id="lb",
    protocol=PoolProtocol.HTTP,
    lb_algorithm=Algorithm.ROUND_ROBIN,
    members=(MEMBER,),
)
TREE = LoadBalancer(id="lb", project_id="demo", vip=VIP, listeners=(LISTENER,), pools=(POOL,))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, []),
        ({"name": ""}, []),
        ({"profile": msgspec.structs.replace(TREE.profile, timeout_tunnel=5)}, []),
        ({"listeners": ()}, ["listener li is missing in Octavia"]),
        ({"admin_state_up": False}, ["loadbalancer lb differs in admin_state_up"]),
        (
            {"pools": (msgspec.structs.replace(POOL, members=(msgspec.structs.replace(MEMBER, weight=3),)),)},
            ["member me differs in weight"],
        ),
        (
            {"pools": (msgspec.structs.replace(POOL, members=(MEMBER, msgspec.structs.replace(MEMBER, id="new"))),)},
            ["member new exists only in Octavia"],
        ),
    ],
)
def test_each_difference_is_described(change, said):
    assert describe_differences(TREE, msgspec.structs.replace(TREE, **change)) == said


def test_the_order_of_names_is_no_difference():
    one, other = (
        msgspec.structs.replace(TREE, listeners=(msgspec.structs.replace(LISTENER, sni_container_refs=refs),))
        for refs in (("a", "b"), ("b", "a"))
    )
    assert describe_differences(one, other) == []


def policy(one, position, pool=None):
    return L7Policy(id=one, listener_id="li", action=L7Action.REJECT, position=position, redirect_pool_id=pool)


def with_policies(*policies):
    return msgspec.structs.replace(TREE, listeners=(msgspec.structs.replace(LISTENER, l7policies=policies),))


@pytest.mark.parametrize(
    ("leaving", "before", "after"),
    [
        ({"a"}, (policy("a", 1), policy("b", 2)), (policy("b", 1),)),
        ({"po"}, (policy("a", 1, "po"), policy("b", 2, "other")), (policy("a", 1), policy("b", 2, "other"))),
        ((), (policy("a", 3), policy("b", 7)), (policy("a", 1), policy("b", 2))),
    ],
)
def test_policies_remain_in_order(leaving, before, after):
    assert without_objects(with_policies(*before), leaving).listeners[0].l7policies == after


def test_a_removed_pool_takes_its_children_and_references_along():
    left = without_objects(TREE, {"po"})
    assert (left.pools, left.listeners[0].default_pool_id) == ((), None)
    assert without_objects(TREE, {"me"}).pools[0].members == ()
    assert without_objects(TREE, {"li"}).listeners == ()


def test_policy_order_is_a_difference_and_position_numbers_are_not():
    one = with_policies(policy("a", 1), policy("b", 2))
    assert describe_differences(one, with_policies(policy("a", 2), policy("b", 5))) == []
    assert len(describe_differences(one, with_policies(policy("a", 2), policy("b", 1)))) == 2
