# SPDX-License-Identifier: Apache-2.0
"""Bursts: load balancers are created together, and members of all of them change at the same time.

`AMPHORA_BURST=100` creates a hundred load balancers; half of them then take twenty changes each (`AMPHORA_CHANGES`).
This takes six minutes on two otherwise idle processors. Octavia accepts one change of a load balancer at a time: a
refused client repeats the request.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa
from openstack.exceptions import ConflictException

from amphora_driver.database.tables import amphora, job, object_status, request
from sandbox import topology

NUMBER = int(os.environ.get("AMPHORA_BURST", "8"))
CHANGED = (NUMBER + 1) // 2
CHANGES = int(os.environ.get("AMPHORA_CHANGES", "0")) or (20 if NUMBER >= 100 else 5)
# Concurrent users.
USERS = 8
# Seconds. The boot of an amphora takes one or two seconds of processor time, and the machine has two processors.
TIME_LIMIT = 60.0 + 10.0 * NUMBER
pytestmark = [pytest.mark.root, pytest.mark.extended, pytest.mark.lasts(3 * TIME_LIMIT)]


def create(cloud, number):
    members = [cloud.member("member1"), cloud.member("member2")]
    pool = {"name": "pool", "protocol": "HTTP", "lb_algorithm": "ROUND_ROBIN", "members": members}
    listener = {"name": "http", "protocol": "HTTP", "protocol_port": 80, "default_pool": pool}
    return cloud.balancers.create_load_balancer(
        name=f"burst-{number}", vip_subnet_id=topology.VIP_SUBNET, listeners=[listener]
    )


def add_members(cloud, balancer):
    """Add members one by one, with retries; return the number of refusals."""
    pool, refused = cloud.pool_of(balancer), 0
    deadline = time.monotonic() + TIME_LIMIT
    for number in range(CHANGES):
        # Disabled members get no requests, so the expected answers stay the same.
        member = cloud.member("member3", protocol_port=9000 + number, admin_state_up=False)
        while True:
            try:
                cloud.balancers.create_member(pool, **member)
                break
            except ConflictException:
                assert time.monotonic() < deadline, f"{balancer.name} stays immutable"
                refused += 1
                # At each request Octavia acquires and releases its only write lock.
                time.sleep(0.2)
    return refused


def settled(cloud):
    """Wait until no load balancer is PENDING; return them by provisioning status."""

    def ask():
        found = [one.provisioning_status for one in cloud.balancers.load_balancers()]
        return None if any(one.startswith("PENDING") for one in found) else found

    return cloud.until(ask, "no load balancer is PENDING", TIME_LIMIT)


def rows(cloud, *columns, where=()):
    return cloud.database.read(lambda connection: connection.execute(sa.select(*columns).where(*where)).all())


def taken(cloud, balancers):
    """Return the time from acceptance to service of each change: the provider's part."""
    where = (request.c.action == "create member", request.c.load_balancer_id.in_([one.id for one in balancers]))
    found = sorted(end - begin for begin, end in rows(cloud, request.c.accepted_at, request.c.applied_at, where=where))
    return round(found[len(found) // 2], 2), round(found[len(found) * 9 // 10], 2)


def test_load_balancers_created_together_all_serve(cloud, record_property):
    """All become ACTIVE and serve; each call is applied once, and no load balancer has two amphorae."""
    begun = time.monotonic()
    with ThreadPoolExecutor(USERS) as users:
        balancers = list(users.map(lambda number: create(cloud, number), range(NUMBER)))
        accepted = time.monotonic() - begun
        assert settled(cloud) == ["ACTIVE"] * NUMBER
        record_property(
            "created", f"{NUMBER}: accepted in {accepted:.1f} s, ACTIVE in {time.monotonic() - begun:.1f} s"
        )
        for balancer in balancers:
            cloud.balanced(balancer.vip_address, {"member1": 1, "member2": 1})
        assert len(rows(cloud, amphora.c.id)) == NUMBER

        begun = time.monotonic()
        refused = sum(users.map(lambda balancer: add_members(cloud, balancer), balancers[:CHANGED]))
        assert settled(cloud) == ["ACTIVE"] * NUMBER
        seconds = time.monotonic() - begun
    record_property("changed", f"{CHANGED * CHANGES} in {seconds:.1f} s, {refused} refused by Octavia")
    record_property("accepted to applied, seconds (p50, p90)", taken(cloud, balancers[:CHANGED]))
    for balancer in balancers[:CHANGED]:
        members = list(cloud.balancers.members(cloud.pool_of(balancer)))
        assert len(members) == 2 + CHANGES
        assert {one.provisioning_status for one in members} == {"ACTIVE"}
        cloud.balanced(balancer.vip_address, {"member1": 1, "member2": 1})
    # Each change has one request: no request is open, and no request is counted twice.
    assert len(rows(cloud, request.c.id)) == NUMBER + CHANGED * CHANGES
    assert rows(cloud, request.c.id, where=(request.c.applied_at.is_(None),)) == []
    assert rows(cloud, job.c.load_balancer_id, where=(job.c.applied < job.c.generation,)) == []
    assert rows(cloud, object_status.c.object_id, where=(object_status.c.pending.is_not(None),)) == []
