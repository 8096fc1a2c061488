# SPDX-License-Identifier: Apache-2.0
"""An ordinary port and an SR-IOV port on one network: each member is reached through the port of its type (`wire.py`).

The driver sends a route to each member (`amphora_driver/render/bundle.py`).
"""

from __future__ import annotations

import ipaddress
import socket
import subprocess
from dataclasses import replace

import pytest
from amphora_lab import ip
from wire import bundle, interface

pytestmark = pytest.mark.root

# The members are addresses on a bridge that connects both cables.
MEMBERS = {"ordinary": ("192.0.2.21", "2001:db8:2::21"), "sr_iov": ("192.0.2.22", "2001:db8:2::22")}
OWN = {"ordinary": ("192.0.2.11", "2001:db8:2::11"), "sr_iov": ("192.0.2.12", "2001:db8:2::12")}
NUMBERS = {"ordinary": 1, "sr_iov": 2}
PREFIXES = (32, 128)


def port(kind, *, routes=True):
    """The interface of a port, with the routes that it has beside the other one."""
    addresses = [f"{one}/{length}" for one, length in zip(OWN[kind], (24, 64), strict=True)]
    to = [(f"{one}/{length}", None) for one, length in zip(MEMBERS[kind], PREFIXES, strict=True)]
    return interface(NUMBERS[kind], f"m{NUMBERS[kind]}", *addresses, routes=to if routes else ())


@pytest.fixture
def network(wire):
    space = f"-n {wire.prefix}-peer"
    ip(f"{space} link add br0 type bridge stp_state 0", f"{space} link set br0 up")
    ip(*(f"{space} link set far{number} master br0" for number in NUMBERS.values()))
    for addresses in MEMBERS.values():
        for address, length in zip(addresses, (24, 64), strict=True):
            ip(f"{space} addr add {address}/{length} dev br0" + " nodad" * (":" in address))
    return wire


class Connection:
    """A TCP connection from the amphora to a member."""

    def __init__(self, wire, address):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listening = wire.spaces["peer"].run(socket.create_server, (address, 0), family=family)
        with listening:
            self._near = wire.inner.run(socket.create_connection, listening.getsockname()[:2], 10)
            self._far, (self.source, *_) = listening.accept()
        self._far.settimeout(10)

    def carries(self):
        """Send a byte in each direction; fail after the time-out."""
        for sender, receiver in ((self._near, self._far), (self._far, self._near)):
            sender.sendall(b"x")
            assert receiver.recv(1) == b"x"

    def close(self):
        self._near.close()
        self._far.close()


@pytest.fixture
def connect(network):
    opened = []

    def open_one(address):
        opened.append(Connection(network, address))
        opened[-1].carries()
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


def mac_addresses(wire):
    """The MAC addresses that the members have learned of the amphora's addresses."""
    found = wire.spaces["peer"].run(_neighbours)
    return {address: mac for address, mac in found.items() if address in (*OWN["ordinary"], *OWN["sr_iov"])}


def _neighbours():
    from pyroute2 import IPRoute  # noqa: PLC0415

    with IPRoute() as route:
        return {
            one.get_attr("NDA_DST"): one.get_attr("NDA_LLADDR")
            for family in (socket.AF_INET, socket.AF_INET6)
            for one in route.get_neighbours(family)
        }


@pytest.mark.parametrize(("first", "second"), [("ordinary", "sr_iov"), ("sr_iov", "ordinary")])
def test_a_second_port_serves_its_members_and_ends_no_connection(network, connect, first, second):
    alone = bundle(port(first, routes=False))
    both = bundle(port("ordinary"), port("sr_iov"))
    network.change(alone)
    lasting = [connect(address) for address in MEMBERS[first]]
    network.change(both, alone)
    assert network.outside(network.plumbing.find_drift, both) == []
    for one in lasting:
        one.carries()
    for kind in ("ordinary", "sr_iov"):
        assert tuple(connect(address).source for address in MEMBERS[kind]) == OWN[kind]
    learned = mac_addresses(network)
    for kind, number in NUMBERS.items():
        assert {learned[address] for address in OWN[kind]} == {f"02:00:00:00:60:{number:02x}"}
    # The members of the second port leave: its connections end, the others continue.
    network.change(alone, both)
    for one in lasting:
        one.carries()
    assert tuple(connect(address).source for address in MEMBERS[first]) == OWN[first]


VIP = "192.0.2.5"


def test_a_client_that_is_a_member_with_sr_iov_gets_its_answers_from_the_vips_port(network):
    ordinary = replace(port("ordinary"), name="eth1", vips=(ipaddress.ip_interface(f"{VIP}/32"),))
    network.change(bundle(ordinary, port("sr_iov")))
    with network.inner.run(socket.create_server, (VIP, 80)) as listening:
        client = network.spaces["peer"].run(
            socket.create_connection, (VIP, 80), 10, source_address=(MEMBERS["sr_iov"][0], 0)
        )
        with client, listening.accept()[0] as served:
            served.sendall(b"x")
            assert client.recv(1) == b"x"
    assert network.spaces["peer"].run(_neighbours)[VIP] == "02:00:00:00:60:01"
    for source, name in ((VIP, "eth1"), (OWN["sr_iov"][0], "m2")):
        words = ["ip", "-n", f"{network.prefix}-inner", "route", "get", MEMBERS["sr_iov"][0], "from", source]
        assert f"dev {name} " in subprocess.run(words, check=True, capture_output=True, text=True).stdout
