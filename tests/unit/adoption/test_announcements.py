# SPDX-License-Identifier: Apache-2.0
"""The request after a revert that lets a single former amphora announce the VIPs.

`tests/openstack/test_cloud_adoption.py` has Octavia's API and worker, and measures the outage.
"""

import logging

import pytest

from amphora_driver import config
from amphora_driver.adoption.cloud import OpenStackCloud
from amphora_driver.adoption.octavia_state import OctaviaState, OldAmphora
from amphora_driver.openstack.errors import ApiError

LB = "00000000-0000-4000-8000-000000000001"


class Balancers:
    """Octavia's API, which refuses all requests if there is an error."""

    def __init__(self, error=None):
        self.received, self._error = [], error

    def request(self, method, path, *, json):
        self.received.append((method, path, json))
        if self._error:
            raise self._error


def edge(balancers):
    made = OpenStackCloud(config.load([]))
    made._octavia = balancers
    return made


def state(number):
    amphorae = [
        OldAmphora(id=f"a{one}", status="ALLOCATED", role="MASTER", compute_id="c", port_id="p")
        for one in range(number)
    ]
    return OctaviaState(
        load_balancer_id=LB,
        project_id="demo",
        provider="amphora",
        status="PENDING_UPDATE",
        topology="SINGLE",
        vip_port_id="vip",
        amphorae=tuple(amphorae),
    )


@pytest.mark.parametrize("number", [1, 2])
def test_only_a_single_amphora_needs_an_update(number):
    balancers = Balancers()
    edge(balancers).announce(state(number))
    wanted = ("PUT", f"/lbaas/loadbalancers/{LB}", {"loadbalancer": {}})
    assert balancers.received == ([wanted] if number == 1 else [])


def test_a_refusal_does_not_stop_the_way_back(caplog):
    refused = ApiError(f"PUT /lbaas/loadbalancers/{LB}", 403, "forbidden", "the policy does not permit it")
    with caplog.at_level(logging.WARNING):
        edge(Balancers(refused)).announce(state(1))
    assert f"openstack loadbalancer set {LB}" in caplog.text
    assert "the policy does not permit it" in caplog.text
