# SPDX-License-Identifier: Apache-2.0
"""Processes are killed at all failpoints: objects become ACTIVE or ERROR, without orphans.

All tests use one sandbox. All failpoints of an operation are armed at once, so each kill is one failpoint further.
A client of another load balancer sends requests, and none fails.
"""

import json

import kill_lab
import pytest
import sqlalchemy as sa
from kill_lab import ContinuousClient, in_step

from amphora_driver.database import tables
from amphora_driver.model.enums import Kind
from amphora_driver.store import desired_objects
from sandbox import topology

pytestmark = [pytest.mark.root, pytest.mark.extended]

API = ("intent-written", "intent-committed")
VIPS = ("claim-noted", "addresses-taken")
TELLING = ("barrier-next", "barrier-passed", "committed", "report-sent", "report-taken")
READING = ("tree-read", "tree-taken")
HEARING = ("flushing", "flushed")
LEASE = ("claimed", "finishing", "finished")
COMING = in_step("Record", "Boot", "Plug", "AwaitAgent", "Push")
GOING = in_step("Release", "ReleaseVip")


@pytest.fixture(scope="module")
def lab():
    with kill_lab.lab() as made:
        yield made


@pytest.fixture(scope="module")
def client(lab):
    balancer = lab.cloud.served("steady", ("member1", "member2"))
    with ContinuousClient(lab.cloud, balancer.vip_address) as client:
        yield client
    assert client.failed == []
    assert client.answered > 100


@pytest.fixture
def cloud(lab, client):
    yield lab.cloud
    lab.disarm()


def creation_values(name):
    return {"name": name, "vip_subnet_id": topology.VIP_SUBNET}


def test_create(lab, cloud):
    create = lambda: cloud.balancers.create_load_balancer(**creation_values("alone"))  # noqa: E731 - sent repeatedly
    before = {one.id for one in cloud.balancers.load_balancers()}
    lab.refused(create, (*VIPS, *API))
    assert {one.id for one in cloud.balancers.load_balancers()} == before, "failed requests create no load balancer"
    made = lab.survive(create, *LEASE, *COMING, *TELLING, *HEARING)
    assert cloud.active(made.id)
    assert len(cloud.amphorae(made)) == 1, "the load balancer has one amphora"


def populated(cloud, name, **more):
    """Create a load balancer with a listener, a pool, and an L7 policy that Octavia's call omits."""
    member = cloud.member("member1")
    pool = {"name": name, "protocol": "HTTP", "lb_algorithm": "ROUND_ROBIN", "members": [member]}
    policy = {"action": "REJECT", "rules": [{"type": "PATH", "compare_type": "EQUAL_TO", "value": "/secret"}]}
    listener = {"name": name, "protocol": "HTTP", "protocol_port": 80, "default_pool": pool, "l7policies": [policy]}
    return cloud.balancers.create_load_balancer(**creation_values(name), listeners=[listener], **more)


@pytest.fixture(scope="module")
def changed(lab, client):
    """A load balancer that is changed while processes are killed."""
    cloud = lab.cloud
    lab.refused(lambda: populated(cloud, "victim"), API)
    made = lab.survive(lambda: populated(cloud, "victim"), *LEASE, *in_step("Push"), *TELLING, *READING)
    balancer = cloud.active(made.id)
    assert cloud.answers(balancer.vip_address, 4) == {"member1": 4}
    assert cloud.get(balancer.vip_address, "/secret")[0] == 403, "the amphora has the L7 policy"
    return balancer


def weight(cloud, balancer):
    return next(iter(cloud.balancers.members(cloud.pool_of(balancer)))).weight


def test_update(lab, cloud, changed):
    pool = cloud.pool_of(changed)
    member = next(iter(cloud.balancers.members(pool)))
    lab.refused(lambda: cloud.balancers.update_member(member, pool, weight=7), API)
    assert weight(cloud, changed) == 1
    cloud.until(lambda: recorded_weight(lab, member.id) == 1, "the provider records the weight that Octavia has")
    lab.survive(lambda: cloud.balancers.update_member(member, pool, weight=3), *LEASE, *in_step("Push"), *TELLING)
    assert (weight(cloud, changed), recorded_weight(lab, member.id)) == (3, 3)


def recorded_weight(lab, member_id):
    return lab.database.read(lambda c: desired_objects.load_object(c, Kind.MEMBER, member_id)).weight


def test_batch(lab, cloud, changed):
    pool = cloud.pool_of(changed)

    def batch():
        return lab.set_members(pool.id, ("member2", "member3"))

    lab.refused(batch, API)
    cloud.until(lambda: cloud.answers(changed.vip_address, 6) == {"member1": 6}, "member1 serves alone")
    lab.survive(batch, *LEASE, *in_step("Push"), *TELLING, *HEARING)
    cloud.balanced(changed.vip_address, {"member2": 1, "member3": 1})


@pytest.mark.parametrize("cascade", [False, True], ids=["alone", "cascade"])
def test_delete(lab, cloud, cascade):
    """A deletion that the provider accepted and Octavia lost is completed, because the user requested it."""
    balancer = cloud.served("gone", ("member1",)) if cascade else cloud.load_balancer("gone")
    delete = lambda: cloud.balancers.delete_load_balancer(balancer.id, cascade=cascade)  # noqa: E731 - sent twice
    lab.refused(delete, API[:1])
    assert cloud.active(balancer.id)
    # After the report to Octavia the rows are deleted, so a process killed later leaves no unfinished work.
    lab.survive(delete, *LEASE[:2], *GOING, *TELLING)
    cloud.gone(balancer.id)


def state(cloud, balancer):
    return cloud.balancers.get_load_balancer(balancer.id).provisioning_status


def test_a_job_that_crashes_every_controller(lab, cloud, changed):
    """The load balancer gets ERROR with the reason; others continue; it recovers after the repair."""
    other = cloud.served("beside", ("member1",))
    lab.deadly("ApplyVipOptions-before")
    policy = topology.derive_id("ten-megabit")
    cloud.put(f"loadbalancers/{changed.id}", {"loadbalancer": {"vip_qos_policy_id": policy}})
    changes = 0
    while state(cloud, changed) != "ERROR":
        cloud.balancers.update_load_balancer(other.id, description=str(changes))
        cloud.active(other.id)
        changes += 1
    assert changes, "another load balancer changes meanwhile"
    mine = tables.job.c.load_balancer_id == changed.id
    reason = lab.database.read(lambda c: c.execute(sa.select(tables.job.c.error).where(mine)).scalar())
    assert "controllers in a row crashed or stalled" in reason
    assert all(one.startswith("member") for one in cloud.answers(changed.vip_address, 4)), (
        "the members answer meanwhile"
    )
    lab.disarm()
    cloud.until(lambda: state(cloud, changed) == "ACTIVE", "the controller retries")
    lab.settled()


@pytest.fixture
def pairs(cloud):
    """A flavor of pairs with a takeover in less than a second."""
    data = {"loadbalancer_topology": "ACTIVE_STANDBY", "vrrp_advert_interval": 0.2}
    profile = cloud.balancers.create_flavor_profile(name="pairs", provider_name="haproxy", flavor_data=json.dumps(data))
    made = cloud.balancers.create_flavor(name="pairs", flavor_profile_id=profile.id, is_enabled=True)
    yield made.id
    cloud.balancers.delete_flavor(made)
    cloud.balancers.delete_flavor_profile(profile)


def test_a_pair(lab, cloud, pairs):
    points = (*in_step("Record", "Boot", "Plug", "Push"), "claimed", "finished", "barrier-passed", "tree-read")
    made = lab.survive(lambda: populated(cloud, "pair", flavor_id=pairs), *points)
    assert len(cloud.amphorae(made)) == 2
    balancer = cloud.active(made.id)
    cloud.until(lambda: cloud.answers(balancer.vip_address, 2) == {"member1": 2}, "member1 serves")
    lab.survive(lambda: cloud.balancers.delete_load_balancer(made.id, cascade=True), *GOING)
