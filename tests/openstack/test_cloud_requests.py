# SPDX-License-Identifier: Apache-2.0
"""The numbers of requests to Nova, Neutron and Glance for a load balancer of each topology and for each change.

With AMPHORA_INCUMBENT=1 those of Octavia's own provider are counted too. `--junitxml FILE` has the numbers.
"""

import os
from contextlib import contextmanager

import pytest
import sqlalchemy as sa
from request_log import RequestLog, writes

from amphora_driver.database.tables import job
from sandbox import demo_hosts

# In the second part of a run, one process starts one cloud for all tests (tests/README.md).
pytestmark = [pytest.mark.extended, pytest.mark.lasts(1800)]
# The pair takes two more minutes, and does not fit into the 60 minutes of a run.
ALL = pytest.mark.skipif(os.environ.get("AMPHORA_CLOUD") != "all", reason="AMPHORA_CLOUD=all runs this")
INCUMBENT = pytest.mark.skipif(os.environ.get("AMPHORA_INCUMBENT") != "1", reason="AMPHORA_INCUMBENT=1 runs this")
CLIENTS = ["198.51.100.0/25"]
REPLACED = 300.0
# Of each amphora: its server, and the interfaces on the networks of the VIPs and of the members.
SERVER, INTERFACES = {"POST servers": 1}, {"POST servers/os-interface": 2}
# Of each amphora: one port on each of these networks and on that of the agents.
PORTS = {"POST ports": 3, "PUT ports/tags": 3}
# What `haproxy` writes to Nova and to Neutron for each amphora; without the VIP port of octavia-api.
WRITES = {
    "created": ({**SERVER, **INTERFACES}, PORTS),
    "a listener": ({}, {}),
    "allowed_cidrs": ({}, {}),
    "a pool": ({}, {}),
    "a member": ({}, {}),
    "no such member": ({}, {}),
    "a member on a further network": ({"POST servers/os-interface": 1}, {"POST ports": 1, "PUT ports/tags": 1}),
    "no member on this network": ({"DELETE servers/os-interface": 1}, {"DELETE ports": 1}),
    "a QoS policy": ({}, {"PUT ports": 1}),
    "no QoS policy": ({}, {"PUT ports": 1}),
    "a security group": ({}, {"PUT ports": 1}),
    "no security group": ({}, {"PUT ports": 1}),
    "replaced": ({**SERVER, **INTERFACES, "DELETE servers": 1}, {**PORTS, "DELETE ports": 3}),
    "deleted": ({"DELETE servers": 1}, {"DELETE ports": 3}),
}
VIP_PORT = {"created": {"POST ports": 1, "PUT ports/tags": 1}, "deleted": {"DELETE ports": 1}}


@pytest.fixture(scope="module", autouse=True)
def first_load_balancer(cloud_user):
    """Create and delete a load balancer if the deployment has had none: it creates the groups of the deployment."""
    mark = f"octavia-amphora-driver deployment {cloud_user.stack.deployment_id}"
    groups = cloud_user.admin.network.security_groups(description=mark)
    if "octavia-amphora-traffic" not in {one.name for one in groups}:
        cloud_user.delete(cloud_user.load_balancer("first"))


@pytest.fixture(scope="module")
def further(cloud_user):
    """A subnet of the user without members."""
    _, subnet = cloud_user.add_network("counted", "203.0.116.0/24")
    return subnet


@pytest.fixture(scope="module")
def policy(cloud_user):
    network = cloud_user.admin.network
    made = network.create_qos_policy(name="counted", project_id=cloud_user.project_id)
    network.create_qos_bandwidth_limit_rule(made, max_kbps=10**6)
    return made.id


@pytest.fixture(scope="module")
def group(cloud_user):
    return cloud_user.connection.network.create_security_group(name="counted").id


class Changes:
    """The changes of one load balancer, each with its numbers of requests.

    Attributes:
        counted: the numbers by the name of the change.
    """

    def __init__(self, user, provider, flavor_id):
        self.counted = {}
        self._user = user
        self._log = RequestLog(user.cloud)
        with self.measured("created"):
            self.balancer = user.load_balancer("counted", provider=provider, flavor_id=flavor_id)

    @contextmanager
    def measured(self, name):
        """Count the requests of a block, and of the controller after it."""
        self._log.counted()
        yield
        if name != "deleted":
            self.settle()
        self.counted[name] = self._log.counted()

    def settle(self):
        """Wait until the load balancer is ACTIVE and the controller has nothing to do for it."""
        self._user.settled(self.balancer.id, seconds=REPLACED)
        query = sa.select(job.c.dirty).where(job.c.load_balancer_id == self.balancer.id, job.c.dirty)
        self._user.until(lambda: not self._user.stack.read(query), "the controller has nothing to do", REPLACED)

    def update(self, **values):
        path = f"/lbaas/loadbalancers/{self.balancer.id}"
        answer = self._user.balancers.put(path, json={"loadbalancer": values})
        assert answer.ok, answer.text

    def configuration(self):
        """Change listeners, pools and members on known networks."""
        user, client = self._user, self._user.balancers
        with self.measured("a listener"):
            listener = client.create_listener(
                loadbalancer_id=self.balancer.id, name="further", protocol="HTTP", protocol_port=81
            )
        with self.measured("allowed_cidrs"):
            client.update_listener(listener, allowed_cidrs=CLIENTS)
        with self.measured("a pool"):
            pool = client.create_pool(
                listener_id=listener.id, name="further", protocol="HTTP", lb_algorithm="ROUND_ROBIN"
            )
        with self.measured("a member"):
            member = client.create_member(pool, **self.member(user.back_subnet, user.members["member1"]))
        with self.measured("no such member"):
            client.delete_member(member, pool)
        return pool

    def networks(self, pool, subnet):
        """Add and remove the only member on a network."""
        client = self._user.balancers
        with self.measured("a member on a further network"):
            member = client.create_member(pool, **self.member(subnet, "203.0.116.250"))
        with self.measured("no member on this network"):
            client.delete_member(member, pool)

    def options(self, policy, group):
        """Set and remove a QoS policy and a security group of the VIPs."""
        for name, key, value, none in (
            ("QoS policy", "vip_qos_policy_id", policy, None),
            ("security group", "vip_sg_ids", [group], []),
        ):
            with self.measured(f"a {name}"):
                self.update(**{key: value})
            with self.measured(f"no {name}"):
                self.update(**{key: none})

    @staticmethod
    def member(subnet, address):
        return {"address": address, "protocol_port": demo_hosts.MEMBER_PORT, "subnet_id": subnet.id}

    def replace(self):
        with self.measured("replaced"):
            self._user.admin.load_balancer.failover_load_balancer(self.balancer.id)

    def delete(self):
        with self.measured("deleted"):
            self._user.delete(self.balancer)


@pytest.mark.parametrize("name", [pytest.param("SINGLE"), pytest.param("ACTIVE_STANDBY", marks=ALL)])
@pytest.mark.parametrize("provider", [pytest.param("haproxy"), pytest.param("amphora", marks=INCUMBENT)])
def test_numbers_of_requests(cloud_user, topology, record_property, further, policy, group, provider, name):
    with cloud_user.unchanged():
        changes = Changes(cloud_user, provider, topology(name, provider))
        changes.networks(changes.configuration(), further)
        # The first call creates the group beside those of users, once in a deployment.
        changes.options(policy, group)
        changes.options(policy, group)
        changes.replace()
        changes.delete()
    for change, found in changes.counted.items():
        for service, requests in found.items():
            record_property(f"{provider} {change}: {service}", dict(requests))
    if provider == "haproxy":
        number = 1 if name == "SINGLE" else 2
        written = {
            change: (writes(found["nova"]), writes(found["neutron"])) for change, found in changes.counted.items()
        }
        assert written == {change: expected(change, number) for change in WRITES}


def expected(change, number):
    """What the provider writes to Nova and to Neutron for a change of a load balancer with this number of amphorae."""
    nova, neutron = ({words: number * each for words, each in found.items()} for found in WRITES[change])
    for words, each in VIP_PORT.get(change, {}).items():
        neutron[words] += each
    return nova, neutron
