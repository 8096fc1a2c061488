# SPDX-License-Identifier: Apache-2.0
"""Nova's scheduler and the load balancers of Octavia's API: no room for a server, and two hosts in one zone."""

import json
from contextlib import contextmanager

import pytest
import sqlalchemy as sa
from whole_cloud import BALLAST, WITHOUT_GUEST, ZONES

from amphora_driver.database.tables import object_status

# In the second part of a run, one process starts one cloud for all tests (tests/README.md).
pytestmark = [pytest.mark.extended, pytest.mark.lasts(900)]
BOTH = {"member1": 4, "member2": 4}
# Seconds until the controller has tried a boot `give_up_after` times.
GIVEN_UP = 240.0
# No host has this number of processors.
ENORMOUS = {"resources:VCPU": "1000"}


@pytest.fixture
def user(cloud_user):
    """The user, with no object of the test left afterwards."""
    with cloud_user.unchanged():
        yield cloud_user


@pytest.fixture
def sized(cloud_user):
    """A flavor of Nova for amphorae, and the flavor of Octavia that names it."""
    compute, balancers = cloud_user.admin.compute, cloud_user.admin.load_balancer
    flavor = compute.create_flavor(name="sized", ram=64, vcpus=1, disk=1)
    data = json.dumps({"compute_flavor": flavor.id})
    profile = balancers.create_flavor_profile(name="sized", provider_name="haproxy", flavor_data=data)
    made = balancers.create_flavor(name="sized", flavor_profile_id=profile.id, is_enabled=True)
    yield flavor, made.id
    balancers.delete_flavor(made)
    balancers.delete_flavor_profile(profile)
    compute.delete_flavor(flavor)


def test_no_valid_host_is_the_reason_of_error_until_a_host_has_room(user, provider_stack, sized):
    flavor, flavor_id = sized
    compute = user.admin.compute
    compute.create_flavor_extra_specs(flavor, ENORMOUS)
    made = user.request("no room", flavor_id=flavor_id)
    user.settled(made.id, "ERROR", GIVEN_UP)
    shown = json.loads(provider_stack.amphoractl("loadbalancer", "show", made.id, "-f", "json"))
    assert "Nova reports status ERROR of server" in shown["Reason"]
    assert "No valid host was found" in shown["Reason"]
    query = sa.select(object_status.c.provisioning).where(object_status.c.object_id == made.id)
    assert [one.provisioning for one in provider_stack.read(query)] == ["ERROR"]

    for name in ENORMOUS:
        compute.delete_flavor_extra_specs_property(flavor, name)
    balancer = user.active(made.id)
    assert user.answers(balancer.vip_address) == BOTH
    assert len(user.servers()) == 1, "the failed servers are deleted"
    user.delete(balancer)


@pytest.fixture
def zone_of_both(cloud_user):
    """An availability zone of Octavia with both hosts. They are in one zone of Nova during the test."""
    balancers = cloud_user.admin.load_balancer
    (_, joint), (moved, former) = ZONES.items()
    cloud_user.cloud.set_zone(moved, joint)
    data = json.dumps({"compute_zone": joint})
    profile = balancers.create_availability_zone_profile(
        name="both hosts", provider_name="haproxy", availability_zone_data=data
    )
    made = balancers.create_availability_zone(
        name="both hosts", availability_zone_profile_id=profile.id, is_enabled=True
    )
    yield made.name
    balancers.delete_availability_zone(made.name)
    balancers.delete_availability_zone_profile(profile)
    cloud_user.cloud.set_zone(moved, former)


@contextmanager
def server(cloud_user, flavor, zone):
    """A server without a guest in a zone, or on a host of it; yield its host."""
    compute, image_id = cloud_user.cloud.connect().compute, cloud_user.stack.deployment.image_id
    flavor_id = next(one.id for one in compute.flavors() if one.name == flavor)
    body = {
        "name": flavor, "flavorRef": flavor_id, "imageRef": image_id, "networks": "none", "availability_zone": zone,
    }  # fmt: skip
    made = compute.post("/servers", json={"server": body}, microversion="2.67").json()["server"]
    try:
        yield compute.wait_for_server(compute.get_server(made["id"]), interval=0.5, wait=120).compute_host
    finally:
        left = compute.get_server(made["id"])
        compute.delete_server(left)
        compute.wait_for_delete(left, interval=0.5, wait=120)


def test_the_hint_of_a_pair_overrides_the_preference_of_novas_scheduler(user, topology, zone_of_both):
    zone, (first, second) = ZONES["compute0"], ZONES
    # Most free memory is on the first host, and no failed build of an earlier test counts against it.
    with server(user, BALLAST, f"{zone}:{second}"), server(user, WITHOUT_GUEST, f"{zone}:{first}"):
        for _ in range(2):
            with server(user, WITHOUT_GUEST, zone) as chosen:
                assert chosen == first, "without a hint, Nova prefers the first host"
        balancer = user.load_balancer("apart", flavor_id=topology("ACTIVE_STANDBY"), availability_zone=zone_of_both)
        amphorae = [one for name, one in user.servers().items() if name.startswith("octavia-amphora")]
        assert sorted(one.compute_host for one in amphorae) == [first, second]
        assert {one.availability_zone for one in amphorae} == {zone}
        assert user.answers(balancer.vip_address) == BOTH
        user.delete(balancer)
