# SPDX-License-Identifier: Apache-2.0
"""After a hand-over, the new holder keeps new connections, also during a SYN flood (real kernel)."""

from __future__ import annotations

import json
import re
import socket
import struct
import subprocess
from ipaddress import ip_address, ip_interface

import pytest
from amphora_lab import eventually
from wire import PAIR, VIP, VIP6, bundle, eth1, mac

from amphora_agent.bundle import VrrpInstance
from amphora_agent.network import connection_tunnel

pytestmark = pytest.mark.root

SYN, ACK = 0x02, 0x10
ROOM = 3
ETHERTYPES = {4: 0x0800, 6: 0x86DD}
CLIENTS = {4: ip_address("203.0.113.7"), 6: ip_address("2001:db8:7::7")}
VIPS = {4: ip_interface(VIP), 6: ip_interface(VIP6)}


@pytest.fixture(params=[4, 6])
def small_table(request, wire, monkeypatch):
    """An amphora after a hand-over, with a small table of half-open connections."""
    monkeypatch.setattr(connection_tunnel, "_MOST_BEGUN", ROOM)
    monkeypatch.setattr(connection_tunnel, "_BEGUN_SECONDS", 1)
    yield from begun(request.param, wire)


@pytest.fixture(params=[4, 6])
def full_table(request, wire, monkeypatch):
    """An amphora after a hand-over, with space for one established connection."""
    monkeypatch.setattr(connection_tunnel, "MOST_CONNECTIONS", 1)
    monkeypatch.setattr(connection_tunnel, "_BEGUN_SECONDS", 60)
    yield from begun(request.param, wire)


def begun(version, wire):
    wire.change(bundle(eth1()))
    # The link only counts redirected packets. Without an address, the link sends no packets of its own.
    wire.ip(
        f"link add {connection_tunnel.NAME} type veth peer name away",
        f"link set {connection_tunnel.NAME} addrgenmode none",
        "link set away up",
        f"link set {connection_tunnel.NAME} up",
    )
    wire.inner.run(connection_tunnel.start_redirect, VrrpInstance(PAIR, tuple(VIPS.values()), 1500))
    made = RedirectedPackets(wire, version)
    yield made
    made.close()


class RedirectedPackets:
    """The amphora's kernel, and raw packets of a client."""

    def __init__(self, wire, version):
        self.wire = wire
        self.version = version
        self._socket = wire.spaces["peer"].run(socket.socket, socket.AF_PACKET, socket.SOCK_RAW)
        self._socket.bind(("far1", 0))

    def close(self):
        self._socket.close()

    def redirected(self, *packets):
        """Send packets (flags, client's port) at once, and return the number of redirected ones."""
        before, mark, one = self._redirected(), self._frame(ACK, 1, bytes(1000)), len(self._frame(ACK, 1))
        for flags, port in packets:
            self._socket.send(self._frame(flags, port))
        # The mark is sent last, is longer than all others, and is always redirected.
        self._socket.send(mark)
        eventually(lambda: self._redirected() - before >= len(mark), "the mark is redirected")
        return (self._redirected() - before - len(mark)) // one

    def known(self, name):
        """Return the clients' ports in a set of nftables."""
        command = [
            "ip",
            "netns",
            "exec",
            f"{self.wire.prefix}-inner",
            "nft",
            "list",
            "set",
            "netdev",
            "amphora_handover",
        ]
        said = subprocess.run([*command, f"{name}{self.version}"], check=True, capture_output=True, text=True).stdout
        return {int(port) for port in re.findall(r" \. (\d+) \. \S+ \. 80\b", said)}

    def _redirected(self):
        command = ["ip", "-n", f"{self.wire.prefix}-inner", "-j", "-s", "link", "show", connection_tunnel.NAME]
        said = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        return said[0]["stats64"]["tx"]["bytes"]

    def _frame(self, flags, port, payload=b""):
        vip, client = VIPS[self.version].ip.packed, CLIENTS[self.version].packed
        segment = struct.pack("!HHIIBBHHH", port, 80, 1, 1, 5 << 4, flags, 1024, 0, 0) + payload
        if self.version == 4:
            header = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(segment), 0, 0, 64, socket.IPPROTO_TCP, 0)
        else:
            header = struct.pack("!IHBB", 6 << 28, len(segment), socket.IPPROTO_TCP, 64)
        ethernet = bytes.fromhex(mac(1).replace(":", "")) + bytes(6) + struct.pack("!H", ETHERTYPES[self.version])
        return ethernet + header + client + vip + segment


def test_a_syn_flood_fills_the_table_for_a_short_time_only(small_table):
    begins = ((SYN, 11), (ACK, 11), (SYN, 12), (SYN, 13))
    without_room = ((SYN, 14), (ACK, 14))
    assert small_table.redirected(*begins, *without_room) == 2, "both packets over the limit are redirected"
    eventually(lambda: small_table.redirected((SYN, 14), (ACK, 14)) == 0, "half-open connections expire")
    assert small_table.redirected((ACK, 12)) == 1
    assert small_table.redirected((ACK, 11)) == 0, "the connection of a silent client stays"
    assert small_table.known("own") == {11, 14}


def test_an_active_connection_stays_when_the_table_is_full(full_table):
    assert full_table.redirected((SYN, 11), (ACK, 11), (SYN, 12), (ACK, 12), (ACK, 12)) == 0
    assert (full_table.known("own"), full_table.known("begun")) == ({11}, {11, 12})
