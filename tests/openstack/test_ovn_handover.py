# SPDX-License-Identifier: Apache-2.0
"""Planned hand-over of the VIPs on OVN in user space, with stateless and stateful security groups.

The answers of the former holder go back through the tunnel, and leave from the port of the new holder. So the
connection tracking of a stateful group sees both directions there. An amphora whose kernel does not support this
answers from its own port. A stateful group drops these answers, because it tracks no packet of the client there.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

import pytest
from ovn_kernel_tracking import invalid_in_kernel, tracked_by_kernel
from ovn_lab import CHASSIS
from ovn_network import VIRTUAL, chassis_of
from ovn_pair import tunnelled
from ovn_streams import Download, Upload

from amphora_lab import eventually  # isort: skip
from pair_lab import MEDIUM, USUAL  # isort: skip
from wanted import VIP, VIP6  # isort: skip

pytestmark = [pytest.mark.root, pytest.mark.quiet]
pytest_plugins = ("ovn_fixtures",)

_LONGEST_GAP = 5.0
"""Seconds. The move takes a fraction of a second, and a retransmission on a busy machine seconds. A stall lasts."""
_LEAST_TUNNELLED = 100
_FEW = 20
_SILENT = 3.0
"""Seconds without data after which a connection has stalled. The sender repeats its data several times meanwhile."""


def _invalid(pair):
    return sum(map(pair.ovn.invalid, CHASSIS))


def _hand_over(pair, streams, record_property):
    """Hand the VIPs over; assert that data continue through the new holder's tunnel without a loss."""
    holder, standby = pair.holder, pair.standby
    before, dropped, began = tunnelled(standby), _invalid(pair), time.monotonic()
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
    eventually(
        lambda: holder.call("GET", "/v2/vrrp")[1][count] == len(streams), "the former holder counts its connections"
    )
    assert pair.holder is standby
    assert _invalid(pair) == dropped, "connection tracking knows all packets"
    for each in streams:
        each.finish()
    for vip in VIRTUAL:
        assert pair.client.fetch(address=vip).status == 200


# Stateless first: Open vSwitch 3.1.0 aborts sometimes after a group has become stateful again (conn_update_state()).
@pytest.mark.parametrize("place", ["cl", pytest.param("far", marks=pytest.mark.extended)], ids=["near", "routed"])
@pytest.mark.parametrize("stateful", [False, True], ids=["stateless", "stateful"])
def test_open_connections_lose_nothing(ovn_pair, record_property, stateful, place):
    """An echo, a download and an upload to each VIP continue through the new holder."""
    ovn_pair.network.set_group(stateful=stateful)
    _hand_over(ovn_pair, ovn_pair.open(VIP, VIP6, place=place), record_property)


@pytest.mark.extended
def test_open_connections_lose_nothing_with_connection_tracking_of_the_kernel(ovn_pair, record_property):
    """The kernel's tracking is stricter than that of user space, and real compute nodes use it."""
    pair = ovn_pair
    with ExitStack() as tracking:
        for node in pair.nodes:
            tracking.enter_context(tracked_by_kernel(pair.ovn, chassis_of(node.where), node.where.cable))
        pair.ovn.nb("--wait=hv", "sync")
        pair.calm()
        _hand_over(pair, pair.open(VIP, VIP6), record_property)
        # Packets that cross the move, or the end of a connection.
        assert sum(invalid_in_kernel(pair.ovn, chassis) for chassis in CHASSIS) < _FEW
        pair.tidy()
        # The tracking works: the kernel drops answers that leave directly.
        streams = pair.open(VIP, VIP6)
        holder = pair.holder
        pair.move()
        holder.inside("nft", "delete", "table", "netdev", "amphora_answers")
        for each in streams:
            each.progress.await_stall(_SILENT)
        assert invalid_in_kernel(pair.ovn, chassis_of(holder.where)) > 0
        holder.inside("ss", "-K", "src", VIP, "or", "src", f"[{VIP6}]")
        pair.tidy()
    pair.ovn.nb("--wait=hv", "sync")


@pytest.mark.extended
def test_open_connections_lose_nothing_with_a_tunnel_over_ipv6(ovn_pair, record_property):
    """The kernel fragments no packet for such a tunnel: both sides agree on segments that fit into it."""
    pair = ovn_pair
    pair.network.set_group(stateful=True)
    pair.speak_ipv6(alone=False)
    pair.advert = MEDIUM
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
def test_an_ordinary_move_with_a_stateful_group_resets_at_once(ovn_pair, record_property):
    """Clients know at once that their connection has ended, and connect again."""
    pair = ovn_pair
    pair.network.set_group(stateful=True)
    streams = pair.open(VIP, VIP6)
    with pair.poll() as polling:
        began = time.monotonic()
        pair.move(drain=0)
        for each in streams:
            after = each.progress.await_end(_LONGEST_GAP) - began
            record_property(f"seconds until the end: {each}", round(after, 3))
            assert isinstance(each.progress.error, ConnectionError), f"{each}: {each.progress.error!r}"
        pair.open(VIP, VIP6)
    record_property("seconds in which new connections failed", round(polling.outage, 3))
    assert polling.outage < 1.0, polling.failed


@pytest.mark.extended
def test_stateful_group_drops_answers_that_leave_directly(ovn_pair, record_property):
    """Without answers through the tunnel, downloads and uploads stall, and clients get no error.

    If the test fails, data continue to arrive: compare `docs/explanation/decisions/0019-answers-through-tunnel.md`.
    """
    pair = ovn_pair
    pair.network.set_group(stateful=True)
    streams = pair.open(VIP, VIP6, kinds=(Download, Upload))
    holder = pair.holder
    before, began = pair.ovn.invalid(chassis_of(holder.where)), time.monotonic()
    pair.move()
    holder.inside("nft", "delete", "table", "netdev", "amphora_answers")  # as if the kernel had no egress hook
    for each in streams:
        record_property(f"seconds until the stall: {each}", round(each.progress.await_stall(_SILENT) - began, 3))
    assert pair.ovn.invalid(chassis_of(holder.where)) > before, "the switch drops the former holder's packets"
    holder.inside("ss", "-K", "src", VIP, "or", "src", f"[{VIP6}]")  # they would last until the drain ends
