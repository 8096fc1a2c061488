# SPDX-License-Identifier: Apache-2.0
"""Counters of connections and bytes stay exact through reloads, restarts and kills."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest
from amphora_lab import MEMBERS, VIP, Client, alive, descendants, eventually, get
from configuration_text import LISTENER, MEMBER_IDS, POOL, SECOND, listener, text
from counted import metrics, total
from faults import answered, end_agent, haproxy_pids

pytestmark = pytest.mark.root
ECHO = str(uuid.uuid5(uuid.NAMESPACE_DNS, "echo"))
ECHO_PORT = 7007


def wanted(number: int, members=("m1", "m2")) -> str:
    """Return a configuration with HTTP on port 80 and TCP on 8080; each number needs a new worker."""
    front = f"frontend {SECOND}\n    mode tcp\n    timeout client 300s\n    bind {VIP}:8080\n"
    back = f"backend {POOL}:{SECOND}\n    mode tcp\n    timeout server 300s\n"
    back += f"    server {ECHO} {MEMBERS['m1']}:{ECHO_PORT}\n"
    http_too = text(listener(members, extra=f"    fullconn {number}\n"))
    return f"{http_too}{front}    default_backend {POOL}:{SECOND}\n{back}"


class Echo:
    """An echo server in the members' namespace."""

    def __init__(self, network):
        self._server = network.thread("mem").run(socket.create_server, (MEMBERS["m1"], ECHO_PORT))
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self):
        with suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                self._threads.append(threading.Thread(target=self._serve, args=(connection,), daemon=True))
                self._threads[-1].start()

    def _serve(self, connection):
        with connection, suppress(OSError):
            while data := connection.recv(65536):
                connection.sendall(data)

    def close(self):
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for thread in self._threads:
            thread.join(10)


class LongConnection:
    """A long connection that counts sent and received bytes."""

    def __init__(self, network):
        self.bytes = 0
        self._run = network.thread("cl").run
        self._socket = self._run(socket.create_connection, (VIP, 8080), 10)

    def say(self, size: int = 1000):
        self._socket.sendall(b"x" * size)
        missing = size
        while missing:
            got = len(self._socket.recv(missing))
            assert got, "the connection is closed"
            missing -= got
        self.bytes += size

    def is_closed(self, seconds: float = 10.0) -> bool:
        self._socket.settimeout(seconds)
        try:
            return self._socket.recv(1) == b""
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False

    def close(self):
        self._socket.close()


@pytest.fixture
def echo(network):
    made = Echo(network)
    yield made
    made.close()


@pytest.fixture
def opened(network):
    made: list[LongConnection] = []

    def new():
        made.append(LongConnection(network))
        return made[-1]

    yield new
    for one in made:
        one.close()


class TotalsReader:
    """Reads the totals from heartbeats and from metrics."""

    def __init__(self, amphora, receiver):
        self._amphora, self._receiver = amphora, receiver
        self.fallen: list[str] = []
        self.scrapes = 0
        self._last: dict[str, float] = {}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def told(self, listener_id):
        return self._receiver.next().document["listeners"].get(listener_id, {})

    def scrape(self) -> dict[str, float]:
        return metrics(self._amphora)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ending.set()
        self._thread.join(30)

    def _watch(self):
        """Assert that no counter decreases."""
        while not self._ending.wait(0.05):
            found = self.scrape()
            self.scrapes += bool(found)
            for name, value in found.items():
                if value < self._last.get(name, 0.0):
                    self.fallen.append(f"{name}: {self._last[name]} {value}")
            self._last.update(found)


def test_totals_are_exact_over_reloads_and_restarts_of_everything(amphora, receiver, echo, opened):
    assert amphora.push(1, wanted(1))[0] == 200
    eternal, number = opened(), 1
    longs = [eternal]
    with TotalsReader(amphora, receiver) as totals:
        with Client(amphora.network) as client:
            for step in range(10):
                number += 1
                longs.append(opened())
                for one in longs:
                    one.say(100 + step)
                client.hears("m1")
                status, said = amphora.push(number, wanted(number))
                assert (status, said["how"]) == (200, "reload"), said
                if step in (3, 7):  # between reloads, while old workers drain
                    end_agent(amphora, signal.SIGTERM if step == 3 else signal.SIGKILL)
                if step % 2:
                    longs.pop(1).close()
            client.hears("m2")
        assert client.failures == []
        for one in longs:
            one.say(7)
        # The stop closes open connections, and the agent counts all connections.
        assert amphora.push(number + 1, None)[1]["how"] == "stop"
        assert all(one.is_closed() for one in longs)
        assert amphora.push(number + 2, wanted(number + 2))[1]["how"] == "start"
        assert {answered(amphora) for _ in range(10)} == {"m1", "m2"}
        status, said = amphora.push(number + 3, wanted(number + 3))
        assert (status, said.get("how")) == (200, "reload"), said
        requests = client.total + 10

        def complete():
            return totals.told(LISTENER).get("total_connections") == requests

        eventually(complete, f"{requests} requests are reported", 20)
        found = eventually(totals.scrape, "metrics are available")
    assert totals.scrapes > 10
    assert totals.fallen == []
    assert total(found, "listener_sessions_total", LISTENER) == requests
    assert total(found, "member_http_responses_total", 'code="2xx"') == requests
    for name in ("m1", "m2"):
        assert total(found, "member_sessions_total", MEMBER_IDS[name]) == client.answers[name] + 5
    assert totals.told(SECOND)["total_connections"] == 11
    assert totals.told(LISTENER)["request_errors"] == 0


def test_bytes_are_exact_however_a_connection_ends(amphora, receiver, echo, opened):
    """Connections end by themselves, at the end of a drain, or with a worker over the limit."""
    totals = TotalsReader(amphora, receiver)
    limits = {"connections": None, "threads": None, "drain": None, "workers": 2}
    assert amphora.push(1, wanted(1), limits=limits)[0] == 200
    longs = []
    for generation in range(2, 6):
        longs.append(opened())
        longs[-1].say(1000 * generation)
        status, said = amphora.push(generation, wanted(generation), limits=limits)
        assert (status, said["how"]) == (200, "reload"), said
        replaced = amphora.call("GET", "/v2/diagnostics")[1]["show proc"].partition("# old workers")[2]
        assert replaced.count("worker") <= 2
    # The agent has ended the two oldest workers and their connections. The two others continue.
    assert [one.is_closed(5.0 if place < 2 else 0.2) for place, one in enumerate(longs)] == [True, True, False, False]
    ended = amphora.call("GET", "/v2/info")[1]["changes"]["workers_ended"]
    assert ended == {"count": 2, "connections": 2}
    expected = sum(one.bytes for one in longs[:2])
    eventually(lambda: totals.told(SECOND).get("bytes_in") == expected, "the bytes of ended workers are reported")
    for number in (signal.SIGKILL, signal.SIGTERM):
        longs[2].say(11)
        end_agent(amphora, number)
        longs[2].say(13)
    longs[2].close()
    expected += longs[2].bytes
    eventually(
        lambda: totals.told(SECOND).get("bytes_out") == expected, "the bytes of a closed connection are reported"
    )
    longs[3].close()
    expected += longs[3].bytes
    # The drain limit applies to workers that start with it.
    assert amphora.push(6, wanted(6), limits={**limits, "drain": 2})[0] == 200
    assert "hard-stop-after 2s" in (amphora.var / "haproxy.cfg").read_text()
    drained = opened()
    drained.say(500)
    began = time.monotonic()
    assert amphora.push(7, wanted(7), limits=limits)[0] == 200
    drained.say(50)
    assert drained.is_closed(20.0)
    # The connection lasts for the drain limit, less the time to count it, and longer on a busy machine.
    assert time.monotonic() - began > 1
    expected += drained.bytes
    eventually(
        lambda: totals.told(SECOND).get("bytes_in") == expected, "the bytes of a drained connection are reported"
    )
    assert totals.told(SECOND)["total_connections"] == 5
    # The agent applies the limit of workers; HAProxy's configuration does not contain it.
    assert amphora.push(8, wanted(7), limits={**limits, "workers": 3})[1]["how"] == "unchanged"


def test_counters_of_a_killed_haproxy_are_kept(amphora, receiver):
    assert amphora.push(1, wanted(1))[0] == 200
    totals = TotalsReader(amphora, receiver)
    for _ in range(20):
        assert answered(amphora) is not None
    eventually(lambda: totals.told(LISTENER).get("total_connections") == 20, "20 requests are reported")
    before = eventually(totals.scrape, "metrics are available")
    for victim in (0, 1):
        pids = haproxy_pids(amphora)
        os.kill(pids[victim], signal.SIGKILL)
        eventually(lambda pids=pids: not any(alive(pid) for pid in pids), "both processes are dead")
        told = totals.told(LISTENER).get("total_connections", 0)
        eventually(lambda: answered(amphora) is not None, "HAProxy answers again")
        eventually(lambda told=told: totals.told(LISTENER).get("total_connections", 0) > told, "the counter increases")
    after = eventually(totals.scrape, "metrics are available")
    assert {name for name, value in before.items() if after.get(name, 0) < value} == set()


@pytest.mark.parametrize("more", [0, 120])
def test_counters_continue_for_a_member_removed_and_added_at_runtime(amphora, receiver, more):
    """The agent does not take a sample at each change of a large pool, so the member returns between two samples."""
    others = "".join(
        f"    server {uuid.uuid5(uuid.NAMESPACE_DNS, str(n))} {MEMBERS['m1']}:80 weight 0\n" for n in range(more)
    )
    assert amphora.push(1, text(listener(["m1", "m2"], extra=others)))[0] == 200
    totals, served = TotalsReader(amphora, receiver), 0
    for generation in range(2, 8):
        served += sum(answered(amphora) == "m2" for _ in range(6))
        members = ["m1"] if generation % 2 == 0 else ["m1", "m2"]
        status, said = amphora.push(generation, text(listener(members, extra=others)))
        assert (status, said["how"]) == (200, "runtime"), said
    assert served >= 6
    name = f'octavia_member_sessions_total{{pool="{POOL}:{LISTENER}",member="{MEMBER_IDS["m2"]}"}}'
    eventually(lambda: totals.scrape().get(name) == served, f"{served} sessions are reported")


def processor_time(pids) -> float:
    ticks = 0
    for pid in pids:
        with suppress(FileNotFoundError):
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


@pytest.mark.quiet
def test_counters_of_a_thousand_members_take_little_processor_time(amphora, receiver):
    servers = "".join(
        f"    server {uuid.uuid5(uuid.NAMESPACE_DNS, str(n))} {MEMBERS['m1']}:80 weight 1\n" for n in range(1000)
    )
    for generation in (1, 2):
        extra = f"    fullconn {generation}\n{servers}"
        assert amphora.push(generation, text(listener([], extra=extra)))[0] == 200
        for _ in range(200):
            amphora.network.thread("cl").run(get)
    totals = TotalsReader(amphora, receiver)
    name = f'octavia_listener_sessions_total{{listener="{LISTENER}"}}'
    eventually(lambda: totals.scrape().get(name) == 400, "all sessions are reported")
    everything = descendants(amphora.init())
    began, at, scrapes = processor_time(everything), time.monotonic(), 5
    while time.monotonic() - at < 4:
        time.sleep(0.2)  # the test measures this interval
    a_second = (processor_time(everything) - began) / (time.monotonic() - at)
    began = processor_time(everything)
    for _ in range(scrapes):
        assert len(totals.scrape()) > 15_000
    a_scrape = (processor_time(everything) - began) / scrapes - a_second
    # Processor time of HAProxy and of the agent: 0.05 and 0.09 s on a busy machine.
    assert a_second < 0.2, f"{a_second * 1000:.0f} ms each second"
    assert a_scrape < 0.25, f"{a_scrape * 1000:.0f} ms for a scrape"


def test_heartbeats_have_the_usage_of_limited_resources(amphora, receiver, echo, opened):
    limited = wanted(1).replace("    timeout client 300s\n", "    timeout client 300s\n    maxconn 10\n")
    assert amphora.push(1, limited)[0] == 200
    for _ in range(9):
        opened()

    def measured():
        found = receiver.next().document["usage"]
        return found if found.get("listener_connections") == 90 and "conntrack" in found else None

    found = eventually(measured, "nine of ten connections are reported")
    # This amphora is a network namespace, which shares CPU and memory with other processes.
    assert found.keys() == {"connections", "listener_connections", "file_descriptors", "conntrack"}
    assert found["file_descriptors"] < 50
