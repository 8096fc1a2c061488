# SPDX-License-Identifier: Apache-2.0
"""Senlin 16.0.0 manages a load balancer of the provider: attach, each action with pre_op and post_op, and detach.

Octavia's API, the provider, the amphora and the members are those of the sandbox. Traffic shows which members serve.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "system"))

import sandbox_of_a_test
from cloud import Cloud
from senlin_cloud import SERVERS, CloudStub
from senlin_process import Senlin

from amphora_cluster.policy import from_mapping, names, to_create_body
from amphora_driver.database.engine import Database
from sandbox import demo, topology

pytestmark = [pytest.mark.extended, pytest.mark.lasts(600)]

IDS = {name: server for server, name in SERVERS.items()}
POOL = {"protocol": "HTTP", "protocol_port": 8080, "subnet": "member-subnet"}
VIP = {"subnet": "vip-subnet", "protocol": "HTTP", "protocol_port": 80}
MONITOR = {"type": "HTTP", "delay": 1, "timeout": 1, "max_retries": 1, "http_method": "GET", "url_path": "/"}
# Senlin counts its pauses as ten seconds each. With those of senlin_program.py this is one minute.
TIMEOUT = 3000


@pytest.fixture(scope="module")
def cloud():
    with sandbox_of_a_test.common() as common, common.used() as (_, settings):
        connection = demo.connect(settings)
        database = Database(settings.database_url)
        made = Cloud(settings, connection, database)
        yield made
        made.clean()
        connection.close()
        database.dispose()


class SenlinCluster:
    """A cluster of Senlin's engine, and the load balancer that its policy manages."""

    def __init__(self, cloud, senlin):
        self.cloud, self.senlin = cloud, senlin
        self.nodes, self.policy, self.binding = {}, "", {}

    def create_node(self, name):
        """A node on a server; Senlin has created both."""
        self.nodes[name] = self.senlin("engine.create_node", name, IDS[name])
        return self.nodes[name]

    def delete_node(self, name):
        self.senlin("engine.delete_node", self.nodes.pop(name))

    def attach(self, **properties):
        self.policy = self.senlin("engine.create_policy", {"lb_status_timeout": TIMEOUT, **properties})
        done, reason = self.senlin("engine.attach", self.policy)
        assert done, reason
        self.binding = self.senlin("engine.binding", self.policy)

    def detach(self):
        done, reason = self.senlin("engine.detach", self.policy)
        assert done, reason

    def check(self, when, action, target=None, inputs=None, data=None):
        """The check of an action by the attached policy; the action's data with the result."""
        found = self.senlin("engine.check", when, action, target or self.cluster_id, inputs or {}, data or {})
        assert found["status"] == "OK", found["reason"]
        return found

    @property
    def cluster_id(self):
        return self.senlin("engine.get_cluster_id")

    def serves(self, *names):
        """Assert that Octavia has members for exactly these servers, and that exactly these answer."""
        pool = self.binding["pool"]
        members = list(self.cloud.balancers.members(pool))
        assert sorted(one.address for one in members) == sorted(f"192.0.2.{topology.MEMBERS[one]}" for one in names)
        recorded = {
            name: self.senlin("engine.node", node)["data"].get("lb_member") for name, node in self.nodes.items()
        }
        assert {name for name, member in recorded.items() if member} == set(names)
        assert {recorded[one] for one in names} == {one.id for one in members}
        balancer = self.cloud.active(self.binding["loadbalancer"])
        wanted = set(names) or {"503"}
        self.cloud.until(lambda: set(self.cloud.answers(balancer.vip_address)) == wanted, f"{wanted} answer")


@pytest.fixture
def cluster(cloud, tmp_path):
    stub = CloudStub(cloud.settings.endpoint, cloud.settings.network_endpoint)
    senlin = Senlin(tmp_path)
    try:
        senlin("engine.begin", stub.auth_url)
        yield SenlinCluster(cloud, senlin)
        assert stub.trusts == {"trust"}
    finally:
        print(senlin.log())  # noqa: T201 - a failure needs Senlin's log
        senlin.close()
        stub.close()
        cloud.clean()


def test_the_life_of_a_policy(cluster):
    cluster.create_node("member1")
    cluster.attach(pool={**POOL, "lb_method": "ROUND_ROBIN"}, vip=VIP, health_monitor=MONITOR)
    assert set(cluster.binding) == {"loadbalancer", "listener", "pool", "healthmonitor"}
    cluster.serves("member1")

    # S4
    created = [cluster.create_node("member2")]
    cluster.check("AFTER", "CLUSTER_SCALE_OUT", data={"creation": {"count": 1, "nodes": created}})
    cluster.serves("member1", "member2")
    # S5
    added = [cluster.create_node("member3")]
    inputs = {"nodes": added}
    cluster.check("AFTER", "CLUSTER_ADD_NODES", inputs=inputs, data={"creation": {"nodes": added}})
    cluster.serves("member1", "member2", "member3")
    # S1, without other policies: the policy chooses the node.
    deletion = cluster.check("BEFORE", "CLUSTER_SCALE_IN", inputs={"count": 1})["deletion"]
    assert deletion["count"] == 1
    (chosen,) = [name for name, node in cluster.nodes.items() if node in deletion["candidates"]]
    rest = sorted({"member1", "member2", "member3"} - {chosen})
    cluster.serves(*rest)
    cluster.delete_node(chosen)
    # S7
    node = cluster.create_node(chosen)
    cluster.check("AFTER", "NODE_CREATE", target=node)
    cluster.serves("member1", "member2", "member3")
    # S2
    named = [cluster.nodes["member1"], cluster.nodes["member3"]]
    cluster.check("BEFORE", "CLUSTER_DEL_NODES", inputs={"candidates": named})
    cluster.serves("member2")
    cluster.delete_node("member1")
    cluster.delete_node("member3")
    # S6
    created = [cluster.create_node("member1"), cluster.create_node("member3")]
    inputs = {"adjustment_type": "EXACT_CAPACITY", "number": 3}
    cluster.check("AFTER", "CLUSTER_RESIZE", inputs=inputs, data={"creation": {"count": 2, "nodes": created}})
    cluster.serves("member1", "member2", "member3")
    # S3
    inputs = {"adjustment_type": "CHANGE_IN_CAPACITY", "number": -2}
    deletion = cluster.check("BEFORE", "CLUSTER_RESIZE", inputs=inputs)["deletion"]
    (left,) = [name for name, node in cluster.nodes.items() if node not in deletion["candidates"]]
    cluster.serves(left)
    # NODE_DELETE
    cluster.check("BEFORE", "NODE_DELETE", target=cluster.nodes[left])
    cluster.serves()

    cluster.detach()
    cluster.cloud.gone(cluster.binding["loadbalancer"])


def test_replacement_and_recovery(cluster):
    cluster.create_node("member1")
    cluster.attach(pool=POOL, vip=VIP)
    assert "healthmonitor" not in cluster.binding
    cluster.serves("member1")
    old, new = cluster.nodes["member1"], cluster.create_node("member2")
    inputs = {"candidates": {old: new}}
    cluster.check("BEFORE", "CLUSTER_REPLACE_NODES", inputs=inputs, data={"deletion": {"count": 1}})
    cluster.serves()
    cluster.check("AFTER", "CLUSTER_REPLACE_NODES", inputs=inputs)
    cluster.serves("member2")
    # A recovered node without member joins.
    cluster.check("AFTER", "NODE_RECOVER", target=old)
    cluster.serves("member1", "member2")
    # A node whose server was created again gets a new member.
    before = cluster.senlin("engine.node", old)["data"]
    cluster.senlin("engine.change_data", old, {**before, "recovery": "RECREATE"})
    cluster.check("AFTER", "NODE_RECOVER", target=old)
    cluster.serves("member1", "member2")
    assert cluster.senlin("engine.node", old)["data"]["lb_member"] != before["lb_member"]


def test_an_existing_load_balancer(cluster):
    cloud = cluster.cloud
    balancer = cloud.served("existing", ("member3",))
    pool = cloud.pool_of(balancer)
    for name in ("member1", "member2"):
        cluster.create_node(name)
    cluster.attach(loadbalancer=balancer.id, pool={**POOL, "id": pool.id}, vip={"subnet": "vip-subnet"})
    wanted = {"member1", "member2", "member3"}
    cloud.until(lambda: set(cloud.answers(balancer.vip_address)) == wanted, "the nodes answer beside the other member")
    cluster.check("BEFORE", "NODE_DELETE", target=cluster.nodes["member1"])
    cluster.delete_node("member1")
    cluster.detach()
    assert [one.name for one in cloud.balancers.members(pool)] == ["member3"]
    cloud.until(lambda: set(cloud.answers(balancer.vip_address)) == {"member3"}, "the other member stays")


def described(cloud, balancer):
    """The load balancer and its objects in Octavia, without ids, names, times and tags."""
    found = cloud.balancers.get_load_balancer(balancer)
    pool = cloud.pool_of(found)
    monitor = cloud.balancers.get_health_monitor(pool.health_monitor_id)
    kinds = {"load balancer": found, "listener": cloud.listener_of(found), "pool": pool, "monitor": monitor}
    varies = {"created_at", "updated_at", "tags", "name", "id", "location", "operating_status"}
    varies |= {"listeners", "loadbalancers", "load_balancers", "members", "pools"}
    return {
        kind: {
            key: value
            for key, value in one.to_dict().items()
            if key not in varies and not key.endswith(("_id", "_ids"))
        }
        for kind, one in kinds.items()
    }


def test_all_properties(cluster):
    """Octavia has the same objects from Senlin's calls and from our single one."""
    cloud = cluster.cloud
    cluster.create_node("member1")
    persistence = {"type": "APP_COOKIE", "cookie_name": "sid"}
    properties = {
        "pool": {**POOL, "lb_method": "LEAST_CONNECTIONS", "admin_state_up": True, "session_persistence": persistence},
        "vip": {**VIP, "network": "vip", "address": "198.51.100.77", "connection_limit": 500, "admin_state_up": True},
        "health_monitor": {**MONITOR, "admin_state_up": True, "expected_codes": "200"},
    }
    cluster.attach(**properties)
    cluster.serves("member1")
    theirs = described(cloud, cluster.binding["loadbalancer"])
    assert theirs["load balancer"]["vip_address"] == "198.51.100.77"
    assert theirs["listener"]["connection_limit"] == 500
    assert theirs["pool"]["session_persistence"]["cookie_name"] == "sid"
    assert theirs["monitor"]["expected_codes"] == "200"
    cluster.detach()
    cloud.gone(cluster.binding["loadbalancer"])

    ids = {
        ("subnet", "vip-subnet"): topology.VIP_SUBNET,
        ("network", "vip"): topology.VIP_NETWORK,
        ("subnet", "member-subnet"): topology.MEMBER_SUBNET,
    }
    spec = from_mapping(properties)
    assert set(names(spec)) == set(ids)
    made = cloud.post("loadbalancers", to_create_body(spec, "ours", ids=ids, tags=("amphora-cluster:g",)))
    cloud.active(made["loadbalancer"]["id"])
    assert described(cloud, made["loadbalancer"]["id"]) == theirs
