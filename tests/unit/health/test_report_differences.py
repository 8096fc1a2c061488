# SPDX-License-Identifier: Apache-2.0
"""Differences between reports: the agent's code and the health manager's, also of an earlier version."""

import copy
import random
import uuid

import msgspec
import pytest

from amphora_agent.stats import heartbeat_codec, report_differences
from amphora_agent.stats.report_differences import COMPLETE_EVERY, ReportDifferences
from amphora_driver.health.amphora_reports import AmphoraReports
from amphora_driver.health.heartbeat_codec import decode_datagram
from amphora_driver.secret import Secret

AMPHORA = uuid.UUID("0b9d1c52-7f0e-4a55-9f0c-2f6f3a1f9c11")
KEY = bytes(range(32))
INTERVAL, EXPIRY = 3.0, 15.0


def identity(*words):
    return str(uuid.uuid5(uuid.NAMESPACE_OID, "/".join(map(str, words))))


def document(listeners=10, members=10, generation=1):
    names = [identity("listener", number) for number in range(listeners)]
    counted = {"bytes_in": 0, "bytes_out": 0, "request_errors": 0, "total_connections": 0}
    return {
        "generation": generation,
        "holds_vip": None,
        "agent_version": "0.1.0",
        "usage": {"connections": 1},
        "listeners": {one: {"status": "OPEN", "active_connections": 0, **counted} for one in names},
        "pools": {
            f"{identity('pool', one)}:{one}": {
                "status": "UP",
                "members": {identity("member", one, number): "UP" for number in range(members)},
            }
            for one in names
        },
    }


class Sender:
    """Encodes reports as the agent's sender does."""

    def __init__(self, epoch=1):
        self.differences, self.epoch, self.sequence = ReportDifferences(), epoch, 0
        self.sizes = []

    def send(self, report, *, complete=False):
        if complete:
            self.differences.forget()
        report = copy.deepcopy(report)
        difference = self.differences.find(report)
        first = self.sequence + 1
        made = list(heartbeat_codec.datagrams(AMPHORA, KEY, self.epoch, first, difference or report))
        self.sequence += len(made)
        if difference is None:
            self.differences.record(report, first, [len(one) for one in made])
        self.sizes.append(sum(map(len, made)))
        return [decode_datagram(one, Secret(KEY)) for one in made]


class Manager:
    """A health manager's reports; one of an earlier version ignores the field `full`."""

    def __init__(self, *, is_old=False):
        self.reports, self.now, self.is_old, self.totals = AmphoraReports(expiry=EXPIRY), 0.0, is_old, {}

    def hear(self, heartbeats):
        for one in heartbeats:
            report = msgspec.structs.replace(one.report, full=None) if self.is_old else one.report
            assert self.reports.accept(msgspec.structs.replace(one, report=report), self.now)
        for counters in self.reports.take_counters([str(AMPHORA)]).values():
            self.totals.update({name: one.bytes_in for name, one in counters.items()})

    def statuses(self):
        report = self.reports.live_reports([str(AMPHORA)], self.now).get(str(AMPHORA))
        if report is None:
            return {}, {}
        listeners = {name: one.status for name, one in report.listeners.items()}
        return listeners, {name: (one.status, one.members) for name, one in report.pools.items()}


def expected(report):
    listeners = {name: one["status"] for name, one in report["listeners"].items()}
    return listeners, {name: (one["status"], one["members"]) for name, one in report["pools"].items()}


def change(report, chance):
    for one in report["listeners"].values():
        if chance.random() < 0.7:
            one["bytes_in"] += chance.randrange(1, 1000)
        if chance.random() < 0.05:
            one["status"] = chance.choice(["OPEN", "FULL"])
    for pool in report["pools"].values():
        for member in pool["members"]:
            if chance.random() < 0.02:
                pool["members"][member] = chance.choice(["UP", "DOWN", "UP 1/2"])
        pool["status"] = "UP" if "UP" in pool["members"].values() else "DOWN"


@pytest.mark.parametrize("is_old", [False, True], ids=["new manager", "old manager"])
@pytest.mark.parametrize("seed", range(5))
def test_the_manager_knows_every_state_and_count(seed, is_old):
    chance, sender, manager, report = random.Random(seed), Sender(), Manager(is_old=is_old), document()
    for _ in range(60):
        manager.hear(sender.send(report))
        assert manager.statuses() == expected(report)
        assert manager.totals == {name: one["bytes_in"] for name, one in report["listeners"].items()}
        manager.now += INTERVAL
        change(report, chance)


@pytest.mark.parametrize("seed", range(5))
def test_a_lost_difference_has_no_effect(seed):
    chance, sender, manager, report = random.Random(seed), Sender(), Manager(), document()
    for number in range(60):
        sent = sender.send(report)
        if number % COMPLETE_EVERY == 0 or chance.random() < 0.5:
            manager.hear(sent)
            assert manager.statuses() == expected(report)
        manager.now += INTERVAL
        change(report, chance)


@pytest.mark.parametrize("is_old", [False, True], ids=["new manager", "old manager"])
@pytest.mark.parametrize("seed", range(5))
def test_after_any_loss_no_state_is_wrong_after_the_next_complete_report(seed, is_old):
    chance, sender, manager, report = random.Random(seed), Sender(), Manager(is_old=is_old), document()
    for number in range(120):
        sent = sender.send(report)
        if chance.random() < 0.6:
            manager.hear(sent)
            if number % COMPLETE_EVERY == 0:
                assert manager.statuses() == expected(report)
        manager.now += INTERVAL
        change(report, chance)


def test_a_restarted_manager_has_all_states_after_the_next_complete_report():
    sender, report = Sender(), document()
    sender.send(report)
    manager = Manager()
    known = []
    for _ in range(COMPLETE_EVERY):
        manager.hear(sender.send(report))
        known.append(manager.statuses() == expected(report))
        manager.now += INTERVAL
    assert known == [False, False, False, True]


def test_a_report_of_size_m_is_smaller_as_a_difference():
    sender, report = Sender(), document()
    for _ in range(COMPLETE_EVERY + 1):
        sender.send(report)
    first, *differences, last = sender.sizes
    assert last == first > 1400
    assert max(differences) < first / 10


@pytest.mark.parametrize(
    "changed",
    [document(generation=2), document(listeners=9), document(members=9), document(listeners=11)],
    ids=["generation", "less listeners", "less members", "more listeners"],
)
def test_other_objects_or_another_generation_cause_a_complete_report(changed):
    sender, manager = Sender(), Manager()
    manager.hear(sender.send(document()))
    (found,) = sender.send(changed)
    assert found.report.full is None
    manager.now += 2 * EXPIRY
    manager.hear([found])
    assert manager.statuses() == expected(changed)


def test_short_and_very_long_reports_are_always_complete(monkeypatch):
    for report in (document(listeners=1, members=2), document(listeners=100, members=50)):
        sender = Sender()
        assert {one.report.full for _ in range(3) for one in sender.send(report)} == {None}
    monkeypatch.setattr(report_differences, "MOST_BYTES", 1500)
    sender = Sender()
    assert {one.report.full for _ in range(3) for one in sender.send(document())} == {None}


@pytest.mark.parametrize(("members", "is_complete"), [(98, False), (99, True)])
def test_reports_with_very_many_names_are_always_complete(members, is_complete):
    """50 listeners use one pool, so the report is short in spite of its names."""
    sender, manager, report = Sender(), Manager(), document(listeners=50, members=0)
    shared = {identity("member", number): "UP" for number in range(members)}
    report["pools"] = {
        f"{identity('pool')}:{one}": {"status": "UP", "members": dict(shared)} for one in report["listeners"]
    }
    manager.hear(sender.send(report))
    report["listeners"][identity("listener", 0)]["status"] = "FULL"
    (found,) = sender.send(report)
    assert (found.report.full is None) is is_complete
    manager.hear([found])
    assert manager.statuses() == expected(report)
    assert max(sender.sizes) < report_differences.MOST_BYTES


def test_a_complete_report_on_request():
    sender = Sender()
    found = [sender.send(document(), complete=number == 2)[0].report.full for number in range(4)]
    assert found == [None, 1, None, 3]


def test_a_difference_of_another_epoch_gives_counters_and_no_states():
    manager, report = Manager(), document()
    manager.hear(Sender(epoch=1).send(report))
    late = Sender(epoch=2)
    late.send(report)
    changed, *_ = report["listeners"]
    report["listeners"][changed] |= {"status": "FULL", "bytes_in": 7}
    difference = late.send(report)
    before = manager.statuses()
    manager.hear(difference)
    assert (manager.statuses(), manager.totals[changed]) == (before, 7)
    manager.now += EXPIRY + 1
    manager.hear(late.send(report))
    assert manager.statuses() == ({}, {})
    (found,) = late.send(report, complete=True)
    manager.hear([found])
    assert manager.statuses() == expected(report)
