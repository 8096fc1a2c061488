# SPDX-License-Identifier: Apache-2.0
"""Octavia's heartbeats: content, signature and targets."""

import hashlib
import hmac
import json
import socket
import uuid
import zlib

import pytest

from amphora_agent.change_priority import ChangePriority
from amphora_agent.config import Settings, Target
from amphora_agent.octavia_api_v1 import host_info
from amphora_agent.paths import Paths
from amphora_agent.stats import octavia_heartbeat
from amphora_agent.stats.active_sender import ActiveSender
from amphora_agent.stats.octavia_heartbeat import OctaviaSender

AMPHORA = uuid.UUID("a0000000-0000-4000-8000-000000000001")


def known(bytes_in, bytes_out=0, total=0, errors=0, active=0):
    counters = {"bytes_in": bytes_in, "bytes_out": bytes_out, "total_connections": total, "request_errors": errors}
    return {
        "generation": None,
        "listeners": {"l": {"status": "OPEN", "active_connections": active, **counters}},
        "pools": {"p:l": {"status": "UP", "members": {"m": "UP 1/3"}}},
    }


def opened(datagram, key):
    packed, seal = datagram[:-64], datagram[-64:]
    assert hmac.new(key, packed, hashlib.sha256).hexdigest().encode() == seal
    return json.loads(zlib.decompress(packed))


def test_traffic_counts_since_the_last_heartbeat():
    said, reported = octavia_heartbeat.document(AMPHORA, 3, known(100, 50, 7, 1, active=2), {})
    assert said == {
        "id": str(AMPHORA),
        "seq": 3,
        "ver": 3,
        "listeners": {"l": {"status": "OPEN", "stats": {"tx": 50, "rx": 100, "totconns": 7, "ereq": 1, "conns": 2}}},
        "pools": {"p:l": {"status": "UP", "members": {"m": "UP 1/3"}}},
    }
    said, reported = octavia_heartbeat.document(AMPHORA, 4, known(160, 50, 8, 1), reported)
    assert said["listeners"]["l"]["stats"] == {"tx": 0, "rx": 60, "totconns": 1, "ereq": 0, "conns": 0}
    # A listener that returns continues its count.
    away, reported = octavia_heartbeat.document(AMPHORA, 5, {"listeners": {}, "pools": {}}, reported)
    assert away["listeners"] == {}
    said, _ = octavia_heartbeat.document(AMPHORA, 6, known(161, 50, 8, 1), reported)
    assert said["listeners"]["l"]["stats"]["rx"] == 1
    # The sums are lost, so all present counters are new.
    said, _ = octavia_heartbeat.document(AMPHORA, 7, known(5), reported)
    assert said["listeners"]["l"]["stats"]["rx"] == 5


def test_members_with_weight_zero_are_draining():
    found = known(1)
    found["pools"]["p:l"]["members"] = {"a": "UP", "b": "UP", "c": "DOWN", "d": "no check"}
    said, _ = octavia_heartbeat.document(AMPHORA, 0, found, {}, {("p:l", "b"), ("p:l", "c"), ("p:l", "d")})
    assert said["pools"]["p:l"]["members"] == {"a": "UP", "b": "DRAIN", "c": "DOWN", "d": "no check"}


def test_the_signature_is_that_of_octavia():
    datagram = octavia_heartbeat.encode({"id": "x"}, b"insecure")
    assert datagram.startswith(b"\x78\xda")
    assert opened(datagram, b"insecure") == {"id": "x"}


class Counting:
    """A collector whose listener gets ten bytes between heartbeats."""

    pause = 0.0
    priority = ChangePriority()

    def __init__(self):
        self.bytes = 0

    def sample(self, _work=None):
        self.bytes += 10

    def document(self, generation):
        assert generation is None
        return known(self.bytes)

    def write(self, _work=None):
        pass


@pytest.fixture
def controllers():
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
        each.settimeout(10)
    yield sockets
    for each in sockets:
        each.close()


def made(controllers, interval=0.02, key=b"k"):
    targets = tuple(Target(*each.getsockname()) for each in controllers)
    return Settings(AMPHORA, "127.0.0.1", 9443, "supervisor", 20, interval, targets, key, "octavia")


def test_controllers_get_heartbeats_in_turn_without_duplicates(controllers, tmp_path):
    paths = Paths(tmp_path)
    paths.var.mkdir(parents=True)
    collector = Counting()
    sender = OctaviaSender(made(controllers), paths, collector, frozenset)
    sender.start()
    beats = [opened(controllers[n % 2].recv(65536), b"k") for n in range(6)]
    sender.close()
    assert [beat["seq"] for beat in beats] == list(range(6))
    stored = json.loads((paths.var / "octavia-reported.json").read_text())
    assert stored["l"]["rx"] <= collector.bytes
    # The next agent continues at the stored position.
    said, _ = octavia_heartbeat.document(
        AMPHORA,
        0,
        known(stored["l"]["rx"] + 1),
        OctaviaSender(made(controllers), paths, collector, frozenset)._restored(),
    )
    assert said["listeners"]["l"]["stats"]["rx"] == 1


def test_changed_settings_apply_at_once(controllers, tmp_path):
    paths = Paths(tmp_path)
    paths.var.mkdir(parents=True)
    reporter = ActiveSender(made(controllers[:1]), lambda wanted: OctaviaSender(wanted, paths, Counting(), frozenset))
    reporter.start()
    opened(controllers[0].recv(65536), b"k")
    reporter.change(made(controllers[1:], key=b"another"))
    assert opened(controllers[1].recv(65536), b"another")["id"] == str(AMPHORA)
    assert reporter.settings.heartbeat_key == b"another"
    assert reporter.errors() == {}
    reporter._sender.close()


def test_an_unreachable_target_is_reported(tmp_path):
    paths = Paths(tmp_path)
    paths.var.mkdir(parents=True)
    settings = Settings(
        AMPHORA, "127.0.0.1", 9443, "supervisor", 20, 1, (Target("255.255.255.255", 9),), b"k", "octavia"
    )
    sender = OctaviaSender(settings, paths, Counting(), frozenset)
    sender._send()
    for each in sender._sockets.values():
        each.close()
    assert sender.errors()["255.255.255.255:9"]["count"] == 1


# -- host metrics ------------------------------------------------------------------------------------------------------


def test_host_metrics_are_read():
    assert host_info.cpu("cpu  10 1 20 100 5 2 3 0 0 0\ncpu0 1 1 1\n") == {
        "total": 141,
        "user": "10",
        "system": "20",
        "soft_irq": "3",
    }
    found = host_info.memory("MemTotal:       2048 kB\nMemFree:  1024 kB\nHugePages_Total:       0\n")
    assert (found["total"], found["free"], found["slab"]) == (2048, 1024, 0)
    dev = (
        "Inter-|   Receive                                                |  Transmit\n"
        " face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets\n"
        "    lo:  84       1    0    0    0     0          0         0       84       1    0    0    0     0  0  0\n"
        "  eth1: 1000      10    0    0    0     0          0         0     2000      20    0    0    0     0  0  0\n"
    )
    assert host_info.networks(dev) == {"eth1": {"network_rx": 1000, "network_tx": 2000}}
