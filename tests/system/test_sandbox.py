# SPDX-License-Identifier: Apache-2.0
"""The sandbox on one machine: a second start has no effect, and its network API is correct."""

import http.client

import openstack.exceptions
import pytest
from sandbox_of_a_test import DROPPED

from amphora_driver import config
from amphora_driver.cli import host_checks
from amphora_driver.cli.status_checks import Result
from amphora_driver.host import detached_process, namespaces
from amphora_driver.openstack import octavia
from sandbox import demo_hosts, topology
from sandbox import settings as sandbox_settings

pytestmark = pytest.mark.root


def processes(stack):
    return {name: stack.supervision.running(name) for name in stack.supervision.names()}


def test_a_second_up_starts_no_program_again(stack):
    before = processes(stack)
    stack.up()
    assert processes(stack) == before
    assert None not in before.values()


def test_all_programs_run(stack):
    assert set(processes(stack)) == {program.name for program in stack.programs()}


def test_octavia_drops_a_driver_that_it_cannot_load(settings, tmp_path):
    account = tmp_path / "account.conf"
    account.write_text(f"[amp_openstack]\nauth_type = none\nload_balancer_endpoint_override = {settings.endpoint}\n")
    conf = config.load([str(settings.driver_configuration), str(account)])
    assert set(octavia.list_providers(conf, 30.0)) == {"haproxy", "noop_driver"}
    assert host_checks.check_provider(conf).result is Result.SUCCESS
    conf.set_override("provider", DROPPED, "amp_octavia")
    found = host_checks.check_provider(conf)
    assert (found.result, "Unable to load provider driver" in found.details) == (Result.FAILURE, True)
    assert f"Unable to load provider driver {DROPPED}" in (settings.log / "octavia-api.log").read_text()


def test_settings_are_chosen_once(settings, tmp_path):
    again = sandbox_settings.load_or_create_settings(tmp_path / "../.." / settings.state, "other", "/no/such/python")
    assert again == settings


def test_the_root_namespace_is_unchanged(settings):
    own = namespaces.run_with_netlink(
        "/proc/self/ns/net", lambda kernel: {link.get_attr("IFLA_IFNAME") for link in kernel.get_links()}
    )
    inside = namespaces.run_with_netlink(
        namespaces.path(settings.switch), lambda kernel: {link.get_attr("IFLA_IFNAME") for link in kernel.get_links()}
    )
    assert {"br-mgmt", "br-vip", "br-members"} <= inside
    assert not own & {"br-mgmt", "br-vip", "br-members"}


@pytest.mark.parametrize("address", ["192.0.2.11", "2001:db8:2::11"])
def test_the_client_reaches_members_through_the_router(cloud, address):
    assert cloud.get(address, port=demo_hosts.MEMBER_PORT) == (200, "member1\n")


def test_the_management_network_is_not_routed(cloud):
    with pytest.raises(OSError, match=r"unreachable|timed out|No route"):
        cloud.get(topology.CONTROL_ADDRESS, port=1)


def test_members_serve_sizes(cloud):
    assert cloud.get("192.0.2.12", "/size/5", demo_hosts.MEMBER_PORT) == (200, "xxxxx")


def test_the_apis_refuse_requests_of_web_pages(settings):
    for port in (settings.octavia_port, settings.network_port):
        for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request("POST", "/v2/lbaas/loadbalancers", "{}", {**headers, "Content-Type": "application/json"})
            assert connection.getresponse().status == 403
            connection.close()


class TestNetworkApi:
    def test_names_and_ids(self, connection):
        subnet = connection.network.find_subnet("vip-subnet")
        assert (subnet.id, subnet.cidr) == (topology.VIP_SUBNET, "198.51.100.0/24")
        assert connection.network.get_network(subnet.network_id).name == "vip"
        assert connection.network.find_subnet("nowhere") is None
        assert {one.name for one in connection.network.networks()} == {"management", "vip", "members"}

    def test_a_port_in_use_is_refused(self, connection):
        fixed = [{"subnet_id": topology.VIP_SUBNET, "ip_address": "198.51.100.99"}]
        port = connection.network.create_port(network_id=topology.VIP_NETWORK, fixed_ips=fixed)
        assert connection.network.get_port(port.id).fixed_ips == fixed
        with pytest.raises(openstack.exceptions.ConflictException, match=r"198\.51\.100\.99 .* is in use"):
            connection.network.create_port(network_id=topology.VIP_NETWORK, fixed_ips=fixed)
        connection.network.delete_port(port.id)
        assert connection.network.find_port(port.id) is None


class TestVip:
    @pytest.mark.feature("lb.vip_port_id")
    def test_a_users_port_is_kept(self, cloud, connection):
        port = connection.network.create_port(network_id=topology.VIP_NETWORK)
        balancer = cloud.load_balancer("brought", vip_subnet_id=topology.VIP_SUBNET, vip_port_id=port.id)
        assert balancer.vip_port_id == port.id
        cloud.balancers.delete_load_balancer(balancer.id, cascade=True)
        cloud.gone(balancer.id)
        assert connection.network.get_port(port.id).device_id == ""
        connection.network.delete_port(port.id)

    @pytest.mark.feature("lb.vip_network_id", "lb.vip_address")
    def test_by_network_and_by_address(self, cloud):
        balancer = cloud.load_balancer("by-network", vip_subnet_id=None, vip_network_id=topology.VIP_NETWORK)
        assert balancer.vip_subnet_id == topology.VIP_SUBNET
        with pytest.raises(openstack.exceptions.ConflictException, match="in use"):
            cloud.load_balancer("same", vip_address=balancer.vip_address)

    def test_ipv6(self, cloud):
        member = {**cloud.member("member2"), "address": "2001:db8:2::12", "subnet_id": topology.MEMBER_SUBNET_6}
        pool = {"name": "six", "protocol": "HTTP", "lb_algorithm": "ROUND_ROBIN", "members": [member]}
        listener = {"name": "six", "protocol": "HTTP", "protocol_port": 80, "default_pool": pool}
        balancer = cloud.load_balancer("six", vip_subnet_id=topology.VIP_SUBNET_6, listeners=[listener])
        assert cloud.answers(balancer.vip_address, 2) == {"member2": 2}


@pytest.mark.extended
def test_down_and_up_again_serves_as_before(stack, cloud, monkeypatch):
    # From here on the programs start as in an operator's sandbox, without forks (tests/preloaded.py).
    monkeypatch.setattr(stack.supervision, "spawn", detached_process.spawn)
    balancer = cloud.served("lasting", ("member1",))
    amphorae = cloud.amphorae(balancer)
    assert cloud.answers(balancer.vip_address, 2) == {"member1": 2}
    stack.down()
    assert namespaces.names(f"{stack.settings.prefix}-") == []
    assert stack.supervision.names() == []
    stack.up()
    cloud.until(lambda: cloud.answers(balancer.vip_address, 1) == {"member1": 1}, "member1 serves", 30)
    assert cloud.amphorae(balancer) == amphorae
    # The controller is a real program now: it boots an amphora with the real programs of an amphora.
    second = cloud.served("made by real programs", ("member2",))
    assert cloud.answers(second.vip_address, 2) == {"member2": 2}
