# SPDX-License-Identifier: Apache-2.0
"""Operations on load balancers in a complete OpenStack: TLS, further VIPs, replaced amphorae, resizes, refusals."""

import json
from contextlib import ExitStack, contextmanager

import pytest
import sqlalchemy as sa
from dataplane.pki import Authority
from openstack.exceptions import HttpException
from whole_cloud import IMAGE_TAG, ZONES

from amphora_driver.database.tables import amphora, job, object_status
from amphora_driver.database.tables_fleet import rotation
from sandbox import demo_hosts

# In the second part of a run, one process starts one cloud for all tests (tests/README.md).
pytestmark = [pytest.mark.extended, pytest.mark.lasts(900)]
AUTHORITY = Authority("cloud")
BOTH = {"member1": 4, "member2": 4}
REPLACED = 300.0


@pytest.fixture
def user(cloud_user):
    """The user, with no object of the test left afterwards."""
    with cloud_user.unchanged():
        yield cloud_user


@pytest.fixture(scope="module")
def dual(cloud_user):
    """A network with two IPv4 subnets and an IPv6 subnet, and the client `client`; return the subnets."""
    network, *subnets = cloud_user.add_network("dual", "198.51.102.0/24", "198.51.103.0/24", "2001:db8:102::/64")
    cloud_user.cloud.host("visitor", network, *subnets)
    return subnets


@pytest.fixture(scope="module")
def member3(cloud_user, provider_stack):
    """The body of a member on a network without other members."""
    network, subnet = cloud_user.add_network("further", "203.0.115.0/24")
    address = provider_stack.member("member3", network, subnet).fixed_ips[0]["ip_address"]
    return {"name": "member3", "address": address, "protocol_port": demo_hosts.MEMBER_PORT, "subnet_id": subnet.id}


def secrets(cloud_user):
    """All secrets and containers in Barbican of the user and of Octavia's account."""
    managers = cloud_user.connection.key_manager, cloud_user.cloud.connect().key_manager
    return {one.name for manager in managers for kind in (manager.secrets, manager.containers) for one in kind()}


@pytest.fixture(scope="class")
def certificate(cloud_user):
    """The reference of a certificate that the user stores in Barbican, as PKCS #12."""
    reference = cloud_user.store_certificate(AUTHORITY.issue("www.example.com"))
    yield reference
    assert secrets(cloud_user) == {"www"}
    cloud_user.connection.key_manager.delete_secret(reference.rpartition("/")[2])


def hosts(cloud_user):
    return sorted(one.compute_host for one in cloud_user.servers().values())


def ids(cloud_user):
    return {one.id for one in cloud_user.servers().values()}


def settled(stack, balancer):
    """Whether the controller has nothing to do for a load balancer."""
    return not stack.read(sa.select(job.c.dirty).where(job.c.load_balancer_id == balancer.id, job.c.dirty))


def rotated(stack, cloud_user, *words):
    """Rotate with amphoractl until the rotation is done."""
    number = json.loads(stack.amphoractl("rotate", *words, "-f", "json"))["ID"]
    query = sa.select(rotation.c.state, rotation.c.reason).where(rotation.c.id == number)

    def ended():
        [found] = stack.read(query)
        return None if found.state == "running" else found

    found = cloud_user.until(ended, f"rotation {number} has ended", REPLACED)
    assert found.state == "done", found.reason


@contextmanager
def disabled(cloud_user, *names):
    """Nova starts no server on these hosts."""
    compute = cloud_user.admin.compute
    chosen = [one for one in compute.services() if one.host in names]
    assert len(chosen) == len(names)
    for one in chosen:
        compute.disable_service(one)
    try:
        yield
    finally:
        for one in chosen:
            compute.enable_service(one)


class TestPair:
    """A pair in two zones with three VIPs, a listener with TLS, and members on other networks than the VIPs."""

    @pytest.fixture(scope="class")
    def pair(self, cloud_user, topology, dual, member3, certificate):
        secure = {"protocol": "TERMINATED_HTTPS", "protocol_port": 443, "default_tls_container_ref": certificate}
        first, *others = dual
        with cloud_user.unchanged():
            balancer = cloud_user.load_balancer(
                "pair",
                flavor_id=topology("ACTIVE_STANDBY"),
                vip_subnet_id=first.id,
                additional_vips=[{"subnet_id": one.id} for one in others],
                listeners=[cloud_user.listener("plain"), cloud_user.listener("secure", **secure)],
            )
            yield balancer
            cloud_user.delete(balancer)

    @staticmethod
    def serves(cloud_user, balancer, members):
        """Each VIP answers with and without TLS, and each member receives requests."""
        vips = [balancer.vip_address, *(one["ip_address"] for one in balancer.additional_vips)]
        # Octavia shows additional VIPs in the order of its database.
        assert sorted(":" in one for one in vips) == [False, False, True]
        for vip in vips:
            cloud_user.served(vip, host="visitor")
            assert set(cloud_user.answers(vip, 9, host="visitor")) == members
            assert cloud_user.answers(vip, host="visitor", port=443, authority=AUTHORITY.pem) == BOTH

    def test_each_vip_serves_http_and_tls(self, cloud_user, pair):
        assert {one.availability_zone for one in cloud_user.servers().values()} == set(ZONES.values())
        self.serves(cloud_user, pair, {"member1", "member2"})

    def test_a_member_on_a_further_network_is_added(self, cloud_user, pair, member3):
        before = ids(cloud_user)
        pool = next(one for one in cloud_user.balancers.pools(loadbalancer_id=pair.id) if one.name == "plain")
        cloud_user.balancers.create_member(pool, **member3)
        cloud_user.settled(pair.id)
        self.serves(cloud_user, pair, {"member1", "member2", "member3"})
        assert ids(cloud_user) == before

    def test_a_failover_through_octavia_replaces_both_amphorae(self, cloud_user, pair, provider_stack):
        before = ids(cloud_user)
        members = set(cloud_user.answers(pair.vip_address, 9, host="visitor"))
        # Octavia's default policy permits it to administrators.
        cloud_user.openstack("admin", "loadbalancer", "failover", pair.id)
        cloud_user.settled(pair.id, seconds=REPLACED)
        cloud_user.until(
            lambda: len(ids(cloud_user)) == 2 and ids(cloud_user).isdisjoint(before), "both are replaced", REPLACED
        )
        cloud_user.until(lambda: settled(provider_stack, pair), "the fail-over has ended")
        assert hosts(cloud_user) == sorted(ZONES)
        self.serves(cloud_user, pair, members)

    def test_an_evacuation_moves_the_pair_to_the_other_host(self, cloud_user, pair, provider_stack):
        members = set(cloud_user.answers(pair.vip_address, 9, host="visitor"))
        with disabled(cloud_user, "compute0"):
            rotated(provider_stack, cloud_user, "--host", "compute0", "--loadbalancer", pair.id)
            cloud_user.until(lambda: hosts(cloud_user) == ["compute1", "compute1"], "compute0 has no amphora")
            cloud_user.until(lambda: settled(provider_stack, pair), "the job has ended")
        self.serves(cloud_user, pair, members)
        assert cloud_user.balancers.get_load_balancer(pair.id).provisioning_status == "ACTIVE"


class TestSingle:
    """A load balancer that gets a new image, moves to another zone, and becomes a pair."""

    @pytest.fixture(scope="class")
    def balancer(self, cloud_user):
        with cloud_user.unchanged():
            made = cloud_user.load_balancer("changed")
            yield made
            cloud_user.delete(made)

    def test_a_rotation_replaces_the_image(self, cloud_user, balancer, provider_stack):
        client = cloud_user.cloud.connect().image
        image = client.create_image(
            name="newer", data=b"no guest reads it", disk_format="raw", container_format="bare", tags=[IMAGE_TAG]
        )
        try:
            rotated(provider_stack, cloud_user, "--image", image.id, "--loadbalancer", balancer.id)
            [server] = cloud_user.servers().values()
            recorded = provider_stack.read(sa.select(amphora.c.image).where(amphora.c.load_balancer_id == balancer.id))
            assert (server.image.id, {one.image for one in recorded}) == (image.id, {image.id})
        finally:
            client.delete_image(image)
        assert cloud_user.answers(balancer.vip_address) == BOTH

    def test_an_evacuation_of_a_zone_moves_the_amphora_to_the_other_one(self, cloud_user, balancer, provider_stack):
        """All hosts stay enabled: the product chooses the zone, and not Nova."""
        [former] = cloud_user.servers().values()
        [left] = set(ZONES.values()) - {former.availability_zone}
        rotated(provider_stack, cloud_user, "--zone", former.availability_zone, "--loadbalancer", balancer.id)
        [server] = cloud_user.servers().values()
        assert (server.id != former.id, server.availability_zone) == (True, left)
        cloud_user.until(lambda: settled(provider_stack, balancer), "the job has ended")
        recorded = provider_stack.read(sa.select(amphora.c.zone).where(amphora.c.load_balancer_id == balancer.id))
        assert [one.zone for one in recorded] == [left]
        assert cloud_user.answers(balancer.vip_address) == BOTH
        assert cloud_user.balancers.get_load_balancer(balancer.id).provisioning_status == "ACTIVE"

    @pytest.fixture
    def larger(self, cloud_user):
        """The id of a flavor of Nova with twice the memory."""
        compute = cloud_user.admin.compute
        made = compute.create_flavor(name="larger", ram=128, vcpus=1, disk=1)
        yield made.id
        compute.delete_flavor(made)

    def test_a_resize_changes_the_size_and_the_zone(self, cloud_user, balancer, provider_stack, larger):
        [former] = cloud_user.servers().values()
        [zone] = set(ZONES.values()) - {former.availability_zone}
        flavor = {"compute_flavor": larger}
        self.resize(provider_stack, cloud_user, balancer, zones=[zone], zone={"compute_zone": zone}, flavor=flavor)
        [server] = cloud_user.servers().values()
        assert (former.flavor.ram, server.flavor.ram) == (64, 128)

    def test_a_resize_makes_a_pair_in_two_zones(self, cloud_user, balancer, provider_stack):
        zones = sorted(ZONES.values())
        flavor = {"loadbalancer_topology": "ACTIVE_STANDBY"}
        self.resize(provider_stack, cloud_user, balancer, zones=zones, zone={"compute_zones": zones}, flavor=flavor)
        assert hosts(cloud_user) == sorted(ZONES)

    @staticmethod
    def resize(stack, cloud_user, balancer, *, zones, zone, flavor=None):
        """Resize; wait until only new amphorae serve, in these zones."""
        before = ids(cloud_user)
        words = ["--availability-zone", json.dumps(zone)]
        words += [] if flavor is None else ["--flavor", json.dumps(flavor)]
        stack.amphoractl("loadbalancer", "resize", balancer.id, *words)

        def moved():
            found = list(cloud_user.servers().values())
            # Nova reports no zone of a server that it still builds.
            placed = sorted(one.availability_zone or "" for one in found)
            return before.isdisjoint(one.id for one in found) and placed == zones

        cloud_user.until(moved, f"amphorae in {zones} serve", REPLACED)
        cloud_user.until(lambda: settled(stack, balancer), "the resize has ended")
        recorded = stack.read(sa.select(amphora.c.zone).where(amphora.c.load_balancer_id == balancer.id))
        assert sorted(one.zone for one in recorded) == zones
        assert cloud_user.answers(balancer.vip_address) == BOTH
        assert cloud_user.balancers.get_load_balancer(balancer.id).provisioning_status == "ACTIVE"


@contextmanager
def without_quota(cloud_user):
    """The quota of the account permits no further server."""
    compute, project = cloud_user.admin.compute, cloud_user.cloud.projects["service"]
    before = compute.get_quota_set(project).instances
    compute.update_quota_set(project, instances=0)
    try:
        yield
    finally:
        compute.update_quota_set(project, instances=before)


@contextmanager
def without_image(cloud_user):
    """No image has the tag of the amphorae."""
    client, image = cloud_user.cloud.connect().image, cloud_user.stack.deployment.image_id
    client.remove_tag(image, IMAGE_TAG)
    try:
        yield
    finally:
        client.add_tag(image, IMAGE_TAG)


def without_hosts(cloud_user):
    """Nova has no host for a server."""
    return disabled(cloud_user, *ZONES)


# Each one with a part of the reason of the ERROR.
OBSTACLES = {
    without_quota: "Quota exceeded for instances",
    without_image: "no active image with the tag",
    without_hosts: "requested availability zone is not available",
}


def await_reason(cloud_user, balancer, reason):
    """Wait until the reason of the status contains these words."""
    query = sa.select(object_status.c.reason).where(object_status.c.object_id == balancer.id)
    cloud_user.until(lambda: reason in str(cloud_user.stack.read(query)), f"the reason is {reason}")


def test_each_obstacle_is_the_reason_of_error_until_it_is_removed(user, provider_stack):
    made = None
    with ExitStack() as present:
        for place, reason in OBSTACLES.items():
            # An obstacle is removed after the next one exists.
            with present.pop_all():
                present.enter_context(place(user))
            made = made or user.request("obstructed")
            await_reason(user, made, reason)
            user.settled(made.id, "ERROR")
            shown = json.loads(provider_stack.amphoractl("loadbalancer", "show", made.id, "-f", "json"))
            assert reason in shown["Reason"]
    balancer = user.active(made.id)
    assert user.answers(balancer.vip_address) == BOTH
    user.delete(balancer)


def test_a_flavor_with_an_unknown_nova_flavor_is_refused(user):
    balancers = user.admin.load_balancer
    data = json.dumps({"compute_flavor": "missing"})
    with pytest.raises(HttpException, match="Nova has no flavor with this id or name"):
        balancers.create_flavor_profile(name="unknown", provider_name="haproxy", flavor_data=data)
    assert "unknown" not in {one.name for one in balancers.flavor_profiles()}


def test_a_creation_continues_after_outages_of_neutron_and_octavias_api(user, provider_stack):
    made = user.request("outage")
    user.cloud.kill("neutron")
    try:
        provider_stack.restart("octavia")
        query = sa.select(job.c.attempts).where(job.c.load_balancer_id == made.id, job.c.attempts > 0)
        user.until(lambda: provider_stack.read(query), "the controller has repeated a step")
    finally:
        user.cloud.serve("neutron")
        user.cloud.await_answer("neutron")
    balancer = user.active(made.id)
    assert user.answers(balancer.vip_address) == BOTH
    user.delete(balancer)
