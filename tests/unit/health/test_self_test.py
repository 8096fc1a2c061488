# SPDX-License-Identifier: Apache-2.0
"""The self-test of a health manager: only its own recent test datagram proves that it receives."""

import socket
import threading
import time
from contextlib import contextmanager

import pytest
import sqlalchemy as sa

from amphora_driver.database.tables_fleet import process
from amphora_driver.errors import StoreError
from amphora_driver.health.receiver import Receiver
from amphora_driver.health.self_test import ReceiverSelfTest


@contextmanager
def receiving(host="127.0.0.1", **options):
    received = []
    made = Receiver(host, 0, lambda _: {}, received.append, **options)
    thread = threading.Thread(target=made.run)
    thread.start()
    try:
        yield made, received
    finally:
        made.stop()
        thread.join()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_the_receiver_receives_its_own_datagram(host):
    with receiving(host) as (receiver, received):
        assert receiver.receives_probe(10)
        assert receiver.receives_probe(10)
        assert (received, receiver.accepted, dict(receiver.refused)) == ([], 0, {}), "the test datagram is no heartbeat"


def test_the_self_test_fails_without_the_receiving_thread():
    receiver = Receiver("127.0.0.1", 0, lambda _: {}, lambda _: None)
    try:
        assert not receiver.receives_probe(0.05)
    finally:
        receiver.close()
    assert not receiver.receives_probe(0.05), "the self-test fails without a socket"


def test_only_the_own_datagram_passes_the_self_test():
    """A similar datagram that was not sent recently is handled as any other datagram."""
    with receiving() as (receiver, _):
        assert receiver.receives_probe(10)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            for forged in (b"AHM1" + bytes(32), b"AHM1", b"AHM1" + bytes(200)):
                before = receiver.refused.total()
                stranger.sendto(forged, ("127.0.0.1", receiver.port))
                deadline = time.monotonic() + 10
                while receiver.refused.total() == before:
                    assert time.monotonic() < deadline
                    time.sleep(0.005)
        assert not receiver._probe_received.is_set() or receiver._probe == b""


def beat(database):
    rows = database.read(lambda c: c.execute(sa.select(process)).all())
    return [(row.name, row.kind, row.beat) for row in rows]


def test_the_beat_grows_only_after_a_received_datagram_and_a_write(database):
    hears = [True]
    hearing = ReceiverSelfTest(database, "me", lambda _: hears[0], interval=0.01, max_flush_age=60.0)
    hearing.test()
    assert beat(database) == [("me", "health-manager", 0)], "nothing was written yet"
    hearing.record_flush()
    hearing.test()
    hearing.test()
    assert beat(database) == [("me", "health-manager", 2)]
    hears[0] = False
    hearing.test()
    assert beat(database) == [("me", "health-manager", 2)]
    hears[0] = True
    hearing.test()
    assert beat(database) == [("me", "health-manager", 3)]


def test_old_test_datagrams_do_not_count(database, caplog):
    hearing = ReceiverSelfTest(database, "me", lambda _: True, interval=0.01, max_flush_age=0.0)
    hearing.record_flush()
    time.sleep(0.01)
    hearing.test()
    assert beat(database) == [("me", "health-manager", 0)]
    assert "no recent flush to the database succeeded" in caplog.text


@pytest.mark.parametrize("error", [StoreError("write", "away"), RuntimeError("unexpected")])
def test_the_self_test_survives_errors(database, monkeypatch, error):
    hearing = ReceiverSelfTest(database, "me", lambda _: True, interval=0.001, max_flush_age=60.0)
    hearing.record_flush()
    trouble = [error]

    def write(work, real=database.write):
        if trouble:
            raise trouble.pop()
        return real(work)

    monkeypatch.setattr(database, "write", write)
    stopping = threading.Event()
    thread = threading.Thread(target=hearing.run, args=(stopping,))
    thread.start()
    deadline = time.monotonic() + 10
    while not (beat(database) and beat(database)[0][2] > 1):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    stopping.set()
    thread.join()
    assert beat(database) == [], "a clean shutdown leaves no row"
