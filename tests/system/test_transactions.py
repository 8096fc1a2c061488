# SPDX-License-Identifier: Apache-2.0
"""No status is reported before the commit of Octavia's transaction, which would overwrite it.

Octavia calls the provider inside an open transaction. The test uses MariaDB, which locks rows and not the whole file.
The time between the provider's return and Octavia's commit is extended from milliseconds to 0.7 seconds. The provider's
own database is on MariaDB too.
"""

import os
from pathlib import Path

import mariadb
import msgspec
import pytest
from cloud import Cloud
from sandbox_of_a_test import running

from amphora_driver.database.engine import Database
from sandbox import demo

pytestmark = pytest.mark.root
WINDOW = "0.7"


@pytest.fixture(scope="module")
def cloud():
    with (
        mariadb.server("octavia", "provider") as (octavia, provider),
        running(store_url=provider, octavia_url=octavia) as (stack, settings),
    ):
        slow_down(stack)
        connection = demo.connect(settings)
        database = Database(settings.database_url)
        cloud = Cloud(settings, connection, database)
        yield cloud
        cloud.clean()
        database.dispose()
        connection.close()


def slow_down(stack):
    """Replace the API by the slow one."""
    program = next(one for one in stack.programs() if one.name == "octavia-api")
    argv = (*program.argv[:-1], "--pythonpath", str(Path(__file__).parent), "slow_octavia:api()")
    stack.supervision.stop(program.name)
    os.environ["SLOW_OCTAVIA"] = WINDOW
    try:
        slow = msgspec.structs.replace(program, argv=argv)
        stack.supervision.start(slow)
        stack.supervision.wait_ready(slow, 60)
    finally:
        del os.environ["SLOW_OCTAVIA"]


def settled(cloud, balancer):
    """Wait until no object of the load balancer is PENDING in Octavia."""

    def pending():
        tree = cloud.balancers.get(cloud.url(f"loadbalancers/{balancer.id}/status")).json()["statuses"]["loadbalancer"]
        return "PENDING" in str(tree)

    cloud.active(balancer.id)
    cloud.until(lambda: not pending(), "no object is PENDING")


def test_every_kind_of_object_becomes_active(cloud):
    balancers = cloud.balancers
    balancer = cloud.load_balancer("slow")
    settled(cloud, balancer)
    listener = balancers.create_listener(protocol="HTTP", protocol_port=80, load_balancer_id=balancer.id)
    settled(cloud, balancer)
    pool = balancers.create_pool(protocol="HTTP", lb_algorithm="ROUND_ROBIN", listener_id=listener.id)
    settled(cloud, balancer)
    member = balancers.create_member(pool, **cloud.member("member1"))
    settled(cloud, balancer)
    monitor = balancers.create_health_monitor(
        type="HTTP", delay=1, timeout=1, max_retries=1, max_retries_down=1, pool_id=pool.id
    )
    settled(cloud, balancer)
    for change in (
        lambda: balancers.update_load_balancer(balancer.id, name="slower"),
        lambda: balancers.update_listener(listener, name="slower"),
        lambda: balancers.update_pool(pool, name="slower"),
        lambda: balancers.update_member(member, pool, weight=3),
        lambda: balancers.update_health_monitor(monitor, delay=2),
        lambda: balancers.delete_health_monitor(monitor),
        lambda: balancers.delete_member(member, pool),
        lambda: balancers.delete_pool(pool),
        lambda: balancers.delete_listener(listener),
    ):
        change()
        settled(cloud, balancer)


def test_a_fully_populated_load_balancer_becomes_active(cloud):
    balancer = cloud.served("slow-whole", monitor={"type": "TCP", "delay": 1, "timeout": 1, "max_retries": 1})
    settled(cloud, balancer)
    assert cloud.answers(balancer.vip_address, 4) == {"member1": 2, "member2": 2}
