# SPDX-License-Identifier: Apache-2.0
"""Two amphorae on OVN with their requests of a hand-over, and the connections of a test.

Invariant: `tidy` ends the connections and redirects of a test.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from ovn_network import OvnNetwork
from ovn_streams import KINDS, Stream, StreamServer

# ovn_lab has made the modules of the data plane's tests importable.
from amphora_lab import eventually  # isort: skip
from pair_lab import Node, Pair  # isort: skip
from peers import SocketFactory  # isort: skip
from wanted import listener, load_balancer, member, pool  # isort: skip

_KIND = "ov"
_EXPECT_SECONDS, _DRAIN_SECONDS = 60, 30
WEB_PORT, STREAM_PORT = 80, 81


class OvnPair(Pair):
    """A pair with HTTP on port 80 and lasting connections on port 81."""

    network: OvnNetwork
    opened: list[Stream]

    def serve(self) -> None:
        """Start the members, push the load balancer, and wait for a VIP holder that serves."""
        self.web()
        self.streams = StreamServer(self.members, "streams")
        self.peers.append(self.streams)
        self.tree = load_balancer(
            listener(WEB_PORT),
            listener(STREAM_PORT, protocol="TCP", pool="tcp"),
            pool("pool", member(self.peers[0])),
            pool("tcp", member(self.streams), protocol="TCP"),
        )
        self.push(self.tree)
        self.calm()

    @property
    def ovn(self):
        return self.network.ovn

    def expect(self, node: Node, seconds: float = _EXPECT_SECONDS) -> None:
        """Let a node redirect packets of unknown connections to its partner."""
        status, answer = node.call("POST", "/v2/vrrp/expect", {"seconds": seconds})
        assert status == 200, answer

    def move(self, drain: float = _DRAIN_SECONDS) -> Node:
        """Move the VIPs to the standby; return the standby when it holds them."""
        holder, standby = self.holder, self.standby
        if drain:
            self.expect(standby)
        self.release(holder, drain)
        eventually(lambda: standby.holds(self.vip), "the partner holds the VIPs", 5.0)
        return standby

    def release(self, node: Node, drain: float = _DRAIN_SECONDS) -> None:
        """Let a node release the VIPs."""
        status, answer = node.call("POST", "/v2/vrrp/release", {"drain": drain})
        assert (status, answer["holds_vip"]) == (200, False), answer

    def open(self, *vips: str, place: str = "cl", kinds: Sequence[type[Stream]] = KINDS) -> list[Stream]:
        """Open connections of each kind to each VIP, and wait until data flow on each."""
        sockets = SocketFactory(self.network.thread(place))
        made = [kind(sockets, vip, STREAM_PORT, self.streams) for kind in kinds for vip in vips]
        self.opened += made
        for each in made:
            each.await_flow()
        return made

    def tidy(self) -> None:
        """End connections and redirects, so that the next test begins without them."""
        for each in self.opened:
            each.close()
        self.opened.clear()
        self.streams.again()
        for node in self.nodes:
            self.expect(node, 0)
        for node in self.nodes:
            eventually(lambda n=node: _is_idle(n), "the hand-over has ended")


def _is_idle(node: Node) -> bool:
    found = node.call("GET", "/v2/vrrp")[1]
    return found["expecting"] is None and found["draining"] is None


def tunnelled(node: Node) -> int:
    """Return the number of packets that a node has sent into the tunnel."""
    listed = json.loads(node.inside("ip", "-s", "-j", "link", "show", "handover0"))
    return listed[0]["stats64"]["tx"]["packets"] if listed else 0
