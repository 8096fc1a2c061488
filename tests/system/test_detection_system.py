# SPDX-License-Identifier: Apache-2.0
"""Failure detection replaces dead amphorae, and waits while it receives no heartbeats.

AMPHORA_OUTAGE_SECONDS is the time for which controllers and health managers are stopped or ended, for example 600.
"""

import fcntl
import functools
import hashlib
import hmac
import json
import os
import secrets
import signal
import socket
import struct
import subprocess
import threading
import time
import uuid
import zlib
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa
from cloud import Cloud
from openstack.exceptions import HttpException
from sandbox_of_a_test import running

from amphora_driver.database.engine import Database
from amphora_driver.database.tables import amphora, amphora_heartbeat, job
from amphora_driver.database.tables_fleet import failover
from amphora_driver.database.vault import Vault
from amphora_driver.host import namespaces
from amphora_driver.secret import Secret
from amphora_driver.store import circuit_breaker, failovers, silent_amphorae
from amphora_driver.store.amphorae import key_location
from sandbox import config_files, demo, topology

# The production limit of 30 s, scaled to four seconds on a shared machine.
SILENT_AFTER = 4.0
BLIND_FOR = 2.5 * SILENT_AFTER
# Seconds for the longest wait for the write lock and the rest of a request.
REFUSED_WITHIN = 15.0 + 15.0
OUTAGE = max(BLIND_FOR, float(os.environ.get("AMPHORA_OUTAGE_SECONDS", "0")))
pytestmark = [pytest.mark.root, pytest.mark.lasts(300 + OUTAGE)]
OPTIONS = {
    "amp_health": {"interval": "0.5", "flush_interval": "0.2"},
    "amp_failover": {
        "silent_after": str(SILENT_AFTER),
        "probe_timeout": "1",
        "breaker_window": "30",
        "breaker_close_after": "2",
        "backoff_first": "1",
    },
}
FLEET = 50


@pytest.fixture(scope="module")
def sandbox():
    with running(options=OPTIONS) as (stack, settings):
        connection, database = demo.connect(settings), Database(settings.database_url)
        cloud = Cloud(settings, connection, database)
        try:
            yield stack, cloud
            cloud.clean()
        finally:
            database.dispose()
            connection.close()


@pytest.fixture(scope="module")
def stack(sandbox):
    return sandbox[0]


@pytest.fixture(scope="module")
def cloud(sandbox):
    return sandbox[1]


@pytest.fixture(scope="module")
def balancer(cloud):
    made = cloud.served("watched", ("member1",))
    cloud.online(made.id)
    return made


@pytest.fixture
def no_failover(cloud, balancer):
    """Assert that all heartbeats arrive, no amphora was replaced, and no object is in ERROR."""
    seeing(cloud)
    before, known = cloud.amphorae(balancer), len(rows(cloud))
    yield
    seeing(cloud)
    # A wrong detection would have happened by now.
    sees_for(cloud, 2 * SILENT_AFTER)
    assert len(rows(cloud)) == known, "no amphora is replaced"
    assert cloud.amphorae(balancer) == before
    assert cloud.balancers.get_load_balancer(balancer.id).operating_status == "ONLINE"


def rows(cloud):
    return cloud.database.read(lambda c: c.execute(sa.select(failover).order_by(failover.c.id)).all())


def breaker(cloud, name=circuit_breaker.AUTOMATIC):
    return cloud.database.read(circuit_breaker.read_breaker_rows).get(name)


def silent(cloud):
    return {row.amphora_id: row for row in cloud.database.read(silent_amphorae.list_silent_amphorae)}


def seeing(cloud):
    def ask():
        sight = breaker(cloud, circuit_breaker.SIGHT)
        return sight is not None and sight.state == circuit_breaker.SEEING and not silent(cloud)

    cloud.until(ask, "the detector receives heartbeats, and no amphora is silent")


def blind(cloud):
    cloud.until(
        lambda: breaker(cloud, circuit_breaker.SIGHT).state == circuit_breaker.BLIND,
        "the detector is blind",
    )


def sees_for(cloud, seconds):
    """Wait until the detector has had heartbeats for this time without a gap."""

    def ask():
        sight = breaker(cloud, circuit_breaker.SIGHT)
        return sight.state == circuit_breaker.SEEING and time.time() - sight.since > seconds

    cloud.until(ask, f"the detector receives heartbeats for {seconds:.0f} s")


@contextmanager
def stopped(stack, name):
    """Stop a program and its children (SIGSTOP) while none of them holds the database's write lock."""
    group = stack.supervision.running(name).pid
    with Path(f"{stack.settings.data}/amphora-driver.sqlite.lock").open("wb") as lock:
        os.killpg(group, signal.SIGSTOP)
        while not free(lock):
            os.killpg(group, signal.SIGCONT)
            time.sleep(0.05)
            os.killpg(group, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(group, signal.SIGCONT)


def free(lock, seconds=2.0):
    """Return whether the write lock becomes free in that time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.01)
        else:
            fcntl.flock(lock, fcntl.LOCK_UN)
            return True
    return False


def kill(cloud, amphora_id):
    """Kill a machine as in a power cut."""
    record = Path(cloud.settings.amphorae, amphora_id, "process.json")
    os.kill(json.loads(record.read_text())["pid"], signal.SIGKILL)


def test_a_dead_amphora_is_replaced_automatically(cloud, balancer):
    seeing(cloud)
    (old,) = cloud.amphorae(balancer)
    killed = time.time()
    kill(cloud, old)
    row = cloud.until(lambda: next(iter(rows(cloud)), None), "a fail-over has begun")
    assert (row.cause, row.amphora_id, row.load_balancer_id) == ("silent", old, balancer.id)
    assert row.silent_since <= killed + 1
    # Detection takes silent_after plus the age of the last heartbeat and the load of the machine.
    assert row.begun_at - killed < SILENT_AFTER + 10
    cloud.operating(lambda: cloud.balancers.get_load_balancer(balancer.id), "ERROR")
    cloud.until(lambda: old not in cloud.amphorae(balancer), "the dead amphora is removed", 90)
    cloud.online(balancer.id)
    assert cloud.answers(balancer.vip_address, 3) == {"member1": 3}
    words = [one.word for one in cloud.database.read(lambda c: failovers.list_failover_events(c, row.id))]
    assert {"begun", "found"} <= set(words)
    assert len(rows(cloud)) == 1
    seeing(cloud)


@contextmanager
def gone(stack, *names):
    """Kill programs (SIGKILL), and start them again."""
    for name in names:
        process = stack.supervision.running(name)
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait(10)
    try:
        yield
    finally:
        stack.up()


@pytest.fixture
def change(cloud, balancer, record_property):
    """Request a change without a controller; the next controller applies it."""
    pool = cloud.pool_of(balancer)
    member = next(iter(cloud.balancers.members(pool)))

    @contextmanager
    def asked():
        cloud.balancers.update_member(member, pool, weight=member.weight % 100 + 1)
        yield
        assert cloud.balancers.get_load_balancer(balancer.id).provisioning_status == "PENDING_UPDATE"

    yield asked
    begun = time.monotonic()
    cloud.active(balancer.id)
    record_property("outage", OUTAGE)
    record_property("seconds until the change was applied", round(time.monotonic() - begun, 1))


@pytest.mark.usefixtures("no_failover")
def test_a_stopped_controller_replaces_no_amphora_afterwards(cloud, stack, change):
    with stopped(stack, "amphora-controller"), change():
        time.sleep(OUTAGE)
    sees_for(cloud, 1)


@pytest.mark.usefixtures("no_failover")
def test_a_restarted_controller_replaces_no_amphora(stack, change):
    with gone(stack, "amphora-controller"), change():
        time.sleep(OUTAGE)


@pytest.mark.usefixtures("no_failover")
def test_a_stopped_health_manager_causes_no_failover(cloud, stack):
    with stopped(stack, "amphora-health-manager"):
        blind(cloud)
        time.sleep(OUTAGE)
        assert not silent(cloud)


@pytest.mark.usefixtures("no_failover")
def test_a_stopped_control_plane_causes_no_failover(stack, change):
    """The whole host is suspended: no clock shows it, and all heartbeats of that time are lost."""
    with stopped(stack, "amphora-controller"), stopped(stack, "amphora-health-manager"), change():
        time.sleep(OUTAGE)


@pytest.mark.usefixtures("no_failover")
def test_a_restarted_control_plane_causes_no_failover(stack, change):
    with gone(stack, "amphora-controller", "amphora-health-manager"), change():
        time.sleep(OUTAGE)


@pytest.mark.usefixtures("no_failover")
def test_a_locked_database_causes_no_failover(cloud):
    with Path(f"{cloud.settings.data}/amphora-driver.sqlite.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        time.sleep(BLIND_FOR)


@pytest.mark.usefixtures("no_failover")
def test_a_request_is_refused_while_the_database_is_locked(cloud, balancer):
    """A stopped process holds the write lock: a request is refused in time and leaves no trace."""
    change = functools.partial(cloud.balancers.update_load_balancer, balancer.id, description="changed")
    with Path(f"{cloud.settings.data}/amphora-driver.sqlite.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        begun = time.monotonic()
        with pytest.raises(HttpException, match="could not use its database") as refused:
            change()
        assert time.monotonic() - begun < REFUSED_WITHIN
    assert refused.value.status_code == 500
    # The log names the process that holds the lock.
    assert (
        f"the write lock was not free within 15 s: process {os.getpid()} "
        in (cloud.settings.log / "octavia-api.log").read_text()
    )
    assert cloud.active(balancer.id).description != "changed"
    change()
    assert cloud.active(balancer.id).description == "changed"


@pytest.mark.usefixtures("no_failover")
def test_an_unreachable_management_network_causes_no_failover(cloud):
    """The control plane's interface is down: no heartbeat arrives, and no agent can be reached."""
    inside = ("nsenter", f"--net={namespaces.path(cloud.settings.control)}", "--", "ip", "link", "set", "eth0")
    subprocess.run([*inside, "down"], check=True)
    try:
        cloud.until(lambda: silent(cloud), "an amphora is silent")
        time.sleep(SILENT_AFTER)
        assert all("cannot probe its agent" in one.verdict for one in silent(cloud).values())
    finally:
        subprocess.run([*inside, "up"], check=True)


@pytest.mark.usefixtures("no_failover")
def test_a_mute_amphora_is_not_replaced(cloud, balancer):
    """The agent answers probes, so the amphora is mute and not dead."""
    (one,) = cloud.amphorae(balancer)
    inside = ("nsenter", f"--net={namespaces.path(f'{cloud.settings.prefix}-{one[:13]}')}", "--", "nft")
    table = f"mute{os.getpid()}"
    rules = (
        f"add table inet {table}; add chain inet {table} out {{ type filter hook output priority 0; }}; "
        f"add rule inet {table} out udp dport {config_files.HEALTH_PORT} drop"
    )
    subprocess.run([*inside, rules], check=True)
    try:
        cloud.until(lambda: (row := silent(cloud).get(one)) and row.kind == "mute", "the amphora is mute")
        time.sleep(SILENT_AFTER)
        assert "its agent answers" in silent(cloud)[one].verdict
    finally:
        subprocess.run([*inside, "delete", "table", "inet", table], check=True)


class Fleet:
    """Simulated amphorae that only send heartbeats, signed with recorded keys."""

    def __init__(self, cloud):
        self.cloud = cloud
        self.keys = {str(uuid.uuid4()): secrets.token_bytes(32) for _ in range(FLEET)}
        self.owners = {one: str(uuid.uuid4()) for one in self.keys}
        self.speaks, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._speak)

    def __enter__(self):
        vault = Vault.load(str(self.cloud.settings.etc / "encryption.keys"))
        now = time.time()
        wanted = {"op": "apply", "generation": 1, "committed": 1, "applied": 1, "dirty": False}
        ready = {"role": "STANDALONE", "state": "ready", "management_address": "203.0.113.251", "confirmed": 1}
        times = {"created_at": now, "booted_at": now, "ready_at": now, "confirmed_at": now}
        self.cloud.database.write(
            lambda c: [
                c.execute(job.insert(), [{"load_balancer_id": of, **wanted} for of in self.owners.values()]),
                c.execute(
                    amphora.insert(),
                    [
                        ready
                        | times
                        | {
                            "id": one,
                            "load_balancer_id": of,
                            "heartbeat_key": vault.seal(Secret(key), key_location(one)),
                        }
                        for (one, of), key in zip(self.owners.items(), self.keys.values(), strict=True)
                    ],
                ),
            ]
        )
        self.speaks.set()
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()
        ids, owners = list(self.keys), list(self.owners.values())
        self.cloud.database.write(
            lambda c: [
                c.execute(amphora.delete().where(amphora.c.id.in_(ids))),
                c.execute(amphora_heartbeat.delete().where(amphora_heartbeat.c.amphora_id.in_(ids))),
                c.execute(job.delete().where(job.c.load_balancer_id.in_(owners))),
            ]
        )

    def _speak(self):
        place = namespaces.path(self.cloud.settings.control)
        target = (topology.CONTROL_ADDRESS, config_files.HEALTH_PORT)
        epoch, sequence = time.time_ns(), 0
        with namespaces.run_inside(place, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as sender:
            while not self._over.wait(0.5):
                sequence += 1
                if self.speaks.is_set():
                    for one, key in self.keys.items():
                        content = b"AHB1" + uuid.UUID(one).bytes + struct.pack("!QQ", epoch, sequence)
                        content += zlib.compress(json.dumps({"generation": 1}).encode())
                        sender.sendto(content + hmac.digest(key, content, hashlib.sha256), target)


@pytest.mark.usefixtures("no_failover")
def test_fifty_silent_amphorae_open_the_breaker_until_they_return(cloud):
    with Fleet(cloud) as fleet:
        cloud.until(
            lambda: breaker(cloud, circuit_breaker.SIGHT).watched == FLEET + 1, "the detector watches all amphorae"
        )
        seeing(cloud)
        before = len(rows(cloud))
        fleet.speaks.clear()
        cloud.until(lambda: breaker(cloud).state == circuit_breaker.OPEN, "the breaker is open")
        cloud.until(lambda: len(silent(cloud)) == FLEET, "the fleet is silent")
        time.sleep(SILENT_AFTER)
        assert breaker(cloud).state == circuit_breaker.OPEN
        assert len(rows(cloud)) == before, "no amphora is replaced"
        log = Path(cloud.settings.log, "amphora-controller.log").read_text(encoding="utf-8")
        assert "ERROR" in log
        assert "circuit breaker opened, so no automatic fail-over begins" in log
        fleet.speaks.set()
        cloud.until(lambda: breaker(cloud).state == circuit_breaker.CLOSED, "the breaker is closed again")
        assert not silent(cloud)
