# SPDX-License-Identifier: Apache-2.0
"""The network backend `neutron` changes objects of its own deployment only, whatever users and programs write."""

import uuid
from functools import partial

import pytest
from neutron_requests import group_named, new_id, ports_on, take, vip_port_request
from openstack.exceptions import HttpException

from amphora_driver.model.network import VipOptions
from amphora_driver.network.interface import management_port
from amphora_driver.network.neutron_objects import derive_mac


class TestForeignObjects:
    @pytest.fixture
    def incumbent(self, admin, tenant):
        """A load balancer of Octavia's own provider with its usual objects."""
        one, amphora = new_id(), new_id()
        group = admin.create_security_group(name=f"lb-{one}")
        vip = admin.create_port(
            network_id=tenant.network.id,
            project_id=tenant.project_id,
            name=f"octavia-lb-{one}",
            device_id=f"lb-{one}",
            device_owner="Octavia",
            admin_state_up=False,
        )
        base = [
            admin.create_port(network_id=tenant.network.id, name=name, security_group_ids=[group.id])
            for name in (f"octavia-lb-vrrp-{amphora}", f"octavia-lb-member-{amphora}")
        ]
        return one, amphora, [vip, *base]

    def test_objects_of_others_are_neither_listed_nor_changed(self, make_backend, tenant, admin, incumbent):
        ours, theirs = make_backend(uuid.uuid4().hex), make_backend(uuid.uuid4().hex)
        their_lb, their_amphora = new_id(), new_id()
        their_vips = take(theirs, tenant, load_balancer_id=their_lb)
        theirs.ensure_port(management_port(their_amphora, tenant.network.id, [tenant.v4.id]))
        one, amphora, ports = incumbent
        before = {port.id: port.to_dict() for port in ports_on(admin, tenant)}
        groups = {found.id for found in admin.security_groups()}
        owners = ours.owners()
        assert (owners.amphorae, owners.load_balancers) == (set(), set())
        for load_balancer in (one, their_lb):
            ours.release_load_balancer(load_balancer)
        for machine in (amphora, their_amphora):
            assert ours.ports(machine) == ()
        for port_id in before:
            ours.delete_port(port_id)
            ours.apply_vip_options(one, tenant.project_id, VipOptions(), [port_id])
        assert not ours.direct_answers_allowed([port.id for port in ports])
        after = {port.id: port.to_dict() for port in ports_on(admin, tenant)}
        assert after == before
        assert groups <= {found.id for found in admin.security_groups()}
        # Each deployment still finds its own objects.
        assert theirs.owners().load_balancers == {their_lb}
        assert take(theirs, tenant, load_balancer_id=their_lb) == their_vips

    def test_the_same_load_balancer_id_in_two_deployments(self, make_backend, tenant, admin):
        ours, theirs = make_backend(uuid.uuid4().hex), make_backend(uuid.uuid4().hex)
        one = new_id()
        for backend in (ours, theirs):
            take(backend, tenant, load_balancer_id=one)
        ours.release_load_balancer(one)
        assert (ours.owners().load_balancers, theirs.owners().load_balancers) == (set(), {one})


class TestForgedMarks:
    """A user can write description, names, device owner, device id, MAC address and tags of the user's own objects."""

    @pytest.fixture
    def mark(self, deployment):
        return f"octavia-amphora-driver deployment {deployment}"

    @pytest.fixture
    def forge(self, tenant, user, deployment, mark):
        """Creates a port of the user `demo`, or of another client, with all values of a VIP port."""

        def create(load_balancer_id, client=user, **more):
            values = {
                "network_id": tenant.network.id,
                "name": f"octavia-lb-{load_balancer_id}",
                "description": mark,
                "device_id": f"lb-{load_balancer_id}",
                "device_owner": "Octavia",
                "mac_address": derive_mac(deployment, load_balancer_id, tenant.network.id),
                "is_admin_state_up": False,
            }
            port = client.create_port(**{**values, **more})
            client.set_tags(port, [f"octavia-deployment={deployment}", f"octavia-load-balancer={load_balancer_id}"])
            return client.get_port(port.id)

        return create

    def test_copies_of_a_vip_port_are_neither_used_nor_removed(self, backend, cloud, tenant, user, forge):
        one, two = new_id(), new_id()
        client = cloud.connect("other", "other").network
        network = client.create_network(name="theirs")
        forged = [
            forge(one),
            forge(two, mac_address="fa:16:3e:00:00:01"),
            forge(two, client, network_id=network.id, mac_address="fa:16:3e:00:00:02"),
        ]
        (vip,) = take(backend, tenant, load_balancer_id=two)
        assert vip.port_id not in {port.id for port in forged}
        assert take(backend, tenant, load_balancer_id=two) == (vip,)
        assert backend.owners().load_balancers == {two}
        for load_balancer_id in (one, two):
            backend.release_load_balancer(load_balancer_id)
        left = [*user.ports(network_id=tenant.network.id), *client.ports(network_id=network.id)]
        assert {port.id: port.to_dict() for port in left} == {port.id: port.to_dict() for port in forged}

    def test_no_user_gives_the_group_of_vip_ports_to_a_port(self, backend, cloud, tenant, admin, deployment):
        take(backend, tenant)
        group = group_named(admin, deployment, "octavia-amphora-vips")
        for project in ("demo", "other"):
            client = cloud.connect(project, project).network
            network = client.create_network(name="front")
            port = client.create_port(network_id=network.id)
            for request in (
                partial(client.create_port, network_id=network.id, security_group_ids=[group.id]),
                partial(client.update_port, port.id, security_group_ids=[group.id]),
            ):
                with pytest.raises(HttpException) as refused:
                    request()
                assert refused.value.response.json()["NeutronError"]["type"] == "SecurityGroupNotFound"

    def test_a_mark_on_a_port_that_the_user_provided(self, backend, tenant, user, mark):
        port = user.create_port(network_id=tenant.network.id, fixed_ips=[{"subnet_id": tenant.v4.id}])
        one = new_id()
        (vip,) = take(backend, tenant, {"port_id": port.id}, load_balancer_id=one)
        user.update_port(port.id, description=mark, name=f"octavia-lb-{one}")
        assert backend.owners().load_balancers == set()
        assert take(backend, tenant, {"port_id": port.id}, load_balancer_id=one) == (vip,)
        backend.release_load_balancer(one)
        after = user.get_port(port.id)
        assert (after.device_id, after.device_owner, after.tags) == ("", "", [])

    def test_the_device_id_on_a_port_that_the_request_does_not_name(self, backend, tenant, user):
        one, two = new_id(), new_id()
        forged = {user.create_port(network_id=tenant.network.id, device_id=f"lb-{each}").id for each in (one, two)}
        (vip,) = take(backend, tenant, load_balancer_id=one)
        assert vip.port_id not in forged
        mine = user.create_port(network_id=tenant.network.id, fixed_ips=[{"subnet_id": tenant.v4.id}])
        for _ in range(2):
            (vip,) = take(backend, tenant, {"port_id": mine.id}, load_balancer_id=two)
            assert vip.port_id == mine.id
        for load_balancer_id in (one, two):
            backend.release_load_balancer(load_balancer_id)
        assert {port.id for port in user.ports(network_id=tenant.network.id)} == {*forged, mine.id}

    def test_other_objects_are_in_the_project_of_the_service(
        self, make_backend, deployment, tenant, admin, user, forge, mark
    ):
        backend = make_backend(deployment, listener_rules=True)
        one, amphora = new_id(), new_id()
        names = (f"octavia-lb-{one}", "octavia-amphora-vips")
        groups = [user.create_security_group(name=name, description=mark) for name in names]
        before = [user.get_security_group(group.id).to_dict() for group in groups]
        # A copy of an amphora's port, and one of a VIP port in the user's own group.
        ports = [
            forge(one, name=f"amphora-vip-{amphora}", device_id="", device_owner="", mac_address="fa:16:3e:00:00:01"),
            forge(new_id(), security_group_ids=[groups[1].id]),
        ]
        owners = backend.owners()
        assert (owners.amphorae, owners.load_balancers, backend.ports(amphora)) == (set(), set(), ())
        (vip,) = take(backend, tenant, load_balancer_id=one)
        made = backend.ensure_port(vip_port_request(tenant, one, amphora))
        assert made.id not in {port.id for port in ports}
        used = {*admin.get_port(vip.port_id).security_group_ids, *admin.get_port(made.id).security_group_ids}
        assert used.isdisjoint(group.id for group in groups)
        owners = backend.owners()
        assert (owners.amphorae, owners.load_balancers) == ({amphora}, {one})
        for port_id in (*(port.id for port in ports), made.id):
            backend.delete_port(port_id)
        backend.release_load_balancer(one)
        assert {port.id for port in ports_on(admin, tenant)} == {port.id for port in ports}
        assert [user.get_security_group(group.id).to_dict() for group in groups] == before


class TestGroupOfVipPorts:
    def test_a_network_without_port_security(self, backend, tenant, admin):
        admin.update_network(tenant.network, is_port_security_enabled=False)
        one = new_id()
        (vip,) = take(backend, tenant, load_balancer_id=one)
        assert take(backend, tenant, load_balancer_id=one) == (vip,)
        backend.release_load_balancer(one)
        assert ports_on(admin, tenant) == []

    def test_an_operator_deletes_the_group(self, backend, tenant, admin, deployment):
        one = new_id()
        take(backend, tenant, load_balancer_id=one)
        backend.release_load_balancer(one)
        admin.delete_security_group(group_named(admin, deployment, "octavia-amphora-vips").id)
        take(backend, tenant, load_balancer_id=one)
        assert backend.owners().load_balancers == {one}
