# SPDX-License-Identifier: Apache-2.0
"""The receiver on a real socket: accepted and refused datagrams, and floods."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import secrets
import socket
import struct
import threading
import time
import uuid
import zlib
from contextlib import contextmanager

import pytest

from amphora_driver.errors import ConfigurationError, StoreError
from amphora_driver.health import amphora_budgets
from amphora_driver.health import receiver as receiver_module
from amphora_driver.health.heartbeat_codec import decompress_document
from amphora_driver.health.receiver import Receiver
from amphora_driver.secret import Secret

AMPHORA = "0b9d1c52-7f0e-4a55-9f0c-2f6f3a1f9c11"
KEY = bytes(range(32))


def datagram(sequence=1, *, amphora_id=AMPHORA, key=KEY, generation=8):
    content = b"AHB1" + uuid.UUID(amphora_id).bytes + struct.pack("!QQ", 1, sequence)
    content += zlib.compress(json.dumps({"generation": generation}).encode())
    return content + hmac.new(key, content, hashlib.sha256).digest()


class Running:
    """A receiver in a thread; records its heartbeats and its key queries."""

    def __init__(self, host, keys=None, **options):
        self.received = []
        self.asked = []
        self.arrived = threading.Condition()
        self.answers = {AMPHORA: Secret(KEY)}
        self.receiver = Receiver(host, 0, keys or self.keys, self.take, **options)
        self.sender = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
        self.target = (host, self.receiver.port)
        self.thread = threading.Thread(target=self.receiver.run)
        self.thread.start()

    def keys(self, known):
        self.asked.append(known)
        return {one: key for one, key in self.answers.items() if one not in known}

    def take(self, heartbeat):
        with self.arrived:
            self.received.append(heartbeat)
            self.arrived.notify()

    def send(self, content):
        self.sender.sendto(content, self.target)

    def wait(self, condition, seconds=5):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, (self.received, self.receiver.refused)
            time.sleep(0.002)


@contextmanager
def running(host="127.0.0.1", **options):
    made = Running(host, **options)
    try:
        yield made
    finally:
        made.receiver.stop()
        made.thread.join()
        made.sender.close()


def test_every_heartbeat_arrives_including_the_first():
    with running() as made:
        made.send(datagram(1))
        made.wait(lambda: made.received)
        made.send(datagram(2))
        made.wait(lambda: len(made.received) == 2)
        assert [heartbeat.sequence for heartbeat in made.received] == [1, 2]
        assert made.receiver.accepted == 2
        assert made.asked == [set()]
        assert not made.receiver.refused


def test_the_receiver_supports_ipv6():
    with running("::1") as made:
        made.send(datagram())
        made.wait(lambda: made.received)


def test_refusals_are_counted_by_reason_and_logged_once(caplog):
    with caplog.at_level(logging.WARNING), running() as made:
        made.receiver.preload({AMPHORA: Secret(KEY)})
        made.send(b"")
        made.send(b"x" * 100)
        made.send(datagram(key=b"wrong"))
        made.send(datagram(generation="eight"))
        made.send(datagram(2, amphora_id=str(uuid.uuid4())))
        made.wait(lambda: sum(made.receiver.refused.values()) == 5)
        assert made.receiver.refused == {
            "short": 1,
            "magic": 1,
            "signature": 1,
            "document": 1,
            "unknown": 1,
        }
        made.send(datagram())
        made.wait(lambda: made.received)
    assert len([record for record in caplog.records if "Heartbeats refused since" in record.message]) == 1


@pytest.mark.quiet
def test_stop_ends_the_receiver_at_once():
    made = Running("127.0.0.1")
    begin = time.monotonic()
    made.receiver.stop()
    made.receiver.stop()
    made.thread.join(5)
    assert not made.thread.is_alive()
    assert time.monotonic() - begin < 1
    made.sender.close()


def test_a_stop_before_the_start_ends_the_receiver():
    receiver = Receiver("127.0.0.1", 0, lambda _: {}, print)
    receiver.stop()
    receiver.run()


def test_a_stopped_receiver_releases_its_port():
    receiver = Receiver("127.0.0.1", 0, lambda _: {}, print)
    with pytest.raises(ConfigurationError, match="bind_port"):
        Receiver("127.0.0.1", receiver.port, lambda _: {}, print)
    receiver.close()
    Receiver("127.0.0.1", receiver.port, lambda _: {}, print).close()


def test_a_foreign_address_is_an_error():
    with pytest.raises(ConfigurationError, match="bind_address"):
        Receiver("192.0.2.1", 0, lambda _: {}, print)


def test_an_unknown_amphora_causes_one_database_read():
    with running(key_read_interval=0.0) as made:
        unknown = str(uuid.uuid4())
        for number in range(50):
            made.send(datagram(number, amphora_id=unknown))
            made.wait(lambda expected=number + 1: made.receiver.refused["unknown"] == expected)
        assert made.asked == [set()]
        made.send(datagram())
        made.wait(lambda: made.received)
        assert made.asked == [set()], "the first read returns all keys"


def test_a_new_amphora_is_received_during_a_flood_of_unknown_ids(monkeypatch):
    """Each read returns all new keys, whatever fills the queue."""
    monkeypatch.setattr("amphora_driver.health.heartbeat_keys._MAX_WAITING", 20)
    known, new = str(uuid.uuid4()), [str(uuid.uuid4()) for _ in range(5)]
    with running(key_read_interval=0.05) as made:
        made.receiver.preload({known: Secret(KEY)})
        begin = time.monotonic()
        sent = 0

        def invent(many=100):
            for _ in range(many):
                made.send(datagram(amphora_id=str(uuid.uuid4())))

        def heard():
            return {one.amphora_id for one in made.received}

        for one in new:
            made.answers[one] = Secret(KEY)
            while one not in heard():
                assert time.monotonic() < begin + 20
                invent()
                sent += 1
                made.send(datagram(sent, amphora_id=one))
                made.send(datagram(sent, amphora_id=known))
                time.sleep(0.01)
        made.wait(lambda: [one.sequence for one in made.received if one.amphora_id == known][-1] == sent)
        assert made.receiver.refused["busy"] > 0
        assert len(made.asked) <= (time.monotonic() - begin) / 0.05 + 2


def test_a_long_datagram_of_an_unknown_amphora_does_not_wait():
    with running() as made:
        made.send(datagram(amphora_id=str(uuid.uuid4()), generation="x" + secrets.token_hex(4096)))
        made.wait(lambda: made.receiver.refused["busy"] == 1)


def test_the_receiver_ends_if_it_is_stopped_just_before_it_reads_its_wakeups(monkeypatch):
    read = Receiver._drain_wakeups

    def stop_and_read(receiver):
        receiver.stop()
        read(receiver)

    monkeypatch.setattr(Receiver, "_drain_wakeups", stop_and_read)
    with running() as made:
        # The key of a known amphora needs no read, whose end would be another wake-up.
        made.receiver.preload({AMPHORA: Secret(KEY)})
        made.send(datagram())
        made.thread.join(5)
        ended = not made.thread.is_alive()
    assert ended


def test_a_hanging_database_delays_only_unknown_amphorae():
    release = threading.Event()

    def hang(_known):
        release.wait(10)
        return {}

    with running(keys=hang) as made:
        made.receiver.preload({AMPHORA: Secret(KEY)})
        made.send(datagram(1, amphora_id=str(uuid.uuid4())))
        for number in range(100):
            made.send(datagram(number))
        made.wait(lambda: len(made.received) == 100)
        release.set()


def test_a_failed_read_is_repeated_after_the_next_heartbeat(caplog):
    failures = [StoreError("read from the database", "it is away"), ValueError("a bug")]

    def sometimes(_known):
        if failures:
            raise failures.pop(0)
        return {AMPHORA: Secret(KEY)}

    with running(keys=sometimes, key_read_interval=0.0) as made:
        for number in range(1, 3):
            made.send(datagram(number))
            made.wait(lambda expected=number: made.receiver.refused["lookup"] == expected)
        made.send(datagram(3))
        made.wait(lambda: made.received)
    assert "it is away" in caplog.text


def test_a_removed_amphora_is_refused():
    addresses = []
    with running(key_read_interval=0.0, on_unknown=lambda one, address: addresses.append((one, address))) as made:
        made.send(datagram(1))
        made.wait(lambda: made.received)
        del made.answers[AMPHORA]
        made.receiver.forget([AMPHORA])
        made.send(datagram(2))
        # The receiver counts a refusal before it names the sender.
        made.wait(lambda: addresses)
        assert made.receiver.refused["unknown"] == 1
        assert len(made.received) == 1
        assert addresses == [(AMPHORA, "127.0.0.1")]


def test_an_error_of_the_handler_does_not_end_the_loop(caplog):
    with running() as made:
        made.receiver.preload({AMPHORA: Secret(KEY)})
        made.receiver._on_heartbeat = lambda beat: 1 / 0 if beat.sequence == 1 else made.take(beat)
        made.send(datagram(1))
        made.send(datagram(2))
        made.wait(lambda: made.received)
        assert made.receiver.refused["handler"] == 1
    assert "ZeroDivisionError" in caplog.text


def test_many_errors_of_the_handler_are_logged_once(caplog):
    with running() as made:
        made.receiver.preload({AMPHORA: Secret(KEY)})
        made.receiver._on_heartbeat = lambda beat: 1 / 0
        for number in range(1, 20):
            made.send(datagram(number))
        made.wait(lambda: made.receiver.refused["handler"] == 19)
    assert caplog.text.count("ZeroDivisionError: ") == 1


def test_the_largest_datagram_is_received():
    with running() as made:
        made.receiver.preload({AMPHORA: Secret(KEY)})
        content = b"AHB1" + uuid.UUID(AMPHORA).bytes + struct.pack("!QQ", 1, 1)
        content += zlib.compress(json.dumps({"generation": 1, "more": "x" * 59_000}).encode(), 0)
        made.send(content + hmac.new(KEY, content, hashlib.sha256).digest())
        made.wait(lambda: made.received)


def test_a_replay_is_refused_before_decompression(monkeypatch):
    unpacked = []
    monkeypatch.setattr(
        receiver_module,
        "decompress_document",
        lambda signed: unpacked.append(signed.sequence) or decompress_document(signed),
    )
    last = [(-1, -1)]

    def newer(_amphora_id, order):
        found, last[0] = order > last[0], max(order, last[0])
        return found

    with running(is_newer=newer) as made:
        made.receiver.preload({AMPHORA: Secret(KEY)})
        for number in (1, 2, 2, 1, 3):
            made.send(datagram(number))
        made.wait(lambda: len(made.received) == 3)
        assert made.receiver.refused == {"old": 2}
        assert made.receiver.refused_by_amphora == {AMPHORA: 2}
    assert unpacked == [1, 2, 3]


def test_an_amphora_over_its_budget_loses_its_own_datagrams_only():
    other = str(uuid.uuid4())
    with running() as made:
        made.receiver.preload({AMPHORA: Secret(KEY), other: Secret(KEY)})
        many = int(amphora_budgets.DATAGRAM_BURST) + 100
        for number in range(many):
            made.send(datagram(number))
        made.send(datagram(1, amphora_id=other))
        made.wait(lambda: any(one.amphora_id == other for one in made.received))
        assert made.receiver.refused["budget"] > 0
        assert made.receiver.refused_by_amphora.keys() == {AMPHORA}
        mine = [one for one in made.received if one.amphora_id == AMPHORA]
        assert amphora_budgets.DATAGRAM_BURST <= len(mine) < many


def test_the_speed_of_the_receiver(capsys):
    """CPU time of kernel, loop, keys and decoding. All datagrams are sent before the measurement starts."""
    listeners = {
        str(uuid.uuid4()): {"status": "OPEN", "bytes_in": 123456, "bytes_out": 7890123, "total_connections": 4}
        for _ in range(7)
    }
    pools = {
        f"{uuid.uuid4()}:{name}": {"status": "UP", "members": {str(uuid.uuid4()): "UP" for _ in range(8)}}
        for name in listeners
    }
    document = json.dumps({"generation": 1, "listeners": listeners, "pools": pools}).encode()
    # Each amphora stays within its budget.
    senders = [uuid.uuid4() for _ in range(20)]
    contents = []
    for one in senders:
        content = b"AHB1" + one.bytes + struct.pack("!QQ", 1, 1) + zlib.compress(document)
        contents.append(content + hmac.new(KEY, content, hashlib.sha256).digest())
    count = [0]

    def take(_heartbeat):
        count[0] += 1
        if count[0] == sent:
            receiver.stop()

    receiver = Receiver("127.0.0.1", 0, lambda _: {}, take)
    receiver.preload({str(one): Secret(KEY) for one in senders})
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sent = 1000 if receiver._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) > 8 << 20 else 20
        for number in range(sent):
            sender.sendto(contents[number % len(contents)], ("127.0.0.1", receiver.port))
    begin = time.process_time()
    receiver.run()
    each = (time.process_time() - begin) / sent
    with capsys.disabled():
        figure = f"{each * 1e6:.1f} us for each of {sent}, {1 / each:,.0f}/s per core"
        print(f"\nreceiver, {len(contents[0])} byte datagrams: {figure}")  # noqa: T201 - the purpose
    assert count == [sent]
