# SPDX-License-Identifier: Apache-2.0
"""The network backend `neutron`: number of requests, many ports, and a minute without Neutron."""

import time

import pytest
import sqlalchemy as sa
from neutron_requests import new_id, take, vip_port_request

from amphora_driver.errors import NetworkError
from amphora_driver.model.network import VipRequest
from amphora_driver.network.interface import PortPurpose, management_port

pytestmark = pytest.mark.extended


@pytest.fixture
def management(admin):
    network = admin.create_network(name="management")
    subnet = admin.create_subnet(network_id=network.id, ip_version=4, cidr="172.16.0.0/22")
    return network, subnet


class Balancer:
    """The calls of the controller for one load balancer."""

    def __init__(self, backend, tenant, management):
        self.id = new_id()
        self._backend = backend
        self._tenant = tenant
        self._management = management
        self.vips = take(backend, tenant, load_balancer_id=self.id)

    def boot(self):
        """Create the ports of one amphora, and read its subnets; return its id."""
        one = new_id()
        network, subnet = self._management
        self._backend.ensure_port(management_port(one, network.id, [subnet.id]))
        addresses = tuple(vip.address for vip in self.vips)
        self._backend.ensure_port(vip_port_request(self._tenant, self.id, one, vips=addresses))
        self._backend.subnet(self._tenant.v4.id)
        return one

    def add_member(self, amphora_id, subnet):
        """Add a member on a separate network."""
        self._backend.subnet(subnet.id, self._tenant.project_id)
        more = {"network_id": subnet.network_id, "subnet_ids": (subnet.id,), "purpose": PortPurpose.MEMBER, "vips": ()}
        self._backend.ensure_port(vip_port_request(self._tenant, self.id, amphora_id, **more))
        self._backend.subnet(subnet.id)

    def destroy(self, amphora_id):
        for port in self._backend.ports(amphora_id):
            self._backend.delete_port(port.id)


class TestNumberOfRequests:
    """docs/reference/figures.md has these numbers; security groups and networks are cached."""

    def test_of_each_topology_and_change(self, backend, tenant, management, admin, watch):
        Balancer(backend, tenant, management).boot()
        network = admin.create_network(name="members", project_id=tenant.project_id)
        subnet = admin.create_subnet(
            network_id=network.id, project_id=tenant.project_id, ip_version=4, cidr="10.0.0.0/24"
        )
        sent = watch(backend)
        found = {}

        def measured(name):
            counted = sent.counted()
            writes = sum(number for (method, _), number in counted.items() if method != "GET")
            found[name] = (sum(counted.values()), writes)

        single = Balancer(backend, tenant, management)
        amphora = single.boot()
        measured("create SINGLE")
        pair = Balancer(backend, tenant, management)
        amphorae = [pair.boot(), pair.boot()]
        measured("create ACTIVE_STANDBY")
        for one in amphorae:
            pair.add_member(one, subnet)
        measured("first member on a network, pair")
        replacement = single.boot()
        single.destroy(amphora)
        measured("fail-over of an amphora")
        single.destroy(replacement)
        backend.release_load_balancer(single.id)
        measured("delete SINGLE")
        assert found == NUMBERS


# Requests, and the number of writing requests.
NUMBERS = {
    "create SINGLE": (9, 6),
    "create ACTIVE_STANDBY": (15, 10),
    "first member on a network, pair": (8, 4),
    "fail-over of an amphora": (11, 6),
    "delete SINGLE": (10, 3),
}


class TestManyPorts:
    def test_a_thousand_ports_are_listed_in_pages(self, make_backend, deployment, cloud, admin, management, watch):
        backend = make_backend(deployment, page_size=200)
        network, _ = management
        amphorae = [new_id() for _ in range(1000)]
        first = admin.create_port(
            network_id=network.id,
            name=f"amphora-vip-{amphorae[0]}",
            fixed_ips=[],
            project_id=backend._neutron.project_id(),
            description=f"octavia-amphora-driver deployment {deployment}",
        )
        copy_port(cloud.databases["neutron"], first.id, [f"amphora-vip-{one}" for one in amphorae[1:]])
        sent = watch(backend)
        assert backend.owners().amphorae == set(amphorae)
        # Five full pages and an empty one.
        assert sent.counted()["GET", "ports"] == 6
        (port,) = backend.ports(amphorae[500])
        backend.delete_port(port.id)
        assert len(backend.owners().amphorae) == 999


def copy_port(url, port_id, names):
    """Copy the rows of a port without addresses in Neutron's database: Neutron itself creates eight ports a second."""
    engine = sa.create_engine(url)
    found = sa.MetaData()
    found.reflect(engine, only=["ports", "standardattributes", *PARTS_OF_PORT], resolve_fks=False)
    attributes, ports, *parts = (found.tables[name] for name in ("standardattributes", "ports", *PARTS_OF_PORT))
    with engine.begin() as connection:

        def rows(table, column, value):
            return [dict(row) for row in connection.execute(sa.select(table).where(column == value)).mappings()]

        (port,) = rows(ports, ports.c.id, port_id)
        (described,) = rows(attributes, attributes.c.id, port["standard_attr_id"])
        first = connection.scalar(sa.select(sa.func.max(attributes.c.id))) + 1000
        copies = [
            {**port, "id": new_id(), "name": name, "standard_attr_id": first + number, "mac_address": mac(number)}
            for number, name in enumerate(names)
        ]
        connection.execute(attributes.insert(), [{**described, "id": one["standard_attr_id"]} for one in copies])
        connection.execute(ports.insert(), copies)
        for part in parts:
            for row in rows(part, part.c.port_id, port_id):
                connection.execute(part.insert(), [{**row, "port_id": one["id"]} for one in copies])
    engine.dispose()


PARTS_OF_PORT = ("ml2_port_bindings", "portsecuritybindings", "securitygroupportbindings")


def mac(number):
    """Return a MAC address outside the range of Neutron."""
    return f"02:00:00:00:{number // 256:02x}:{number % 256:02x}"


class TestOutage:
    def test_neutron_is_away_for_a_minute(self, make_backend, deployment, cloud, tenant):
        backend = make_backend(deployment, allocation_timeout=5)
        one = new_id()
        vips = take(backend, tenant, load_balancer_id=one)
        request = vip_port_request(tenant, one, vips=tuple(vip.address for vip in vips))
        calls = (
            lambda: backend.ensure_port(request),
            lambda: backend.allocate_vip(new_id(), tenant.project_id, [VipRequest(subnet_id=tenant.v4.id)]),
            backend.owners,
        )
        cloud.kill("neutron")
        ends = time.monotonic() + 60
        try:
            while time.monotonic() < ends:
                for call in calls:
                    with pytest.raises(NetworkError) as caught:
                        call()
                    assert not caught.value.final
                # Controllers retry their steps with a back-off.
                time.sleep(2)
        finally:
            cloud.serve("neutron")
        cloud.await_answer("neutron")
        port = backend.ensure_port(request)
        assert backend.ensure_port(request) == port
        assert backend.owners().amphorae == {request.amphora_id}
