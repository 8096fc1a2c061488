# SPDX-License-Identifier: Apache-2.0
"""One amphora with a valid key sends 2,000 hostile datagrams in a second beside 500 honest amphorae. The health manager
is a separate process with a real database; docs/reference/heartbeat.md states its memory limit.
"""

import hashlib
import hmac
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import uuid
import zlib
from itertools import count, cycle
from pathlib import Path

import psutil
import pytest
import sqlalchemy as sa
from cryptography.fernet import Fernet
from free_ports import free_ports

from amphora_driver.database.tables import amphora_heartbeat, listener_statistics, object_status
from amphora_driver.database.vault import Vault
from amphora_driver.model.enums import ListenerProtocol
from amphora_driver.model.loadbalancer import Listener, LoadBalancer, Vip
from amphora_driver.secret import Secret
from amphora_driver.store import amphorae
from amphora_driver.store.requests import RequestRecorder

HONEST = 500
HOSTILE_RATE = 2000
INTERVAL = 1.0
ROUNDS = 6
# Seconds after which an amphora is silent, and seconds until a report is written on a busy machine.
SILENT_AFTER = 10.0
CURRENT = 4.0
EPOCH = 1_900_000_000_000_000_000
VIP = Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1")
DOCUMENT = Path(__file__).parents[3] / "docs/reference/heartbeat.md"

pytestmark = pytest.mark.quiet


class Amphora:
    def __init__(self, name):
        self.id, self.key = str(uuid.uuid4()), os.urandom(32)
        self.load_balancer, self.listener = f"lb{name}", f"li{name}"
        self.sequence = count(1)

    def record(self, connection, vault):
        sealed = vault.seal(Secret(self.key), amphorae.key_location(self.id))
        amphorae.insert_amphora(connection, self.id, self.load_balancer, "standalone", sealed)

    def tree(self):
        listener = Listener(
            id=self.listener, loadbalancer_id=self.load_balancer, protocol=ListenerProtocol.TCP, protocol_port=80
        )
        return LoadBalancer(id=self.load_balancer, project_id="demo", vip=VIP, listeners=(listener,))

    def datagram(self, document, sequence=None):
        content = b"AHB1" + uuid.UUID(self.id).bytes
        content += struct.pack("!QQ", EPOCH, next(self.sequence) if sequence is None else sequence)
        content += document if isinstance(document, bytes) else zlib.compress(json.dumps(document).encode(), 1)
        return content + hmac.digest(self.key, content, hashlib.sha256)

    def report(self, counted):
        said = {"status": "OPEN", "bytes_in": counted, "bytes_out": counted, "total_connections": counted}
        return {"generation": 1, "listeners": {self.listener: said}}


def hostile(amphora):
    """Yield datagrams without end, each with a valid signature: late refusals cost most."""
    bomb = zlib.compress(b" " * (2 << 20), 9)
    huge = zlib.compress(b" " * (64 << 20), 9)
    many = {f"{number:032x}": {"status": "UP", "members": {}} for number in range(1500)}
    kinds = (
        lambda: amphora.datagram(bomb),
        lambda: amphora.datagram(huge),
        lambda: amphora.datagram(b"no deflate"),
        lambda: amphora.datagram({"generation": 1, "pools": many}),
        lambda: amphora.datagram({"generation": 2**63 - 1, "drift": ["link"]}),
        lambda: amphora.datagram({"generation": 1, "drifted": {"at": time.time(), "sentences": ["\U0001f600" * 500]}}),
        lambda: amphora.datagram({"generation": 1, "listeners": {"li0": {"status": "OPEN", "bytes_in": 2**70}}}),
        lambda: amphora.datagram({"generation": "x" * 1000}),
        lambda: amphora.datagram(amphora.report(1), sequence=1),
    )
    prepared = [[kind() for _ in range(20)] for kind in kinds]
    for kind, ready in cycle(zip(kinds, prepared, strict=True)):
        # Most datagrams are prepared: a replay reaches the same check, and the sender keeps up its rate.
        yield kind() if ready is prepared[-1] else (ready.pop() if ready else kind())


@pytest.fixture
def fleet(tmp_path, database):
    (tmp_path / "key").write_bytes(Fernet.generate_key())
    (tmp_path / "key").chmod(0o600)
    vault = Vault.load(str(tmp_path / "key"))
    fleet = [Amphora(str(number)) for number in range(HONEST + 1)]
    recorder = RequestRecorder(database, lambda node: None)
    for one in fleet:
        recorder.create_load_balancer(one.tree(), read_back=False)
    database.write(lambda c: [one.record(c, vault) for one in fleet])
    return fleet


@pytest.fixture
def manager(tmp_path, database, fleet):
    (port,) = free_ports(1)
    conf = tmp_path / "driver.conf"
    conf.write_text(
        f"[amp_database]\nconnection = {database.url}\nencryption_key_file = {tmp_path}/key\n"
        f"[amp_queue]\nsocket_dir = {tmp_path}/bells\n"
        f"[amp_health]\nbind_address = 127.0.0.1\nbind_port = {port}\n[amp_status_page]\nhealth_bind_port = 0\n"
    )
    log = (tmp_path / "log").open("wb")
    process = subprocess.Popen(
        [sys.executable, "-m", "amphora_driver.health.service"],
        env={**os.environ, "AMPHORA_DRIVER_CONFIG": str(conf)},
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        yield process, port, tmp_path / "log"
    finally:
        process.terminate()
        process.wait(30)
        log.close()


def memory(process):
    """Return the bytes of the largest process of the service."""
    of_all = [process.pid, *(one.pid for one in psutil.Process(process.pid).children(recursive=True))]
    return max(psutil.Process(pid).memory_info().rss for pid in of_all)


def limit():
    """Return the documented memory limit in bytes."""
    found = re.search(r"at most (\d+) MiB of memory", DOCUMENT.read_text())
    return int(found.group(1)) << 20


def test_a_hostile_amphora_does_not_affect_other_amphorae(fleet, manager, database):
    process, port, log = manager
    bad, honest = fleet[0], fleet[1:]
    target = ("127.0.0.1", port)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        deadline = time.monotonic() + 30
        while not database.read(lambda c: c.scalar(sa.select(sa.func.count()).select_from(amphora_heartbeat))):
            assert time.monotonic() < deadline, log.read_text()
            sender.sendto(honest[0].datagram(honest[0].report(0)), target)
            time.sleep(0.1)
        ending, sent = threading.Event(), []
        attack = threading.Thread(target=flood, args=(bad, target, ending, sent))
        begun = time.monotonic()
        attack.start()
        try:
            largest = 0
            for number in range(1, ROUNDS + 1):
                for index, one in enumerate(honest):
                    sender.sendto(one.datagram(one.report(number)), target)
                    at = begun + (number - 1 + index / HONEST) * INTERVAL
                    time.sleep(max(0.0, at - time.monotonic()))
                largest = max(largest, memory(process))
                oldest = time.time() - min(places(database, honest, amphora_heartbeat.c.seen_at).values(), default=0.0)
                if number > 1:
                    assert oldest < SILENT_AFTER, "an honest amphora counts as silent"
            said = time.monotonic()
            while not is_current(database, honest):
                assert time.monotonic() < said + CURRENT, "statuses and statistics are not current"
                time.sleep(0.1)
        finally:
            ending.set()
            attack.join()
    passed = time.monotonic() - begun
    assert len(sent) > 0.7 * HOSTILE_RATE * passed, "the hostile amphora did not reach its rate"
    assert largest < limit()
    assert "with a valid signature, by amphora: {'" + bad.id in log.read_text()


def places(database, honest, column):
    """Return one column of the last heartbeats of the honest amphorae."""
    rows = database.read(lambda c: c.execute(sa.select(amphora_heartbeat.c.amphora_id, column)).all())
    ids = {one.id for one in honest}
    return {amphora_id: value for amphora_id, value in rows if amphora_id in ids}


def is_current(database, honest):
    counters = database.read(
        lambda c: c.execute(sa.select(listener_statistics.c.listener_id, listener_statistics.c.bytes_in)).all()
    )
    found = dict(map(tuple, counters))
    told = dict(
        map(
            tuple,
            database.read(lambda c: c.execute(sa.select(object_status.c.object_id, object_status.c.operating)).all()),
        )
    )
    return all(found.get(one.listener) == ROUNDS and told[one.load_balancer] == "ONLINE" for one in honest)


def flood(bad, target, ending, sent):
    """Send datagrams at a constant rate."""
    begun = time.monotonic()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for datagram in hostile(bad):
            if ending.is_set():
                return
            sender.sendto(datagram, target)
            sent.append(len(datagram))
            time.sleep(max(0.0, begun + len(sent) / HOSTILE_RATE - time.monotonic()))
