# SPDX-License-Identifier: Apache-2.0
"""The network backend `neutron` with a real Keystone and a real Neutron: each call of the interface."""

import time

import msgspec
import pytest
from neutron_requests import group_named, groups_of, new_id, ports_on, rules_of_groups, take, vip_port_request
from openstack.exceptions import ConflictException

from amphora_driver.deadline import limit_wait
from amphora_driver.errors import ConfigurationError, Conflict, NetworkError, UnsupportedOption
from amphora_driver.model.network import ListenerRule, Route, VipOptions, VipRequest
from amphora_driver.network.interface import NotYet, PortPurpose, management_port


class TestVips:
    def test_a_vip_port_has_octavias_fields_and_the_deployments_tags(self, backend, tenant, admin, deployment):
        one = new_id()
        (vip,) = take(backend, tenant, load_balancer_id=one)
        (port,) = ports_on(admin, tenant)
        assert (vip.port_id, vip.network_id, vip.subnet_id) == (port.id, tenant.network.id, tenant.v4.id)
        assert (port.name, port.device_id, port.device_owner) == (f"octavia-lb-{one}", f"lb-{one}", "Octavia")
        assert (port.is_admin_state_up, port.project_id) == (False, tenant.project_id)
        assert port.description == f"octavia-amphora-driver deployment {deployment}"
        assert set(port.tags) == {f"octavia-deployment={deployment}", f"octavia-load-balancer={one}"}

    def test_a_users_port_is_used_once_and_released(self, backend, tenant, user):
        port = user.create_port(network_id=tenant.network.id, name="mine", fixed_ips=[{"subnet_id": tenant.v4.id}])
        one = new_id()
        (vip,) = take(backend, tenant, {"port_id": port.id}, load_balancer_id=one)
        assert (vip.port_id, vip.address) == (port.id, port.fixed_ips[0]["ip_address"])
        assert take(backend, tenant, {"port_id": port.id}, load_balancer_id=one) == (vip,)
        with pytest.raises(Conflict, match="in use"):
            take(backend, tenant, {"port_id": port.id})
        assert backend.owners().load_balancers == set()
        backend.release_load_balancer(one)
        after = user.get_port(port.id)
        assert (after.device_id, after.device_owner, after.name, after.tags) == ("", "", "mine", [])

    def test_release_is_idempotent_also_after_a_deletion_by_octavia(self, backend, tenant, admin):
        for octavia_was_first in (False, True):
            one = new_id()
            (vip,) = take(backend, tenant, load_balancer_id=one)
            assert backend.owners().load_balancers == {one}
            if octavia_was_first:
                admin.delete_port(vip.port_id)
            backend.release_load_balancer(one)
            backend.release_load_balancer(one)
            assert (ports_on(admin, tenant), backend.owners().load_balancers) == ([], set())

    def test_neutron_does_not_answer_in_time(self, make_backend, tenant, deployment, cloud):
        backend = make_backend(deployment, allocation_timeout=0.1)
        backend._neutron._service.request = lambda *_, **__: cloud_is_slow()
        answer = take(backend, tenant)
        assert isinstance(answer, NotYet)
        assert "did not answer in 0.1 s" in answer.reason


def cloud_is_slow():
    """Wait until the deadline of the operation."""
    while limit_wait(1.0):
        time.sleep(0.02)


class TestAddresses:
    @pytest.fixture
    def backend(self, shared_backend):
        return shared_backend

    def test_additional_vips_keep_their_order_over_repeated_calls(self, backend, tenant, admin):
        one = new_id()
        wanted = (
            {"subnet_id": tenant.v6.id, "address": "2001:DB8:0::00F0"},
            {"subnet_id": tenant.v4.id},
            {"subnet_id": tenant.v4.id, "address": "198.51.100.50"},
        )
        vips = take(backend, tenant, *wanted, load_balancer_id=one)
        assert (vips[0].address, vips[2].address) == ("2001:db8::f0", "198.51.100.50")
        assert (vips[1].subnet_id, len({vip.port_id for vip in vips})) == (tenant.v4.id, 1)
        assert take(backend, tenant, *wanted, load_balancer_id=one) == vips
        assert len(ports_on(admin, tenant)) == 1

    def test_a_request_with_a_network_only(self, backend, tenant):
        assert take(backend, tenant, {"network_id": tenant.network.id})[0].subnet_id == tenant.v4.id
        (vip,) = take(backend, tenant, {"network_id": tenant.network.id, "address": "2001:db8::77"})
        assert (vip.subnet_id, vip.address) == (tenant.v6.id, "2001:db8::77")

    @pytest.mark.parametrize(
        ("address", "error", "reason"),
        [
            ("192.0.2.7", UnsupportedOption, "not a valid IP for the specified subnet"),
            ("198.51.100.50", Conflict, "already allocated"),
        ],
    )
    def test_an_address_that_is_not_available(self, backend, tenant, address, error, reason):
        take(backend, tenant, {"subnet_id": tenant.v4.id, "address": "198.51.100.50"})
        with pytest.raises(error, match=reason):
            take(backend, tenant, {"subnet_id": tenant.v4.id, "address": address})

    def test_no_address_is_free(self, backend, tenant, admin):
        tiny = admin.create_subnet(
            network_id=tenant.network.id, project_id=tenant.project_id, ip_version=4, cidr="203.0.113.0/30"
        )
        take(backend, tenant, {"subnet_id": tiny.id})
        with pytest.raises(Conflict, match="No more IP addresses available"):
            take(backend, tenant, {"subnet_id": tiny.id})

    def test_a_subnet_or_network_that_does_not_exist(self, backend, tenant):
        for kind in ("subnet_id", "network_id"):
            with pytest.raises(UnsupportedOption, match="does not exist"):
                take(backend, tenant, {kind: new_id()})


class TestProjects:
    """A reference of a user is checked with the project of the load balancer."""

    @pytest.fixture
    def backend(self, shared_backend):
        return shared_backend

    @pytest.fixture
    def foreign(self, cloud, admin):
        return cloud.projects["other"]

    def test_a_network_of_another_project_until_it_is_shared(self, backend, tenant, admin, foreign, make_backend):
        def allocate(network):
            return network.allocate_vip(new_id(), foreign, [VipRequest(subnet_id=tenant.v4.id)])

        # The service account sees this network as shared, the user does not.
        service = admin.create_rbac_policy(
            object_type="network",
            object_id=tenant.network.id,
            action="access_as_shared",
            target_project_id=backend._neutron.project_id(),
        )
        assert admin.get_network(tenant.network.id).is_shared
        with pytest.raises(UnsupportedOption, match="must not use it"):
            allocate(backend)
        with pytest.raises(UnsupportedOption, match="must not use it"):
            backend.subnet(tenant.v4.id, foreign)
        for target in (foreign, "*"):
            policy = admin.create_rbac_policy(
                object_type="network",
                object_id=tenant.network.id,
                action="access_as_shared",
                target_project_id=target,
            )
            # A new backend has read no RBAC policy yet.
            (vip,) = allocate(make_backend("shared"))
            admin.delete_port(vip.port_id)
            admin.delete_rbac_policy(policy)
        admin.delete_rbac_policy(service)

    def test_an_external_network(self, backend, tenant, admin, foreign):
        def allocate():
            return backend.allocate_vip(new_id(), foreign, [VipRequest(subnet_id=tenant.v4.id)])

        values = {"object_type": "network", "object_id": tenant.network.id, "action": "access_as_external"}
        policy = admin.create_rbac_policy(**values, target_project_id=new_id())
        assert admin.get_network(tenant.network.id).is_router_external
        with pytest.raises(UnsupportedOption, match="must not use it"):
            allocate()
        admin.delete_rbac_policy(policy)
        admin.update_network(tenant.network, is_router_external=True)
        assert allocate()[0].subnet_id == tenant.v4.id

    def test_a_port_of_another_project(self, backend, tenant, admin, foreign):
        port = admin.create_port(network_id=tenant.network.id, project_id=tenant.project_id)
        with pytest.raises(UnsupportedOption, match="must not use it"):
            backend.allocate_vip(new_id(), foreign, [VipRequest(port_id=port.id)])
        assert admin.get_port(port.id).device_id == ""

    def test_a_policy_and_a_group_of_another_project(self, backend, tenant, admin, foreign):
        policy = admin.create_qos_policy(name="theirs", project_id=foreign)
        group = admin.create_security_group(name="theirs", project_id=foreign)
        for options in (VipOptions(qos_policy_id=policy.id), VipOptions(security_group_ids=(group.id,))):
            with pytest.raises(UnsupportedOption, match="must not use it"):
                backend.ensure_port(vip_port_request(tenant, options=options))
        assert ports_on(admin, tenant) == []
        port = backend.ensure_port(vip_port_request(tenant))
        for options in (VipOptions(qos_policy_id=policy.id), VipOptions(security_group_ids=(group.id,))):
            with pytest.raises(UnsupportedOption, match="must not use it"):
                backend.apply_vip_options(new_id(), tenant.project_id, options, [port.id])
        # A call without a project has no such limit.
        assert backend.subnet(tenant.v4.id).network_id == tenant.network.id

    def test_a_policy_and_a_group_that_do_not_exist(self, backend, tenant):
        for options in (VipOptions(qos_policy_id=new_id()), VipOptions(security_group_ids=(new_id(),))):
            with pytest.raises(UnsupportedOption, match="does not exist"):
                backend.ensure_port(vip_port_request(tenant, options=options))


class TestPorts:
    def test_an_amphoras_vip_port_is_complete_at_its_creation(self, backend, tenant, admin, deployment, watch):
        policy = admin.create_qos_policy(name="slow", project_id=tenant.project_id)
        request = vip_port_request(tenant, options=VipOptions(qos_policy_id=policy.id))
        sent = watch(backend)
        port = backend.ensure_port(request)
        assert sent.counted()["PUT", "ports"] == 1  # the tags
        made = admin.get_port(port.id)
        assert made.name == f"amphora-vip-{request.amphora_id}"
        assert {one["ip_address"] for one in made.allowed_address_pairs} == set(request.vips)
        assert (made.qos_policy_id, made.binding_vnic_type, made.is_admin_state_up) == (policy.id, "normal", True)
        assert made.security_group_ids == [group_named(admin, deployment, "octavia-amphora-traffic").id]
        assert made.project_id == backend._neutron.project_id()
        assert (port.mac, port.mtu) == (made.mac_address, admin.get_network(tenant.network.id).mtu)
        assert [one.address for one in port.addresses] == [one["ip_address"] for one in made.fixed_ips]

    def test_a_repeated_call_only_adds_missing_addresses(self, backend, tenant, admin):
        request = vip_port_request(tenant, vips=("198.51.100.200",))
        first = backend.ensure_port(request)
        assert backend.ensure_port(request) == first
        more = msgspec.structs.replace(
            request, subnet_ids=(tenant.v4.id, tenant.v6.id), vips=("198.51.100.200", "2001:db8::200")
        )
        second = backend.ensure_port(more)
        assert (second.id, second.addresses[0]) == (first.id, first.addresses[0])
        assert second.addresses[1].subnet_id == tenant.v6.id
        pairs = admin.get_port(first.id).allowed_address_pairs
        assert [one["ip_address"] for one in pairs] == ["198.51.100.200", "2001:db8::200"]

    def test_a_port_that_lost_its_group_gets_it_again(self, backend, tenant, admin, deployment):
        """An operator deletes the group while Neutron creates the first port with it, and Neutron answers 201."""
        request = vip_port_request(tenant)
        port = backend.ensure_port(request)
        admin.update_port(port.id, security_group_ids=[])
        admin.delete_security_group(group_named(admin, deployment, "octavia-amphora-traffic"))
        assert backend.ensure_port(request) == port
        group = group_named(admin, deployment, "octavia-amphora-traffic")
        assert admin.get_port(port.id).security_group_ids == [group.id]

    def test_a_port_is_found_after_nova_has_attached_it(self, backend, tenant, admin):
        request = vip_port_request(tenant)
        port = backend.ensure_port(request)
        admin.update_port(port.id, device_id=new_id(), device_owner="compute:nova", binding_host_id="host")
        assert admin.get_port(port.id).status == "ACTIVE"
        assert backend.ensure_port(request) == port
        assert backend.ports(request.amphora_id) == (port,)
        assert backend.owners().amphorae == {request.amphora_id}
        backend.delete_port(port.id)
        backend.delete_port(port.id)
        assert (ports_on(admin, tenant), backend.owners().amphorae) == ([], set())

    def test_management_and_member_ports(self, backend, tenant, admin, deployment):
        one = new_id()
        management = backend.ensure_port(management_port(one, tenant.network.id, [tenant.v4.id, tenant.v6.id]))
        other = admin.create_network(name="members")
        subnet = admin.create_subnet(network_id=other.id, ip_version=4, cidr="10.0.0.0/24")
        member = backend.ensure_port(
            vip_port_request(
                tenant,
                amphora_id=one,
                network_id=other.id,
                subnet_ids=(subnet.id,),
                purpose=PortPurpose.MEMBER,
                vips=(),
            )
        )
        assert {port.id for port in backend.ports(one)} == {management.id, member.id}
        names = {group.name: group for group in groups_of(admin, deployment)}
        assert set(names) == {"octavia-amphora-management", "octavia-amphora-traffic"}
        assert admin.get_port(management.id).security_group_ids == [names["octavia-amphora-management"].id]
        ingress = [
            one for one in names["octavia-amphora-management"].security_group_rules if one["direction"] == "ingress"
        ]
        assert {(one["protocol"], one["port_range_min"]) for one in ingress} == {
            ("tcp", 9443), ("icmp", None), ("ipv6-icmp", None),
        }  # fmt: skip

    def test_the_management_network_can_have_vips_and_members(self, backend, tenant, admin):
        request = vip_port_request(tenant)
        management = backend.ensure_port(management_port(request.amphora_id, tenant.network.id, ()))
        vip = backend.ensure_port(request)
        assert vip.id != management.id
        assert backend.ensure_port(msgspec.structs.replace(request, purpose=PortPurpose.MEMBER, vips=())) == vip
        assert backend.ensure_port(management_port(request.amphora_id, tenant.network.id, ())) == management
        assert backend.management_ports(request.amphora_id) == (management,)
        assert {port.id for port in backend.ports(request.amphora_id)} == {management.id, vip.id}
        assert admin.get_port(management.id).allowed_address_pairs == []

    def test_a_list_in_pages_is_complete_although_a_port_is_deleted_meanwhile(
        self, make_backend, deployment, tenant, admin
    ):
        backend = make_backend(deployment, page_size=1)
        made = {backend.ensure_port(one).id: one.amphora_id for one in (vip_port_request(tenant) for _ in range(3))}
        first = min(made)
        send = backend._neutron._service.request

        def delete_after_the_first_page(method, path, **more):
            answer = send(method, path, **more)
            if "limit" in dict(more.get("params", ())) and first in made:
                del made[first]
                admin.delete_port(first)
            return answer

        backend._neutron._service.request = delete_after_the_first_page
        assert backend.owners().amphorae == set(made.values())
        assert len(made) == 2

    def test_a_subnet_with_routes(self, backend, tenant):
        subnet = backend.subnet(tenant.v4.id, tenant.project_id)
        assert (subnet.cidr, subnet.gateway) == ("198.51.100.0/24", "198.51.100.1")
        assert subnet.routes == (Route(destination="192.0.2.0/24", gateway="198.51.100.9"),)
        with pytest.raises(UnsupportedOption, match="does not exist"):
            backend.subnet(new_id())


class TestSrIov:
    @pytest.fixture
    def backend(self, shared_backend):
        return shared_backend

    def test_sr_iov_ports_have_no_port_security(self, backend, tenant, admin):
        port = backend.ensure_port(vip_port_request(tenant, vnic_type="direct"))
        made = admin.get_port(port.id)
        assert (made.binding_vnic_type, made.is_port_security_enabled) == ("direct", False)
        assert (made.security_group_ids, made.allowed_address_pairs) == ([], [])
        assert backend.direct_answers_allowed([port.id])
        group = admin.create_security_group(name="mine", project_id=tenant.project_id)
        with pytest.raises(UnsupportedOption, match="do not apply to SR-IOV"):
            backend.apply_vip_options(
                new_id(), tenant.project_id, VipOptions(security_group_ids=(group.id,)), [port.id]
            )

    @pytest.mark.parametrize("vnic_type", ["normal", "direct"])
    def test_the_type_of_a_users_vip_port_does_not_decide(self, backend, tenant, admin, user, vnic_type):
        """The VIP port reserves the addresses only; the flavor decides the type of the amphora's port."""
        mine = user.create_port(
            network_id=tenant.network.id, fixed_ips=[{"subnet_id": tenant.v4.id}], binding_vnic_type="direct"
        )
        one = new_id()
        (vip,) = take(backend, tenant, {"port_id": mine.id}, load_balancer_id=one)
        port = backend.ensure_port(vip_port_request(tenant, one, vips=(vip.address,), vnic_type=vnic_type))
        made = admin.get_port(port.id)
        pairs = [pair["ip_address"] for pair in made.allowed_address_pairs]
        assert (made.binding_vnic_type, pairs) == (vnic_type, [vip.address] if vnic_type == "normal" else [])
        backend.delete_port(port.id)
        backend.release_load_balancer(one)
        (left,) = ports_on(admin, tenant)
        assert (left.id, left.binding_vnic_type, left.device_id, left.tags) == (mine.id, "direct", "", [])

    def test_members_of_both_types_have_a_port_each_on_one_network(self, backend, tenant, admin):
        asked = vip_port_request(tenant, purpose=PortPurpose.MEMBER, vips=())
        ordinary = backend.ensure_port(asked)
        admin.update_port(ordinary.id, device_id=new_id(), device_owner="compute:nova", binding_host_id="host")
        # A bound port keeps its type.
        with pytest.raises(ConflictException, match="already has an attached device"):
            admin.update_port(ordinary.id, binding_vnic_type="direct")
        direct = backend.ensure_port(msgspec.structs.replace(asked, vnic_type="direct"))
        admin.update_port(direct.id, device_id=new_id(), device_owner="compute:nova", binding_host_id="host")
        assert {port.id: (port.binding_vnic_type, port.status) for port in ports_on(admin, tenant)} == {
            ordinary.id: ("normal", "ACTIVE"),
            direct.id: ("direct", "ACTIVE"),
        }
        assert backend.ensure_port(asked) == ordinary
        assert backend.ensure_port(msgspec.structs.replace(asked, vnic_type="direct")) == direct
        assert {port.id for port in backend.ports(asked.amphora_id)} == {ordinary.id, direct.id}
        backend.delete_port(ordinary.id)
        assert backend.ports(asked.amphora_id) == (direct,)


class TestOptions:
    def test_the_shared_group_is_stateless_and_groups_of_the_user_replace_it(self, backend, tenant, admin, deployment):
        one = new_id()
        ports = [backend.ensure_port(vip_port_request(tenant, one)).id for _ in range(2)]
        assert backend.direct_answers_allowed(ports)
        group = admin.create_security_group(name="mine", project_id=tenant.project_id)
        policy = admin.create_qos_policy(name="mine", project_id=tenant.project_id)
        options = VipOptions(qos_policy_id=policy.id, security_group_ids=(group.id,))
        backend.apply_vip_options(one, tenant.project_id, options, ports)
        names = {found.name: found for found in groups_of(admin, deployment)}
        peers = names["octavia-amphora-peers"]
        for port in map(admin.get_port, ports):
            assert (set(port.security_group_ids), port.qos_policy_id) == ({group.id, peers.id}, policy.id)
        rules = {(rule["protocol"], rule["port_range_min"]) for rule in peers.security_group_rules}
        assert rules == {(None, None), ("112", None), ("tcp", 1025), ("udp", 4789)}
        assert not backend.direct_answers_allowed(ports)
        backend.apply_vip_options(one, tenant.project_id, VipOptions(), ports)
        for port in map(admin.get_port, ports):
            assert (port.security_group_ids, port.qos_policy_id) == ([names["octavia-amphora-traffic"].id], None)
        assert not backend.direct_answers_allowed([*ports, new_id()])

    def test_a_stateless_group_of_the_user(self, backend, tenant, admin):
        group = admin.create_security_group(name="mine", project_id=tenant.project_id, stateful=False)
        request = vip_port_request(tenant, options=VipOptions(security_group_ids=(group.id,)))
        port = backend.ensure_port(request)
        assert backend.direct_answers_allowed([port.id])

    def test_rules_of_listeners(self, make_backend, deployment, tenant, admin, watch):
        backend = make_backend(deployment, listener_rules=True)
        assert backend.listener_rules
        one = new_id()
        rules = (ListenerRule(protocol="tcp", port=80), ListenerRule(protocol="udp", port=53, cidr="192.0.2.0/24"))
        request = vip_port_request(tenant, one, options=VipOptions(listener_rules=rules))
        port = backend.ensure_port(request)

        def opened():
            (group,) = groups_of(admin, deployment)
            assert (group.name, admin.get_port(port.id).security_group_ids) == (f"octavia-lb-{one}", [group.id])
            return {
                (rule["protocol"], rule["port_range_min"], rule["remote_ip_prefix"], rule["ethertype"])
                for rule in group.security_group_rules
                if rule["direction"] == "ingress" and not rule["remote_group_id"]
            }

        http = {("tcp", 80, None, "IPv4"), ("tcp", 80, None, "IPv6")}
        assert opened() == {*http, ("udp", 53, "192.0.2.0/24", "IPv4")}
        sent = watch(backend)
        changed = (rules[0], ListenerRule(protocol="sctp", port=99, cidr="2001:db8:1::/48"))
        backend.apply_vip_options(one, tenant.project_id, VipOptions(listener_rules=changed), [port.id])
        assert opened() == {*http, ("sctp", 99, "2001:db8:1::/48", "IPv6")}
        counted = sent.counted()
        assert counted["POST", "security-group-rules"] == counted["DELETE", "security-group-rules"] == 1
        assert not backend.direct_answers_allowed([port.id])
        assert backend.owners().load_balancers == {one}
        backend.delete_port(port.id)
        backend.release_load_balancer(one)
        assert groups_of(admin, deployment) == []


class TestCrashes:
    """The process ends after each request in turn; the repeated call finds the existing objects."""

    def crashed(self, make_backend, deployment, watch, crash, call):
        """Repeat the call with new backends, each of which crashes one request later; return the last."""
        for number in range(1, 40):
            backend = make_backend(deployment)
            watch(backend).crash_after = number
            try:
                call(backend)
            except crash:
                continue
            assert number > 3
            return backend
        raise AssertionError("the call needs more than 39 requests")

    def test_repeated_calls_leave_no_orphan_and_no_duplicate(
        self, make_backend, deployment, tenant, admin, watch, crash
    ):
        one = new_id()
        request = vip_port_request(tenant, one)

        def create(backend):
            take(backend, tenant, load_balancer_id=one)
            backend.ensure_port(request)

        backend = self.crashed(make_backend, deployment, watch, crash, create)
        assert len(ports_on(admin, tenant)) == 2
        assert rules_of_groups(admin, deployment) == {"octavia-amphora-traffic": [4], "octavia-amphora-vips": [2]}
        owners = backend.owners()
        assert (owners.amphorae, owners.load_balancers) == ({request.amphora_id}, {one})

        def remove(backend):
            for port in backend.ports(request.amphora_id):
                backend.delete_port(port.id)
            backend.release_load_balancer(one)

        self.crashed(make_backend, deployment, watch, crash, remove)
        assert ports_on(admin, tenant) == []


class TestRefusals:
    def test_a_quota(self, backend, tenant, admin, cloud):
        project_id = cloud.connect("admin", "admin").identity.create_project(name=new_id(), domain_id="default").id
        admin.update_network(tenant.network, is_router_external=True)
        admin.update_quota(project_id, ports=0)
        with pytest.raises(NetworkError, match="a quota is used up") as caught:
            backend.allocate_vip(new_id(), project_id, [VipRequest(subnet_id=tenant.v4.id)])
        assert caught.value.final
        assert "Raise the quota" in str(caught.value)

    def test_an_account_without_rights(self, make_backend, tenant):
        backend = make_backend("plain", account="plain")
        with pytest.raises((NetworkError, UnsupportedOption)):
            take(backend, tenant)

    def test_a_wrong_password(self, make_backend, cloud, tenant):
        backend = make_backend(openstack={**cloud.auth(), "password": "wrong"})
        with pytest.raises(ConfigurationError, match="authentication") as caught:
            take(backend, tenant)
        assert "wrong" not in str(caught.value)

    def test_a_cloud_that_does_not_listen(self, make_backend, cloud, tenant):
        backend = make_backend(openstack={**cloud.auth(), "network_endpoint_override": "http://127.0.0.1:1"})
        with pytest.raises(NetworkError) as caught:
            backend.ports(new_id())
        assert not caught.value.final

    def test_the_account_in_octavias_file(self, make_backend, cloud, tenant, tmp_path):
        file = tmp_path / "octavia.conf"
        account = "".join(f"{key} = {value}\n" for key, value in cloud.auth().items())
        file.write_text(f"[service_auth]\n{account}\n[neutron]\nregion_name = RegionOne\nvalid_interfaces = internal\n")
        backend = make_backend(openstack={"octavia_config": file})
        assert backend.subnet(tenant.v4.id).id == tenant.v4.id

    def test_a_deployment_without_an_id(self, make_backend):
        with pytest.raises(ConfigurationError, match="uuidgen"):
            make_backend(deployment=None)
