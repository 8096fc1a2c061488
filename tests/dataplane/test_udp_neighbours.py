# SPDX-License-Identifier: Apache-2.0
"""The checker detects an absent member host by its link address, which every check resolves again."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess

import pytest
from amphora_lab import eventually, ip
from checked_members import CheckedNetwork, Process, address, member, monitor, server, udp

from amphora_agent.l4_checks.neighbor_probe import NeighborProbe

pytestmark = pytest.mark.root
FAR, GATEWAY = "203.0.113.7", address(0)


@pytest.fixture(scope="module")
def place():
    made = CheckedNetwork(f"ngh{os.getpid()}")
    try:
        # With this setting, the kernel considers a host reachable for hours, unless it is probed.
        for family in ("ipv4", "ipv6"):
            made.run(made.inner, "sysctl", "-qw", f"net.{family}.neigh.eth0.base_reachable_time_ms=36000000")
        yield made
    finally:
        made.close()


@pytest.fixture
def neighbours(place):
    made = place.within(place.inner, NeighborProbe)
    yield made
    made.close()


def entry(place, where):
    said = subprocess.run(
        ["ip", "-j", "-n", place.inner, "neigh", "show", where], capture_output=True, text=True, check=True
    ).stdout
    found = json.loads(said or "[]")
    return found[0]["state"] if found else []


def talk(where):
    with socket.socket(socket.AF_INET6 if ":" in where else socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.sendto(b"?", (where, 9))


def meet(place, where):
    """Exchange packets, so that the kernel has a neighbour entry of the host."""
    place.within(place.inner, talk, where)
    eventually(lambda: entry(place, where) == ["REACHABLE"], "the neighbour is known")


@pytest.mark.parametrize("version", [4, 6])
def test_an_absent_host_is_down_and_a_returning_host_is_up(place, tmp_path, version):
    gone, other = (member(number, version) for number in (3, 4))
    where, bits = str(gone.address), {4: 24, 6: 64}[version]
    with contextlib.ExitStack() as closing:
        closing.callback(udp(place, str(other.address)).close)
        closing.callback((there := udp(place, where)).close)
        checker = Process(place, tmp_path)
        checker.start()
        closing.callback(checker.close)
        checker.serve(server(gone, other, checked=monitor("UDP-CONNECT", interval=2, timeout=1, fall=2)))
        checker.become("UP", "UP")
        eventually(lambda: there.heard, "the member is checked")
        ip(f"-n {place.inner} neigh change {where} dev eth0 nud reachable")
        ip(f"-n {place.members} addr del {where}/{bits} dev eth0")
        checker.become("DOWN", "UP")
        assert checker.members()[gone.id]["reason"] == "host unreachable"
        ip(f"-n {place.members} addr add {where}/{bits} dev eth0 {'nodad' if version == 6 else ''}")
        checker.become("UP", "UP")


@pytest.mark.parametrize("version", [4, 6])
def test_only_resolved_dynamic_neighbours_are_probed(place, neighbours, version):
    where = address(5, version)
    assert not neighbours.probe(where), "the kernel has no entry yet"
    meet(place, where)
    assert neighbours.probe(where)
    assert not neighbours.is_unresolved(where)
    eventually(lambda: entry(place, where) == ["REACHABLE"], "the neighbour has answered")
    mac = "02:00:00:00:00:05"
    place.run(place.inner, "ip", "neigh", "replace", where, "lladdr", mac, "dev", "eth0", "nud", "permanent")
    assert not neighbours.probe(where)
    assert entry(place, where) == ["PERMANENT"]
    place.run(place.inner, "ip", "neigh", "del", where, "dev", "eth0")
    absent = address(99, version)
    place.within(place.inner, talk, absent)
    assert neighbours.is_unresolved(absent)
    assert not neighbours.probe(absent)


def test_a_member_behind_a_router_is_not_probed(place, neighbours):
    meet(place, GATEWAY)
    assert not neighbours.probe(FAR), "there is no route"
    ip(f"-n {place.inner} route add {FAR}/32 via {GATEWAY}")
    try:
        assert not neighbours.probe(FAR), "the host is behind a router"
        assert entry(place, GATEWAY) == ["REACHABLE"]
    finally:
        ip(f"-n {place.inner} route del {FAR}/32")
    assert not neighbours.probe("192.0.2.1"), "the address is local"
