# SPDX-License-Identifier: Apache-2.0
"""Session persistence by source address: clients stay on their member."""

from __future__ import annotations

import pytest
from http_clients import CLIENT, CLIENT6, OTHER, OTHER6, ask
from peers import MEMBER, MEMBER6
from wanted import VIP, VIP6, listener, load_balancer, member, monitor, pool

pytestmark = pytest.mark.root

CLIENTS = (CLIENT, CLIENT6, OTHER, OTHER6)
NEWCOMERS = ("198.51.100.22", "2001:db8:1::22")


def vip_of(source: str) -> str:
    return VIP6 if ":" in source else VIP


class StickyPool:
    """A pool with persistence by source address."""

    def __init__(self, served, name: str, protocol: str = "HTTP", watched=None) -> None:
        self.served = served
        self.protocol = protocol
        self.watched = watched
        self.pool = name
        make = served.web if protocol == "HTTP" else served.echo
        self.peers = {n: make(n, (MEMBER, MEMBER6)[place % 2]) for place, n in enumerate("abcd")}

    def push(self, *names: str, changes=None, listening=None) -> str:
        members = [member(self.peers[name], **(changes or {}).get(name, {})) for name in names]
        tree = load_balancer(
            listener(80, protocol=self.protocol, pool=self.pool, **(listening or {})),
            pool(
                self.pool,
                *members,
                protocol=self.protocol,
                persistence=("SOURCE_IP", None),
                monitor=self.watched,
            ),
        )
        return self.served.push(tree).how

    def home(self, source: str) -> str:
        connection = self.served.client.connect(80, vip_of(source), source=source)
        try:
            if self.protocol == "HTTP":
                return ask(connection).member
            return connection.recv(100).decode().strip()
        finally:
            connection.close()

    def homes(self, clients=CLIENTS) -> dict[str, str]:
        return {source: self.home(source) for source in clients}


@pytest.mark.feature("pool.session_persistence.SOURCE_IP")
@pytest.mark.parametrize("protocol", ["HTTP", "TCP"])
def test_clients_stay(served, protocol):
    """Clients stay while other members are added, removed and drained, and after a reload."""
    kept = StickyPool(served, f"kept {protocol}", protocol)
    kept.push("a", "b")
    before = kept.homes()
    assert sorted(before.values()) == ["a", "a", "b", "b"]  # round robin assigns new clients
    for _ in range(3):
        assert kept.homes() == before
    # One more member: no client moves.
    assert kept.push("a", "b", "c") == "runtime"
    assert kept.homes() == before
    # A new worker: no client moves.
    assert kept.push("a", "b", "c", listening={"timeout_client_data": 49_000}) == "reload"
    served.until_learned(len(CLIENTS))
    assert kept.homes() == before
    # A draining member keeps its clients and gets no new one.
    drained = {"a": {"weight": 0}}
    assert kept.push("a", "b", "c", changes=drained, listening={"timeout_client_data": 49_000}) == "runtime"
    assert kept.homes() == before
    assert "a" not in kept.homes(NEWCOMERS).values()
    assert kept.push("a", "b", changes={"a": {"weight": 0}}) == "reload"
    served.until_learned(len(CLIENTS))
    assert kept.homes() == before
    # A removed member loses its clients; others keep theirs, and moved clients stay.
    assert kept.push("b", "c") == "runtime"
    moved = kept.homes()
    assert all(moved[source] == "b" for source in CLIENTS if before[source] == "b")
    assert set(moved.values()) <= {"b", "c"}
    assert kept.homes() == moved
    assert kept.push("a", "b", "c") == "runtime"
    assert kept.homes() == moved


@pytest.mark.feature("pool.session_persistence.SOURCE_IP", "member.admin_state_up")
def test_disabled_or_dead_member_keeps_no_client(served):
    kept = StickyPool(served, "kept", watched=monitor("TCP"))
    kept.push("a", "b")
    served.until_states("kept", {"a": "UP", "b": "UP"})
    before = kept.homes()
    assert set(before.values()) == {"a", "b"}
    assert kept.push("a", "b", changes={"a": {"admin_state_up": False}}) == "runtime"
    assert set(kept.homes().values()) == {"b"}
    assert kept.push("a", "b") == "runtime"
    assert set(kept.homes().values()) == {"b"}  # clients stay on their present member
    kept.peers["b"].stop()
    served.until_states("kept", {"a": "UP", "b": "DOWN"})
    assert set(kept.homes().values()) == {"a"}


@pytest.mark.feature("pool.session_persistence.SOURCE_IP")
def test_nothing_is_kept_without_persistence(served):
    """Without persistence, all members receive requests of one client."""
    kept = StickyPool(served, "kept anew")
    kept.push("a", "b")
    assert kept.home(CLIENT) == kept.home(CLIENT)
    members = [member(kept.peers[name]) for name in "ab"]
    served.push(load_balancer(listener(80, pool="kept anew"), pool("kept anew", *members)))
    assert {kept.home(CLIENT) for _ in range(4)} == {"a", "b"}


@pytest.mark.feature("pool.session_persistence.SOURCE_IP", "pool.lb_algorithm.LEAST_CONNECTIONS")
@pytest.mark.parametrize("protocol", ["PROXY", "PROXYV2"])
def test_pools_with_headers_keep_their_clients(served, protocol):
    peers = [served.web(name, proxied=True) for name in "ab"]
    served.push(
        load_balancer(
            listener(80, protocol="TCP", pool=protocol),
            pool(
                protocol,
                *map(member, peers),
                protocol=protocol,
                persistence=("SOURCE_IP", None),
                algorithm="LEAST_CONNECTIONS",
            ),
        )
    )
    homes = {}
    for _ in range(3):
        for source in CLIENTS:
            seen = served.client.fetch(address=vip_of(source), source=source).seen
            assert seen.proxied.source[0] == source
            assert homes.setdefault(source, seen.member) == seen.member
    assert set(homes.values()) == {"a", "b"}
