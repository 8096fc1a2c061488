# SPDX-License-Identifier: Apache-2.0
"""The seven scenarios of the load-balancing policy under traffic: no request fails while servers join and leave.

A cluster creates its servers before they join, and deletes them after they left. Nova is a stub; the servers are the
member hosts of the sandbox. The second provider has no data plane, so its scenarios have no traffic.
"""

import client_traffic
import pytest

pytestmark = [pytest.mark.root, pytest.mark.lasts(300)]


def slow_traffic(cloud, balancer):
    """A client whose requests take longer than a pass, so that they run while their server drains."""
    return client_traffic.Traffic(cloud, balancer.vip_address, path="/slow/0.7", timeout=5)


def weights(cloud, web):
    """The weights of all members of the pool, by server."""
    return {one.name: one.weight for one in cloud.balancers.members(web.group.pool_id)}


def scenarios(web, cluster, first, expect):
    """Run all scenarios; `expect` checks after each one which servers serve."""
    # S7, NODE_CREATE: one server is created, then joins.
    [second] = cluster.create("member2")
    assert web.done("join", {"server": second})["succeeded"] == [second]
    expect(first, second)

    # S4, CLUSTER_SCALE_OUT: new servers are created; the group finds them by itself, and the caller waits.
    [third] = cluster.create("member3")
    assert web.done("sync", {"servers": [third]})["kind"] == "sync"
    web.reaches({first: "serving", second: "serving", third: "serving"})
    expect(first, second, third)

    # S1, CLUSTER_SCALE_IN: one server is chosen and leaves, then is deleted.
    scale_in = {"count": 1, "criterion": "youngest"}
    [left] = web.done("leave", scale_in, key="scale-in-1")["succeeded"]
    rest = {first, second, third} - {left}
    expect(*rest)
    # The caller repeats its request after a lost answer: no second server leaves.
    assert web.done("leave", scale_in, key="scale-in-1")["succeeded"] == [left]
    # S5, CLUSTER_ADD_NODES: the server is added again instead.
    assert web.done("join", {"servers": [left]})["succeeded"] == [left]
    expect(first, second, third)

    # S2, CLUSTER_DEL_NODES: the caller names the servers.
    assert web.done("leave", {"servers": [second]})["succeeded"] == [second]
    expect(first, third)
    cluster.delete(second)
    web.reaches({first: "serving", third: "serving"})

    # S3, CLUSTER_RESIZE that shrinks: the number of servers is given.
    [left] = web.done("leave", {"count": 1}, key="resize-1")["succeeded"]
    [stays] = {first, third} - {left}
    expect(stays)
    cluster.delete(left)

    # S7, NODE_DELETE, refused: the last server must not leave.
    status, refused = web.post("leave", {"servers": [stays]})
    assert (status, "minimum of the group is 1" in refused["happened"], set(refused["failed"])) == (409, True, {stays})
    expect(stays)

    # S6, CLUSTER_RESIZE that expands: several servers at once.
    hosts = {"member1", "member2", "member3"} - {cluster.hosts[stays]}
    made = cluster.create(*hosts)
    assert set(web.done("join", {"servers": made})["succeeded"]) == set(made)
    expect(stays, *made)


def test_no_request_fails_in_any_scenario(cloud, served, cluster):
    balancer, web, first = served(minimum=1)
    seen = []
    with client_traffic.Traffic(cloud, balancer.vip_address) as fast, slow_traffic(cloud, balancer) as slow:

        def expect(*servers):
            assert weights(cloud, web) == dict.fromkeys(servers, 1)
            fast.more(30)
            assert set(cloud.answers(balancer.vip_address, 12)) == {cluster.hosts[one] for one in servers}
            assert (fast.failed, slow.failed) == (0, 0), (fast.answers, slow.answers)
            seen.append(servers)

        scenarios(web, cluster, first, expect)
    assert (fast.failed, slow.failed) == (0, 0), (fast.answers, slow.answers)
    assert len(seen) == 8
    assert slow.answers["200"] > 10


@pytest.mark.extended
def test_the_scenarios_with_another_provider(cloud, served, cluster, other_provider):
    _, web, first = served("noop_driver", minimum=1)

    def expect(*servers):
        assert weights(cloud, web) == dict.fromkeys(servers, 1)

    scenarios(web, cluster, first, expect)
    web.deleted()
