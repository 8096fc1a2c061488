# SPDX-License-Identifier: Apache-2.0
"""Pools: the choice of a member by each algorithm."""

from __future__ import annotations

import socket
import struct
import subprocess
import threading
from collections import Counter

import pytest
from amphora_lab import eventually
from http_clients import CLIENT, CLIENT6, ask
from peers import MEMBER, MEMBER6, Answer
from wanted import VIP, VIP6, listener, load_balancer, member, monitor, pool

pytestmark = pytest.mark.root

# Addresses that no other module uses: the stick tables of the amphora remember clients.
CROWD = tuple(f"198.51.100.{n}" for n in range(200, 224))
CROWD6 = tuple(f"2001:db8:1::{n}" for n in range(200, 224))


@pytest.fixture(scope="module")
def client_addresses(lab):
    """Add the addresses of 48 clients."""
    name = lab.network.name("cl")

    def all_of_them(verb: str) -> None:
        lines = [f"addr {verb} {address}/24 dev eth0" for address in CROWD]
        # Deprecated, so that other clients do not use these as source.
        lines += [f"addr {verb} {address}/64 dev eth0 nodad preferred_lft 0" for address in CROWD6]
        subprocess.run(["ip", "-n", name, "-batch", "-"], input="\n".join(lines), text=True, check=True)

    all_of_them("replace")
    yield CROWD + CROWD6
    all_of_them("del")


def vip_of(source: str) -> str:
    return VIP6 if ":" in source else VIP


def greeting(connection: socket.socket) -> str:
    """Return the name that a TCP member sends first."""
    line = b""
    while not line.endswith(b"\n"):
        data = connection.recv(100)
        assert data, "the connection ended"
        line += data
    return line.decode().strip()


def reset(connection: socket.socket) -> None:
    """Reset a connection, so that a new one can use the same ports at once."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


# -- round robin --------------------------------------------------------------------------------------------------


@pytest.mark.feature("pool.lb_algorithm.ROUND_ROBIN", "member.weight")
@pytest.mark.parametrize("protocol", ["HTTP", "TCP"])
def test_round_robin_follows_the_weights(served, protocol):
    """Weights apply to both VIPs and to members of both families. They change without a reload."""
    make = served.web if protocol == "HTTP" else served.echo
    peers = {"one": make("one"), "three": make("three", MEMBER6), "none": make("none")}

    def shares(times: int, vip: str) -> Counter[str]:
        if protocol == "HTTP":
            connection = served.client.connect(80, vip)
            return Counter(ask(connection).member for _ in range(times))
        return Counter(greeting(served.client.connect(80, vip)) for _ in range(times))

    def tree(**weights: int):
        members = [member(peers[name], weight=weight) for name, weight in weights.items()]
        return load_balancer(
            listener(80, protocol=protocol), pool("pool", *members, protocol=protocol, algorithm="ROUND_ROBIN")
        )

    served.push(tree(one=1, three=3, none=0))
    for vip in (VIP, VIP6):
        assert shares(16, vip) == {"one": 4, "three": 12}
    pushed = served.push(tree(one=50, three=50, none=100))
    assert pushed.how == "runtime"
    found = shares(40, VIP)
    assert all(abs(found[name] - wanted) <= 1 for name, wanted in (("one", 10), ("three", 10), ("none", 20))), found


# -- least connections -------------------------------------------------------------------------------------------


@pytest.mark.feature("pool.lb_algorithm.LEAST_CONNECTIONS", "member.weight")
def test_least_connections_counts_open_connections(served):
    echoes = [served.echo(name, address) for name, address in (("a", MEMBER), ("b", MEMBER6), ("c", MEMBER))]
    a, b, c = (member(echo, weight=weight) for echo, weight in zip(echoes, (1, 1, 2), strict=True))
    served.push(
        load_balancer(
            listener(80, protocol="TCP"), pool("pool", a, b, c, protocol="TCP", algorithm="LEAST_CONNECTIONS")
        )
    )
    opened = [served.client.connect(80, (VIP, VIP6)[n % 2]) for n in range(8)]
    names = [greeting(connection) for connection in opened]
    assert Counter(names) == {"a": 2, "b": 2, "c": 4}
    # HAProxy uses the member with the fewest connections, in any order of members.
    for _ in range(2):
        place = names.index("b")
        names.pop(place)
        opened.pop(place).close()
    echoes[1].until(lambda: not echoes[1]._open, "the connections of member b have ended")
    # HAProxy notices the ends of the client and of the member separately.
    rows = lambda: [row["scur"] for (_, name), row in served.statistics().items() if name == b.id]  # noqa: E731
    eventually(lambda: rows() == ["0"], "HAProxy counts no connection of member b")
    assert [greeting(served.client.connect()) for _ in range(2)] == ["b", "b"]


@pytest.mark.feature("pool.lb_algorithm.LEAST_CONNECTIONS")
def test_least_connections_avoid_busy_members(served):
    free = threading.Event()
    quick = served.web("quick")

    def slowly(seen):
        if seen.target == "/slow":
            free.wait(10)
        return Answer()

    slow = served.web("slow", answer=slowly)
    served.push(load_balancer(listener(80), pool("pool", member(slow), member(quick), algorithm="LEAST_CONNECTIONS")))
    while served.client.fetch("/").member != "quick":  # after the quick member, the slow one is next
        pass
    waiting = served.client.connect()
    waiting.sendall(b"GET /slow HTTP/1.1\r\nHost: www.example.com\r\n\r\n")
    busy = "slow" if slow.until(lambda: slow.asked("/slow") or quick.asked("/slow"), "a request at a member") else ""
    try:
        for _ in range(6):
            # While HAProxy still counts an answered request, both members have one, and the slow one is next.
            eventually(lambda: _answering(served) == 1, "one request is open")
            assert served.client.fetch().member == "quick", busy
    finally:
        free.set()


def _answering(served) -> int:
    """Return the number of open requests of all members."""
    rows = served.statistics().items()
    return sum(int(row["scur"]) for (_, name), row in rows if name not in ("FRONTEND", "BACKEND", "responder"))


# -- hash of the client --------------------------------------------------------------------------------------------


def homes(served, client_addresses, protocol: str = "HTTP") -> dict[str, str]:
    """Return the member of each client."""
    found = {}
    for source in client_addresses:
        connection = served.client.connect(80, vip_of(source), source=source)
        found[source] = ask(connection).member if protocol == "HTTP" else greeting(connection)
        connection.close()
    return found


@pytest.mark.feature("pool.lb_algorithm.SOURCE_IP")
@pytest.mark.parametrize("protocol", ["HTTP", "TCP"])
def test_source_ip_keeps_clients_on_their_member(served, client_addresses, protocol):
    """Added and removed members move only their own clients, at run time and after a reload."""
    make = served.web if protocol == "HTTP" else served.echo
    peers = [make(name, address) for name, address in zip("abcd", (MEMBER, MEMBER6) * 2, strict=True)]

    def push(*names, **more):
        members = [member(peer) for peer in peers if peer.name in names]
        return served.push(
            load_balancer(
                listener(80, protocol=protocol, **more),
                pool("pool", *members, protocol=protocol, algorithm="SOURCE_IP"),
            )
        ).how

    push("a", "b", "c")
    before = homes(served, client_addresses, protocol)
    assert homes(served, client_addresses, protocol) == before
    for family in (CROWD, CROWD6):
        assert {before[source] for source in family} == set("abc")
    assert max(Counter(before.values()).values()) <= len(client_addresses) * 2 // 3

    assert push("a", "b", "c", "d") == "runtime"
    joined = homes(served, client_addresses, protocol)
    moved = {source for source in client_addresses if joined[source] != before[source]}
    assert moved
    assert {joined[source] for source in moved} == {"d"}

    assert push("a", "c", "d") == "runtime"
    left = homes(served, client_addresses, protocol)
    assert {source for source in client_addresses if left[source] != joined[source]} == {
        source for source in client_addresses if joined[source] == "b"
    }

    assert push("a", "c", "d", timeout_client_data=49_000) == "reload"
    assert homes(served, client_addresses, protocol) == left
    assert push("a", "b", "c") == "reload"  # the time-out is the default again
    assert homes(served, client_addresses, protocol) == before


@pytest.mark.feature("pool.lb_algorithm.SOURCE_IP_PORT")
@pytest.mark.parametrize(("protocol", "listening"), [("HTTP", "HTTP"), ("HTTP", "TCP"), ("TCP", "TCP")])
def test_source_ip_port_distinguishes_connections(served, protocol, listening):
    """The same address and port reach the same member; another port can reach another member."""
    make = served.web if protocol == "HTTP" else served.echo
    peers = [make(name, address) for name, address in zip("abcd", (MEMBER, MEMBER6) * 2, strict=True)]

    def push(*names, **more):
        members = [member(peer) for peer in peers if peer.name in names]
        return served.push(
            load_balancer(
                listener(80, protocol=listening, **more),
                pool("pool", *members, protocol=protocol, algorithm="SOURCE_IP_PORT"),
            )
        ).how

    def chosen(source: str, port: int) -> str:
        connection = served.client.connect(80, vip_of(source), source=source, source_port=port)
        if protocol == "TCP":
            name = greeting(connection)
        else:
            name, again = (ask(connection).member for _ in range(2))
            assert name == again
        reset(connection)
        return name

    def all_of_them():
        return {(source, port): chosen(source, port) for source in (CLIENT, CLIENT6) for port in range(20_000, 20_024)}

    push("a", "b", "c")
    before = all_of_them()
    assert all_of_them() == before
    for client in (CLIENT, CLIENT6):
        assert {name for (source, _), name in before.items() if source == client} == set("abc")
    assert push("a", "b", "c", "d") == "runtime"
    joined = all_of_them()
    assert {joined[each] for each in before if joined[each] != before[each]} == {"d"}
    assert push("a", "b", "c", timeout_client_data=49_000) == "reload"
    assert all_of_them() == before


@pytest.mark.feature("pool.lb_algorithm.SOURCE_IP", "pool.lb_algorithm.SOURCE_IP_PORT", "member.weight")
@pytest.mark.parametrize("algorithm", ["SOURCE_IP", "SOURCE_IP_PORT"])
def test_hash_algorithms_skip_members_that_are_down_or_have_weight_0(served, client_addresses, algorithm):
    """No request goes to a member with weight 0 or to an absent one."""
    names = ("heavy", "light", "none", "dead")
    peers = {name: served.web(name, address) for name, address in zip(names, (MEMBER, MEMBER6) * 2, strict=True)}

    def push(**weights):
        members = [member(peers[name], weight=weight) for name, weight in weights.items()]
        served.push(load_balancer(listener(80), pool("pool", *members, algorithm=algorithm, monitor=monitor("TCP"))))
        served.until_states("pool", {name: "DOWN" if name == "dead" else "UP" for name in weights})
        return Counter(homes(served, client_addresses).values())

    peers["dead"].stop()
    found = push(heavy=200, light=20, none=0)
    assert set(found) == {"heavy", "light"}
    assert found["heavy"] > 2 * found["light"]
    assert set(push(heavy=20, light=20, none=0, dead=20)) == {"heavy", "light"}
