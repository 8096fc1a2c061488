# SPDX-License-Identifier: Apache-2.0
"""New amphorae prepare a load balancer without its VIPs, and take the VIPs before the former amphora is cut off.

The former amphora is one of this project: only its VIPs matter. A client asks every 10 ms. The cut of the cable stands
for Neutron, which disables a port.
"""

from __future__ import annotations

import os

import pytest
from amphora_lab import eventually, ip
from pair_lab import PLACES, VIP, VIP6, Pair, PairNetwork, plain
from stalls import Stalls
from wanted import load_balancer

from amphora_driver.reconcile import desired_bundle

pytestmark = [pytest.mark.root, pytest.mark.quiet]

LIMIT = 3.0
"""Seconds without an answer that an adoption may cause."""


@pytest.fixture
def stage(authority, tmp_path):
    network = PairNetwork(f"ad{os.getpid()}")
    made = Pair(network, tmp_path, authority, advert=desired_bundle._TAKING_INTERVAL)
    made.stalls = Stalls()
    try:
        yield made
    finally:
        made.close()
        made.stalls.close()
        network.close()


@pytest.mark.parametrize("number", [1, 2], ids=["single", "pair"])
def test_the_vips_move_to_prepared_amphorae(stage, number, record_property):
    former = stage.boot(PLACES[2])
    eventually(former.answers, "the agent of the former amphora answers")
    stage.web()
    stage.push(plain(stage), to=[former], alone=True)
    eventually(stage.serves, "the former amphora serves")
    new = [stage.boot(place) for place in PLACES[:number]]
    stage.nodes = new
    for node in new:
        eventually(node.answers, "the agent of a new amphora answers")
    with stage.poll(interval=0.01) as during_preparation:
        for _ in range(2):
            stage.push(plain(stage), to=new, held=True)
        for node in new:
            eventually(lambda node=node: node.health() == "0", "HAProxy of a new amphora runs")
            assert not {VIP, VIP6} & set(node.addresses())
            assert node.call("GET", "/v2/info")[1]["holds_vip"] is None
    assert during_preparation.failed == []
    with stage.poll(interval=0.01) as polling:
        stage.push(plain(stage), to=new, alone=number == 1)
        eventually(stage.holders, "a new amphora has the VIPs")
        if number == 1:
            # A client that asks during the overlap can learn the address of the former amphora.
            for vip in (VIP, VIP6):
                entry = f"{vip} lladdr {former.where.mac} dev eth0 nud reachable"
                ip(f"-n {stage.network.name('cl')} neigh replace {entry}")
        stage.network.cut(former.where)
        announced = [node.call("POST", "/v2/vips/announce")[1]["announced"] for node in new]
        assert announced == ([[VIP, VIP6]] if number == 1 else [[], []])
        macs = {node.where.mac for node in new}
        eventually(lambda: stage.network.neighbour("cl", VIP) in macs, "the client uses a new amphora")
        eventually(stage.serves, "a new amphora serves")
    record_property("outage", round(polling.outage, 3))
    assert polling.outage < LIMIT
    assert len(stage.holders()) == 1
    # The usual interval follows, and the VIPs stay.
    holder = stage.holder
    if number == 2:
        standby = next(one for one in new if one is not holder)
        with stage.poll(interval=0.01) as polling:
            stage.push(plain(stage), to=[standby, holder], advert_interval=1.0)
            eventually(lambda: all(node.is_well() for node in new), "both nodes are well")
        assert stage.holder is holder
        assert polling.failed == []
    if number == 1:
        assert stage.network.neighbour("cl", VIP6) in macs
    # Without the VIPs again, the nodes keep serving nothing.
    stage.push(load_balancer(), to=new, held=True)
    assert stage.holders() == []
    stage.nodes = [former, *new]
