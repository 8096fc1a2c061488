# SPDX-License-Identifier: Apache-2.0
"""Batch updates of members: hundreds in one request, additions, and the removal of half of them.

Octavia's own cost is quadratic: for each removed member, its status reporting loads all the others.
`AMPHORA_MEMBERS=1000` therefore takes minutes.
"""

import os
import sys
import time

import pytest
from agreement import assert_agreed

pytestmark = [pytest.mark.root, pytest.mark.extended]
NUMBER = int(os.environ.get("AMPHORA_MEMBERS", "300"))
TIME_LIMIT = 100 + 0.3 * NUMBER


def far(number, **more):
    """Return a member behind the gateway, without a host."""
    address = f"10.0.{number // 250}.{number % 250 + 1}"
    return {"name": f"far-{number}", "address": address, "protocol_port": 8080, **more}


@pytest.mark.feature("member.batch")
def test_hundreds_of_members(cloud, capsys):
    balancer = cloud.served("many", ("member1",))
    pool = cloud.pool_of(balancer)
    many = [far(number) for number in range(NUMBER)]

    def put(what, members, query=""):
        begin = time.monotonic()
        answer = cloud.balancers.put(cloud.url(f"pools/{pool.id}/members{query}"), json={"members": members})
        accepted = time.monotonic()
        assert answer.status_code == 202, answer.text
        cloud.until(
            lambda: cloud.balancers.get_load_balancer(balancer.id).provisioning_status == "ACTIVE", what, TIME_LIMIT
        )
        took = f"accepted in {accepted - begin:.1f} s, ACTIVE {time.monotonic() - accepted:.1f} s later"
        with capsys.disabled():
            sys.stdout.write(f"\n{what}: {took}\n")
        assert_agreed(cloud, balancer)
        found = list(cloud.balancers.members(pool))
        assert {one.provisioning_status for one in found} == {"ACTIVE"}
        return {one.name for one in found}

    names = {one["name"] for one in many}
    assert put(f"{NUMBER} members instead of one", many) == names
    more = [cloud.member("member1"), far(0, weight=0)]
    assert put("one member added, one changed", more, "?additive_only=true") == names | {"member1"}
    rest = [cloud.member("member1"), *(far(number, weight=0) for number in range(NUMBER // 2))]
    assert put("half of the members removed, the others with weight 0", rest) == {one["name"] for one in rest}
    assert cloud.answers(balancer.vip_address, 3) == {"member1": 3}
    # The test deletes the load balancer, because the fixture's time-out is too short.
    cloud.balancers.delete_load_balancer(balancer.id, cascade=True)
    cloud.until(lambda: not list(cloud.balancers.load_balancers()), "the load balancer is deleted", TIME_LIMIT)
