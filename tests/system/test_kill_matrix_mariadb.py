# SPDX-License-Identifier: Apache-2.0
"""Some kills of `test_kill_matrix` on MariaDB, which locks rows, and a kill of MariaDB itself."""

import kill_lab
import mariadb
import pytest
from kill_lab import ContinuousClient, in_step

from sandbox import topology

pytestmark = [pytest.mark.root, pytest.mark.extended]


@pytest.fixture(scope="module")
def server():
    with mariadb.killable("octavia", "provider") as made:
        yield made


@pytest.fixture(scope="module")
def lab(server):
    octavia, provider = server.urls
    with kill_lab.lab(store_url=provider, octavia_url=octavia) as made:
        yield made


@pytest.fixture(scope="module")
def balancer(lab):
    """A load balancer with a continuous client; each process is killed once during its creation."""
    lab.arm("claimed", *in_step("Boot", "Push"), "barrier-passed", "tree-read", "report-sent", "flushing")
    made = lab.cloud.balancers.create_load_balancer(
        name="survivor", vip_subnet_id=topology.VIP_SUBNET, listeners=[listener(lab.cloud)]
    )
    lab.reached()
    lab.settled()
    balancer = lab.cloud.active(made.id)
    with ContinuousClient(lab.cloud, balancer.vip_address) as client:
        yield balancer
    assert client.failed == []
    assert client.answered > 20


def listener(cloud):
    pool = {"name": "survivor", "protocol": "HTTP", "lb_algorithm": "ROUND_ROBIN", "members": [cloud.member("member1")]}
    return {"protocol": "HTTP", "protocol_port": 80, "default_pool": pool}


def batch(lab, balancer, *names):
    return lab.set_members(lab.cloud.pool_of(balancer).id, names)


@pytest.mark.parametrize("point", ["intent-written", "intent-committed"])
def test_rolled_back_requests_are_not_served(lab, balancer, point):
    lab.arm(point)
    lab.failed(lambda: batch(lab, balancer, "member2", "member3"))
    lab.settled()
    lab.cloud.until(lambda: lab.cloud.answers(balancer.vip_address, 4) == {"member1": 4}, "member1 serves alone")


@pytest.mark.parametrize(
    ("point", "names"),
    [
        ("intent-committed", ("member1", "member2")),
        ("Push-before", ("member1",)),
        ("Push-done", ("member1", "member2")),
        ("barrier-passed", ("member1",)),
        ("report-sent", ("member1", "member2")),
    ],
)
def test_the_server_is_killed(lab, balancer, server, point, names):
    """MariaDB is killed while a process waits with an open or just committed transaction, then restarts."""
    lab.hold(point)
    asked = lab.beside(lambda: batch(lab, balancer, *names))
    lab.held(point)
    answered = point != "intent-committed" and asked()
    server.kill()
    lab.disarm()
    server.start()
    asked()
    lab.settled()
    pool = lab.cloud.pool_of(balancer)
    kept = {one.name for one in lab.cloud.balancers.members(pool)}
    assert kept == set(names) or not answered, "an answered change is kept"
    lab.cloud.until(
        lambda: set(lab.cloud.answers(balancer.vip_address, 6)) == kept, "the members that Octavia has serve"
    )


def test_delete(lab, balancer):
    other = lab.cloud.load_balancer("gone")
    lab.arm("Release-done", "Release-marked", "ReleaseVip-done", "report-sent")
    lab.cloud.balancers.delete_load_balancer(other.id)
    lab.reached()
    lab.settled()
    lab.cloud.gone(other.id)
