# SPDX-License-Identifier: Apache-2.0
"""The amphora's firewall in a real kernel: rules for permitted sources, and their effect on clients."""

from __future__ import annotations

import os
import re
import socket
import struct
import subprocess
import threading
from contextlib import closing, suppress
from pathlib import Path

import pytest
from amphora_lab import eventually, ip
from http_clients import CLIENT, CLIENT6, OTHER, OTHER6
from wanted import listener, load_balancer, member, pool
from wire import FIXED, FIXED6, PAIR, SECOND, VIP, VIP6, addresses, bundle, eth1

from amphora_agent.errors import FirewallError
from amphora_agent.network import firewall, libnftables, nft_apply
from amphora_agent.network.namespace import Namespace
from amphora_driver.render.haproxy import render

pytestmark = pytest.mark.root


def test_edited_firewall_rules_are_repaired(wire):
    wanted = bundle(allowed=((80, ["192.0.2.0/24"]),))
    wire.change(wanted)
    before = wire.everything()["nft"]
    nft = ["ip", "netns", "exec", f"{wire.prefix}-inner", "nft"]
    (name,) = re.findall(r"set (port-80-ipv4-\S+)", before)
    for damage in (
        "flush chain inet amphora beginning",
        "delete table inet amphora",
        f"add element inet amphora {name} {{ 10.0.0.0/8 }}",
        "add set inet amphora mine { type ipv4_addr; }",
        "add chain inet amphora mine",
        "add counter inet amphora mine",
    ):
        subprocess.run([*nft, *damage.split(" ", 99)], check=True)
        assert wire.everything()["nft"] != before
        wire.change(wanted, wanted)
        assert wire.everything()["nft"] == before


def test_a_restricted_listener_is_refused_without_nftables(wire, monkeypatch):
    monkeypatch.setattr(libnftables, "_library", lambda: None)
    monkeypatch.setenv("PATH", "/nonexistent")
    first = bundle(eth1())
    wire.change(first)
    with pytest.raises(FirewallError, match="nf_tables"):
        wire.change(bundle(eth1(SECOND), allowed=((80, ["192.0.2.0/24"]),)), first)
    monkeypatch.undo()
    assert addresses(wire) == {FIXED, FIXED6, VIP, VIP6}


def test_the_nft_command_has_the_same_result_as_the_library(wire, monkeypatch):
    wanted = bundle(
        allowed=(
            (80, ["192.0.2.0/24", "10.0.1.0/24", "10.0.2.0/24", "::ffff:192.0.2.0/120"]),
            (81, []),
            (82, ["::/0"]),
        ),
        vrrp=PAIR,
    )
    wire.change(wanted)
    listed = wire.inner.run(nft_apply.list_table)
    monkeypatch.setattr(libnftables, "_library", lambda: None)
    assert wire.inner.run(nft_apply.list_table) == listed
    assert not wire.inner.run(nft_apply.replace_table, firewall.render(firewall.restrictions_of(wanted)))
    assert wire.inner.run(nft_apply.replace_table, "")
    assert "table" not in wire.everything()["nft"]


def test_the_library_is_not_used_with_many_open_files(wire):
    """The library uses select(2), and aborts the process if its descriptor is above 1023."""
    text = firewall.render(firewall.restrictions_of(bundle(allowed=((80, []),))))
    null = os.open("/dev/null", os.O_RDONLY)
    many = [null, *(os.dup(null) for _ in range(1100))]
    try:
        assert wire.inner.run(nft_apply.replace_table, text)
        assert wire.inner.run(nft_apply.holds, text)
    finally:
        for each in many:
            os.close(each)


def test_rendered_rules_equal_listed_rules(wire):
    """A difference would make every audit replace the rules."""
    many = [f"10.{n // 256}.{n % 256}.0/25" for n in range(1000)] + [f"2001:db8:{n:x}::/48" for n in range(1000)]
    for allowed, vrrp in (
        (((80, many), (443, many[:1]), (8443, many[-1:])), None),
        (((1, []), (2, ["0.0.0.0/0"]), (3, ["::/0"]), (4, ["192.0.2.7/32", "2001:db8::7/128"])), PAIR),
        ((), PAIR),
        (((80, ["10.0.1.0/24", "10.0.2.0/24", "10.0.4.0/23", "::ffff:192.0.2.0/120", "0.0.0.0/32", "::/128"]),), None),
        (((65535, ["0.0.0.0/1", "192.0.0.0/2", "8000::/1"]),), PAIR),
    ):
        text = firewall.render(firewall.restrictions_of(bundle(allowed=allowed, vrrp=vrrp)))
        assert wire.inner.run(nft_apply.replace_table, text)
        assert not wire.inner.run(nft_apply.replace_table, text), wire.inner.run(nft_apply.list_table)


class Callers:
    """Clients that open one connection after the other, from the neighbour's namespace."""

    def __init__(self, wire, address: str, port: int, threads: int = 4) -> None:
        self.taken, self.refused = [0] * threads, 0
        self._target = (address, port)
        self._ending = threading.Event()
        place = Path("/run/netns", f"{wire.prefix}-peer")
        self._threads = [threading.Thread(target=inside, args=(place, self._call, n)) for n in range(threads)]

    def _call(self, number: int) -> None:
        while not self._ending.is_set():
            with socket.socket() as opened:
                opened.settimeout(10)
                # The connection ends with a reset, without TIME_WAIT.
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                try:
                    opened.connect(self._target)
                    self.taken[number] += 1
                except ConnectionRefusedError:
                    self.refused += 1

    def __enter__(self):
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_) -> None:
        self._ending.set()
        for each in self._threads:
            each.join()


def inside(place: Path, function, *arguments) -> None:
    with closing(Namespace(place)) as space:
        space.run(function, *arguments)


def taking(server: socket.socket, ending: threading.Event) -> None:
    """Accept and close connections until the stop."""
    server.settimeout(0.1)
    while not ending.is_set():
        with suppress(TimeoutError, ConnectionError):
            server.accept()[0].close()


@pytest.mark.parametrize("before", [True, False], ids=["changed", "from nothing"])
def test_permitted_client_is_not_refused_during_a_change(wire, before):
    """The kernel may query a set before it is complete, and then refuses permitted clients."""
    wire.change(bundle(eth1()))
    neighbours(wire, "198.51.100.12/24")
    ours = "198.51.100.0/24"
    one, other = (
        firewall.render(firewall.restrictions_of(bundle(eth1(), allowed=((80, [ours, more]), (443, [more])))))
        for more in ("10.0.0.0/8", "192.0.2.0/24")
    )
    ending = threading.Event()
    with at(wire, "198.51.100.5", 80) as server:
        server.listen(1024)
        taker = threading.Thread(target=taking, args=(server, ending))
        taker.start()
        try:
            with Callers(wire, "198.51.100.5", 80) as callers:
                eventually(lambda: min(callers.taken) > 10, "clients connect")
                for _ in range(150):
                    for text in (one, other if before else ""):
                        assert wire.inner.run(nft_apply.replace_table, text)
        finally:
            ending.set()
            taker.join()
    assert sum(callers.taken) > 1000
    assert callers.refused == 0


def at(wire, address: str, port: int):
    """Open a server in the load balancer's namespace."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    opened = wire.inner.run(socket.socket, family, socket.SOCK_STREAM)
    opened.bind((address, port))
    opened.listen()
    return opened


def reaches(space, source: str, address: str, port: int) -> bool:
    """Return whether a connection is accepted; others are refused at once."""
    with space.run(socket.socket, socket.AF_INET6 if ":" in source else socket.AF_INET, socket.SOCK_STREAM) as opened:
        opened.settimeout(10)
        opened.bind((source, 0))
        try:
            opened.connect((address, port))
        except ConnectionRefusedError:
            return False
        return True


def neighbours(wire, *own: str) -> None:
    for address in own:
        ip(f"-n {wire.prefix}-peer addr add {address} dev far1" + (" nodad" if ":" in address else ""))


def test_only_partners_reach_vrrp_and_stick_tables(wire):
    """HAProxy's next process on the same amphora reaches the stick tables, too."""
    wire.change(bundle(eth1(), allowed=((1025, []),), vrrp=PAIR))
    neighbours(wire, "198.51.100.12/24", "198.51.100.13/24")
    outside = wire.spaces["peer"]
    vrrp = wire.inner.run(socket.socket, socket.AF_INET, socket.SOCK_RAW, 112)
    vrrp.settimeout(5)
    with at(wire, "198.51.100.11", 1025), vrrp:
        assert reaches(outside, "198.51.100.12", "198.51.100.11", 1025)
        assert not reaches(outside, "198.51.100.13", "198.51.100.11", 1025)
        assert reaches(wire.inner, "198.51.100.11", "198.51.100.11", 1025)
        for source in ("198.51.100.13", "198.51.100.12"):
            with outside.run(socket.socket, socket.AF_INET, socket.SOCK_RAW, 112) as opened:
                opened.bind((source, 0))
                opened.sendto(source.encode(), ("198.51.100.11", 0))
        assert vrrp.recv(100)[20:] == b"198.51.100.12"
    # A listener may have the same port on its VIPs.
    ip(f"-n {wire.prefix}-inner addr add {VIP} dev eth1")
    with at(wire, "198.51.100.5", 1025):
        assert not reaches(outside, "198.51.100.12", "198.51.100.5", 1025)


def test_the_loopback_is_open(wire):
    """HAProxy's checks reach the agent's responder on the loopback, with any port of a listener."""
    wire.change(bundle(eth1(), allowed=((9101, []),)))
    neighbours(wire, "198.51.100.12/24")
    with at(wire, "127.0.0.1", 9101), at(wire, "::1", 9101), at(wire, "198.51.100.5", 9101):
        assert reaches(wire.inner, "127.0.0.1", "127.0.0.1", 9101)
        assert reaches(wire.inner, "::1", "::1", 9101)
        assert not reaches(wire.spaces["peer"], "198.51.100.12", "198.51.100.5", 9101)
        # The rules treat the load balancer as any other client of its VIP.
        assert not reaches(wire.inner, "198.51.100.11", "198.51.100.5", 9101)


# -- clients of a load balancer ---------------------------------------------------------------------------------------


def worker(served) -> str:
    return served.amphora.ask_haproxy("show info").partition("\nPid: ")[2].split()[0]


def refused(served, source: str, port: int = 80) -> bool:
    """Return whether the kernel resets a client's connection at once."""
    vip = "2001:db8:1::5" if ":" in source else "198.51.100.5"
    with suppress(ConnectionRefusedError):
        served.client.connect(port, vip, source=source).close()
        return False
    return True


@pytest.mark.feature("listener.allowed_cidr")
def test_networks_change_without_a_new_worker_and_open_connections_go_on(served):
    echo = served.echo()

    def serve(*cidrs):
        front = listener(80, protocol="TCP", allowed_cidrs=cidrs or None)
        return served.push(load_balancer(front, pool("pool", member(echo), protocol="TCP")))

    serve(f"{CLIENT}/32", f"{CLIENT6}/128")
    before = worker(served)
    kept = [
        served.client.connect(80, vip, source=source)
        for vip, source in (("198.51.100.5", CLIENT), ("2001:db8:1::5", CLIENT6))
    ]
    assert [each.recv(100) for each in kept] == [b"echo\n"] * 2
    for cidrs, wanted in (
        ((f"{OTHER}/32",), {OTHER}),
        ((f"{OTHER6}/128",), {OTHER6}),
        ((f"{CLIENT}/32", f"{OTHER6}/128"), {CLIENT, OTHER6}),
        ((), {CLIENT, CLIENT6, OTHER, OTHER6}),
        (("203.0.113.0/24",), set()),
    ):
        done = serve(*cidrs)
        assert (done.how, done.reason) == ("runtime", "allowed clients of port 80 changed")
        assert {each for each in (CLIENT, CLIENT6, OTHER, OTHER6) if not refused(served, each)} == wanted
    assert serve("203.0.113.0/24").how == "unchanged"
    for each in kept:
        each.sendall(b"still here")
        assert each.recv(100) == b"still here"
    assert worker(served) == before
    firewall = served.amphora.call("GET", "/v2/diagnostics")[1]["firewall"]
    assert re.search(r"tcp dport 80 ip saddr != @port-80-ipv4-\w+ counter packets", firewall)


@pytest.mark.feature("listener.allowed_cidr")
def test_a_thousand_networks(served):
    web = served.web()
    many = tuple(f"10.{n // 256}.{n % 256}.0/25" for n in range(998))

    def serve(*cidrs):
        return served.push(load_balancer(listener(80, allowed_cidrs=cidrs), pool("pool", member(web))))

    serve(f"{CLIENT}/32")
    done = serve(*many, f"{OTHER}/32", f"{OTHER6}/128")
    assert done.how == "runtime"
    assert [refused(served, each) for each in (CLIENT, CLIENT6, OTHER, OTHER6)] == [True, True, False, False]
    assert serve(*many, f"{CLIENT6}/128").how == "runtime"
    assert [refused(served, each) for each in (CLIENT, CLIENT6, OTHER, OTHER6)] == [True, False, True, True]


class Attempts:
    """Continuous requests from one address to one port; a refused client continues."""

    def __init__(self, served, source: str, port: int) -> None:
        self.answered = 0
        self.refused = 0
        self._sockets, self._source, self._port = served.lab.clients, source, port
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._ending.is_set():
            with self._sockets.socket(self._source) as opened:
                opened.settimeout(10)
                opened.bind((self._source, 0))
                try:
                    opened.connect(("198.51.100.5", self._port))
                    opened.sendall(b"GET / HTTP/1.0\r\n\r\n")
                    said = opened.recv(100)
                except OSError:
                    said = b""
            if b" 200 " in said:
                self.answered += 1
            else:
                self.refused += 1

    def goes_on(self) -> None:
        """Wait for further attempts, which follow the last change."""
        before = self.answered + self.refused
        eventually(lambda: self.answered + self.refused > before + 5, "the client has sent further requests")

    def __enter__(self) -> Attempts:
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._ending.set()
        self._thread.join(20)


@pytest.mark.feature("listener.allowed_cidr")
def test_a_restricted_listener_is_never_open(served):
    """Other clients are never served while restrictions and listeners change."""
    parts = pool("pool", member(served.web()))

    def closed(port, **more):
        return listener(port, allowed_cidrs=(f"{CLIENT}/32",), **more)

    served.push(load_balancer(listener(80), parts))
    with Attempts(served, OTHER, 81) as stranger:
        for wanted in (
            (listener(80), closed(81)),
            (listener(80, connection_limit=100), closed(81, connection_limit=50)),
            (listener(80),),
            (closed(81),),
        ):
            served.push(load_balancer(*wanted, parts))
            stranger.goes_on()
        assert not refused(served, CLIENT, 81)
    assert stranger.answered == 0
    # A client that is permitted before and after a change is permitted during it.
    served.push(load_balancer(listener(80), parts))
    with Attempts(served, CLIENT, 80) as friend:
        for wanted in ((closed(80),), (closed(80), listener(81)), (listener(80), closed(81))):
            friend.goes_on()
            served.push(load_balancer(*wanted, parts))
        friend.goes_on()
    assert friend.refused == 0


@pytest.mark.feature("listener.allowed_cidr")
def test_a_failed_push_keeps_the_former_networks(served):
    web = served.web()
    tree = load_balancer(listener(80, allowed_cidrs=(f"{CLIENT}/32",)), pool("pool", member(web)))
    served.push(tree)
    before = served.amphora.call("GET", "/v2/diagnostics")[1]["firewall"]
    generation = next(served.lab.generations)
    document = {"allowed": [{"port": 80, "networks": ["0.0.0.0/0", "::/0"]}]}
    # HAProxy refuses the first text; an interface of the second bundle is missing.
    status, answer = served.amphora.push(generation, "defaults\n    no such words\n", **document)
    assert status == 422, answer
    status, answer = served.amphora.push(
        generation,
        render(tree).text,
        **document,
        interfaces=[
            {"mac": "02:00:00:00:5e:99", "name": "eth9", "mtu": 1500, "addresses": [], "vips": [], "routes": []},
        ],
    )
    assert status == 500, answer
    assert [refused(served, each) for each in (CLIENT, OTHER, CLIENT6)] == [False, True, True]
    found = served.amphora.call("GET", "/v2/diagnostics")[1]["firewall"]
    assert without_counts(found) == without_counts(before)


def without_counts(text: str) -> str:
    return re.sub(r"packets \d+ bytes \d+", "", text)
