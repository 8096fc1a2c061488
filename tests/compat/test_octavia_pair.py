# SPDX-License-Identifier: Apache-2.0
"""A pair that Octavia's worker creates with its flow for ACTIVE_STANDBY."""

from __future__ import annotations

import http.client
from contextlib import suppress

import pytest
from amphora_lab import eventually, get
from balancers import SUBNET, balancer, listener, member, plug, pool
from pair_lab import PLACES, Node

STICKY = pool(member("m1"), member("m2"), member("m3"), persistence={"type": "SOURCE_IP"})
PRIORITIES = (100, 90)
# Three advertisements of one second each may be missed. The rest is a margin for a busy machine.
TAKEN_OVER_SECONDS = 30.0


@pytest.fixture
def nodes(compat_network, controllers, tmp_path):
    made = []
    try:
        for place in PLACES[:2]:
            compat_network.plug_in(place)
            directory = tmp_path / place.namespace
            directory.mkdir()
            made.append(Node(compat_network, directory, controllers, place))
            made[-1].start()
        for node in made:
            eventually(node.answers, "the agent answers")
        yield made
    finally:
        for node in made:
            node.power_off()
            compat_network.pull_out(node.where)


@pytest.mark.extended
def test_a_pair_created_by_octavia_fails_over(worker, nodes, compat_network):
    client = compat_network.thread("cl")
    for node, partner, priority in zip(nodes, reversed(nodes), PRIORITIES, strict=True):
        worker.drive(node, node.where.fixed, priority)
        worker("configure", "ACTIVE_STANDBY", heartbeat_key="k", controller_ip_port_list=[], heartbeat_interval=10)
        plug(worker, node.where.mac)
        assert worker("interface", node.where.fixed) == "eth1"
        assert not node.holds()  # the partner can have the VIP
        wanted = balancer(listener(), STICKY, partners=[{"id": partner.id, "vrrp_ip": partner.where.fixed}])
        worker("update", wanted)
        worker("vrrp", "upload", wanted, SUBNET)
        worker("vrrp", "start", wanted, SUBNET)
    first, second = nodes
    eventually(lambda: [node.holds() for node in nodes].count(True) == 1, "one node holds the VIPs", TAKEN_OVER_SECONDS)
    holder, other = (first, second) if first.holds() else (second, first)
    said = eventually(lambda: answer(client), "the pair serves")
    # The stick-table entry must be at the partner before the holder fails.
    eventually(lambda: "used:1" in other.ask_haproxy("show table"), "the partner has the stick-table entry")
    holder.power_off()
    eventually(lambda: answer(client), "the partner serves", TAKEN_OVER_SECONDS)
    assert {answer(client) for _ in range(6)} == {said}


def answer(client):
    with suppress(OSError, http.client.HTTPException):
        return client.run(get, timeout=1.0)[1]
    return None
