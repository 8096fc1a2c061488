# SPDX-License-Identifier: Apache-2.0
"""L7 policies and rules from the driver call to the rows, with the positions of their neighbours."""

import pytest
from octavia_lib.api.drivers import data_models
from octavia_objects import LB, LISTENER, POOL, listener, load_balancer, pool

from amphora_driver.store import desired_objects

RULE = "50000000-0000-4000-8000-000000000001"


def policy_id(name):
    return f"40000000-0000-4000-8000-0000000000{ord(name):02x}"


def policy(name, position=2147483647, **more):
    values = {
        "l7policy_id": policy_id(name),
        "listener_id": LISTENER,
        "name": name,
        "action": "REJECT",
        "position": position,
        "admin_state_up": True,
        "project_id": "demo",
    }
    return data_models.L7Policy(**{**values, **more})


def change(name, **more):
    return data_models.L7Policy(l7policy_id=policy_id(name), **more)


def rule(number=1, **more):
    values = {
        "l7rule_id": f"{RULE[:-1]}{number}",
        "l7policy_id": policy_id("a"),
        "type": "PATH",
        "compare_type": "EQUAL_TO",
        "value": "/",
        "key": None,
        "invert": False,
        "admin_state_up": True,
    }
    return data_models.L7Rule(**{**values, **more})


@pytest.fixture
def policies(database):
    """Name and position of every policy in the order of evaluation."""

    def read():
        tree = database.read(lambda connection: desired_objects.load_tree(connection, LB))
        return [(one.name, one.position) for one in tree.listeners[0].l7policies]

    return read


def order(found):
    assert [position for _, position in found] == list(range(1, len(found) + 1))
    return "".join(name for name, _ in found)


@pytest.fixture
def listening(provider):
    provider.loadbalancer_create(load_balancer())
    provider.listener_create(listener())
    provider.pool_create(pool())
    return provider


def test_neighbours_of_a_policy_move_without_a_call(listening, policies):
    for name, position in (("a", 1), ("b", 2), ("c", 1), ("d", 2), ("e", 5)):
        listening.l7policy_create(policy(name, position))
    assert order(policies()) == "cdabe"
    listening.l7policy_update(None, change("b", position=1))
    listening.l7policy_update(None, change("c", position=99))
    assert order(policies()) == "bdaec"
    listening.l7policy_update(None, change("a", action="REJECT"))
    assert order(policies()) == "bdaec"
    listening.l7policy_delete(policy("d"))
    listening.l7policy_delete(policy("b"))
    assert order(policies()) == "aec"


def test_only_the_pending_objects_of_octavia_wait(listening, policies, database):
    listening.l7policy_create(policy("a"))
    listening.l7policy_create(policy("b", 1))
    newest = database.read(
        lambda connection: (
            connection.exec_driver_sql(
                "SELECT object_id FROM object_status WHERE pending = (SELECT generation FROM job)"
            )
            .scalars()
            .all()
        )
    )
    assert set(newest) == {policy_id("b"), LISTENER, LB}, "policy a was moved and is not PENDING"
    listening.l7rule_create(rule())
    newest = database.read(
        lambda connection: (
            connection.exec_driver_sql(
                "SELECT object_id FROM object_status WHERE pending = (SELECT generation FROM job)"
            )
            .scalars()
            .all()
        )
    )
    assert set(newest) == {RULE, policy_id("a"), LISTENER, LB}


def test_policies_and_rules_nested_in_other_calls(provider, database):
    provider.loadbalancer_create(load_balancer())
    inner = policy("a", 1, action="REDIRECT_TO_POOL", redirect_pool_id=POOL, rules=[rule(1), rule(2, value="/x")])
    provider.listener_create(listener(l7policies=[inner, policy("b", 2)]))
    provider.l7policy_create(policy("c", 1, rules=[rule(3, l7policy_id=policy_id("c"))]))
    tree = database.read(lambda connection: desired_objects.load_tree(connection, LB))
    found = {one.name: (one.position, [rule.value for rule in one.rules]) for one in tree.listeners[0].l7policies}
    assert found == {"c": (1, ["/"]), "a": (2, ["/", "/x"]), "b": (3, [])}
    provider.listener_delete(listener())
    assert database.read(lambda connection: desired_objects.load_tree(connection, LB)).listeners == ()


def test_a_changed_action_removes_the_old_fields(listening, database):
    listening.l7policy_create(
        policy("a", action="REDIRECT_TO_URL", redirect_url="http://example.com/", redirect_http_code=301)
    )
    listening.l7policy_update(None, change("a", action="REDIRECT_TO_POOL", redirect_pool_id=POOL))
    tree = database.read(lambda connection: desired_objects.load_tree(connection, LB))
    (found,) = tree.listeners[0].l7policies
    assert (found.redirect_url, found.redirect_http_code, found.redirect_pool_id) == (None, None, POOL)
    users = database.read(lambda connection: desired_objects.users_of_pool(connection, POOL))
    assert {one[1] for one in users} == {LISTENER, policy_id("a")}
    listening.l7policy_update(None, change("a", action="REJECT"))
    users = database.read(lambda connection: desired_objects.users_of_pool(connection, POOL))
    assert {one[1] for one in users} == {LISTENER}, "a pool that no policy uses can be deleted"
