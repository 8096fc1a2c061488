# SPDX-License-Identifier: Apache-2.0
"""L7 policies through Octavia's API: positions from Octavia, actions, complete trees in one request."""

import http.client

import pytest

from amphora_driver.host import namespaces
from amphora_driver.store import desired_objects
from sandbox import topology

pytestmark = pytest.mark.root

REJECT = {"action": "REJECT"}


def recorded(cloud, balancer):
    """Return the provider's rows of the first listener's policies."""
    tree = cloud.database.read(lambda connection: desired_objects.load_tree(connection, balancer.id))
    return {one.name: one.position for one in tree.listeners[0].l7policies}


def octavias(cloud):
    return {one.name: one.position for one in cloud.balancers.l7_policies()}


def same_order(cloud, balancer):
    """Assert that Octavia and the provider agree; return the names in order."""
    found = octavias(cloud)
    assert recorded(cloud, balancer) == found
    assert sorted(found.values()) == list(range(1, len(found) + 1))
    return "".join(sorted(found, key=found.get))


def ask(cloud, address, path="/", method="GET", **headers):
    """Return status, Location, and the answering member."""

    def go():
        connection = http.client.HTTPConnection(address, 80, timeout=5)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.getheader("Location"), answer.read().decode().strip()
        finally:
            connection.close()

    return namespaces.run_inside(namespaces.path(cloud.settings.host(topology.CLIENT)), go)


@pytest.fixture
def balancer(cloud):
    return cloud.served("l7", ("member1",))


def test_positions_follow_octavias_own(cloud, balancer):
    listener = cloud.listener_of(balancer)

    def put_in(name, **more):
        cloud.balancers.create_l7_policy(name=name, listener_id=listener.id, **REJECT, **more)
        cloud.active(balancer.id)

    def change(name, **more):
        policy = next(one for one in cloud.balancers.l7_policies() if one.name == name)
        cloud.balancers.update_l7_policy(policy.id, **more)
        cloud.active(balancer.id)

    def take_out(name):
        policy = next(one for one in cloud.balancers.l7_policies() if one.name == name)
        cloud.balancers.delete_l7_policy(policy.id)
        cloud.active(balancer.id)

    put_in("a")
    put_in("b")
    put_in("c", position=1)
    assert same_order(cloud, balancer) == "cab"
    put_in("d", position=2)
    put_in("e", position=99)
    put_in("f", position=5)
    assert same_order(cloud, balancer) == "cdabfe"
    change("e", position=1)
    assert same_order(cloud, balancer) == "ecdabf"
    change("c", position=5)
    assert same_order(cloud, balancer) == "edabcf"
    change("d", position=1000)
    assert same_order(cloud, balancer) == "eabcfd"
    change("b", position=3, description="stays")
    change("a", description="stays too")
    assert same_order(cloud, balancer) == "eabcfd"
    take_out("b")
    assert same_order(cloud, balancer) == "eacfd"
    put_in("g", position=2)
    take_out("d")
    take_out("e")
    assert same_order(cloud, balancer) == "gacf"
    served = {one.provisioning_status for one in cloud.balancers.l7_policies()}
    assert served == {"ACTIVE"}


@pytest.mark.extended
def test_the_first_matching_policy_applies(cloud, balancer):
    """A change of the action removes the fields of the earlier action, in Octavia and in the provider."""
    listener = cloud.listener_of(balancer)
    other = cloud.balancers.create_pool(
        name="other", protocol="HTTP", lb_algorithm="ROUND_ROBIN", loadbalancer_id=balancer.id
    )
    cloud.active(balancer.id)
    cloud.balancers.create_member(other, **cloud.member("member2"))
    cloud.active(balancer.id)

    def policy(name, path, **more):
        made = cloud.balancers.create_l7_policy(name=name, listener_id=listener.id, **more)
        cloud.active(balancer.id)
        cloud.balancers.create_l7_rule(made, type="PATH", compare_type="STARTS_WITH", value=path)
        cloud.active(balancer.id)
        return made

    def change(made, **more):
        # openstacksdk knows no redirect_http_code.
        cloud.put(f"l7policies/{made.id}", {"l7policy": more})
        cloud.active(balancer.id)

    address = balancer.vip_address
    first = policy("first", "/a", action="REDIRECT_TO_POOL", redirect_pool_id=other.id)
    second = policy("second", "/a/b", action="REJECT")
    assert ask(cloud, address, "/")[2] == "member1"
    assert ask(cloud, address, "/a/b")[2] == "member2", "the first policy applies"
    change(second, position=1)
    assert ask(cloud, address, "/a/b")[0] == 403
    assert ask(cloud, address, "/a")[2] == "member2"
    change(first, action="REDIRECT_TO_URL", redirect_url="http://example.com/?a=1&b=2#c", redirect_http_code=301)
    assert ask(cloud, address, "/a")[:2] == (301, "http://example.com/?a=1&b=2#c")
    change(first, action="REDIRECT_PREFIX", redirect_prefix="https://example.com")
    assert ask(cloud, address, "/a/c?x=y")[1] == "https://example.com/a/c?x=y"
    change(first, action="REJECT")
    assert ask(cloud, address, "/a")[0] == 403
    found = cloud.balancers.get_l7_policy(first.id)
    assert (found.redirect_url, found.redirect_prefix, found.redirect_pool_id) == (None, None, None)
    tree = cloud.database.read(lambda connection: desired_objects.load_tree(connection, balancer.id))
    ours = next(one for one in tree.listeners[0].l7policies if one.id == first.id)
    assert (ours.redirect_url, ours.redirect_prefix, ours.redirect_pool_id, ours.redirect_http_code) == (None,) * 4
    change(first, admin_state_up=False)
    assert ask(cloud, address, "/a")[2] == "member1"
    cloud.operating(lambda: cloud.balancers.get_l7_policy(first.id), "OFFLINE")
    cloud.operating(lambda: cloud.balancers.get_l7_policy(second.id), "ONLINE")


def test_a_whole_tree_with_policies_in_one_request(cloud):
    def rule(path):
        return {"type": "PATH", "compare_type": "STARTS_WITH", "value": path}

    monitor = {"type": "HTTP", "delay": 1, "timeout": 1, "max_retries": 1, "url_path": "/"}
    elsewhere = {
        "name": "elsewhere",
        "protocol": "HTTP",
        "lb_algorithm": "ROUND_ROBIN",
        "members": [cloud.member("member2")],
        "healthmonitor": monitor,
    }
    policies = [
        {"name": "pool", "action": "REDIRECT_TO_POOL", "redirect_pool": elsewhere, "rules": [rule("/pool")]},
        {"name": "again", "action": "REDIRECT_TO_POOL", "redirect_pool": {"name": "elsewhere"}, "rules": [rule("/x")]},
        {"name": "first", "action": "REJECT", "position": 1, "rules": [rule("/pool/no"), rule("/pool")]},
    ]
    balancer = cloud.served("whole", ("member1",), monitor=monitor, listener={"l7policies": policies})
    address = balancer.vip_address
    assert {path: ask(cloud, address, path)[2] for path in ("/", "/pool", "/x/y")} == {
        "/": "member1",
        "/pool": "member2",
        "/x/y": "member2",
    }
    assert ask(cloud, address, "/pool/no")[0] == 403
    assert same_order(cloud, balancer) == "firstpoolagain"
    cloud.until(
        lambda: (
            {(one.provisioning_status, one.operating_status) for one in cloud.balancers.l7_policies()}
            == {("ACTIVE", "ONLINE")}
        ),
        "every policy is ACTIVE and ONLINE",
    )
    rules = [rule for policy in cloud.balancers.l7_policies() for rule in cloud.balancers.l7_rules(policy)]
    assert len(rules) == 4
    cloud.until(
        lambda: all(
            rule.operating_status == "ONLINE"
            for policy in cloud.balancers.l7_policies()
            for rule in cloud.balancers.l7_rules(policy)
        ),
        "every rule is ONLINE",
    )
    cloud.operating(lambda: next(one for one in cloud.balancers.pools() if one.name == "elsewhere"), "ONLINE")
    cloud.balancers.delete_load_balancer(balancer.id, cascade=True)
    cloud.gone(balancer.id)
