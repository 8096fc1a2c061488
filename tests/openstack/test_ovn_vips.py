# SPDX-License-Identifier: Apache-2.0
"""VIPs on OVN in user space: a holder claims its virtual ports by the announcements of keepalived."""

from __future__ import annotations

import signal
import time

import pytest
from ovn_network import VIRTUAL

from amphora_lab import eventually  # isort: skip
from pair_lab import FAST, USUAL  # isort: skip
from peers import SocketFactory  # isort: skip
from http_clients import HttpClient  # isort: skip

pytestmark = [pytest.mark.root, pytest.mark.quiet]
pytest_plugins = ("ovn_fixtures",)

_CLAIM_SECONDS = 3.0


def test_announcements_claim_the_virtual_ports(ovn_pair, record_property):
    """Gratuitous ARP and unsolicited neighbour advertisements suffice, without packets of clients."""
    pair = ovn_pair
    for port in VIRTUAL.values():
        assert pair.ovn.claims.parent(port) == pair.holder.where.cable
    began = time.monotonic()
    holder = pair.move(drain=0)
    for vip, port in VIRTUAL.items():
        claimed = pair.ovn.claims.await_parent(port, holder.where.cable, began, _CLAIM_SECONDS)
        record_property(f"seconds until {vip} is claimed", round(claimed, 3))
    for place in ("cl", "far"):
        client = HttpClient(SocketFactory(pair.network.thread(place)))
        for vip in VIRTUAL:
            assert client.fetch(address=vip).status == 200, f"{vip} from {place}"
    assert pair.holder is holder


@pytest.mark.extended
@pytest.mark.parametrize(("advert", "bound"), [(FAST, 1.5), (USUAL, 4.5)])
def test_time_of_an_unplanned_failover(ovn_pair, record_property, advert, bound):
    """The standby takes over after three advertisements; clients on both sides of the router follow."""
    pair = ovn_pair
    pair.advert = advert
    pair.push(pair.tree)
    pair.steady()
    holder, standby = pair.holder, pair.standby
    askers = []
    with pair.poll() as near, pair.poll(place="far") as far:
        askers = [near, far]
        began = time.monotonic()
        holder.everything(signal.SIGKILL)
        pair.network.cut(holder.where)
        eventually(lambda: standby.holds(pair.vip), "the standby holds the VIPs", 10 * advert + 5)
        for vip, port in VIRTUAL.items():
            claimed = pair.ovn.claims.await_parent(port, standby.where.cable, began)
            record_property(f"seconds until {vip} is claimed", round(claimed, 3))
        eventually(pair.serves, "the pair serves")
    pair.reboot(holder)
    pair.advert = USUAL
    eventually(holder.answers, "the agent answers")
    pair.push(pair.tree)
    pair.steady()
    for place, each in zip(("cl", "far"), askers, strict=True):
        record_property(f"outage in seconds at {place}", round(each.outage, 3))
        assert 0 < each.outage < bound, each.failed
