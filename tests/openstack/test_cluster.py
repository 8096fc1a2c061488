# SPDX-License-Identifier: Apache-2.0
"""Cluster membership with a real Nova, Octavia, Keystone and RabbitMQ: servers of each selector, rights, notifications.

The owner is the user `demo`. The service has the owner's application credential only.
"""

import queue
import uuid
from contextlib import suppress
from datetime import datetime
from urllib.parse import urlsplit

import pytest
from openstack.exceptions import NotFoundException
from whole_cloud import FLAVOR

from amphora_cluster.cloud import session
from amphora_cluster.cloud.errors import CredentialRefused, Missing
from amphora_cluster.cloud.notifications import NovaNotifications
from amphora_cluster.cloud.nova import NovaServers
from amphora_cluster.cloud.octavia import OctaviaPools
from amphora_cluster.cloud.options import CloudSettings
from amphora_cluster.cloud.session import CloudConnection
from amphora_cluster.credential import ApplicationCredential
from amphora_cluster.members import GONE
from amphora_cluster.model import Group, MemberChange, MemberTemplate, Selector, SelectorKind, Step, StepKind
from amphora_driver.secret import Secret

pytestmark = [pytest.mark.extended, pytest.mark.lasts(900)]


class Owner:
    """A user of the cloud with servers."""

    def __init__(self, cloud, name):
        self.cloud, self.name = cloud, name
        self.connection = cloud.connect(name, name)
        self.network = self.connection.network.create_network(name="cluster")
        self.subnet = self.connection.network.create_subnet(
            network_id=self.network.id, ip_version=4, cidr="198.51.102.0/24", gateway_ip=None
        )
        self.image = self.connection.image.create_image(
            name="cluster", data=b"no guest reads it", disk_format="raw", container_format="bare"
        )
        self._made = []

    def credential(self):
        """Create an application credential; return it with a function that revokes it."""
        identity, user = self.connection.identity, self.connection.current_user_id
        made = identity.create_application_credential(user, uuid.uuid4().hex)
        credential = ApplicationCredential(id=made.id, secret=Secret(made.secret.encode()))
        return credential, lambda: identity.delete_application_credential(user, made)

    def boot(self, *, tags=(), metadata=None, hints=None):
        """Boot a server; return its id."""
        compute = self.connection.compute
        body = {
            "server": {
                "name": f"web-{len(self._made)}", "flavorRef": compute.find_flavor(FLAVOR).id,
                "imageRef": self.image.id, "networks": [{"uuid": self.network.id}], "config_drive": True,
                "tags": list(tags), "metadata": metadata or {},
            },
            **({"os:scheduler_hints": hints} if hints else {}),
        }  # fmt: skip
        answer = compute.post("/servers", json=body, microversion="2.67")
        assert answer.status_code == 202, answer.text
        self._made.append(answer.json()["server"]["id"])
        return self._made[-1]

    def active(self, *server_ids):
        for one in server_ids:
            server = self.connection.compute.get_server(one)
            self.connection.compute.wait_for_server(server, interval=0.5, wait=240)

    def deleted(self, *server_ids):
        compute = self.connection.compute
        for one in server_ids:
            compute.delete_server(one, ignore_missing=True)
        for one in server_ids:
            with suppress(NotFoundException):
                compute.wait_for_delete(compute.get_server(one), interval=0.5, wait=120)

    def clean(self):
        self.deleted(*self._made)
        self.connection.image.delete_image(self.image)
        self.connection.network.delete_network(self.network)


@pytest.fixture(scope="module")
def nova_cloud(provider_stack):
    return provider_stack.cloud


@pytest.fixture(scope="module")
def owner(nova_cloud):
    found = Owner(nova_cloud, "demo")
    yield found
    found.clean()


@pytest.fixture(scope="module")
def fleet(owner, nova_cloud):
    """Three servers of the owner, and one of another project with the same tag and metadata."""
    group = owner.connection.compute.create_server_group(name="web", policy="soft-anti-affinity")
    other = Owner(nova_cloud, "other")
    servers = [
        owner.boot(tags=["web", "blue"], metadata={"role": "web"}, hints={"group": group.id}),
        owner.boot(tags=["web"], metadata={"role": "db"}),
        owner.boot(metadata={"role": "web"}, hints={"group": group.id}),
    ]
    strange = other.boot(tags=["web"], metadata={"role": "web"})
    owner.active(*servers)
    other.active(strange)
    yield group.id, servers, strange
    other.clean()
    owner.deleted(*servers)
    owner.connection.compute.delete_server_group(group)


@pytest.fixture
def connect(owner, nova_cloud):
    """Make a connection with an application credential of the owner, which is revoked at the end."""
    revoke = []

    def make(**more):
        credential, ended = owner.credential()
        revoke.append(ended)
        settings = CloudSettings(auth_url=nova_cloud.auth_url, region_name="RegionOne", **more)
        return CloudConnection(settings, credential, owner.connection.current_project_id), ended

    yield make
    session.close_http_sessions()
    for one in revoke:
        one()


def selected(kind, value="", servers=()):
    return Selector(kind=SelectorKind(kind), value=value, servers=servers)


def ids(servers):
    return [one.id for one in servers]


class TestServers:
    def test_each_selector_and_pages(self, fleet, connect):
        group, (one, two, three), strange = fleet
        for size in (1000, 2, 1):
            nova = NovaServers(connect(page_size=size)[0])
            assert set(ids(nova.servers(selected("tag", "web")))) == {one, two}
            assert set(ids(nova.servers(selected("metadata", "role=web")))) == {one, three}
            assert set(ids(nova.servers(selected("server_group", group)))) == {one, three}
            assert ids(nova.servers(selected("list", servers=(two, strange)))) == [two]

    def test_the_values_of_a_server(self, fleet, connect, owner):
        _, (one, *_), _ = fleet
        connection, _ = connect()
        nova = NovaServers(connection)
        [found] = nova.servers(selected("list", servers=(one,)), subnets=True)
        known = owner.connection.compute.get_server(one)
        [address] = [it["addr"] for it in known.addresses["cluster"]]
        assert [(it.ip, it.family, it.subnet_id) for it in found.addresses] == [(address, 4, owner.subnet.id)]
        assert (found.name, found.status, found.vcpus, found.metadata) == (known.name, "ACTIVE", 1, {"role": "web"})
        created = datetime.fromisoformat(known.created_at.replace("Z", "+00:00"))
        assert found.created_at == created.timestamp()
        # The subnets of known addresses are not read again: one list, and one read of the interfaces.
        nova.servers(selected("list", servers=(one,)), subnets=True, fresh=True)
        assert connection.calls == {("GET", "nova"): 3}

    def test_a_deleted_server_vanishes(self, owner, connect):
        server = owner.boot(tags=["short"])
        owner.active(server)
        nova = NovaServers(connect()[0])
        assert ids(nova.servers(selected("tag", "short"), known=[server])) == [server]
        owner.deleted(server)
        # Nova shows the status DELETED until it has removed the server. The plan ignores these servers too.
        found = nova.servers(selected("tag", "short"), known=[server])
        assert [one for one in found if one.status not in GONE] == []

    def test_a_missing_server_group(self, connect):
        with pytest.raises(Missing):
            NovaServers(connect()[0]).servers(selected("server_group", str(uuid.uuid4())))


class TestRights:
    def test_a_revoked_application_credential(self, connect):
        connection, revoke = connect()
        NovaServers(connection).servers(selected("list"))
        revoke()
        # Services keep a valid token in a cache for some minutes (keystonemiddleware), so they may accept the last one.
        again = CloudConnection(connection.settings, connection._credential, connection.project_id)
        with pytest.raises(CredentialRefused) as caught:
            NovaServers(again).servers(selected("list"))
        assert caught.value.final

    def test_the_pool_of_another_project(self, cloud_user, connect, owner):
        """The service has no right of its own: it cannot reach what the owner cannot reach."""
        balancers = owner.cloud.connect("other", "other").load_balancer
        foreign = Owner(owner.cloud, "other")
        balancer = balancers.create_load_balancer(
            name="foreign", vip_subnet_id=foreign.subnet.id,
            listeners=[{"name": "foreign", "protocol": "HTTP", "protocol_port": 80,
                        "default_pool": {"name": "foreign", "protocol": "HTTP", "lb_algorithm": "ROUND_ROBIN"}}],
        )  # fmt: skip
        try:
            pools = OctaviaPools(connect()[0])
            with pytest.raises(CredentialRefused):
                pools.read_pool(group_of(balancer.id, balancers.get_load_balancer(balancer.id).pools[0]["id"]))
        finally:
            balancers.wait_for_load_balancer(balancer.id, interval=0.5, wait=240)
            balancers.delete_load_balancer(balancer.id, cascade=True)
            cloud_user.until(
                lambda: balancer.id not in {one.id for one in balancers.load_balancers()}, "it is deleted", 120
            )
            foreign.clean()


def group_of(balancer_id, pool_id, **more):
    return Group(
        id=str(uuid.uuid4()), name="web", project_id="p", selector=selected("list"), load_balancer_id=balancer_id,
        pool_id=pool_id, member=MemberTemplate(ports=(8080,), **more),
    )  # fmt: skip


def test_a_server_of_nova_joins_a_pool(fleet, connect, owner, cloud_user):
    """The member has the address and the subnet that Nova shows, on a load balancer of the owner."""
    _, (one, *_), _ = fleet
    connection, _ = connect()
    [server] = NovaServers(connection).servers(selected("list", servers=(one,)), subnets=True)
    balancer = cloud_user.load_balancer("cluster")
    pools = OctaviaPools(connection)
    group = group_of(balancer.id, next(iter(cloud_user.balancers.pools(loadbalancer_id=balancer.id))).id)
    before = {it.id for it in pools.read_pool(group).members}
    assert len(before) == 2
    change = MemberChange(
        member_id=None, name=one, address=server.addresses[0].ip, port=8080, weight=1,
        subnet_id=server.addresses[0].subnet_id, monitor_port=None, backup=False,
    )  # fmt: skip
    join = Step(kind=StepKind.JOIN, server_id=one, members=(change,))
    assert pools.apply(group, [join]).changes == 1
    cloud_user.settled(balancer.id)
    [member] = [it for it in pools.read_pool(group).members if it.id not in before]
    assert (member.name, member.tags, member.subnet_id) == (one, (group.tag,), owner.subnet.id)
    leave = Step(kind=StepKind.LEAVE, server_id=one, members=(changed(change, member.id),))
    assert pools.apply(group, [leave]).changes == 1
    cloud_user.settled(balancer.id)
    assert {it.id for it in pools.read_pool(group).members} == before
    cloud_user.delete(balancer)


def changed(change, member_id):
    return MemberChange(
        **{**{name: getattr(change, name) for name in change.__struct_fields__}, "member_id": member_id}
    )


def test_notifications_of_nova(owner, nova_cloud):
    """Nova's own versioned notifications name the server and its project."""
    url = urlsplit(nova_cloud.transport)
    found = queue.Queue()
    receiver = NovaNotifications(f"amqp://{url.netloc}{url.path or '/'}", found.put)
    receiver.start()
    try:
        seen = {}
        server = owner.boot()
        owner.active(server)
        # The receiver may have connected after the first notifications.
        owner.deleted(server)
        while server not in seen:
            seen |= found.get(timeout=60)
        assert seen[server] == owner.connection.current_project_id
    finally:
        receiver.stop(10)
