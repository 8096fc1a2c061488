# SPDX-License-Identifier: Apache-2.0
"""The agent under a flood of TLS handshakes without a controller's certificate."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import sys
import time

import pytest
from amphora_lab import AMPHORA, ip

from amphora_agent import tls_gate

pytestmark = pytest.mark.root
STRANGER, NEWCOMER = "203.0.113.66", "203.0.113.67"
INTERVAL = 0.5
SECONDS = 3.0
# Starts handshakes for the given time, and prints the numbers of started and of answered handshakes. Each handshake
# sends a whole ClientHello, because the server's answer is the expensive part.
FLOOD = """
import json, selectors, socket, ssl, sys, time
source, target, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
outgoing = ssl.MemoryBIO()
context = ssl.create_default_context()
try:
    context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="x").do_handshake()
except ssl.SSLWantReadError:
    hello = outgoing.read()
begun, answered, open_ones = 0, 0, []
until = time.monotonic() + seconds
print("begins", flush=True)
while time.monotonic() < until:
    one = socket.socket()
    one.bind((source, 0))
    try:
        one.settimeout(1)
        one.connect((target, 9443))
        one.sendall(hello)
        begun += 1
    except OSError:
        pass
    one.setblocking(False)
    open_ones.append(one)
    if len(open_ones) > 200:
        first = open_ones.pop(0)
        try:
            answered += bool(first.recv(1))
        except OSError:
            pass
        first.close()
time.sleep(0.5)
for one in open_ones:
    try:
        answered += bool(one.recv(1))
    except OSError:
        pass
print(json.dumps([begun, answered]), flush=True)
"""


@pytest.fixture
def addresses(network):
    """Add client addresses to the controller's namespace."""
    name = network.name("ctl")
    for address in (STRANGER, NEWCOMER):
        ip(f"-n {name} addr add {address}/24 dev eth0")
    yield name
    for address in (STRANGER, NEWCOMER):
        ip(f"-n {name} addr del {address}/24 dev eth0")


@pytest.fixture
def flood(addresses):
    """Return a function that starts a flood, whose output contains the result."""
    begun = []

    def begin():
        words = [sys.executable, "-I", "-c", FLOOD, STRANGER, AMPHORA, str(SECONDS)]
        process = subprocess.Popen(["ip", "netns", "exec", addresses, *words], stdout=subprocess.PIPE, text=True)
        begun.append(process)
        assert process.stdout.readline() == "begins\n"
        return process

    yield begin
    for process in begun:
        process.kill()
        process.communicate()


def test_a_flood_delays_neither_heartbeats_nor_controllers(amphora, network, receiver, flood, record_property):
    assert amphora.call("GET", "/v2/info")[0] == 200
    amphora.disconnect()
    receiver.next()
    process = flood()
    begin = last = time.monotonic()
    gaps, answers = [], []

    def ask() -> float:
        """Send a request from a controller with a new address."""
        started = time.monotonic()
        plain = socket.create_connection((AMPHORA, 9443), 10, source_address=(NEWCOMER, 0))
        context = amphora.tls(amphora.client_certificate)
        with plain, context.wrap_socket(plain, server_hostname=amphora.id) as connection:
            connection.sendall(b"GET /v2/info HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        return time.monotonic() - started

    while last - begin < SECONDS - 0.5:
        receiver.next()
        now = time.monotonic()
        gaps.append(now - last)
        last = now
        answers.append(network.thread("ctl").run(ask))
        assert amphora.call("GET", "/v2/info")[0] == 200
        amphora.disconnect()
    begun, answered = json.loads(process.communicate(timeout=30)[0])
    record_property(
        "flood", f"{begun} begun, {answered} answered, gaps {max(gaps):.2f} s, answers {max(answers):.2f} s"
    )
    assert begun > 10 * tls_gate.ADDRESS_BURST
    assert answered <= tls_gate.ADDRESS_BURST + tls_gate.ADDRESS_RATE * (SECONDS + 2)
    # On an idle machine: 0.5 s and 0.02 s. A processor that other tests use adds up to one interval.
    assert max(gaps) < 4 * INTERVAL
    assert max(answers) < 2.0
    refused = amphora.call("GET", "/v2/diagnostics")[1]["certificate"]["refused_handshakes"]
    assert refused["too many handshakes from there"] > 0


def test_a_handshake_without_a_certificate_makes_no_address_known(amphora, network, addresses):
    """The handshake is complete, but has no controller's certificate."""
    context = amphora.tls(None)

    def unknown_clients() -> int:
        refused = 0
        for _ in range(int(tls_gate.ADDRESS_BURST) + 5):
            try:
                plain = socket.create_connection((AMPHORA, 9443), 10, source_address=(NEWCOMER, 0))
                with plain, context.wrap_socket(plain, server_hostname=amphora.id) as connection:
                    connection.recv(1)
            except ssl.SSLError:
                pass
            except OSError:
                refused += 1
        return refused

    assert network.thread("ctl").run(unknown_clients) >= 3
