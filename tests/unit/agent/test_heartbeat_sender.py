# SPDX-License-Identifier: Apache-2.0
"""The sender of heartbeats over a real socket: complete reports and differences."""

import socket
import uuid
from types import SimpleNamespace

import pytest

from amphora_agent.change_priority import ChangePriority
from amphora_agent.config import Target
from amphora_agent.paths import Paths
from amphora_agent.stats.heartbeat_sender import HeartbeatSender
from amphora_driver.health.heartbeat_codec import decode_datagram
from amphora_driver.secret import Secret

KEY = bytes(range(32))
MEMBERS = [str(uuid.uuid4()) for _ in range(100)]


class Collector:
    """One pool with many members."""

    is_large = False
    priority = ChangePriority()
    pause = 0.0

    def __init__(self):
        self.members = dict.fromkeys(MEMBERS, "UP")
        self.samples = 0

    def sample(self, _work=None):
        self.samples += 1

    def statuses(self):
        return {"pool:listener": dict(self.members)}

    def document(self, generation):
        pools = {"pool:listener": {"status": "UP", "members": dict(self.members)}}
        return {"generation": generation, "listeners": {"listener": {"status": "OPEN"}}, "pools": pools}

    def write(self, _work=None):
        pass


@pytest.fixture
def receiving():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        made.bind(("127.0.0.1", 0))
        made.settimeout(10)
        yield made


@pytest.fixture
def collector():
    return Collector()


@pytest.fixture
def paths(tmp_path):
    made = Paths(tmp_path)
    made.var.mkdir(parents=True)
    return made


def settings_for(receiving):
    targets = (Target(*receiving.getsockname()),)
    return SimpleNamespace(amphora_id=uuid.uuid4(), heartbeat_key=KEY, interval=0.05, targets=targets)


@pytest.fixture
def sender(paths, receiving, collector):
    made = HeartbeatSender(settings_for(receiving), paths, collector, lambda: 1, lambda: None, dict)
    made.start()
    yield made
    made.close()


def read(receiving):
    return decode_datagram(receiving.recv(65536), Secret(KEY))


def test_every_fourth_heartbeat_is_complete(sender, receiving):
    found = [read(receiving) for _ in range(9)]
    assert [one.report.full for one in found] == [None, 1, 1, 1, None, 5, 5, 5, None]
    assert [len(one.report.pools) for one in found] == [1, 0, 0, 0, 1, 0, 0, 0, 1]


def test_a_difference_names_the_changed_member_until_the_next_complete_report(sender, receiving, collector):
    read(receiving)
    collector.members[MEMBERS[7]] = "DOWN"
    found = [read(receiving) for _ in range(8)]
    changed = [one.report.pools["pool:listener"].members for one in found if one.report.full and one.report.pools]
    assert changed
    assert all(one == {MEMBERS[7]: "DOWN"} for one in changed)
    complete = [one for one in found if one.report.full is None][-1]
    assert complete.report.pools["pool:listener"].members == collector.members


def test_a_requested_heartbeat_is_complete(sender, receiving):
    for _ in range(2):
        read(receiving)
    sender.send_now()
    found = [read(receiving).report.full for _ in range(3)]
    assert None in found


class ChangedSender(HeartbeatSender):
    """Its settings change directly before it looks for a request for a complete report."""

    change = None

    @property
    def _is_complete(self):
        change, self.change = self.change, None
        if change is not None:
            self.update(change)
        return self._complete

    @_is_complete.setter
    def _is_complete(self, value):
        self._complete = value


def test_the_first_heartbeat_to_a_new_target_is_complete(paths, receiving, collector):
    sender = ChangedSender(settings_for(receiving), paths, collector, lambda: 1, lambda: None, dict)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as new:
        new.bind(("127.0.0.1", 0))
        new.settimeout(10)
        for _ in range(2):
            sender._send()
        sender.change = settings_for(new)
        for _ in range(2):
            sender._send()
        assert [read(new).report.full for _ in range(2)] == [None, 3]
    assert [read(receiving).report.full for _ in range(2)] == [None, 1]
    for link in sender._sockets.values():
        link.close()


def test_heartbeats_continue_during_the_pause_between_two_samples(paths, receiving, collector):
    collector.pause = 60.0
    sender = HeartbeatSender(settings_for(receiving), paths, collector, lambda: 1, lambda: None, dict)
    sender.start()
    for _ in range(5):
        read(receiving)
    sender.close()
    assert collector.samples == 1
