# SPDX-License-Identifier: Apache-2.0
"""The former amphorae of an adoption in a real Neutron: only the named objects change. Nova is a list of servers."""

import pytest
from neutron_requests import new_id, ports_on, take, vip_port_request

from amphora_driver import config
from amphora_driver.adoption.cloud import OpenStackCloud
from amphora_driver.adoption.octavia_state import OctaviaState, OldAmphora
from amphora_driver.errors import NetworkError


class Servers:
    """Servers and server groups; a deletion ends at the second request."""

    def __init__(self, *names):
        self.running = dict.fromkeys(names, 2)
        self.groups = {}

    def delete_named(self, server_id, name):
        assert name.startswith("amphora-")
        left = self.running.get(server_id, 0)
        self.running[server_id] = left - 1
        return left > 0

    def server_groups(self, name):
        return [{"id": one, "name": name} for one, known in self.groups.items() if known == name]

    def delete_server_group(self, one):
        return self.groups.pop(one, None) is not None


class Former:
    """The objects that Octavia's provider creates for a pair."""

    def __init__(self, admin, tenant, project_id):
        self.id = new_id()
        self.admin = admin
        self.group = admin.create_security_group(name=f"lb-{self.id}", project_id=project_id)
        network = {"network_id": tenant.network.id}
        self.vip = admin.create_port(
            name=f"octavia-lb-{self.id}",
            device_owner="Octavia",
            device_id=f"lb-{self.id}",
            project_id=tenant.project_id,
            is_admin_state_up=False,
            security_groups=[self.group.id],
            **network,
        )
        self.amphorae, self.member_ports = [], []
        for number in (1, 2):
            one = new_id()
            common = {"project_id": project_id, "security_groups": [self.group.id], **network}
            port = admin.create_port(name=f"octavia-lb-vrrp-{one}", **common)
            self.amphorae.append(
                OldAmphora(id=one, status="ALLOCATED", role="MASTER", compute_id=f"server-{number}", port_id=port.id)
            )
            self.member_ports.append(admin.create_port(name=f"octavia-lb-member-{one}", **common).id)

    def state(self, **more):
        values = {
            "load_balancer_id": self.id,
            "project_id": "demo",
            "provider": "amphora",
            "status": "PENDING_UPDATE",
            "topology": "ACTIVE_STANDBY",
            "vip_port_id": self.vip.id,
            "server_group_id": "servers",
            "amphorae": tuple(self.amphorae),
            "member_ports": tuple(self.member_ports),
        }
        return OctaviaState(**{**values, **more})

    def enabled(self):
        return [self.admin.get_port(one.port_id).is_admin_state_up for one in self.amphorae]


@pytest.fixture
def cloud_edge(write_options, deployment):
    made = OpenStackCloud(config.load([str(write_options(deployment))]))
    made._nova = Servers("server-1", "server-2")
    yield made
    adapter = made._neutron._service._adapter
    if adapter is not None:
        adapter.session.session.close()


@pytest.fixture
def former(admin, tenant, cloud):
    return Former(admin, tenant, cloud.projects["service"])


def test_the_former_ports_are_disabled_and_enabled(cloud_edge, former):
    for enabled in (False, False, True, True):
        cloud_edge.enable_old_ports(former.state(), enabled=enabled)
        assert former.enabled() == [enabled, enabled]


def test_a_port_with_another_name_is_not_changed(cloud_edge, former, admin):
    admin.update_port(former.amphorae[0].port_id, name="renamed")
    with pytest.raises(NetworkError, match="is missing, or is not the VRRP port"):
        cloud_edge.enable_old_ports(former.state(), enabled=False)
    assert former.enabled() == [True, True]
    # The way back enables the other port.
    admin.update_port(former.amphorae[1].port_id, is_admin_state_up=False)
    cloud_edge.enable_old_ports(former.state(), enabled=True)
    assert former.enabled() == [True, True]


def test_only_ports_of_the_deployment_count_as_new(cloud_edge, former, backend, tenant, admin):
    mine = backend.ensure_port(vip_port_request(tenant))
    cloud_edge.enable_new_ports((mine.id, former.amphorae[0].port_id), enabled=False)
    assert admin.get_port(mine.id).is_admin_state_up is False
    assert former.enabled() == [True, True]
    cloud_edge.enable_new_ports((mine.id,), enabled=True)
    assert admin.get_port(mine.id).is_admin_state_up is True


def test_the_removal_leaves_only_the_vip_port(cloud_edge, former, tenant, admin, user):
    similar = user.create_security_group(name=f"lb-{former.id}")
    cloud_edge._nova.groups = {"servers": f"octavia-lb-{former.id}", "others": f"octavia-lb-{former.id}"}
    rounds = [cloud_edge.remove(former.state()) for _ in range(4)]
    assert rounds == [False, False, True, True]
    (left,) = ports_on(admin, tenant)
    assert (left.id, left.security_group_ids) == (former.vip.id, [])
    # The group of a user with the same name stays.
    assert [one.id for one in admin.security_groups(name=f"lb-{former.id}")] == [similar.id]
    assert cloud_edge._nova.groups == {"others": f"octavia-lb-{former.id}"}


def test_the_release_of_an_adopted_load_balancer_leaves_the_port_of_octavia(backend, former, admin):
    """Octavia created the VIP port, and deletes it itself after the report of the deletion."""
    backend.release_load_balancer(former.id)
    assert admin.get_port(former.vip.id).id == former.vip.id


def test_a_port_of_the_user_is_marked_and_given_back(backend, tenant, user):
    port = user.create_port(network_id=tenant.network.id, name="mine", fixed_ips=[{"subnet_id": tenant.v4.id}])
    one = new_id()
    address = port.fixed_ips[0]["ip_address"]
    wanted = {"port_id": port.id, "subnet_id": tenant.v4.id, "network_id": tenant.network.id, "address": address}
    for _ in range(2):
        take(backend, tenant, wanted, load_balancer_id=one)
    assert user.get_port(port.id).device_id == f"lb-{one}"
    backend.release_load_balancer(one)
    assert (user.get_port(port.id).device_id, user.get_port(port.id).tags) == ("", [])
