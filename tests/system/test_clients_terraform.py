# SPDX-License-Identifier: Apache-2.0
"""The requests of Terraform's provider `openstack`: one resource in one request, and a wait after each.

The bodies follow terraform-provider-openstack at 27f26125 (`openstack/resource_openstack_lb_*_v2.go`) and gophercloud
at 95eea8e5e. Terraform creates independent resources in parallel, and repeats a request that Octavia answers with 409.
It destroys resources in the opposite order, without a cascade.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from agreement import assert_agreed
from client_session import ClientSession, in_parallel
from cloud import Cloud
from sandbox_of_a_test import running

from amphora_driver.database.engine import Database
from sandbox import demo, topology

pytestmark = [pytest.mark.root, pytest.mark.extended]

PROJECT = "sandbox"


class Terraform:
    """Creates, changes and destroys the resources of one load balancer."""

    def __init__(self, session):
        self.session = session
        self._balancer = None

    def load_balancer(self, **more):
        body = {"name": "loadbalancer_1", "vip_subnet_id": topology.VIP_SUBNET, "admin_state_up": True, **more}
        made = self.session.send("POST", "loadbalancers", {"loadbalancer": body})
        self._balancer = made["id"]
        return self.wait(f"loadbalancers/{made['id']}")

    def create(self, path, word, **body):
        """Create a resource after its parent is ACTIVE; return the resource."""
        self.session.await_object(f"loadbalancers/{self._balancer}")
        made = self.session.repeated("POST", path, {word: {"admin_state_up": True, **body}})
        return self.wait(f"{path}/{made['id']}")

    def update(self, path, word, **body):
        self.session.await_object(f"loadbalancers/{self._balancer}")
        self.session.repeated("PUT", path, {word: body})
        return self.wait(path)

    def members(self, pool, members):
        """Replace the members of a pool: `openstack_lb_members_v2`."""
        self.wait(f"pools/{pool}")
        self.session.repeated("PUT", f"pools/{pool}/members", {"members": members})
        self.wait(f"pools/{pool}")

    def destroy(self, path):
        self.session.repeated("DELETE", path)
        self.session.await_gone(path)

    def wait(self, path):
        return self.session.await_settled(self._balancer, path)


def member(name, **more):
    """`expandLBMembersV2`: the name is empty, and all fields with a default are sent."""
    found = {"address": f"192.0.2.{topology.MEMBERS[name]}", "protocol_port": 8080, "name": "", "weight": 1}
    return {**found, "subnet_id": topology.MEMBER_SUBNET, "admin_state_up": True, "backup": False, **more}


@pytest.fixture
def terraform(cloud):
    return Terraform(ClientSession(cloud))


def test_resources_are_applied_changed_and_destroyed(cloud, terraform):
    session = terraform.session
    balancer = terraform.load_balancer(provider="haproxy", tags=["terraform"], description="applied")
    place = {"loadbalancer_id": balancer["id"]}
    made = {}

    def listener(name, port, **more):
        fields = {"protocol": "HTTP", "protocol_port": port, "name": name, **place, **more}
        made[name] = terraform.create("listeners", "listener", **fields)

    def pool(name, **more):
        fields = {"protocol": "HTTP", "lb_algorithm": "ROUND_ROBIN", "name": name, **more}
        made[name] = terraform.create("pools", "pool", **fields)

    timeouts = {"timeout_client_data": 10000, "timeout_member_connect": 2000, "timeout_member_data": 30000}
    limited = {**timeouts, "timeout_tcp_inspect": 4000, "connection_limit": 500}
    first = {"insert_headers": {"X-Forwarded-For": "true"}, "allowed_cidrs": ["198.51.100.0/24"], "tags": ["tag1"]}
    with in_parallel(
        lambda: listener("listener_1", 8080, **limited, **first),
        lambda: listener("listener_2", 8081, connection_limit=-1),
        lambda: pool("pool_2", **place),
    ):
        pass
    cookie = {"session_persistence": {"type": "APP_COOKIE", "cookie_name": "testCookie"}, "tags": ["foo"]}
    pool("pool_1", listener_id=made["listener_1"]["id"], **cookie)
    one, two, first, second = (made[name]["id"] for name in ("pool_1", "pool_2", "listener_1", "listener_2"))
    checked = {"type": "HTTP", "delay": 20, "timeout": 10, "max_retries": 5, "url_path": "/", "http_method": "GET"}
    checked |= {"http_version": 1.1, "domain_name": "www.example.com", "expected_codes": "200-202"}

    def monitor():
        made["monitor"] = terraform.create("healthmonitors", "healthmonitor", pool_id=one, **checked)

    def policy():
        redirect = {"action": "REDIRECT_TO_POOL", "redirect_pool_id": two, "listener_id": first, "position": 1}
        made["policy"] = terraform.create("l7policies", "l7policy", name="policy_1", **redirect)

    spare = {"monitor_address": "192.0.2.13", "monitor_port": 8080, "backup": True}
    with in_parallel(
        monitor,
        policy,
        lambda: terraform.members(one, [member("member1"), member("member3", weight=5, **spare)]),
        lambda: terraform.members(two, [member("member2")]),
    ):
        pass
    rules = f"l7policies/{made['policy']['id']}/rules"
    rule = terraform.create(rules, "rule", type="PATH", compare_type="STARTS_WITH", value="/api")
    listener_2 = f"listeners/{second}"
    terraform.update(listener_2, "listener", default_pool_id=two)
    assert_agreed(cloud, cloud.active(balancer["id"]))
    assert cloud.answers(balancer["vip_address"], 4, 8080) == {"member1": 4}, "the other member is a backup"
    assert cloud.get(balancer["vip_address"], "/api", 8080) == (200, "member2\n")
    assert cloud.answers(balancer["vip_address"], 2, 8081) == {"member2": 2}
    assert session.conflicts > 0, "parallel requests meet a load balancer that is PENDING"

    # The second apply changes attributes, and clears some of them.
    terraform.members(one, [member("member2", weight=10), member("member3", weight=0, subnet_id=None)])
    terraform.update(f"pools/{one}", "pool", name="pool_1_updated", session_persistence=None, tags=["bar"])
    changes = {"admin_state_up": False, "max_retries_down": 8, "delay": 30}
    terraform.update(f"healthmonitors/{made['monitor']['id']}", "healthmonitor", **changes)
    terraform.update(f"listeners/{first}", "listener", connection_limit=100, allowed_cidrs=[], insert_headers={})
    redirect = {"action": "REDIRECT_TO_URL", "redirect_pool_id": None, "redirect_url": "http://www.example.com/"}
    terraform.update(f"l7policies/{made['policy']['id']}", "l7policy", **redirect)
    terraform.update(f"{rules}/{rule['id']}", "rule", key="", value="/old")
    terraform.update(listener_2, "listener", default_pool_id=None)
    terraform.update(f"loadbalancers/{balancer['id']}", "loadbalancer", tags=[], description="changed")
    assert_agreed(cloud, cloud.active(balancer["id"]))
    assert cloud.answers(balancer["vip_address"], 3, 8080) == {"member2": 3}
    assert cloud.answers(balancer["vip_address"], 1, 8081) == {"503": 1}
    assert cloud.get(balancer["vip_address"], "/old", 8080)[0] == 302

    terraform.destroy(f"{rules}/{rule['id']}")
    terraform.members(one, [])
    with in_parallel(
        lambda: terraform.destroy(f"l7policies/{made['policy']['id']}"),
        lambda: terraform.destroy(f"healthmonitors/{made['monitor']['id']}"),
        lambda: terraform.members(two, []),
    ):
        pass
    with in_parallel(lambda: terraform.destroy(f"pools/{one}"), lambda: terraform.destroy(f"pools/{two}")):
        pass
    with in_parallel(lambda: terraform.destroy(f"listeners/{first}"), lambda: terraform.destroy(listener_2)):
        pass
    terraform.destroy(f"loadbalancers/{balancer['id']}")
    assert cloud.amphorae(SimpleNamespace(id=balancer["id"])) == set()


@contextmanager
def quota(session, **limits):
    """`openstack_lb_quota_v2`: set limits of the project; remove them at the end."""
    session.send("PUT", f"quotas/{PROJECT}", {"quota": limits})
    try:
        yield
    finally:
        session.send("DELETE", f"quotas/{PROJECT}")


@pytest.fixture
def counted():
    """A sandbox whose Octavia counts objects: it does not without authentication. Headers name the role instead."""
    with running(octavia_options={"api_settings": {"auth_strategy": "testing"}}) as (_, settings):
        database = Database(settings.database_url)
        connection = demo.connect(settings)
        connection.load_balancer.additional_headers["X-Roles"] = "admin"
        cloud = Cloud(settings, connection, database)
        yield cloud
        cloud.clean()
        connection.close()
        database.dispose()


def test_quotas_count_the_objects_of_this_provider(counted):
    cloud = counted
    session = ClientSession(cloud)
    terraform = Terraform(session)
    limits = {"loadbalancer": 1, "listener": 1, "pool": 1, "member": 2, "healthmonitor": 1, "l7policy": 1, "l7rule": 1}
    with quota(session, **limits):
        shown = session.shown(f"quotas/{PROJECT}")
        assert {name: shown[name] for name in limits} == limits
        balancer = terraform.load_balancer()
        place = {"loadbalancer_id": balancer["id"]}
        fields = {"protocol": "HTTP", "protocol_port": 80, "name": "listener_1", **place}
        listener = terraform.create("listeners", "listener", **fields)
        pool = terraform.create("pools", "pool", protocol="HTTP", lb_algorithm="ROUND_ROBIN", **place)
        terraform.members(pool["id"], [member("member1"), member("member2")])
        refused = [
            ("POST", "loadbalancers", {"loadbalancer": {"vip_subnet_id": topology.VIP_SUBNET}}),
            ("POST", "listeners", {"listener": {**fields, "protocol_port": 81}}),
            ("PUT", f"pools/{pool['id']}/members", {"members": [member(one) for one in topology.MEMBERS]}),
        ]
        for method, path, body in refused:
            answer = cloud.balancers.request(cloud.url(path), method, json=body)
            assert (answer.status_code, "Quota has been met" in answer.text) == (403, True), (path, answer.text)
        # A replaced member and a deleted listener free their place.
        terraform.members(pool["id"], [member("member3"), member("member2")])
        terraform.destroy(f"listeners/{listener['id']}")
        again = terraform.create("listeners", "listener", **{**fields, "protocol_port": 81})
        assert again["provisioning_status"] == "ACTIVE"
        session.send("DELETE", f"loadbalancers/{balancer['id']}?cascade=true")
        session.await_gone(f"loadbalancers/{balancer['id']}")
        second = terraform.load_balancer(name="loadbalancer_2")
        terraform.destroy(f"loadbalancers/{second['id']}")
