# SPDX-License-Identifier: Apache-2.0
"""The health manager's memory of heartbeats: order, merging and expiry."""

from __future__ import annotations

import threading
import time

import msgspec
import pytest

from amphora_driver.health import amphora_reports
from amphora_driver.health.amphora_reports import AmphoraReports, LastReport
from amphora_driver.health.heartbeat_codec import Heartbeat
from amphora_driver.health.status import ListenerReport, PoolReport, Report

OPEN = ListenerReport("OPEN")


def heartbeat(sequence, report=None, *, epoch=1, amphora_id="a"):
    return Heartbeat(amphora_id, epoch, sequence, report or Report(1))


def pool(**members):
    return PoolReport(status="UP", members=members)


@pytest.fixture
def received():
    return AmphoraReports(expiry=10, wall_clock=lambda: 1000.0)


def test_each_heartbeat_is_accepted_once_and_in_order(received):
    assert received.accept(heartbeat(5), 0)
    assert not received.accept(heartbeat(5), 1)
    assert not received.accept(heartbeat(4), 1)
    assert received.accept(heartbeat(6), 2)
    assert received.last_report("a") == LastReport(2, 1000.0, 1, (1, 6), read_at=2)


def test_a_new_epoch_starts_at_any_sequence_and_ends_the_former_epoch(received):
    assert received.accept(heartbeat(500, epoch=1), 0)
    assert received.accept(heartbeat(1, epoch=2), 0)
    assert not received.accept(heartbeat(501, epoch=1), 0)


def test_a_replay_changes_nothing(received):
    received.accept(heartbeat(2, Report(2, {"l": OPEN})), 0)
    received.take_updated()
    assert not received.accept(heartbeat(1, Report(1, {"old": OPEN})), 5)
    assert received.live_reports(["a"], 5)["a"].listeners == {"l": OPEN}
    assert received.last_report("a").monotonic == 0
    assert received.take_updated() == {}


def test_amphorae_have_separate_reports(received):
    received.accept(heartbeat(1, Report(1, {"l": OPEN})), 0)
    received.accept(heartbeat(1, Report(2, {"m": OPEN}), amphora_id="b"), 0)
    reports = received.live_reports(["a", "b", "never heard"], 0)
    assert reports.keys() == {"a", "b"}
    assert reports["a"].listeners.keys() == {"l"}
    assert reports["b"].amphora_id == "b"


def test_the_amphorae_of_a_pair_share_the_memory_of_equal_ids(received):
    def decoded():
        return heartbeat_report(msgspec.json.encode(Report(1, {"l": OPEN}, {"p:l": pool(member="UP")})))

    heartbeat_report = msgspec.json.Decoder(Report).decode
    for sequence, amphora_id in ((1, "a"), (1, "b"), (2, "a"), (3, "a")):
        assert received.accept(heartbeat(sequence, decoded(), amphora_id=amphora_id), sequence)
    first, second = (received.live_reports([one], 3)[one].pools for one in "ab")
    assert next(iter(first["p:l"].members)) is next(iter(second["p:l"].members))
    assert next(iter(first)) is next(iter(second))


def test_the_memory_for_shared_ids_has_a_limit(received, monkeypatch):
    monkeypatch.setattr(amphora_reports, "_SHARED", {})
    monkeypatch.setattr(amphora_reports, "_MAX_SHARED", 10)
    for number in range(100):
        assert received.accept(heartbeat(number, Report(1, {}, {"p:l": pool(**{f"m{number}": "UP"})})), number)
        assert 0 < len(amphora_reports._SHARED) <= 10


def test_a_split_report_is_merged(received):
    received.accept(heartbeat(1, Report(1, {"l": OPEN}, {"p:l": pool(x="UP")})), 0)
    received.accept(heartbeat(2, Report(1, {"m": OPEN}, {"p:l": pool(y="DOWN"), "q:m": pool()})), 0)
    merged = received.live_reports(["a"], 0)["a"]
    assert merged.listeners.keys() == {"l", "m"}
    assert merged.pools == {"p:l": pool(x="UP", y="DOWN"), "q:m": pool()}


def test_the_later_report_counts(received):
    received.accept(heartbeat(1, Report(1, {}, {"p:l": pool(x="UP", y="UP")})), 0)
    received.accept(heartbeat(2, Report(1, {}, {"p:l": PoolReport(status="DOWN", members={"x": "DOWN"})})), 0)
    merged = received.live_reports(["a"], 0)["a"].pools["p:l"]
    assert merged == PoolReport(status="DOWN", members={"x": "DOWN", "y": "UP"})


@pytest.mark.parametrize("generation", [2, 0, None])
def test_another_generation_replaces_the_former_report(received, generation):
    received.accept(heartbeat(1, Report(1, {"l": OPEN}, {"p:l": pool(x="UP")})), 0)
    received.accept(heartbeat(2, Report(generation, {"m": OPEN})), 0)
    merged = received.live_reports(["a"], 0)["a"]
    assert merged.generation == generation
    assert merged.listeners.keys() == {"m"}
    assert merged.pools == {}


def test_reports_expire(received):
    received.accept(heartbeat(1, Report(1, {"l": OPEN}, {"p:l": pool(x="UP"), "q:l": pool(z="UP")})), 0)
    received.accept(heartbeat(2, Report(1, {"m": OPEN}, {"p:l": pool(y="UP")})), 8)
    assert received.live_reports(["a"], 10)["a"].listeners.keys() == {"l", "m"}
    later = received.live_reports(["a"], 11)["a"]
    assert later.listeners.keys() == {"m"}
    assert later.pools == {"p:l": pool(y="UP")}


def test_a_silent_amphora_has_no_report(received):
    received.accept(heartbeat(1, Report(1, {"l": OPEN})), 0)
    assert received.live_reports(["a"], 10.5) == {}
    assert received.last_report("a").monotonic == 0


def test_an_empty_report_counts_as_a_report(received):
    received.accept(heartbeat(1, Report(3)), 0)
    assert received.live_reports(["a"], 1) == {"a": Report(3, amphora_id="a")}


def test_the_start_of_uninterrupted_heartbeats(received):
    received.accept(heartbeat(1), 5)
    received.accept(heartbeat(1, amphora_id="b"), 7)
    assert received.heard_since(6) == {"b"}
    assert received.heard_since(4.9) == {"a", "b"}
    assert received.heard_since(5) == {"a", "b"}


def test_take_heard_returns_each_heartbeat_once(received):
    received.accept(heartbeat(1), 5)
    received.accept(heartbeat(2, Report(None)), 6)
    assert received.take_updated() == {"a": LastReport(6, 1000.0, 0, (1, 2), read_at=6)}
    assert received.take_updated() == {}
    assert received._states.keys() == {"a"}


def test_a_removed_amphora_is_forgotten(received):
    received.accept(heartbeat(9), 0)
    received.load_orders({"b": (1, 1)})
    received.forget(["a", "b", "unknown"])
    assert received.known_ids() == set()
    assert received.last_report("a") is None
    assert received.take_updated() == {}
    assert received.live_reports(["a"], 0) == {}


def test_statistics_are_counted_once_across_processes(received):
    received.load_orders({"a": (5, 10), "silent": (1, 1)})
    assert received._states == {}
    assert received.last_report("a") is None
    assert received.heard_since(0) == set()
    assert not received.accept(heartbeat(10, epoch=5), 0)
    assert not received.accept(heartbeat(99, epoch=4), 0)
    assert received.accept(heartbeat(11, epoch=5), 0)
    assert received.accept(heartbeat(1, amphora_id="new"), 0)
    assert received.known_ids() == {"a", "silent", "new"}


def test_resumed_counters_never_decrease(received):
    received.accept(heartbeat(7, epoch=5), 0)
    received.load_orders({"a": (5, 6)})
    assert not received.accept(heartbeat(7, epoch=5), 0)
    received.load_orders({"a": (5, 9)})
    assert not received.accept(heartbeat(9, epoch=5), 0)
    assert received.accept(heartbeat(10, epoch=5), 0)


@pytest.mark.parametrize(("epoch", "sequence"), [(2**63, 1), (1, 2**63), (2**64 - 1, 2**64 - 1)])
def test_numbers_that_exceed_the_database_type_are_refused(received, epoch, sequence):
    assert not received.accept(heartbeat(sequence, epoch=epoch), 0)
    assert received.accept(heartbeat(2**63 - 1, epoch=2**63 - 1), 0)


def test_the_memory_for_one_amphora_is_limited(received, monkeypatch):
    monkeypatch.setattr("amphora_driver.health.amphora_reports._MAX_NAMES", 100)
    most = 0
    for number in range(1000):
        listeners = {f"l{number}": OPEN}
        pools = {"p": pool(**{f"m{number}": "UP"}), f"p{number}": pool()}
        received.accept(heartbeat(number, Report(1, listeners, pools)), 0)
        held = received.live_reports(["a"], 0)["a"]
        most = max(most, len(held.listeners) + len(held.pools["p"].members))
    assert 20 < most < 250


def test_a_repeated_report_takes_no_more_memory(received):
    parts = [Report(1, {}, {"p": pool(x="UP")}), Report(1, {}, {"p": pool(y="UP")})]
    for number in range(100):
        received.accept(heartbeat(number, parts[number % 2]), number)
    assert len(received._states["a"]._pools["p"].parts) == 2


@pytest.mark.parametrize("kind", ["listeners", "pools", "members"])
def test_a_difference_to_a_huge_report_changes_no_state(received, kind):
    def send(sequence, names):
        listeners = {"l": OPEN} | (dict.fromkeys(names, OPEN) if kind == "listeners" else {})
        members = dict.fromkeys(names, "UP") if kind == "members" else {}
        pools = {"p": pool(x="UP", **members)} | ({one: pool() for one in names} if kind == "pools" else {})
        received.accept(heartbeat(sequence, Report(1, listeners, pools)), 0)
        difference = Report(1, {"l": ListenerReport("FULL", bytes_in=sequence)}, full=sequence)
        received.accept(heartbeat(sequence + 1, difference), 0)
        assert received.take_counters(["a"])["a"]["l"].bytes_in == sequence
        return received.live_reports(["a"], 0)["a"].listeners["l"].status

    assert send(1, [f"n{number}" for number in range(4997)]) == "FULL"
    assert send(3, [f"n{number}" for number in range(4998)]) == "OPEN"


def test_several_threads_use_the_reports(received):
    def send(amphora_id):
        for number in range(300):
            assert received.accept(heartbeat(number, Report(1, {"l": OPEN}), amphora_id=amphora_id), 0)
            received.live_reports([amphora_id, "0"], 0)
            received.take_updated()

    threads = [threading.Thread(target=send, args=(str(number),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(received._states) == 4


@pytest.mark.quiet
def test_the_speed_of_accept(capsys):
    received = AmphoraReports()
    listeners = {f"listener-{number}": OPEN for number in range(7)}
    members = {f"member-{number}": "UP" for number in range(8)}
    report = Report(1, listeners, {f"pool-{number}": pool(**members) for number in range(7)})
    begin = time.process_time()
    for number in range(2000):
        received.accept(heartbeat(number, report), number / 1000)
    each = (time.process_time() - begin) / 2000
    with capsys.disabled():
        print(f"\nledger: {each * 1e6:.1f} us for 7 listeners, 56 members")  # noqa: T201 - the purpose
    assert each < 500e-6
