# SPDX-License-Identifier: Apache-2.0
"""The process amphora-cluster is killed in the middle of a pass; another one completes the pass.

The process uses the APIs over HTTP. The kill comes after the effect of a change in Octavia, and before its answer.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography.fernet import Fernet
from http_cloud import HttpCloud, options

from amphora_cluster.model import NodeState, Request, RequestKind
from amphora_driver.database.vault import Vault

ROOT = Path(__file__).parents[3]
SECONDS = 60.0


def until(condition):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.02)


@pytest.fixture
def stores(sqlite_cluster, make_stores, tmp_path):
    made = make_stores(sqlite_cluster)
    key = Fernet.generate_key()
    made.vault = made.groups._vault = made.tokens._vault = Vault([key])
    (tmp_path / "keys").write_bytes(key)
    (tmp_path / "keys").chmod(0o600)
    return made


@pytest.fixture
def cloud():
    made = HttpCloud()
    with made.served() as url:
        made.url = url
        yield made


@pytest.fixture
def start(stores, cloud, tmp_path):
    """Return a function that starts the process; `host` separates the lock files, as on several hosts."""
    running = []

    def start(host="one"):
        text = f"[amp_cluster]\nconnection = {stores.database.url}\nencryption_key_file = {tmp_path}/keys\n"
        text += f"lock_dir = {tmp_path}/{host}\npoll_interval = 1000\nlease = 2\nstatus_port = 0\n{options(cloud.url)}"
        path = tmp_path / f"{host}.conf"
        path.write_text(text)
        log = (tmp_path / "log").open("ab")
        process = subprocess.Popen(
            [sys.executable, "-m", "amphora_cluster.controller.service"],
            env={**os.environ, "AMPHORA_CLUSTER_CONFIG": str(path), "PYTHONPATH": str(ROOT)},
            start_new_session=True,
            stdout=log,
            stderr=log,
        )
        log.close()
        running.append(process)
        return process

    yield start
    for process in running:
        kill(process)


def kill(process):
    """Kill the process and its worker, as a power failure does."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(SECONDS)


class KillAt:
    """Kills a process at the first change of a kind."""

    def __init__(self, cloud, process, method):
        self.process, self.method, self.killed = process, method, threading.Event()
        cloud.effects = self

    def __call__(self, method, _path):
        if method == self.method and not self.killed.is_set():
            kill(self.process)
            self.killed.set()


def states(stores):
    return {node.server_id: node.state for node in stores.groups.list_nodes("g1")}


def boot(cloud, number=3):
    for one in range(number):
        cloud.boot(f"s{one}", "web", f"192.0.2.{one + 1}")


def serves(stores, number):
    return list(states(stores).values()) == [NodeState.SERVING] * number


@pytest.mark.parametrize("host", ["one", "two"])
def test_a_killed_join_is_completed(stores, cloud, start, host):
    boot(cloud)
    process = start()
    kill_at = KillAt(cloud, process, "PUT")
    stores.add()
    assert kill_at.killed.wait(SECONDS)
    assert states(stores) == dict.fromkeys(("s0", "s1", "s2"), NodeState.JOINING), "recorded before the step"
    assert stores.groups.get("g1").owner is not None
    start(host)
    until(lambda: serves(stores, 3))
    members = cloud.members("pool")
    assert sorted(members) == ["s0", "s1", "s2"]
    assert len([one for one in cloud.calls if one[0] == "PUT"]) == 1, "the batch of the first process was complete"


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_a_killed_leave_is_completed(stores, cloud, start, method):
    boot(cloud)
    stores.add(drain_seconds=1)
    process = start()
    until(lambda: serves(stores, 3))
    kill_at = KillAt(cloud, process, method)
    request = stores.requests.add(Request(id="", group_id="g1", kind=RequestKind.LEAVE, servers=("s1",)))
    assert kill_at.killed.wait(SECONDS)
    assert states(stores)["s1"] is NodeState.DRAINING
    assert stores.requests.get("g1", request.id).ended_at is None
    start("two")
    until(lambda: stores.requests.get("g1", request.id).ended_at is not None)
    assert stores.requests.get("g1", request.id).outcome == {"s1": ""}
    assert sorted(cloud.members("pool")) == ["s0", "s2"]
    assert states(stores) == {"s0": NodeState.SERVING, "s1": NodeState.LEFT, "s2": NodeState.SERVING}


def test_a_worker_that_crashes_is_restarted(stores, cloud, start):
    boot(cloud, 1)
    stores.add()
    process = start()
    until(lambda: serves(stores, 1))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for child in children:
        os.kill(int(child), signal.SIGKILL)
    cloud.boot("s9", "web", "192.0.2.9")
    stores.groups.make_due(["g1"])
    until(lambda: serves(stores, 2))


def test_a_signal_ends_the_process_and_returns_the_leases(stores, cloud, start):
    boot(cloud, 1)
    stores.add()
    process = start()
    until(lambda: serves(stores, 1))
    process.terminate()
    assert process.wait(SECONDS) == 0
    assert stores.groups.get("g1").owner is None


def test_the_process_does_not_start_with_a_wrong_option(stores, start, tmp_path, cloud):
    (tmp_path / "keys").write_bytes(b"nonsense")
    assert start().wait(SECONDS) == 1
    assert "is not a Fernet key" in (tmp_path / "log").read_text()
