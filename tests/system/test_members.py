# SPDX-License-Identifier: Apache-2.0
"""Members through Octavia's API: they are added, changed and removed, they fail, and they recover."""

import pytest

pytestmark = pytest.mark.root

MONITOR = {"type": "HTTP", "delay": 1, "timeout": 1, "max_retries": 1, "max_retries_down": 1}


def test_add_change_and_remove(cloud):
    balancer = cloud.served("change", ("member1",))
    pool = cloud.pool_of(balancer)
    member = cloud.balancers.create_member(pool, **cloud.member("member2"))
    cloud.active(balancer.id)
    cloud.balanced(balancer.vip_address, {"member1": 1, "member2": 1})
    cloud.balancers.update_member(member, pool, weight=4)
    cloud.active(balancer.id)
    cloud.balanced(balancer.vip_address, {"member1": 1, "member2": 4})
    cloud.balancers.update_member(member, pool, weight=0)
    cloud.active(balancer.id)
    assert cloud.answers(balancer.vip_address, 10) == {"member1": 10}
    cloud.operating(lambda: cloud.balancers.get_member(member.id, pool), "DRAINING")
    cloud.balancers.update_member(member, pool, weight=1)
    cloud.active(balancer.id)
    cloud.balancers.update_member(member, pool, is_admin_state_up=False)
    cloud.active(balancer.id)
    assert cloud.answers(balancer.vip_address, 10) == {"member1": 10}
    cloud.operating(lambda: cloud.balancers.get_member(member.id, pool), "OFFLINE")
    cloud.balancers.delete_member(member, pool)
    cloud.active(balancer.id)
    assert [one.name for one in cloud.balancers.members(pool)] == ["member1"]
    assert cloud.answers(balancer.vip_address, 10) == {"member1": 10}


@pytest.mark.feature("member.batch")
def test_batch_update(cloud):
    balancer = cloud.served("batch", ("member1", "member2"))
    pool = cloud.pool_of(balancer)

    def put(members, query=""):
        answer = cloud.balancers.put(cloud.url(f"pools/{pool.id}/members{query}"), json={"members": members})
        assert answer.status_code == 202, answer.text
        cloud.active(balancer.id)

    put([cloud.member("member2", weight=3), cloud.member("member3")])
    cloud.balanced(balancer.vip_address, {"member2": 3, "member3": 1})
    assert {one.name for one in cloud.balancers.members(pool)} == {"member2", "member3"}
    put([cloud.member("member1")], "?additive_only=true")
    cloud.balanced(balancer.vip_address, {"member1": 1, "member2": 3, "member3": 1})
    put([])
    assert list(cloud.balancers.members(pool)) == []
    assert cloud.answers(balancer.vip_address, 2) == {"503": 2}


def test_a_failed_member_recovers(cloud, member_process):
    balancer = cloud.served("death", monitor=MONITOR)
    pool = cloud.pool_of(balancer)
    member = next(one for one in cloud.balancers.members(pool) if one.name == "member2")

    def fetch():
        return cloud.balancers.get_member(member.id, pool)

    cloud.operating(fetch, "ONLINE")
    with member_process("member2"):
        cloud.operating(fetch, "ERROR")
        assert cloud.answers(balancer.vip_address, 6) == {"member1": 6}
        cloud.operating(lambda: cloud.balancers.get_pool(pool.id), "DEGRADED")
        assert cloud.balancers.get_load_balancer(balancer.id).provisioning_status == "ACTIVE"
    cloud.operating(fetch, "ONLINE")
    cloud.online(balancer.id)
    cloud.balanced(balancer.vip_address, {"member1": 1, "member2": 1})


@pytest.mark.feature("lb.stats", "listener.stats")
def test_statistics_equal_the_requests_sent(cloud):
    balancer = cloud.served("statistics")
    assert sum(cloud.answers(balancer.vip_address, 40).values()) == 40
    pool = cloud.pool_of(balancer)
    # A runtime update and a reload: neither loses a count.
    cloud.balancers.create_member(pool, **cloud.member("member3"))
    cloud.active(balancer.id)
    assert sum(cloud.answers(balancer.vip_address, 20).values()) == 20
    cloud.balancers.update_pool(pool, lb_algorithm="LEAST_CONNECTIONS")
    cloud.active(balancer.id)
    assert sum(cloud.answers(balancer.vip_address, 30).values()) == 30

    def counted():
        return cloud.balancers.get_load_balancer_statistics(balancer.id).total_connections

    cloud.until(lambda: counted() >= 90, "90 connections are counted")
    found = cloud.balancers.get_listener_statistics(cloud.listener_of(balancer).id)
    assert (found.total_connections, found.active_connections, found.request_errors) == (90, 0, 0)
    assert found.bytes_in > 0
    assert found.bytes_out > 0
