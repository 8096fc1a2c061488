# SPDX-License-Identifier: Apache-2.0
"""Processes are killed during fail-overs: each amphora is replaced once, and no resource is orphaned.

As in `test_kill_matrix`, all failpoints of an operation are armed at once. Each process that works on the operation is
killed repeatedly, one failpoint further each time. A client of another load balancer sends requests, and none fails.
"""

import json
import subprocess

import kill_lab
import long_connections
import pytest
from kill_lab import ContinuousClient
from sqlalchemy import select

from amphora_driver.database.tables import job
from amphora_driver.host import namespaces
from amphora_driver.store import amphorae, failovers, rotations, spare_pools
from amphora_driver.store.failovers import Cause, FailoverTrigger
from sandbox import topology

pytestmark = [pytest.mark.root, pytest.mark.extended, pytest.mark.lasts(600)]

BEGINNING = ("failover-written", "failover-begun")


def steps(*kinds):
    """Return the points of these kinds of steps.

    The point before a step equals the last point of the previous step, and is omitted.
    """
    return tuple(f"{kind}-{moment}" for kind in kinds for moment in ("done", "marked"))


@pytest.fixture(scope="module")
def lab():
    haste = {"amp_failover": {"silent_after": "4", "backoff_first": "0"}, "amp_rotation": {"settle": "1"}}
    with kill_lab.lab(haste=haste) as made:
        yield made


@pytest.fixture(scope="module")
def client(lab):
    balancer = lab.cloud.served("steady", ("member1", "member2"))
    with ContinuousClient(lab.cloud, balancer.vip_address) as client:
        yield client
    assert client.failed == []
    assert client.answered > 100
    assert lab.replacements(balancer.id) == [], "the amphora of the other load balancer is not replaced"


@pytest.fixture
def cloud(lab, client):
    lab.settled()
    yield lab.cloud
    lab.disarm()
    for balancer in lab.cloud.balancers.load_balancers():
        if balancer.name != "steady":
            lab.cloud.until(lambda one=balancer: deletable(lab.cloud, one), f"{balancer.name} can be deleted")
            lab.cloud.balancers.delete_load_balancer(balancer.id, cascade=True)
    lab.cloud.until(
        lambda: len(list(lab.cloud.balancers.load_balancers())) == 1, "only the other load balancer is left"
    )


def deletable(cloud, balancer):
    return not cloud.balancers.get_load_balancer(balancer.id).provisioning_status.startswith("PENDING")


@pytest.fixture(scope="module")
def flavored(lab, client):
    """Creates flavors, and deletes unused ones."""
    made, cloud = [], lab.cloud

    def make(name, **data):
        text = json.dumps(data)
        profile = cloud.balancers.create_flavor_profile(name=name, provider_name="haproxy", flavor_data=text)
        made.append((cloud.balancers.create_flavor(name=name, flavor_profile_id=profile.id, is_enabled=True), profile))
        return made[-1][0].id

    yield make
    for flavor, profile in made:
        cloud.balancers.delete_flavor(flavor)
        cloud.balancers.delete_flavor_profile(profile)


def serves(cloud, balancer):
    said = []

    def served():
        said[:] = [cloud.answers(balancer.vip_address, 2)]
        return said == [{"member1": 2}]

    try:
        cloud.until(served, "member1 serves")
    except AssertionError as error:
        neighbours = ["nsenter", f"--net={namespaces.path(cloud.settings.host(topology.CLIENT))}", "ip", "neighbour"]
        known = subprocess.run(neighbours, capture_output=True, text=True, check=False).stdout
        there = cloud.database.read(lambda c: amphorae.load_amphorae(c, balancer.id))
        raise AssertionError(f"{error}: {said}; the client's neighbours: {known}; the amphorae: {there}") from error


def was_replaced(lab, balancer, *former, cause, number=1):
    """Assert that each amphora was replaced once, and the load balancer is ACTIVE and serves."""
    found = lab.replacements(balancer.id)
    assert sorted(one.amphora_id for one in found) == sorted(former)
    assert {(one.cause, one.outcome) for one in found} == {(cause, "done")}
    for one in found:
        assert one.begun_at <= one.served_at <= one.ended_at
    present = lab.cloud.amphorae(balancer)
    assert len(present) == number
    assert not present & set(former)
    assert lab.cloud.balancers.get_load_balancer(balancer.id).provisioning_status == "ACTIVE"
    serves(lab.cloud, balancer)


def operator_replaces(lab, balancer, amphora_id):
    """Write the request of `amphoractl amphora failover`."""
    why = FailoverTrigger(cause=Cause.OPERATOR, reason="an operator wants it", asked_by="test")
    now = lab.database.now()
    begun = lab.database.write(lambda c: failovers.open_failovers(c, balancer.id, [amphora_id], why, now))
    assert begun == 1


def test_a_killed_machine_is_replaced_once(lab, cloud):
    balancer = cloud.served("single", ("member1",))
    (former,) = cloud.amphorae(balancer)
    lab.arm(*BEGINNING, "claimed", *steps("Record", "Boot", "AwaitAgent", "Plug", "Push", "Release"), "finishing")
    lab.power_off(former)
    lab.reached()
    lab.settled()
    was_replaced(lab, balancer, former, cause="silent")


def listener(name, port, *members):
    pool = {"name": name, "protocol": "HTTP", "lb_algorithm": "ROUND_ROBIN", "members": list(members)}
    return {"name": name, "protocol": "HTTP", "protocol_port": port, "default_pool": pool}


def test_the_vip_holder_of_a_pair_is_replaced_once(lab, cloud, flavored):
    """An operator replaces the VIP holder; connections survive all kills; then one amphora is killed."""
    flavor = flavored("pairs", loadbalancer_topology="ACTIVE_STANDBY", vrrp_advert_interval=0.5)
    listeners = [
        listener("usual", 80, cloud.member("member1")),
        listener("lasting", 81, cloud.member("member3", protocol_port=9000)),
    ]
    balancer = cloud.load_balancer("pair", flavor_id=flavor, listeners=listeners)
    serves(cloud, balancer)
    first = holder(cloud, balancer)
    with long_connections.Member(cloud.settings, "member3", 9000) as member:
        visits = member.visits(cloud.settings, balancer.vip_address, 81)
        lab.arm(*steps("Record", "Boot", "Plug", "Push"), "HandOver-done", "LookAfter-before")
        operator_replaces(lab, balancer, first)
        lab.reached()
        for visit in visits:
            visit.goes_on()
        lab.arm(*steps("Release"))
        member.finish()
    lab.reached()
    lab.settled()
    was_replaced(lab, balancer, first, cause="operator", number=2)

    second = holder(cloud, balancer)
    lab.arm("AskHolder-before", "AskHolder-marked", "HandOver-before", "HandOver-marked", "LookAfter-marked")
    operator_replaces(lab, balancer, second)
    lab.reached()
    lab.settled()
    was_replaced(lab, balancer, first, second, cause="operator", number=2)

    third = holder(cloud, balancer)
    lab.arm(*BEGINNING, *steps("Release"))
    lab.power_off(third)
    serves(cloud, balancer)
    lab.reached()
    lab.settled()
    assert [one.amphora_id for one in lab.replacements(balancer.id)] == [first, second, third]
    assert len(cloud.amphorae(balancer) - {first, second, third}) == 2
    serves(cloud, balancer)


def holder(cloud, balancer):
    """Wait until exactly one amphora reports the VIPs; return its id."""

    def ask():
        machines = cloud.database.read(lambda c: amphorae.load_amphorae(c, balancer.id))
        return found if len(found := [one.id for one in machines if one.holds_vip]) == 1 else None

    return cloud.until(ask, "one amphora reports the VIPs")[0]


def test_a_spare_is_created_and_used_once(lab, cloud, flavored):
    """Covers the spare from its boot to its use, with a kill at each point."""
    flavor = flavored("spared", warm_spares=1)
    lab.arm(*steps("Join"))
    balancer = cloud.served("spared", ("member1",), flavor_id=flavor)
    lab.reached()
    its_pool = select(job.c.spare_pool).where(job.c.load_balancer_id == balancer.id)
    pool_id = lab.database.read(lambda c: c.execute(its_pool).scalar_one())

    def ready():
        return {one.id for one in lab.database.read(lambda c: spare_pools.list_ready_spares(c, pool_id))}

    (spare,) = cloud.until(lambda: len(found := ready()) == 1 and found, "a spare is ready")
    (former,) = cloud.amphorae(balancer)
    # The spare pool is suspended: a kill could end its thread before its point, which would stay unreached.
    lab.hold("Record-before")
    lab.arm(*BEGINNING, *steps("Adopt", "Plug", "Push", "Release"))
    lab.power_off(former)
    lab.reached()
    lab.arm(*steps("Record", "Boot", "AwaitAgent"))
    lab.let_go("Record-before")
    lab.reached()
    lab.settled()
    was_replaced(lab, balancer, former, cause="silent")
    assert cloud.amphorae(balancer) == {spare}
    cloud.until(lambda: len(ready() - {spare}) == 1, "the pool has another spare")

    lab.arm(*steps("ReleaseVip", "Retire", "Disband"))
    cloud.balancers.delete_load_balancer(balancer.id, cascade=True)
    cloud.gone(balancer.id)
    lab.reached()
    lab.settled()
    assert lab.database.read(spare_pools.list_pools) == [], "the unused spare pool is deleted"


def test_a_rotation_replaces_each_amphora_once(lab, cloud):
    balancers = [cloud.served(f"turned-{number}", ("member1",)) for number in range(2)]
    former = {one.id: cloud.amphorae(one) for one in balancers}
    lab.arm("rotation-written", "rotation-moved", "failover-written", *steps("Record", "Push", "Release"))
    chosen = rotations.Selection(everything=True, load_balancers=tuple(former))
    asked = lab.database.write(lambda c: rotations.request_rotation(c, chosen, 1, "test"))

    def ended():
        found = lab.database.read(lambda c: rotations.get_rotation(c, asked.id))
        assert found.state is not rotations.RotationState.PAUSED, found.reason
        return found.ended_at is not None

    cloud.until(ended, "the rotation has ended", 240)
    assert lab.armed() == set()
    lab.settled()
    items = lab.database.read(lambda c: rotations.list_items(c, asked.id))
    assert [one.state for one in items] == [rotations.ItemState.DONE] * 2
    for one in balancers:
        was_replaced(lab, one, *former[one.id], cause="rotation")
