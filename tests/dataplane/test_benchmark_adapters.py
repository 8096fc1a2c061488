# SPDX-License-Identifier: Apache-2.0
"""The parts of the benchmark's adapter that start daemons or enter namespaces, at the smallest size.

`tests/unit/benchmarks/test_adapters.py` tests the other parts.
"""

from __future__ import annotations

import base64
import http.client
import importlib
import json
import os
import signal
import socket
import ssl
import sys
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from amphora_lab import DEADLINE, ROOT, eventually, ip
from bench_harness import adapters, identifier, importable, spec
from throwaway_authority import CLIENT, SERVER

from amphora_agent.errors import HaproxyError
from amphora_agent.haproxy.runtime_socket import Socket
from amphora_agent.network.namespace import Namespace
from amphora_driver.database.engine import Database
from amphora_driver.host import detached_process
from amphora_driver.store import process_registry
from amphora_driver.store.process_registry import ProcessKind

pytestmark = pytest.mark.root
AGENT_PORT, METRICS_PORT, IDLE_AGENT_PORT = 9443, 9102, 15558
# Names in HAProxy follow the amphora's conventions, as in the harness.
LISTENER, POOL, MEMBER = (identifier("beat", kind) for kind in ("listener", "pool", "member"))


class PrivateNamespace:
    """A network namespace with loopback only, and the programs of a test in it."""

    def __init__(self, place):
        self.place = place
        self._name = f"bm{os.getpid()}"
        ip(f"netns add {self._name}")
        try:
            ip(f"-n {self._name} link set lo up")
            self._thread = Namespace(Path("/run/netns") / self._name)
        except BaseException:
            self._delete()
            raise

    def run(self, function, *arguments):
        return self._thread.run(function, *arguments)

    @contextmanager
    def running(self, command, log, environment=None):
        """Yield the process of a command, and end it with its descendants afterwards."""
        inside = ["setpriv", "--pdeathsig", "KILL", "--", "nsenter", f"--net=/run/netns/{self._name}", "--", *command]
        started = detached_process.spawn(inside, {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}, log)
        try:
            yield started
        except BaseException:
            sys.stderr.write(log.read_text())
            raise
        finally:
            assert detached_process.signal_and_wait(family(started), signal.SIGKILL, DEADLINE)

    def close(self):
        self._thread.close()
        self._delete()

    def _delete(self):
        ip(f"netns del {self._name}")


def family(one):
    """Return a process and its descendants."""
    return [one, *(descendant for child in one.children() for descendant in family(child))]


@pytest.fixture
def netns():
    # A path of a socket has 107 bytes at most.
    with tempfile.TemporaryDirectory(prefix="bm-") as folder:
        made = PrivateNamespace(Path(folder))
        yield made
        made.close()


@pytest.fixture(scope="module")
def adapter():
    with adapters() as module:
        yield module


@pytest.fixture
def made(adapter, netns):
    return adapter.Haproxy(str(netns.place))


# --- the agent ------------------------------------------------------------------------------------------------


class Ctx:
    """Replaces the harness's class of this name: returns the results of each side."""

    def interleave(self, found):
        return found


class Https:
    """Replaces the harness's class of this name: each request uses a new connection."""

    def __init__(self, netns, port, pki):
        self._room, self._port = netns, port
        self._tls = ssl.create_default_context(cafile=pki["ca"])
        self._tls.check_hostname = False
        self._tls.load_cert_chain(pki["client_pem"])

    def request(self, asked, fresh=True):
        return self._room.run(self._request, *asked)

    def _request(self, method, path, body, kind):
        connection = http.client.HTTPSConnection("127.0.0.1", self._port, timeout=DEADLINE, context=self._tls)
        try:
            connection.request(
                method, path, body and base64.b64decode(body), {"Content-Type": kind} if kind is not None else {}
            )
            with connection.getresponse() as answer:
                return answer.status, json.loads(answer.read())
        finally:
            connection.close()


@pytest.fixture
def side_by_side(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["side_by_side.py", "/nonexistent"])
    with importable(compare={"Ctx": Ctx, "Https": Https, "main": lambda: None}):
        yield importlib.import_module("side_by_side")


@pytest.fixture
def pki(netns, authority):
    files = {
        "ca": authority.pem,
        "server_pem": authority.issue("bench-server", SERVER),
        "client_pem": authority.issue("bench-client", CLIENT),
    }
    for name, content in files.items():
        (netns.place / name).write_text(content)
    return {name: str(netns.place / name) for name in files}


def test_an_agent_serves_the_bundles_of_the_harness(made, netns, pki, side_by_side):
    marker = identifier("marker")
    given = made.agent_prepare(pki, spec(policy=True), {"marker": marker}, AGENT_PORT)
    assert given["url"] == f"https://127.0.0.1:{AGENT_PORT}"
    https = side_by_side.compare.Https(netns, AGENT_PORT, pki)
    generations = []

    def answers():
        with suppress(OSError, http.client.HTTPException):
            return https.request(given["ready"])[0] == 200
        return False

    def asked(name):
        """Return the last answer to the requests of this name."""
        for request in given["requests"][name]:
            status, document = https.request(request)
            assert status == 200, (name, document)
        return document

    def pushed(name):
        document = asked(name)
        generations.append(document["generation"])
        shown = Socket(given["stats_sock"]).ask("show stat")
        assert "FRONTEND" in shown
        return document["how"], marker in shown

    with netns.running(["unshare", "--mount", "/bin/sh", "-c", given["script"]], Path(given["log"])):
        eventually(answers, "the agent answers")
        assert pushed("config_a")[1] is False
        assert asked("info")["amphora_id"] == spec()["amphorae"][0]["id"]
        assert "haproxy" in json.dumps(asked("details"))
        how, there = pushed("config_b")
        assert (how, there) == ("runtime", True)
        assert pushed("full_push_a") == ("runtime", False)
        assert pushed("upload_only")[1] is False
        assert pushed("reload_only") == ("reload", False)
        assert pushed("full_push_b")[1] is True
    assert generations == sorted(set(generations)), "a push has no newer generation"
    assert given["config_bytes"] > 1000


def test_a_side_without_a_result_is_left_out(side_by_side):
    assert side_by_side.compare.Ctx().interleave({"ours": [1.0], "incumbent": []}) == {"ours": [1.0]}


# --- HAProxy of the harness -----------------------------------------------------------------------------------


def haproxy(netns):
    """Write HAProxy's configuration as the harness does; return the file and its statistics socket."""
    folder = netns.place / "hap"
    folder.mkdir()
    file, stats = folder / "h.cfg", folder / "h.sock"
    file.write_text(
        f"global\n    stats socket {stats} mode 0666 level admin\n    maxconn 100\n    nbthread 1\n"
        "defaults\n    mode http\n    timeout connect 5s\n    timeout client 50s\n    timeout server 50s\n"
        f"frontend {LISTENER}\n    bind 127.0.0.1:18099\n    default_backend {POOL}:{LISTENER}\n"
        f"backend {POOL}:{LISTENER}\n    server {MEMBER} 127.0.0.1:18099 weight 1 check inter 3600s\n"
    )
    return file, stats


def answering(stats):
    with suppress(HaproxyError):
        return "Uptime" in Socket(stats).ask("show info")
    return False


def test_a_heartbeat_has_every_member(made, netns):
    file, stats = haproxy(netns)
    with netns.running(["haproxy", "-db", "-f", str(file)], netns.place / "log") as running:
        eventually(lambda: answering(stats), "HAProxy answers")
        made.beat_setup(identifier("beat"), str(stats), running.pid, file.read_text(), "insecure-bench-key")
        first, second = made.beat(), made.beat()
    assert first != second
    assert [made.beat_members(one) for one in (first, second)] == [1, 1]


def test_metrics_are_served_beside_haproxy(made, netns):
    file, stats = haproxy(netns)
    script = f"""set -e
mkdir -p /run/netns
mount -t tmpfs tmpfs /run/netns
ip netns add amphora-haproxy
ip -n amphora-haproxy link set lo up
ip netns exec amphora-haproxy haproxy -db -f {file} &
exec "$@"
"""
    command = ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", script, "sh", *made.prom_command()]
    with netns.running(command, netns.place / "log") as responder:
        eventually(lambda: answering(stats), "HAProxy answers")
        inner = Namespace(Path(f"/proc/{responder.pid}/root/run/netns/amphora-haproxy"))
        try:
            status, text = eventually(lambda: inner.run(scraped), "the responder answers")
        finally:
            inner.close()
    assert status == 200
    assert MEMBER in text
    assert "octavia_loadbalancer_max_connections 100" in text


def scraped():
    connection = http.client.HTTPConnection("127.0.0.1", METRICS_PORT, timeout=DEADLINE)
    try:
        connection.request("GET", "/metrics")
        with connection.getresponse() as answer:
            return answer.status, answer.read().decode()
    except ConnectionRefusedError:
        return None
    finally:
        connection.close()


# --- idle daemons ---------------------------------------------------------------------------------------------


def test_idle_daemons_show_activity(made, netns):
    """Each daemon shows activity, because the harness would also measure a failed daemon."""
    daemons = {one["name"]: one for one in made.processes()}
    database = Database(f"sqlite:///{netns.place}/etc/store.sqlite")
    signs = {
        "amphora-controller": lambda: database.read(
            lambda c: process_registry.list_processes(c, ProcessKind.CONTROLLER)
        ),
        "amphora-health-manager": lambda: database.read(
            lambda c: process_registry.list_processes(c, ProcessKind.HEALTH_MANAGER)
        ),
        "amphora-agent": lambda: netns.run(listens, IDLE_AGENT_PORT),
    }
    assert set(signs) == set(daemons)
    try:
        for name, sign in signs.items():
            one = daemons[name]
            with netns.running(one["argv"], netns.place / f"{name}.log", one.get("env")) as started:
                eventually(sign, f"{name} is up")
                eventually(lambda: len(family(started)) >= one["expect"], f"{name} has its processes")  # noqa: B023
                assert started.alive()
    finally:
        database.dispose()


def listens(port):
    with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), DEADLINE):
        return True
    return False
