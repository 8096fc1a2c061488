# SPDX-License-Identifier: Apache-2.0
"""Planned hand-over of the VIPs on OVN in user space, with stateless and stateful security groups.

The former holder answers as the VIP, while the new holder owns the VIP. With a stateless group nothing is lost. With a
stateful group the switch drops these answers: its connection tracking of the former holder's port sees no packet of the
client. Then the controller uses the ordinary move, which resets connections.
"""

from __future__ import annotations

import time

import pytest
from ovn_network import VIRTUAL, chassis_of
from ovn_pair import tunnelled
from ovn_streams import Download, Upload

from amphora_lab import eventually  # isort: skip
from pair_lab import PATIENT, USUAL  # isort: skip
from wanted import VIP, VIP6  # isort: skip

pytestmark = [pytest.mark.root, pytest.mark.quiet]
pytest_plugins = ("ovn_fixtures",)

_LONGEST_GAP = 5.0
"""Seconds. The move takes a fraction of a second, and a retransmission on a busy machine seconds. A stall lasts."""
_LEAST_TUNNELLED = 100
_SILENT = 3.0
"""Seconds without data after which a connection has stalled. The sender repeats its data several times meanwhile."""


def _hand_over(pair, streams, record_property):
    """Hand the VIPs over; assert that data continue to arrive, by way of the new holder's tunnel, and none is lost."""
    holder, standby = pair.holder, pair.standby
    before, began = tunnelled(standby), time.monotonic()
    pair.move()
    record_property("seconds until the new holder has the VIPs", round(time.monotonic() - began, 3))
    for vip, port in VIRTUAL.items():
        claimed = pair.ovn.claims.await_parent(port, standby.where.cable, began)
        record_property(f"seconds until {vip} is claimed", round(claimed, 3))
    for each in streams:
        each.await_flow()
    for each in streams:
        gap = each.progress.gap(began)
        record_property(f"longest gap in seconds: {each}", round(gap, 3))
        assert gap < _LONGEST_GAP, each
    eventually(lambda: tunnelled(standby) > before + _LEAST_TUNNELLED, "the new holder forwards packets")
    count = "connections"
    eventually(lambda: holder.call("GET", "/v2/vrrp")[1][count] == len(streams), "its connections are counted")
    assert pair.holder is standby
    for each in streams:
        each.finish()
    for vip in VIRTUAL:
        assert pair.visitor.fetch(address=vip).status == 200


def test_stateless_group_loses_nothing(ovn_pair, record_property):
    """An echo, a download and an upload to each VIP continue through the new holder."""
    _hand_over(ovn_pair, ovn_pair.open(VIP, VIP6), record_property)


@pytest.mark.extended
def test_stateless_group_loses_nothing_behind_the_router(ovn_pair, record_property):
    _hand_over(ovn_pair, ovn_pair.open(VIP, VIP6, place="far"), record_property)


@pytest.mark.extended
def test_stateless_group_loses_nothing_with_a_tunnel_over_ipv6(ovn_pair, record_property):
    pair = ovn_pair
    pair.speak_ipv6(alone=False)
    pair.advert = PATIENT
    try:
        pair.push(pair.tree)
        pair.steady()
        _hand_over(pair, pair.open(VIP, VIP6), record_property)
    finally:
        pair.tidy()
        pair.speak_ipv4()
        pair.advert = USUAL
        pair.push(pair.tree)
        pair.steady()


@pytest.mark.extended
def test_stateful_group_ordinary_move_resets_at_once(ovn_pair, record_property):
    """Clients know at once that their connection has ended, and connect again."""
    pair = ovn_pair
    pair.network.set_group(stateful=True)
    streams = pair.open(VIP, VIP6)
    with pair.asking(VIP) as asker, pair.asking(VIP6) as asker6:
        began = time.monotonic()
        pair.move(drain=0)
        for each in streams:
            after = each.progress.await_end(_LONGEST_GAP) - began
            record_property(f"seconds until the end: {each}", round(after, 3))
            assert isinstance(each.progress.error, ConnectionError), f"{each}: {each.progress.error!r}"
        pair.open(VIP, VIP6)
    for each in (asker, asker6):
        record_property("seconds in which new connections failed", round(each.outage, 3))
        assert each.outage < 1.0, each.failed


@pytest.mark.extended
def test_stateful_group_stalls_a_handed_over_connection(ovn_pair, record_property):
    """The reason why the controller does not use the tunnel with a stateful group.

    If this test fails, data continue to arrive: then compare `docs/explanation/decisions/0019-handover-by-group.md`.
    """
    pair = ovn_pair
    pair.network.set_group(stateful=True)
    streams = pair.open(VIP, VIP6, kinds=(Download, Upload))
    holder = pair.holder
    before, began = pair.ovn.invalid(chassis_of(holder.where)), time.monotonic()
    pair.move()
    for each in streams:
        record_property(f"seconds until the stall: {each}", round(each.progress.await_stall(_SILENT) - began, 3))
    assert pair.ovn.invalid(chassis_of(holder.where)) > before, "the switch drops what the former holder sends"
