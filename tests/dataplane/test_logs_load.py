# SPDX-License-Identifier: Apache-2.0
"""A dead or slow log target does not affect traffic, and lost lines are counted."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest
from amphora_lab import CONTROLLER, VIP, eventually
from configuration_text import LISTENER
from log_receivers import TcpReceiver
from test_logs import LOGGED, counters, use

pytestmark = [pytest.mark.root, pytest.mark.quiet, pytest.mark.extended]
# HAProxy itself answers, so that the test measures HAProxy and its log only.
ANSWERED = f"""defaults
    mode http
    timeout connect 2s
    timeout client 30s
    timeout server 30s
frontend {LISTENER}
    bind {VIP}:80
{LOGGED}    http-request deny deny_status 404
"""
CLIENTS, PIPELINED = 2, 32
SECONDS = 2.0
# An address of the network that no machine has: packets to it are lost.
NOWHERE = "203.0.113.250"


class Load:
    """A client that sends as many requests as possible, and one that measures the latency of single requests."""

    def __init__(self, network) -> None:
        self.requests = 0
        self.latencies: list[float] = []
        self._ending = threading.Event()
        place = network.thread("cl")
        connections = [place.run(socket.create_connection, (VIP, 80), 20) for _ in range(CLIENTS)]
        targets = (self._many, self._single)
        self._threads = [threading.Thread(target=one, args=(c,)) for one, c in zip(targets, connections, strict=True)]
        for one in self._threads:
            one.start()

    def _exchange(self, connection, number: int) -> None:
        connection.sendall(b"GET /load HTTP/1.1\r\nHost: a\r\n\r\n" * number)
        received, tail = 0, b""
        while received < number:
            data = tail + connection.recv(1 << 18)
            found = data.count(b"</html>")
            received += found
            tail = data[-6:]
        self.requests += number

    def _many(self, connection) -> None:
        with contextlib.closing(connection):
            while not self._ending.is_set():
                self._exchange(connection, PIPELINED)

    def _single(self, connection) -> None:
        with contextlib.closing(connection):
            while not self._ending.wait(0.005):
                begun = time.monotonic()
                self._exchange(connection, 1)
                self.latencies.append(time.monotonic() - begun)

    def close(self) -> None:
        self._ending.set()
        for one in self._threads:
            one.join(30)


def measure(network):
    """Return requests per second, and the median and 99th percentile of the latency in seconds."""
    with contextlib.closing(Load(network)) as load:
        time.sleep(0.5)
        before, begun = load.requests, time.monotonic()
        load.latencies.clear()
        time.sleep(SECONDS)
        rate = (load.requests - before) / (time.monotonic() - begun)
        found = sorted(load.latencies)
    return rate, found[len(found) // 2], found[int(len(found) * 0.99)], load


def test_a_dead_or_slow_target_does_not_affect_traffic(amphora, network, record_property):
    ctl = network.thread("ctl")
    assert amphora.push(1, ANSWERED)[0] == 200
    receivers = {"slow": ctl.run(TcpReceiver, reads=False), "good": ctl.run(TcpReceiver)}
    targets = {
        "none": (),
        "good": (receivers["good"].url,),
        "slow": (receivers["slow"].url,),
        "dead": (f"tcp://{CONTROLLER}:9", f"tcp://{NOWHERE}:601"),
    }
    results: dict[str, list[float]] = {}
    try:
        # The first measurement warms up. Each kind is measured twice, in turns; the better one counts.
        measure(network)
        for _ in range(2):
            for kind, urls in targets.items():
                use(amphora, tenant=urls, queue_bytes=64 << 10)
                seen = (counters(amphora) or {"received": 0, "lost": 0}) if urls else None
                rate, median, slowest, load = measure(network)
                former = results.get(kind, [0.0, 9.0, 9.0])
                results[kind] = [max(rate, former[0]), min(median, former[1]), min(slowest, former[2])]
                if urls:
                    check_counts(amphora, kind, seen, load.requests)
    finally:
        for one in receivers.values():
            one.close()
    for kind, (rate, median, slowest) in results.items():
        record_property(kind, f"{rate:.0f}/s, {median * 1000:.2f} ms, {slowest * 1000:.2f} ms")
    for kind in ("slow", "dead"):
        assert results[kind][0] > 0.7 * min(results["none"][0], results["good"][0]), results
        assert results[kind][1] < 2 * results["none"][1] + 0.005, results
        assert results[kind][2] < 3 * results["none"][2] + 0.02, results


def check_counts(amphora, kind, before, requests):
    """Each request has a line that was received or counted as lost; full queues count their losses."""

    def complete():
        now = counters(amphora)
        lines = now["received"] - before["received"] + now["lost"] - before["lost"]
        # HAProxy may log the end of the connection of each client too.
        return now if requests <= lines <= requests + CLIENTS else None

    try:
        now = eventually(complete, f"{kind}: all {requests} lines are counted", 20)
    except AssertionError as error:
        raise AssertionError(f"{error}: before {before}, now {counters(amphora)}") from error
    for one in now["tenant"]:
        if kind == "good":
            assert one["sent"] > 0
        else:
            assert one["dropped"] > 0.5 * (now["received"] - before["received"] - 10_000), one
            assert one["waiting_bytes"] < 80 << 10
