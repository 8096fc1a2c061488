# SPDX-License-Identifier: Apache-2.0
"""Answers of Octavia that tests/cluster cannot produce on request."""

import pytest
from cluster_data import group
from test_cloud_session import connect, serving

from amphora_cluster.cloud.errors import Busy
from amphora_cluster.cloud.octavia import OctaviaPools

# The answer of `_test_lb_status` in Octavia's controller of load balancers.
PENDING = {"faultcode": "Client", "faultstring": "Invalid state PENDING_UPDATE of loadbalancer resource lb"}


def answering(status="ACTIVE", active=0, total=0):
    """A function that answers the reads of a pool with one listener."""

    def answer(method, path, headers, body):
        last = path.partition("?")[0].rpartition("/")[2]
        found = {
            "lb": {"loadbalancer": {"provisioning_status": status, "tags": ["amphora-cluster:g"]}},
            "pool": {"pool": {"id": "pool", "healthmonitor_id": None, "listeners": [{"id": "li"}]}},
            "stats": {"stats": {"active_connections": active, "total_connections": total}},
            "members": {"members": []},
        }
        return (409, PENDING, {}) if method == "DELETE" else (200, found[last], {})

    return answer


@pytest.mark.parametrize(("active", "total", "known"), [(0, 0, None), (0, 7, 0), (2, 7, 2)])
def test_zeros_of_a_provider_without_statistics_are_no_number(active, total, known):
    with serving(answering(active=active, total=total)) as url:
        pool = OctaviaPools(connect(url)).read_pool(group(), connections=True)
    assert pool.active_connections == known


@pytest.mark.parametrize(("shown", "found"), [([{"id": "lb2"}], "lb2"), ([], "lb")])
def test_the_load_balancer_of_a_pool(shown, found):
    def answer(method, path, *more):
        status, document, headers = answering()(method, path, *more)
        if "pool" in document:
            assert "fields=loadbalancers" in path
            document["pool"]["loadbalancers"] = shown
        return status, document, headers

    with serving(answer) as url:
        assert OctaviaPools(connect(url)).read_pool(group()).load_balancer_id == found


@pytest.mark.parametrize(("status", "states"), [("ACTIVE", (True, False)), ("ERROR", (False, True)),
                                                ("PENDING_UPDATE", (False, False))])  # fmt: skip
def test_the_states_of_a_load_balancer(status, states):
    with serving(answering(status)) as url:
        pool = OctaviaPools(connect(url)).read_pool(group())
    assert (pool.changeable, pool.failed) == states


def test_a_pending_load_balancer_is_busy_for_a_deletion():
    with serving(answering("PENDING_UPDATE")) as url, pytest.raises(Busy):
        OctaviaPools(connect(url)).delete_load_balancer("g", "lb")
