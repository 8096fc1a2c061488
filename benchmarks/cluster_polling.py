# SPDX-License-Identifier: Apache-2.0
"""Measures the processor time of the controller of cluster membership while nothing changes.

    .sandbox/test-venv/bin/python benchmarks/cluster_polling.py [--groups N] [--servers N] [--projects N] [--seconds S]

The process `amphora-cluster` polls groups over HTTP; a stub in another process answers as Nova and Octavia do. Prints
the processor time of the controller per second, the number of passes, the longest time between two passes of a group,
and the calls of one pass.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from cryptography.fernet import Fernet  # noqa: E402

from amphora_cluster.database.groups import GroupStore  # noqa: E402
from amphora_cluster.database.tables import SCHEMA  # noqa: E402
from amphora_cluster.model import Group, MemberTemplate, Selector, SelectorKind  # noqa: E402
from amphora_driver.database import migrate  # noqa: E402
from amphora_driver.database.engine import Database  # noqa: E402
from amphora_driver.database.vault import Vault  # noqa: E402

_UUID = "{:08x}-0000-4000-8000-{:012x}"


def main() -> int:
    """Measure once, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=100)
    parser.add_argument("--servers", type=int, default=100, help="servers of each group")
    parser.add_argument("--projects", type=int, default=100, help="groups are distributed over the projects")
    parser.add_argument("--poll", type=float, default=9.0, help="poll_interval in seconds")
    parser.add_argument("--seconds", type=float, default=60.0, help="time of the measurement")
    chosen = parser.parse_args()
    print(json.dumps(measure(chosen.groups, chosen.servers, chosen.projects, chosen.poll, chosen.seconds), indent=2))
    return 0


def measure(groups: int, servers: int, projects: int, poll: float, seconds: float) -> dict[str, float]:
    """Return the figures of one run."""
    pipe, far = multiprocessing.Pipe()
    stub = multiprocessing.Process(target=_serve, args=(far, groups, servers, projects), daemon=True)
    stub.start()
    port = pipe.recv()
    with tempfile.TemporaryDirectory(prefix="acp-") as folder:
        process = None
        try:
            database = _prepare(Path(folder), groups, projects, port, poll)
            with Path(folder, "log").open("wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "amphora_cluster.controller.service"],
                    env={**os.environ, "AMPHORA_CLUSTER_CONFIG": f"{folder}/conf", "PYTHONPATH": str(ROOT)},
                    start_new_session=True,
                    stdout=log,
                    stderr=log,
                )
            _await_serving(database, groups * servers, Path(folder, "log"))
            # A round after the last change.
            time.sleep(1.5 * poll)
            return _figures(process, pipe, poll, seconds) | {"groups": groups, "servers": groups * servers}
        finally:
            if process is not None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
                process.wait(30)
            stub.kill()
            stub.join()


def _figures(process, pipe, poll, seconds):
    pipe.send("reset")
    pipe.recv()
    begun, before = time.monotonic(), _processor_time(process)
    time.sleep(seconds)
    passed, used = time.monotonic() - begun, _processor_time(process) - before
    pipe.send("report")
    calls, longest = pipe.recv()
    return {
        "cores": round(used / passed, 4),
        "passes_per_second": round(calls["members"] / passed, 2),
        "longest_between_passes": round(longest, 2),
        "poll_interval": poll,
        "calls": {name: round(number / max(calls["members"], 1), 3) for name, number in calls.items()},
    }


def _processor_time(process) -> float:
    every = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    return sum(one.cpu_times().user + one.cpu_times().system for one in every)


def _prepare(folder: Path, groups: int, projects: int, port: int, poll: float) -> Database:
    key = Fernet.generate_key()
    (folder / "keys").write_bytes(key)
    (folder / "keys").chmod(0o600)
    url = f"sqlite:///{folder}/cluster.sqlite"
    (folder / "conf").write_text(
        f"[amp_cluster]\nconnection = {url}\nencryption_key_file = {folder}/keys\nlock_dir = {folder}/locks\n"
        f"poll_interval = {poll}\nstatus_port = 0\n"
        "[amp_cluster_cloud]\nwithout_keystone = true\n"
        f"octavia_endpoint_override = http://127.0.0.1:{port}/octavia\n"
        f"nova_endpoint_override = http://127.0.0.1:{port}/nova/v2.1\n"
    )
    migrate.upgrade(url, SCHEMA)
    database = Database(url, schema=SCHEMA)
    store = GroupStore(database, Vault([key]))
    for number in range(groups):
        group = Group(
            id=_UUID.format(1, number),
            name=f"group-{number}",
            project_id=f"project-{number % projects}",
            selector=Selector(kind=SelectorKind.METADATA, value=f"role=group-{number}"),
            load_balancer_id=_UUID.format(2, number),
            pool_id=_UUID.format(3, number),
            member=MemberTemplate(ports=(80,)),
        )
        store.create(group, None)
    return database


def _await_serving(database: Database, number: int, log: Path) -> None:
    end = time.monotonic() + 180
    while True:
        counts = GroupStore(database, Vault([Fernet.generate_key()])).count_nodes()
        serving = sum(found for states in counts.values() for state, found in states.items() if state == "serving")
        if serving == number:
            database.dispose()
            return
        assert time.monotonic() < end, f"{serving} of {number} servers serve: {log.read_text()[-2000:]}"
        time.sleep(0.2)


# --- the stub ---------------------------------------------------------------------------------------------------------


def _address(group: int, server: int) -> str:
    return f"10.{group >> 8}.{group & 255}.{server + 1}"


def _server(group: int, server: int) -> dict:
    """A server as Nova 2.69 shows it, with the properties that the controller does not read."""
    name = _UUID.format(0x100 + group, server)
    link = f"https://nova.example.org/v2.1/servers/{name}"
    return {
        "id": name,
        "name": f"server-{group}-{server}",
        "status": "ACTIVE",
        "tenant_id": "0123456789abcdef0123456789abcdef",
        "user_id": "0123456789abcdef0123456789abcdef",
        "metadata": {"role": f"group-{group}"},
        "hostId": "2091634baaccdc4c5a1d57069c833e402921df696b7f970791b12ec6",
        "image": {
            "id": _UUID.format(9, 1),
            "links": [{"rel": "bookmark", "href": "https://nova.example.org/images/1"}],
        },
        "flavor": {"vcpus": 2, "ram": 4096, "disk": 20, "ephemeral": 0, "swap": 0, "original_name": "m1.medium"},
        "created": "2026-01-01T00:00:00Z",
        "updated": "2026-01-01T00:00:00Z",
        "addresses": {
            "net": [
                {
                    "version": 4,
                    "addr": _address(group, server),
                    "OS-EXT-IPS:type": "fixed",
                    "OS-EXT-IPS-MAC:mac_addr": "fa:16:3e:00:00:01",
                }
            ]
        },
        "accessIPv4": "",
        "accessIPv6": "",
        "links": [{"rel": "self", "href": link}, {"rel": "bookmark", "href": link}],
        "OS-DCF:diskConfig": "MANUAL",
        "progress": 0,
        "OS-EXT-AZ:availability_zone": "nova",
        "config_drive": "",
        "key_name": "key",
        "OS-SRV-USG:launched_at": "2026-01-01T00:00:10.000000",
        "OS-SRV-USG:terminated_at": None,
        "security_groups": [{"name": "default"}],
        "OS-EXT-STS:task_state": None,
        "OS-EXT-STS:vm_state": "active",
        "OS-EXT-STS:power_state": 1,
        "os-extended-volumes:volumes_attached": [],
        "locked": False,
        "description": None,
        "tags": [],
        "trusted_image_certificates": None,
        "server_groups": [],
    }


def _serve(pipe, groups: int, servers: int, projects: int) -> None:  # noqa: C901 - one closure for all paths
    lists = {
        f"project-{project}": json.dumps(
            {"servers": [_server(group, one) for group in range(project, groups, projects) for one in range(servers)]}
        ).encode()
        for project in range(projects)
    }
    pools: dict[str, bytes] = {}
    calls: Counter[str] = Counter()
    times: dict[str, list[float]] = defaultdict(list)

    class Handler(BaseHTTPRequestHandler):
        """Answers as Nova and Octavia."""

        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def _answer(self) -> bytes:
            path = self.path.partition("?")[0]
            name = path.rstrip("/").split("/")
            if path.startswith("/nova"):
                calls["servers"] += 1
                return lists[self.headers["X-Project-Id"]]
            if path.endswith("/members"):
                if self.command == "PUT":
                    pools[name[-2]] = _members(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                    return b""
                calls["members"] += 1
                times[name[-2]].append(time.monotonic())
                return pools.get(name[-2], b'{"members": []}')
            if "/pools/" in path:
                calls["pool"] += 1
                return json.dumps({"pool": {"id": name[-1], "healthmonitor_id": "hm", "listeners": []}}).encode()
            if "/loadbalancers/" in path:
                calls["load_balancer"] += 1
                return b'{"loadbalancer": {"provisioning_status": "ACTIVE"}}'
            return b'{"versions": [{"id": "v2.27"}]}'

        def do_GET(self) -> None:
            content = self._answer()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_PUT = do_GET  # noqa: N815 - name of the base class

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True

    threading.Thread(target=server.serve_forever, daemon=True).start()
    pipe.send(server.server_address[1])
    begun = time.monotonic()
    while True:
        if pipe.recv() == "reset":
            calls.clear()
            times.clear()
            begun = time.monotonic()
            pipe.send(None)
        else:
            # The begin and the end of the measurement count too, so that a group with one pass, or none, is found.
            moments = [(begun, *times[name], time.monotonic()) for name in pools]
            gaps = [late - early for one in moments for early, late in itertools.pairwise(one)]
            pipe.send((dict(calls), max(gaps, default=float("inf"))))


def _members(body: dict) -> bytes:
    """The members of a batch as Octavia shows them."""
    shown = [
        {
            "id": _UUID.format(7, number),
            "operating_status": "ONLINE",
            "provisioning_status": "ACTIVE",
            "admin_state_up": True,
            "monitor_port": None,
            "monitor_address": None,
            "subnet_id": None,
            **one,
        }
        for number, one in enumerate(body["members"])
    ]
    return json.dumps({"members": shown, "members_links": []}).encode()


if __name__ == "__main__":
    sys.exit(main())
