# SPDX-License-Identifier: Apache-2.0
"""One process of each type is killed while a load balancer is created, changed and deleted.

`tests/unit/kill_points` kills a process at every point; `test_kill_matrix` does so on the full stack, in
`./run-tests --all`.
"""

import kill_lab
import pytest
from kill_lab import ContinuousClient, in_step

from sandbox import topology

pytestmark = pytest.mark.root

API = ("intent-written", "intent-committed")
CONTROLLER = ("claimed", *in_step("Push"), "finishing")
PROVIDER_AGENT = ("barrier-passed", "report-sent")
HEALTH_MANAGER = ("flushing",)


@pytest.fixture(scope="module")
def lab():
    with kill_lab.lab() as made:
        yield made


@pytest.fixture(scope="module")
def balancer(lab):
    """A load balancer with a continuous client; each process is killed during its creation."""
    made = lab.survive(lambda: create(lab, "survivor"), *CONTROLLER, *PROVIDER_AGENT, *HEALTH_MANAGER)
    balancer = lab.cloud.active(made.id)
    assert len(lab.cloud.amphorae(balancer)) == 1, "the load balancer has one amphora"
    with ContinuousClient(lab.cloud, balancer.vip_address) as client:
        yield balancer
    assert client.failed == []
    assert client.answered > 10


def create(lab, name):
    member = lab.cloud.member("member1")
    pool = {"name": name, "protocol": "HTTP", "lb_algorithm": "ROUND_ROBIN", "members": [member]}
    listener = {"name": name, "protocol": "HTTP", "protocol_port": 80, "default_pool": pool}
    return lab.cloud.balancers.create_load_balancer(name=name, vip_subnet_id=topology.VIP_SUBNET, listeners=[listener])


def test_a_request_of_a_killed_api_process_leaves_no_trace(lab, balancer):
    lab.refused(lambda: create(lab, "never"), API)
    assert [one.name for one in lab.cloud.balancers.load_balancers()] == [balancer.name]


def test_an_accepted_change_survives_each_process(lab, balancer):
    pool = lab.cloud.pool_of(balancer)
    change = lambda: lab.set_members(pool.id, ("member2", "member3"))  # noqa: E731 - sent twice
    lab.refused(change, API[1:])
    lab.cloud.until(lambda: lab.cloud.answers(balancer.vip_address, 4) == {"member1": 4}, "member1 serves alone")
    lab.survive(change, *CONTROLLER, *PROVIDER_AGENT, *HEALTH_MANAGER)
    lab.cloud.balanced(balancer.vip_address, {"member2": 1, "member3": 1})


def test_an_accepted_deletion_survives_each_process(lab, balancer):
    gone = lab.cloud.load_balancer("gone")
    delete = lambda: lab.cloud.balancers.delete_load_balancer(gone.id)  # noqa: E731 - sent by `survive`
    lab.survive(delete, "claimed", "Release-done", "ReleaseVip-done", *PROVIDER_AGENT)
    lab.cloud.gone(gone.id)
