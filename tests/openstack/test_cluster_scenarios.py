# SPDX-License-Identifier: Apache-2.0
"""The seven scenarios of the load-balancing policy, and failures, with a real Nova and the provider `haproxy`.

The controller polls every five minutes, so a test that ends earlier shows that notifications of Nova and webhooks start
each pass. The last test disables the notifications. The owner is the user `demo`, with an application credential.
"""

import json
import time

import cluster_scenarios
import cluster_service
import pytest
from cluster_scenarios import WEB, Outage

from sandbox import demo_hosts

pytestmark = [pytest.mark.extended, pytest.mark.lasts(900)]
POLL_SECONDS = 300
OWNER = "owner"


@pytest.fixture(scope="module")
def service(cloud_user, tmp_path_factory):
    with cluster_service.running(cloud_user, tmp_path_factory.mktemp("cluster"), poll_interval=POLL_SECONDS) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(cloud_user, service):
    """Servers without a group. A group without servers has created the load balancer, whose pool all groups share."""
    policy = service.folder / "policy.json"
    policy.write_text(json.dumps({
        "pool": {"subnet": cloud_user.back_subnet.id, "protocol": "HTTP", "protocol_port": demo_hosts.MEMBER_PORT},
        "vip": {"subnet": cloud_user.front_subnet.id, "protocol": "HTTP", "protocol_port": 80},
        "health_monitor": {"type": "HTTP", "delay": 1, "timeout": 1, "max_retries": 1, "url_path": "/"},
    }))  # fmt: skip
    words = ("--tag", OWNER, "--policy", policy, "--credential-file", service.folder / "credential.json")
    group = service.amphoractl("create", OWNER, *words)
    balancer = cloud_user.settled(group["Load balancer"])
    made = cluster_service.NovaCluster(cloud_user, balancer, group["Pool"])
    yield made
    made.remove()
    service.amphoractl("delete", OWNER)
    cloud_user.until(lambda: not service.groups.list_groups(), "the group that owns the load balancer is deleted", 120)
    assert balancer.id not in {one.id for one in cloud_user.balancers.load_balancers()}


@pytest.fixture
def served(service, cluster, cloud_user):
    """Makes a group with one serving server; returns both."""

    def make(**more):
        web = service.group(cluster.balancer.id, cluster.pool_id, WEB, **more)
        [first] = cluster.create()
        web.done("join", {"server": first})
        cloud_user.served(cluster.balancer.vip_address)
        return web, first

    yield make
    cluster.empty()
    for record in service.groups.list_groups():
        if record.group.name != OWNER:
            service.groups.delete(record.group.id)
    cloud_user.until(lambda: len(service.groups.list_groups()) == 1, "the groups of the test are deleted", 120)


def test_no_request_fails_in_any_scenario(cluster, served, record_property):
    web, first = served(minimum=1)
    for name, answers in zip(("fast", "slow"), cluster_scenarios.no_request_fails(web, cluster, first), strict=True):
        record_property(name, dict(answers))


def test_foreign_members_are_untouched(cluster, served):
    web, first = served()
    cluster_scenarios.foreign_member_is_untouched(web, cluster, first)


def test_two_groups_in_one_pool(cluster, served, service):
    web, first = served()
    blue = service.group(cluster.balancer.id, cluster.pool_id, "blue")
    cluster_scenarios.groups_share_a_pool(web, blue, cluster, first)


def test_nova_and_octavia_fail_for_some_time(cluster, served, provider_stack):
    web, first = served()
    cloud = provider_stack.cloud

    def outage(name, start):
        return Outage(lambda: cloud.kill(name), start, f":{cloud.ports[name]}")

    def start_nova():
        cloud.serve("nova")
        cloud.await_answer("nova")

    def start_octavia():
        provider_stack.serve("octavia")
        provider_stack.await_ready("octavia")

    nova, octavia = outage("nova", start_nova), outage("octavia", start_octavia)
    cluster_scenarios.outages_change_no_member(web, cluster, first, nova, octavia)


def test_a_server_deleted_without_notice(cluster, served):
    """Nova's notifications tell of the new server and of its deletion, because the next poll would be too late."""
    web, first = served()
    begun = time.monotonic()
    cluster_scenarios.deleted_server_leaves(web, cluster, first)
    assert time.monotonic() - begun < POLL_SECONDS


def test_the_next_poll_repairs_a_lost_notification(cluster, served, service):
    """No notification arrives: the controller reads another topic than Nova's."""
    service.restart(notification_topic="lost", poll_interval=2)
    web, first = served()
    cluster_scenarios.deleted_server_leaves(web, cluster, first)
