# SPDX-License-Identifier: Apache-2.0
"""The health manager process: a socket, a database, and restarts."""

import hashlib
import hmac
import json
import socket
import struct
import threading
import time
import uuid
import zlib
from contextlib import contextmanager

import pytest
import sqlalchemy as sa
from cryptography.fernet import Fernet

from amphora_driver import config
from amphora_driver.database.tables import object_status
from amphora_driver.database.vault import Vault
from amphora_driver.errors import StoreError
from amphora_driver.health import service, status_writer
from amphora_driver.health.service import HealthManager
from amphora_driver.model.loadbalancer import LoadBalancer, Vip
from amphora_driver.secret import Secret
from amphora_driver.store import amphorae
from amphora_driver.store.requests import RequestRecorder

AMPHORA = "0b9d1c52-7f0e-4a55-9f0c-2f6f3a1f9c11"
KEY = bytes(range(32))
EPOCH = 1_900_000_000_000_000_000
VIP = Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1")


def datagram(sequence, epoch=EPOCH):
    content = b"AHB1" + uuid.UUID(AMPHORA).bytes + struct.pack("!QQ", epoch, sequence)
    content += zlib.compress(json.dumps({"generation": 1}).encode())
    return content + hmac.new(KEY, content, hashlib.sha256).digest()


@pytest.fixture
def conf(tmp_path, database):
    (tmp_path / "key").write_bytes(Fernet.generate_key())
    (tmp_path / "key").chmod(0o600)
    sealed = Vault.load(str(tmp_path / "key")).seal(Secret(KEY), amphorae.key_location(AMPHORA))
    RequestRecorder(database, lambda node: None).create_load_balancer(
        LoadBalancer(id="lb", project_id="demo", vip=VIP), read_back=False
    )
    database.write(lambda c: amphorae.insert_amphora(c, AMPHORA, "lb", "standalone", sealed))
    path = tmp_path / "driver.conf"
    path.write_text(
        f"[amp_database]\nconnection = {database.url}\nencryption_key_file = {tmp_path}/key\n"
        f"[amp_queue]\nsocket_dir = {tmp_path}/bells\n"
        "[amp_health]\nbind_address = 127.0.0.1\nbind_port = 0\nflush_interval = 0.05\n"
    )
    return config.load([str(path)])


@contextmanager
def running(conf, before=lambda manager: None):
    manager = HealthManager(conf)
    before(manager)
    thread = threading.Thread(target=manager.run)
    thread.start()
    try:
        yield manager
    finally:
        manager.stop()
        assert manager.wait(10)
        thread.join()
        manager._database.dispose()


def send(manager, *datagrams):
    """Send heartbeats, each after the receipt of the one before."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for one in datagrams:
            before = manager._receiver.accepted + manager._receiver.refused["old"]
            sender.sendto(one, ("127.0.0.1", manager._receiver.port))
            until(lambda before=before: manager._receiver.accepted + manager._receiver.refused["old"] > before)


def until(condition):
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def operating(database):
    return database.read(lambda c: c.execute(sa.select(object_status.c.operating)).scalar_one())


def place(database):
    return database.read(amphorae.last_heartbeats).get(AMPHORA)


def test_heartbeats_are_written_before_shutdown(conf, database):
    with running(conf) as manager:
        send(manager, *(datagram(sequence) for sequence in range(1, 4)))
        until(lambda: operating(database) == "ONLINE")
    assert place(database) == (EPOCH, 3)


def test_an_old_datagram_is_refused_after_a_restart(conf, database):
    with running(conf) as manager:
        send(manager, datagram(1), datagram(2))
    with running(conf) as manager:
        send(manager, datagram(2), datagram(1), datagram(9, epoch=EPOCH - 1))
        assert manager._reports._states == {}
        send(manager, datagram(3))
        assert manager._reports._states.keys() == {AMPHORA}
    assert place(database) == (EPOCH, 3)


def test_an_old_datagram_is_refused_even_if_the_database_was_unavailable_at_the_start(conf, database):
    with running(conf) as manager:
        send(manager, datagram(5))

    def away(manager):
        real = manager._database.read

        def read(work):
            manager._database.read = real
            raise StoreError("read from the database", "it is away")

        manager._database.read = read

    with running(conf, before=away) as manager:
        send(manager, datagram(5))
        assert manager._reports._states == {}
        send(manager, datagram(6))
        assert manager._reports._states.keys() == {AMPHORA}


def test_a_long_flush_delays_neither_the_times_of_heartbeats_nor_the_self_test(conf, database, monkeypatch):
    """For example, the flush of a load balancer with thousands of members takes seconds on a busy host."""
    reading, released = threading.Event(), threading.Event()
    load = amphorae.load_serving_states

    def wait(connection, amphora_ids):
        reading.set()
        assert released.wait(30)
        return load(connection, amphora_ids)

    monkeypatch.setattr(amphorae, "load_serving_states", wait)
    with running(conf) as manager:
        try:
            send(manager, datagram(1))
            assert reading.wait(5)
            until(lambda: place(database) == (EPOCH, 1))
            recorded = manager._self_test._flushed_at
            # This heartbeat arrives after the flush has begun.
            send(manager, datagram(2))
            until(lambda: place(database) == (EPOCH, 2))
            until(lambda: manager._self_test._flushed_at > recorded)
            assert operating(database) is None, "the flush lasts"
        finally:
            released.set()
        until(lambda: operating(database) == "ONLINE")


@pytest.mark.parametrize("error", [StoreError("write", "away"), RuntimeError("a fault of ours")])
def test_a_failed_flush_is_retried_without_another_heartbeat(conf, database, error):
    def failing(manager):
        real = manager._database.write

        def write(work):
            manager._database.write = real
            raise error

        manager._database.write = write

    with running(conf, before=failing) as manager:
        send(manager, datagram(1))
        until(lambda: operating(database) == "ONLINE")
        until(lambda: place(database) == (EPOCH, 1))


def test_an_unexpected_error_of_a_flush_has_a_traceback_in_the_log(conf, caplog, monkeypatch):
    monkeypatch.setattr(service, "_IDLE_FLUSH_INTERVAL", 0.01)
    left = [RuntimeError("a fault of ours"), StoreError("write", "the database is away")]

    def fail(manager):
        flush = manager._writer.flush

        def fail_at_first(*, last=False):
            if left:
                raise left.pop(0)
            return flush(last=last)

        manager._writer.flush = fail_at_first

    with running(conf, fail) as manager:
        until(lambda: manager._self_test._flushed_at > 0)
    logged = [one for one in caplog.records if "reports of amphorae" in one.getMessage()]
    assert [bool(one.exc_info) for one in logged] == [True, False]
    assert "a fault of ours" in caplog.text
    assert "the database is away" in caplog.text


def test_the_first_flush_waits_for_no_heartbeat(conf, monkeypatch):
    monkeypatch.setattr(service, "_IDLE_FLUSH_INTERVAL", 3600.0)
    with running(conf) as manager:
        until(lambda: manager._self_test._flushed_at > 0)


def test_a_removed_amphora_takes_no_memory(conf, database, monkeypatch):
    monkeypatch.setattr(status_writer, "_CLEANUP_INTERVAL", 0.0)
    with running(conf) as manager:
        send(manager, datagram(1), datagram(1))
        until(lambda: place(database) == (EPOCH, 1))
        budgets, refused_by_amphora = manager._receiver._budgets._buckets, manager._receiver.refused_by_amphora
        assert list(budgets) == [AMPHORA] == list(refused_by_amphora)
        database.write(lambda c: amphorae.delete_amphora(c, AMPHORA))
        # One more flush is needed; the health manager flushes once a second.
        until(lambda: not budgets and not refused_by_amphora)
