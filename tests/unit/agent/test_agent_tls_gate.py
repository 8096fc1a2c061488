# SPDX-License-Identifier: Apache-2.0
"""Limits of TLS handshakes by address, and connections of unresponsive clients."""

from __future__ import annotations

import random
import socket
import ssl
import time

from gunicorn import util

from amphora_agent import tls_gate
from amphora_agent.tls_gate import Budget, Connection


def admitted(budget: Budget, address: str, times: int, now: float) -> int:
    return sum(budget.take(address, now) for _ in range(times))


def test_an_address_has_a_burst_and_a_rate():
    budget = Budget(0.0)
    assert admitted(budget, "stranger", 100, 0.0) == tls_gate.ADDRESS_BURST
    assert admitted(budget, "stranger", 100, 3.0) == 3 * tls_gate.ADDRESS_RATE
    assert admitted(budget, "another", 1, 3.0) == 1


def test_the_total_rate_is_limited():
    budget = Budget(0.0)
    assert sum(budget.take(f"address {number}", 0.0) for number in range(10000)) == tls_gate.UNKNOWN_BURST
    assert sum(budget.take(f"other {number}", 2.0) for number in range(10000)) == 2 * tls_gate.UNKNOWN_RATE


def test_a_controller_is_unlimited_until_a_long_absence():
    budget = Budget(0.0)
    budget.add_controller("controller", 0.0)
    for number in range(1000):
        budget.take(f"stranger {number}", 0.0)
    assert admitted(budget, "controller", 1000, tls_gate.KNOWN_SECONDS - 1) == 1000
    assert admitted(budget, "controller", 1000, tls_gate.KNOWN_SECONDS + 1) < 1000


def test_unknown_addresses_never_use_the_share_of_controllers():
    """Within the time-out of one handshake, unknown addresses start fewer handshakes than may be open at once."""
    budget, begun, now = Budget(0.0), [], 0.0
    chance = random.Random(1)
    for number in range(20000):
        now += chance.expovariate(1000)
        if budget.take(f"stranger {number % 3000}", now):
            begun.append(now)
    assert len(begun) > tls_gate.UNKNOWN_BURST
    assert all(sum(at <= other < at + tls_gate.HANDSHAKE_SECONDS for other in begun) < tls_gate.MOST for at in begun)


def test_the_number_of_remembered_addresses_is_bounded():
    budget = Budget(0.0)
    for number in range(5000):
        budget.take(f"stranger {number}", 0.0)
        budget.add_controller(f"controller {number}", 0.0)
    assert len(budget._unknown) <= tls_gate._MOST_UNKNOWN
    assert len(budget._known) <= tls_gate._MOST_KNOWN


def test_the_end_of_a_connection_does_not_wait_for_the_client():
    """gunicorn closes connections in its main loop; the client neither closes the connection nor sends data."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.sslsocket_class = Connection
    ours, client = socket.socketpair()
    with client:
        connection = context.wrap_socket(ours, server_side=True, do_handshake_on_connect=False)
        connection.setblocking(True)
        assert connection.gettimeout() == tls_gate.EXCHANGE_SECONDS
        client.sendall(b"not read")
        begin = time.monotonic()
        util.close_graceful(connection, timeout=60)
        assert time.monotonic() - begin < 30
        assert connection.fileno() == -1
