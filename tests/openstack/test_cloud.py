# SPDX-License-Identifier: Apache-2.0
"""Load balancers in a complete OpenStack: Octavia with Keystone, amphorae that Nova boots, ports of Neutron."""

import pytest
from provider_stack import WITNESS

# In the second part of a run, one process starts one cloud for all tests (tests/README.md).
pytestmark = [pytest.mark.extended, pytest.mark.lasts(900)]


@pytest.fixture
def user(cloud_user):
    """The user, with no object of the test left afterwards."""
    with cloud_user.unchanged():
        yield cloud_user


def test_a_single_load_balancer_serves_and_leaves_nothing(user):
    balancer = user.load_balancer("single")
    assert user.answers(balancer.vip_address) == {"member1": 4, "member2": 4}
    assert len(user.servers()) == 1
    user.delete(balancer)


def test_a_boot_that_fails_on_a_hypervisor_is_repeated(user):
    user.cloud.ask("refuse", reasons=["the disk is full"])
    balancer = user.active(user.request("refused").id)
    assert user.answers(balancer.vip_address) == {"member1": 4, "member2": 4}
    assert "the disk is full" in (user.cloud.folder / "hypervisor.log").read_text()
    assert len(user.servers()) == 1
    user.delete(balancer)


def test_a_pair_uses_two_hosts_and_survives_a_killed_amphora(user, topology):
    balancer = user.load_balancer("pair", flavor_id=topology("ACTIVE_STANDBY"))
    assert user.answers(balancer.vip_address) == {"member1": 4, "member2": 4}
    before = user.servers()
    assert {one.compute_host for one in before.values()} == {"compute0", "compute1"}
    killed = next(iter(before.values()))
    user.cloud.ask("power_off", server=killed.id)
    assert user.served(balancer.vip_address)
    user.until(lambda: killed.id not in {one.id for one in user.servers().values()}, "the amphora is replaced")
    user.settled(balancer.id)
    assert {one.compute_host for one in user.servers().values()} == {"compute0", "compute1"}
    assert user.answers(balancer.vip_address) == {"member1": 4, "member2": 4}
    user.delete(balancer)


@pytest.fixture
def management_subnet(cloud_user, provider_stack):
    """The subnet of the agents, in a cloud that has one network for agents and VIPs."""
    network, network_id = cloud_user.admin.network, provider_stack.deployment.network_id
    policy = network.create_rbac_policy(
        object_type="network",
        object_id=network_id,
        action="access_as_shared",
        target_project_id=cloud_user.project_id,
    )
    [found] = network.subnets(network_id=network_id)
    yield found
    network.delete_rbac_policy(policy)


def test_a_vip_on_the_management_network(user, management_subnet):
    balancer = user.load_balancer("managed", vip_subnet_id=management_subnet.id)
    assert user.answers(balancer.vip_address, host=WITNESS) == {"member1": 4, "member2": 4}
    ports = user.admin.network.ports(network_id=management_subnet.network_id)
    assert {"management", "vip"} <= {one.name.split("-")[1] for one in ports if one.name.startswith("amphora-")}
    user.delete(balancer)
