# SPDX-License-Identifier: Apache-2.0
"""Bad input gets the right answer with a sentence a user understands, and leaves nothing half made."""

import json

import openstack
import pytest
import sqlalchemy as sa

from amphora_driver.sandbox import topology
from amphora_driver.store import tables

pytestmark = pytest.mark.root


@pytest.fixture
def nothing_is_left(cloud, database):
    """The same load balancers and ports afterwards as before."""

    def inventory():
        ports = database.read(lambda connection: set(connection.execute(sa.select(tables.local_port.c.id)).scalars()))
        work = database.read(lambda c: set(c.execute(sa.select(tables.work.c.load_balancer_id)).scalars()))
        return {one.id for one in cloud.balancers.load_balancers()}, ports, work

    before = inventory()
    yield
    assert inventory() == before


@pytest.mark.usefixtures("nothing_is_left")
def test_an_address_outside_the_subnet(cloud):
    with pytest.raises(openstack.exceptions.HttpException, match=r"203\.0\.113\.77"):
        cloud.balancers.create_load_balancer(
            name="outside", vip_subnet_id=topology.VIP_SUBNET, vip_address="203.0.113.77"
        )


@pytest.mark.usefixtures("nothing_is_left")
def test_an_address_in_use(cloud):
    taken = cloud.load_balancer("taken").vip_address
    with pytest.raises(openstack.exceptions.ConflictException, match=taken):
        cloud.balancers.create_load_balancer(name="second", vip_subnet_id=topology.VIP_SUBNET, vip_address=taken)
    cloud.balancers.delete_load_balancer(cloud.balancers.find_load_balancer("taken").id)
    cloud.until(lambda: cloud.balancers.find_load_balancer("taken") is None, "deleted")


def test_a_listener_port_in_use(cloud):
    balancer = cloud.served("port-in-use")
    with pytest.raises(openstack.exceptions.ConflictException):
        cloud.balancers.create_listener(protocol="TCP", protocol_port=80, load_balancer_id=balancer.id)
    assert cloud.active(balancer.id)


@pytest.mark.parametrize(
    ("option", "word"),
    [
        ({"protocol": "UDP"}, "UDP"),
        ({"protocol": "SCTP"}, "SCTP"),
        ({"protocol": "HTTP", "connection_limit": 0}, "connection_limit"),
    ],
)
def test_an_option_that_is_not_served(cloud, option, word):
    balancer = cloud.balancers.find_load_balancer("options") or cloud.load_balancer("options")
    with pytest.raises(openstack.exceptions.HttpException, match=word) as refusal:
        cloud.balancers.create_listener(protocol_port=81, load_balancer_id=balancer.id, **option)
    assert refusal.value.status_code == 501
    assert cloud.balancers.get_load_balancer(balancer.id).provisioning_status == "ACTIVE", "not left PENDING"
    assert list(cloud.balancers.listeners(load_balancer_id=balancer.id)) == []


def test_an_unknown_flavor_key(cloud):
    with pytest.raises(openstack.exceptions.HttpException, match="colour"):
        cloud.balancers.create_flavor_profile(
            name="odd", provider_name="haproxy", flavor_data=json.dumps({"colour": "blue"})
        )


def test_a_known_flavor(cloud):
    profile = cloud.balancers.create_flavor_profile(
        name="single", provider_name="haproxy", flavor_data=json.dumps({"loadbalancer_topology": "SINGLE"})
    )
    flavor = cloud.balancers.create_flavor(name="single", flavor_profile_id=profile.id, is_enabled=True)
    assert cloud.load_balancer("flavored", flavor_id=flavor.id).flavor_id == flavor.id


def test_capabilities_are_listed(cloud):
    found = {one.name for one in cloud.balancers.provider_flavor_capabilities("haproxy")}
    assert "loadbalancer_topology" in found
