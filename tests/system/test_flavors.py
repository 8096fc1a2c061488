# SPDX-License-Identifier: Apache-2.0
"""Flavors and availability zones, from the operator's definition to the load balancer's traffic."""

import json
import time

import openstack
import pytest

from amphora_driver.host import namespaces
from amphora_driver.store import desired_objects
from sandbox import topology

pytestmark = pytest.mark.root


@pytest.fixture
def zone(cloud):
    """Creates availability zones; deletes them after the test."""
    made = []

    def make(name, data):
        profile = cloud.balancers.create_availability_zone_profile(
            name=name, provider_name="haproxy", availability_zone_data=json.dumps(data)
        )
        made.append(lambda: cloud.balancers.delete_availability_zone_profile(profile))
        found = cloud.balancers.create_availability_zone(
            name=name, availability_zone_profile_id=profile.id, is_enabled=True
        )
        made.append(lambda: cloud.balancers.delete_availability_zone(found.name))
        return found

    yield make
    cloud.clean()
    for undo in reversed(made):
        undo()


def profile(cloud, balancer):
    return cloud.database.read(lambda connection: desired_objects.load_tree(connection, balancer.id)).profile


def seconds_of_silence(cloud, address, port=80):
    """Return the seconds until a silent client is disconnected."""

    def ask():
        import socket  # noqa: PLC0415 - within the client's namespace only

        with socket.create_connection((address, port), timeout=20) as client:
            begin = time.monotonic()
            while client.recv(1024):
                pass
            return time.monotonic() - begin

    return namespaces.run_inside(namespaces.path(cloud.settings.host(topology.CLIENT)), ask)


@pytest.mark.extended
@pytest.mark.feature("lb.flavor")
def test_a_flavors_timeout_disconnects_a_silent_client(cloud, flavor):
    quick = flavor("quick", {"timeout_client_data": 1000, "timeout_http_request": 30000})
    balancer = cloud.load_balancer("quick", flavor_id=quick.id)
    cloud.balancers.create_listener(name="own", protocol="TCP", protocol_port=80, load_balancer_id=balancer.id)
    cloud.active(balancer.id)
    cloud.balancers.create_listener(
        name="named", protocol="TCP", protocol_port=81, load_balancer_id=balancer.id, timeout_client_data=3000
    )
    cloud.active(balancer.id)
    for port in (80, 81):
        listener = next(
            one for one in cloud.balancers.listeners(load_balancer_id=balancer.id) if one.protocol_port == port
        )
        pool = cloud.balancers.create_pool(
            name=f"pool-{port}", protocol="TCP", lb_algorithm="ROUND_ROBIN", listener_id=listener.id
        )
        cloud.active(balancer.id)
        cloud.balancers.create_member(pool, **cloud.member("member1"))
        cloud.active(balancer.id)
    assert 0.5 < seconds_of_silence(cloud, balancer.vip_address) < 2.5
    assert 2.5 < seconds_of_silence(cloud, balancer.vip_address, 81) < 6, (
        "the listener's time-out overrides the flavor's"
    )


@pytest.mark.feature("lb.flavor", "lb.availability_zone")
def test_a_flavor_profile_is_read_back_unchanged(cloud, flavor, zone):
    patient = flavor("patient", {"timeout_tunnel": 86400000, "connection_limit": 777})
    here = zone("here", {"compute_zone": "z", "valid_vip_networks": [topology.VIP_NETWORK]})
    balancer = cloud.served("patient", ("member1",), flavor_id=patient.id, availability_zone=here.name)
    found = profile(cloud, balancer)
    assert (found.timeout_tunnel, found.connection_limit) == (86400000, 777)
    assert (found.compute, found.network, found.compute_zone) == ("netns", "local", "z")
    assert cloud.answers(balancer.vip_address, 2) == {"member1": 2}


def test_a_vip_outside_the_zones_networks_is_refused(cloud, zone):
    elsewhere = zone("elsewhere", {"valid_vip_networks": [topology.MEMBER_NETWORK]})
    # Octavia's API checks this key too, before it calls the provider.
    with pytest.raises(openstack.exceptions.HttpException, match="not allowed"):
        cloud.balancers.create_load_balancer(
            name="misplaced", vip_subnet_id=topology.VIP_SUBNET, availability_zone=elsewhere.name
        )
    assert list(cloud.balancers.load_balancers()) == []


@pytest.mark.parametrize(
    ("data", "word"),
    [
        ({"loadbalancer_topology": "ACTIVE_ACTIVE"}, "loadbalancer_topology"),
        ({"loadbalancer_topology": "SINGLE", "vrrp_advert_interval": 1}, "vrrp_advert_interval"),
        ({"timeout_tunnel": "long"}, "timeout_tunnel"),
        ({"timeout_tunnel": -1}, "1 or more"),
        ({"amp_image_tag": "new"}, "compute backend netns"),
        ({"compute_driver": "nova"}, "no compute backend of this name is enabled"),
        ({"connection_limit": 2, "process_connection_limit": 1}, "process_connection_limit"),
        ({"log_format": "%ci\nglobal"}, "log_format"),
    ],
)
def test_an_invalid_flavor_is_refused_at_its_creation(cloud, data, word):
    with pytest.raises(openstack.exceptions.HttpException, match=word):
        cloud.balancers.create_flavor_profile(name="odd", provider_name="haproxy", flavor_data=json.dumps(data))


def test_an_invalid_availability_zone_is_refused_at_its_creation(cloud):
    with pytest.raises(openstack.exceptions.HttpException, match="volume_zone"):
        cloud.balancers.create_availability_zone_profile(
            name="odd", provider_name="haproxy", availability_zone_data=json.dumps({"volume_zone": "ssd"})
        )


def test_capabilities_list_the_accepted_keys(cloud):
    listed = {one.name for one in cloud.balancers.provider_flavor_capabilities("haproxy")}
    assert {"timeout_tunnel", "log_format", "compute_driver"} <= listed
    assert not {"amp_image_tag", "sriov_vip"} & listed
    response = cloud.balancers.get(cloud.url("providers/haproxy/availability_zone_capabilities"))
    zones = {one["name"] for one in response.json()["availability_zone_capabilities"]}
    assert zones == {"compute_zone", "compute_zones", "valid_vip_networks"}
