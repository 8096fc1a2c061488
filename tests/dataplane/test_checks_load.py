# SPDX-License-Identifier: Apache-2.0
"""The checker detects a dead UDP member under client load, and its status does not flap."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from amphora_lab import eventually, ip
from checked_members import REAL, CheckedNetwork, Process, address, member, monitor, server, udp

pytestmark = pytest.mark.root
VIP = "198.51.100.5"


@pytest.fixture
def place():
    made = CheckedNetwork(f"chl{os.getpid()}")
    try:
        made.connect_client(VIP)
        yield made
    finally:
        made.close()


@pytest.fixture
def checker(place, tmp_path):
    process = Process(place, tmp_path, REAL)
    process.start()
    try:
        yield process
    finally:
        process.close()


class UdpClients:
    """Reads the output of `udp_clients`."""

    def __init__(self, process):
        self._process = process

    def second(self):
        """Return the numbers sent, received and refused in the next whole second."""
        self._process.stdout.readline()
        return [int(word) for word in self._process.stdout.readline().split()]


@contextmanager
def udp_clients(place, sockets=200, pause=0.0):
    program = Path(__file__).with_name("udp_clients.py")
    words = [sys.executable, str(program), VIP, "53", str(sockets), str(pause)]
    process = subprocess.Popen(["ip", "netns", "exec", place.client, "nice", *words], stdout=subprocess.PIPE, text=True)
    try:
        yield UdpClients(process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
        process.stdout.close()


def changes(checker):
    """Count the status changes of members in the log."""
    return checker.log.read_text().count(" of pool ")


def watched(checker, seconds):
    """Return every status of the first member in this time."""
    end, seen = time.monotonic() + seconds, []
    while time.monotonic() < end:
        seen.append(checker.words()[0])
        time.sleep(0.1)
    return [word for word, _ in itertools.groupby(seen)]


def test_a_closed_member_port_is_detected_under_load(place, checker, record_property):
    one, two = udp(place, address(1), reply=b"here"), udp(place, address(2), reply=b"here")
    try:
        checker.serve(server(member(1), member(2), checked=monitor("UDP-CONNECT", rise=2, fall=3), vips=(VIP,)))
        checker.become("UP", "UP")
        with udp_clients(place, pause=0.01) as clients:
            eventually(lambda: clients.second()[1] > 100, "clients are served")
            one.close()
            begin = time.monotonic()
            checker.become("DOWN", "UP")
            record_property("found after (3 checks, 1 s apart)", f"{time.monotonic() - begin:.1f} s")
            assert watched(checker, 4) == ["DOWN"]
            record_property("sent, received, refused in a second", str(clients.second()))
            one = udp(place, address(1), reply=b"here")
            checker.become("UP", "UP")
            assert watched(checker, 2) == ["UP"]
        assert changes(checker) == 2
    finally:
        one.close()
        two.close()


@pytest.mark.extended
def test_the_only_member_fails_under_load(place, checker):
    """Packets reach the dead member until it is down; then each client is refused at once."""
    one = udp(place, address(1), reply=b"here")
    try:
        checker.serve(server(member(1), checked=monitor("UDP-CONNECT", rise=2, fall=2), vips=(VIP,)))
        checker.become("UP")
        with udp_clients(place, pause=0.01) as clients:
            eventually(lambda: clients.second()[1] > 100, "clients are served")
            one.close()
            checker.become("DOWN")
            assert watched(checker, 3) == ["DOWN"]
            one = udp(place, address(1), reply=b"here")
            checker.become("UP")
            eventually(lambda: clients.second()[1] > 100, "clients are served again")
        assert changes(checker) == 2
    finally:
        one.close()


@pytest.mark.extended
def test_an_absent_member_host_is_detected_under_load(place, checker):
    """Clients' packets fill the queue in which a check would wait for the link address.

    The kernel keeps a link address for 30 to 60 seconds; the test sets one second.
    """
    settings = ("base_reachable_time_ms=1000", "delay_first_probe_time=1", "retrans_time_ms=300")
    place.run(place.inner, "sysctl", "-qw", *(f"net.ipv4.neigh.eth0.{one}" for one in settings))
    one = udp(place, address(1), reply=b"here")
    try:
        checker.serve(server(member(1), checked=monitor("UDP-CONNECT", fall=2), vips=(VIP,)))
        checker.become("UP")
        with udp_clients(place) as clients:
            eventually(lambda: clients.second()[1] > 100, "clients are served")
            ip(f"-n {place.members} addr del {address(1)}/24 dev eth0")
            checker.become("DOWN", seconds=60)
            assert watched(checker, 4) == ["DOWN"]
            ip(f"-n {place.members} addr add {address(1)}/24 dev eth0")
            checker.become("UP")
        assert changes(checker) == 2
    finally:
        one.close()


def test_forwarding_continues_without_a_checker(place, checker):
    one, two = udp(place, address(1), reply=b"here"), udp(place, address(2), reply=b"here")
    try:
        checker.serve(server(member(1), member(2), checked=monitor("UDP-CONNECT"), vips=(VIP,)))
        checker.become("UP", "UP")
        with udp_clients(place, pause=0.01) as clients:
            eventually(lambda: clients.second()[1] > 100, "clients are served")
            before = checker.state()["servers"]["00000000-0000-0000-0000-000000000002"]
            checker.kill()
            sent, got, refused = clients.second()
            assert refused == 0
            assert got > 0.8 * sent
            checker.start()
            after = checker.state()["servers"]["00000000-0000-0000-0000-000000000002"]
            assert after["bytes_in"] > before["bytes_in"]
            assert checker.words() == ["UP", "UP"]
            sent, got, refused = clients.second()
            assert refused == 0
        assert changes(checker) == 0
    finally:
        with suppress(OSError):
            one.close()
        two.close()
