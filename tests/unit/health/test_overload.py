# SPDX-License-Identifier: Apache-2.0
"""Too many heartbeats: a real socket with a full buffer, and a real database."""

import json
import logging
import socket
import threading
import time
import uuid

import pytest
import sqlalchemy as sa

from amphora_agent.stats import heartbeat_codec
from amphora_driver.database.tables import amphora_heartbeat, listener_statistics, object_status
from amphora_driver.health import receiver as receiver_module
from amphora_driver.health.amphora_reports import AmphoraReports
from amphora_driver.health.receiver import Omitted, OverloadMonitor, Receiver
from amphora_driver.health.status_writer import StatusWriter
from amphora_driver.model.enums import ListenerProtocol
from amphora_driver.model.loadbalancer import Listener, LoadBalancer, Vip
from amphora_driver.secret import Secret
from amphora_driver.store import amphorae
from amphora_driver.store.requests import RequestRecorder

FLEET = 20
EPOCH = 1_900_000_000_000_000_000
KEY = bytes(range(32))
VIP = Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1")


class Fleet:
    """Amphorae with one listener each, a receiver with a small buffer, and a writer."""

    def __init__(self, database):
        self.database = database
        self.ids = [uuid.UUID(int=number + 1) for number in range(FLEET)]
        recorder = RequestRecorder(database, lambda node: None)
        for one in self.ids:
            listener = Listener(
                id=f"li{one.int}", loadbalancer_id=f"lb{one.int}", protocol=ListenerProtocol.TCP, protocol_port=80
            )
            tree = LoadBalancer(id=f"lb{one.int}", project_id="demo", vip=VIP, listeners=(listener,))
            recorder.create_load_balancer(tree, read_back=False)
            database.write(
                lambda c, one=one: amphorae.insert_amphora(c, str(one), f"lb{one.int}", "standalone", b"key")
            )
        self.reports = AmphoraReports()
        self.receiver = Receiver(
            "127.0.0.1",
            0,
            lambda _: {},
            lambda heartbeat: self.reports.accept(heartbeat, time.monotonic()),
            is_newer=self.reports.is_newer,
            accept_time=lambda one, order: self.reports.accept_time(one, order, time.monotonic()),
        )
        self.receiver.preload({str(one): Secret(KEY) for one in self.ids})
        self.overloaded = False
        self.writer = StatusWriter(database, self.reports, is_overloaded=lambda: self.overloaded)
        self.sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.thread = None

    def run(self):
        self.thread = threading.Thread(target=self.receiver.run)
        self.thread.start()

    def close(self):
        self.receiver.stop()
        if self.thread is not None:
            self.thread.join()
        self.receiver.close()
        self.sender.close()

    def send(self, sequence, status="OPEN", *, only=None):
        document = {"generation": 1, "pools": {}}
        for one in self.ids if only is None else [only]:
            document["listeners"] = {f"li{one.int}": {"status": status, "bytes_in": sequence}}
            (made,) = heartbeat_codec.datagrams(one, KEY, EPOCH, sequence, document)
            self.sender.sendto(made, ("127.0.0.1", self.receiver.port))

    def receive(self, number):
        """Process datagrams without the receive loop."""
        for _ in range(number):
            size, sender = self.receiver._socket.recvfrom_into(buffer := bytearray(65536))
            self.receiver._handle_datagram(memoryview(buffer)[:size], sender[0], retried=False)

    def until(self, condition):
        # The thread of the receiver changes its counters without an event.
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, json.dumps(self.receiver.refused)
            time.sleep(0.005)

    def column(self, key, column):
        return dict(self.database.read(lambda c: c.execute(sa.select(key, column)).tuples().all()))

    def listeners(self):
        found = self.column(object_status.c.object_id, object_status.c.operating)
        return {found[f"li{one.int}"] for one in self.ids}


@pytest.fixture
def fleet(database, monkeypatch):
    monkeypatch.setattr(receiver_module, "_SOCKET_BUFFER", 1 << 20)
    made = Fleet(database)
    yield made
    made.close()


def fill(fleet, status):
    """Fill the buffer; return the last sequence that fits for all amphorae."""
    for sequence in range(2, 1000):
        fleet.send(sequence, status)
        fleet.receiver.overload.measure()
        if fleet.receiver.overload.lost:
            return sequence - 1
    pytest.fail("the buffer is not full")


def test_with_a_full_buffer_only_times_are_read_until_it_is_empty(fleet, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("amphora_driver.health.amphora_budgets.DATAGRAM_BURST", 10_000.0)
    fleet.send(1)
    fleet.receive(FLEET)
    fleet.writer.flush(last=True)
    last = fill(fleet, "FULL")
    accepted = fleet.receiver.accepted
    fleet.run()
    fleet.until(lambda: fleet.receiver.overload.omitted is Omitted.NOTHING)
    assert fleet.receiver.shortened > FLEET, "the datagrams at the head of a full buffer are not decoded"
    assert fleet.receiver.accepted >= accepted + (last - 1) * FLEET
    fleet.writer.flush(last=True)
    sequences = fleet.column(amphora_heartbeat.c.amphora_id, amphora_heartbeat.c.sequence)
    assert min(sequences.values()) >= last, "no time is lost"
    fleet.send(2000, "FULL")
    fleet.until(lambda: all(not fleet.reports.is_newer(str(one), (EPOCH, 2000)) for one in fleet.ids))
    fleet.writer.flush(last=True)
    assert fleet.listeners() == {"DEGRADED"}
    assert set(fleet.column(listener_statistics.c.listener_id, listener_statistics.c.bytes_in).values()) == {2000}
    assert "reads only the times of heartbeats" in caplog.text
    assert "processes complete heartbeats again" in caplog.text
    assert fleet.receiver.overload.lost > 0


def test_the_first_heartbeat_of_an_amphora_is_complete_in_any_case(fleet):
    fleet.receiver.overload.omitted = Omitted.STATUSES
    fleet.send(1, only=fleet.ids[0])
    fleet.send(2, only=fleet.ids[0])
    fleet.receive(2)
    assert (fleet.receiver.accepted, fleet.receiver.shortened) == (2, 1)
    last = fleet.reports.last_report(str(fleet.ids[0]))
    assert (last.generation, last.order) == (1, (EPOCH, 2))


def test_a_replay_of_a_shortened_heartbeat_is_refused(fleet):
    fleet.receiver.overload.omitted = Omitted.STATUSES
    for sequence in (1, 2, 2):
        fleet.send(sequence, only=fleet.ids[0])
        fleet.receive(1)
    assert fleet.receiver.refused == {"old": 1}


def test_during_overload_statuses_are_written_and_statistics_wait(fleet):
    fleet.send(1)
    fleet.receive(FLEET)
    fleet.overloaded = True
    fleet.writer.flush()
    assert fleet.listeners() == {"ONLINE"}
    assert fleet.column(listener_statistics.c.listener_id, listener_statistics.c.bytes_in) == {}
    fleet.overloaded = False
    fleet.writer.flush()
    assert len(fleet.column(listener_statistics.c.listener_id, listener_statistics.c.bytes_in)) == FLEET


def test_the_levels_have_a_hysteresis():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiving:
        monitor = OverloadMonitor(receiving)
        levels = [monitor._decide(used) for used in (0.0, 0.3, 0.2, 0.6, 0.3, 0.11, 0.09)]
    nothing, statistics, statuses = Omitted
    assert levels == [nothing, statistics, statistics, statuses, statuses, statuses, nothing]
