# SPDX-License-Identifier: Apache-2.0
"""Unknown amphorae: bounded memory, rare writes, and removal by a stated rule."""

import socket
import struct
import threading
import time
import uuid

import pytest
import sqlalchemy as sa

from amphora_driver.database.tables import amphora, orphan
from amphora_driver.database.tables_fleet import unknown_amphora
from amphora_driver.health.receiver import Receiver
from amphora_driver.health.unknown_amphorae import UnknownAmphorae
from amphora_driver.store import orphans
from amphora_driver.store.orphans import MAX_UNKNOWN_AMPHORAE, MAX_UNKNOWN_PER_ADDRESS, UnknownAmphora

STRANGER = "3f0c8a54-31a1-4a0c-8f6e-2b1f6f0a7c55"


def collector(**more):
    return UnknownAmphorae(min_duration=15.0, write_interval=10.0, wall_clock=lambda: 100_000.0, **more)


def test_a_repeated_unknown_sender_is_reported():
    heard = collector()
    heard.add("a", "203.0.113.9", 100.0)
    heard.add("a", "203.0.113.9", 110.0)
    assert heard.find_due(111.0) == [], "a removed amphora may still send heartbeats"
    heard.add("a", "203.0.113.10", 116.0)
    assert heard.find_due(120.0) == [
        UnknownAmphora(amphora_id="a", address="203.0.113.10", first_at=99_980.0, last_at=99_996.0)
    ]


def test_reports_of_unknown_senders_are_rate_limited():
    heard = collector()
    heard.add("a", "x", 100.0)
    heard.add("a", "x", 116.0)
    heard.mark_recorded(heard.find_due(120.0), 120.0)
    heard.add("a", "x", 121.0)
    assert heard.find_due(125.0) == [], "the second report is too early"
    assert [one.amphora_id for one in heard.find_due(130.0)] == ["a"]
    heard.mark_recorded(heard.find_due(130.0), 130.0)
    assert heard.find_due(145.0) == [], "no further heartbeat was received"


def test_the_memory_for_unknown_senders_is_limited():
    heard = collector()
    for index in range(10 * MAX_UNKNOWN_AMPHORAE):
        heard.add(f"a{index}", f"x{index}", 100.0)
        heard.add(f"a{index}", f"x{index}", 116.0)
    assert len(heard.find_due(116.0)) == MAX_UNKNOWN_AMPHORAE
    assert len(heard.find_due(300.0)) == 0, "no further heartbeats"
    heard.add("genuine", "x", 300.0)
    heard.add("genuine", "x", 320.0)
    assert [one.amphora_id for one in heard.find_due(321.0)] == ["genuine"]


def test_a_sender_does_not_hide_another():
    heard = collector()
    for index in range(10 * MAX_UNKNOWN_AMPHORAE):
        heard.add(f"a{index}", "203.0.113.66", 100.0)
        heard.add(f"a{index}", "203.0.113.66", 116.0)
    heard.add("b", "203.0.113.9", 100.0)
    heard.add("b", "203.0.113.9", 116.0)
    assert [one.amphora_id for one in heard.find_due(116.0)] == [
        *(f"a{index}" for index in range(MAX_UNKNOWN_PER_ADDRESS)),
        "b",
    ]


def test_the_receiver_reports_unknown_senders_with_their_address():
    told = []
    receiver = Receiver("127.0.0.1", 0, lambda _: {}, lambda _: None, on_unknown=lambda *one: told.append(one))
    thread = threading.Thread(target=receiver.run)
    thread.start()
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            deadline = time.monotonic() + 10
            while len(told) < 2:
                assert time.monotonic() < deadline
                content = b"AHB1" + uuid.UUID(STRANGER).bytes + struct.pack("!QQ", 1, 1) + bytes(40)
                sender.sendto(content, ("127.0.0.1", receiver.port))
                time.sleep(0.01)
    finally:
        receiver.stop()
        thread.join()
    assert set(told) == {(STRANGER, "127.0.0.1")}


def unknown(name, at=1000.0, address="203.0.113.9"):
    return UnknownAmphora(amphora_id=name, address=address, first_at=at - 20, last_at=at)


def rows(database):
    return {row.amphora_id: row for row in database.read(orphans.list_unknown_amphorae)}


def test_rows_are_bounded(database):
    many = [unknown(f"a{index}", address=f"203.0.113.{index}") for index in range(MAX_UNKNOWN_AMPHORAE + 20)]
    assert database.write(lambda c: orphans.record_unknown_amphorae(c, many, 1000.0)) == 20
    assert len(rows(database)) == MAX_UNKNOWN_AMPHORAE
    assert database.write(lambda c: orphans.record_unknown_amphorae(c, [unknown("late")], 1000.0)) == 1
    later = 1000.0 + 86_401
    assert database.write(lambda c: orphans.record_unknown_amphorae(c, [unknown("late", later)], later)) == 0, (
        "old rows are replaced"
    )
    assert list(rows(database)) == ["late"]


def test_rows_of_one_address_are_bounded(database):
    many = [unknown(f"a{index}") for index in range(20)]
    assert database.write(lambda c: orphans.record_unknown_amphorae(c, many, 1000.0)) == 20 - MAX_UNKNOWN_PER_ADDRESS
    assert database.write(lambda c: orphans.record_unknown_amphorae(c, [unknown("z")], 1000.0)) == 1
    assert (
        database.write(lambda c: orphans.record_unknown_amphorae(c, [unknown("z", address="203.0.113.10")], 1000.0))
        == 0
    )
    assert len(rows(database)) == MAX_UNKNOWN_PER_ADDRESS + 1


def test_a_silent_row_is_replaced(database):
    many = [unknown(f"a{index}", 1000.0 + index, address=f"203.0.113.{index}") for index in range(MAX_UNKNOWN_AMPHORAE)]
    database.write(lambda c: orphans.record_unknown_amphorae(c, many, 1000.0))
    late = unknown("late", 1302.0)
    assert database.write(lambda c: orphans.record_unknown_amphorae(c, [late], 1302.0)) == 0
    assert set(rows(database)) == {f"a{index}" for index in range(1, MAX_UNKNOWN_AMPHORAE)} | {"late"}


def test_a_repeated_sender_keeps_its_row(database):
    database.write(lambda c: orphans.record_unknown_amphorae(c, [unknown("a", 1000.0)], 1000.0))
    database.write(lambda c: orphans.record_unknown_amphorae(c, [unknown("a", 2000.0)], 2000.0))
    (row,) = rows(database).values()
    assert (row.first_at, row.last_at) == (980.0, 2000.0)


def test_a_recorded_amphora_is_not_unknown(database):
    values = {
        "id": "a",
        "load_balancer_id": "lb",
        "role": "r",
        "state": "booting",
        "heartbeat_key": b"",
        "created_at": 1,
    }
    database.write(lambda c: c.execute(amphora.insert().values(**values)))
    assert database.write(lambda c: orphans.record_unknown_amphorae(c, [unknown("a")], 1000.0)) == 0
    assert rows(database) == {}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (None, "only reported: no compute backend of this deployment lists its machine"),
        ("ports", "only reported"),
        ("machine", "its machine in netns is an orphan: housekeeping removes it"),
    ],
)
def test_the_verdict_names_the_rule(database, kind, words):
    database.write(lambda c: orphans.record_unknown_amphorae(c, [unknown("a")], 1000.0))
    if kind is not None:
        found = {"kind": kind, "backend": "netns", "id": "a", "found_at": 1.0}
        database.write(lambda c: c.execute(orphan.insert().values(**found)))
    said = database.read(lambda c: orphans.compute_verdicts(c, 900.0))
    assert words in said["a"]
    database.write(lambda c: orphans.write_verdicts(c, said))
    assert database.read(lambda c: orphans.compute_verdicts(c, 900.0)) == {}, "one message"
    assert words in database.read(lambda c: c.execute(sa.select(unknown_amphora.c.verdict)).scalar_one())
