# SPDX-License-Identifier: Apache-2.0
"""Cluster membership with the real Octavia API of the sandbox that tests/system uses, and two providers."""

import sys
import uuid
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "system"))

import nova_stub
import pytest
import sandbox_of_a_test
import service_lab
from client_traffic import Traffic
from cloud import Cloud
from cluster_scenarios import WEB, Cluster
from other_provider import OtherProvider

from amphora_cluster.cloud import session
from amphora_cluster.cloud.octavia import OctaviaPools
from amphora_cluster.cloud.options import CloudSettings
from amphora_cluster.cloud.session import CloudConnection
from amphora_cluster.model import Group, MemberTemplate, Selector, SelectorKind
from amphora_driver.database.engine import Database
from sandbox import demo, topology

PROJECT = "sandbox"
MONITOR = {"type": "HTTP", "delay": 1, "timeout": 1, "max_retries": 1, "max_retries_down": 1}


@pytest.fixture(scope="session")
def common_sandbox():
    with sandbox_of_a_test.common() as common:
        yield common


@pytest.fixture(scope="module")
def sandbox(common_sandbox):
    with common_sandbox.used() as started:
        yield started


@pytest.fixture(scope="module")
def settings(sandbox):
    return sandbox[1]


@pytest.fixture(scope="module")
def cloud_of_module(settings):
    database = Database(settings.database_url)
    connection = demo.connect(settings)
    yield Cloud(settings, connection, database)
    connection.close()
    database.dispose()


@pytest.fixture
def cloud(cloud_of_module):
    """The sandbox from a user's view, without load balancers before and after the test."""
    yield cloud_of_module
    cloud_of_module.clean()


@pytest.fixture
def other_provider(settings, cloud):
    """Reports the statuses of Octavia's provider `noop_driver`."""
    with OtherProvider(settings, cloud.balancers) as provider:
        yield provider
        provider.remove_all()


@pytest.fixture
def make_connection(settings):
    """Makes connections to Octavia as the service does; closes them after the test."""

    def make(**endpoints):
        return CloudConnection(
            CloudSettings(without_keystone=True, endpoints={"octavia": settings.endpoint, **endpoints}), None, PROJECT
        )

    yield make
    session.close_http_sessions()


@pytest.fixture
def pools(make_connection):
    return OctaviaPools(make_connection())


@pytest.fixture
def make_group():
    """Makes the definition of a group for the pool of a load balancer."""

    def make(balancer, pool, name="group", **more):
        member = {"ports": (8080,), "subnet_id": topology.MEMBER_SUBNET, **more.pop("member", {})}
        values = {"selector": Selector(kind=SelectorKind.LIST), **more}
        return Group(
            id=str(uuid.uuid4()),
            name=name,
            project_id=PROJECT,
            load_balancer_id=balancer.id,
            pool_id=pool.id,
            member=MemberTemplate(**member),
            **values,
        )

    return make


@pytest.fixture(scope="module")
def nova():
    with nova_stub.running() as stub:
        yield stub


@pytest.fixture(scope="module")
def lab_of_module(settings, nova, tmp_path_factory):
    with service_lab.running(tmp_path_factory.mktemp("cluster"), settings, nova) as lab:
        yield lab


@pytest.fixture
def lab(lab_of_module, nova, cloud):
    """The service without groups and servers before and after the test."""
    yield lab_of_module
    nova.fails = None
    for record in lab_of_module.groups.list_groups():
        lab_of_module.groups.delete(record.group.id)
    cloud.until(lambda: not lab_of_module.groups.list_groups(), "all groups are deleted")
    nova.servers.clear()


class SandboxCluster(Cluster):
    """Servers of the stub of Nova on the member hosts: a host runs before its server has a tag, until its deletion."""

    def __init__(self, cloud, balancer, nova, stack):
        super().__init__(cloud.balancers, balancer, cloud.pool_of(balancer).id)
        self.cloud, self.nova, self.stack = cloud, nova, stack
        self._hosts, self._number = {}, 0

    def create(self, number=1, *, tag=WEB):
        self.stack.up()
        free = [host for host in topology.MEMBERS if host not in self._hosts.values()]
        made = []
        for host in free[:number]:
            self._number += 1
            made.append(f"{host}-{self._number}")
            self._hosts[made[-1]] = host
            self.nova.add(made[-1], self._address(made[-1]), subnet_id=topology.MEMBER_SUBNET, tags=[tag])
        assert len(made) == number, "no host is free"
        return made

    def delete(self, *server_ids):
        self.nova.remove(*server_ids)
        self.stack.supervision.stop(*(self._hosts.pop(one) for one in server_ids))

    def add_tag(self, server_id, tag):
        with self.nova.lock:
            self.nova.servers[server_id]["tags"].append(tag)

    def member_of(self, server_id):
        return {"address": self._address(server_id), "protocol_port": 8080, "subnet_id": topology.MEMBER_SUBNET}

    def answers(self, number=12):
        servers = {host: one for one, host in self._hosts.items()}
        return {servers.get(one, one) for one in self.cloud.answers(self.balancer.vip_address, number)}

    def traffic(self, **more):
        return Traffic(self.cloud, self.balancer.vip_address, **more)

    def active(self):
        self.cloud.active(self.balancer.id)

    def stop_host(self, server_id):
        """End the host of a server that Nova still shows as ACTIVE."""
        self.stack.supervision.stop(self._hosts[server_id])

    def _address(self, server_id):
        return f"192.0.2.{topology.MEMBERS[self._hosts[server_id]]}"


@pytest.fixture
def make_cluster(cloud, nova, sandbox):
    """Makes the cluster behind a load balancer."""
    yield lambda balancer: SandboxCluster(cloud, balancer, nova, sandbox[0])
    # Hosts that the test has ended.
    sandbox[0].up()


@pytest.fixture
def served(cloud, lab, make_cluster):
    """Makes a cluster, and a group with one serving server; returns both with the id of the server."""

    def make(provider="haproxy", **more):
        balancer = cloud.served("scenario", (), monitor=MONITOR, provider=provider)
        cluster = make_cluster(balancer)
        [first] = cluster.create()
        web = lab.group(balancer.id, cluster.pool_id, WEB, **more)
        web.done("join", {"server": first})
        return cluster, web, first

    return make
