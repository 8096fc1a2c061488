# SPDX-License-Identifier: Apache-2.0
"""The processes of cluster membership beside a sandbox: controllers, the API, and a stub of Nova."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from cryptography.fernet import Fernet
from free_ports import free_ports

from amphora_cluster.database.groups import GroupStore
from amphora_cluster.database.requests import RequestStore
from amphora_cluster.database.tables import SCHEMA
from amphora_cluster.database.tokens import TokenStore
from amphora_cluster.model import Group, MemberTemplate, NodeState, Selector, SelectorKind
from amphora_driver.database import migrate
from amphora_driver.database.engine import Database
from amphora_driver.database.vault import Vault
from sandbox import topology

PROJECT = "sandbox"
_START_SECONDS = 60.0
_LEASE = 3


class Lab:
    """One deployment of cluster membership, with its own database.

    Args:
        folder: of its files.
        settings: of the sandbox.
        nova: the stub of Nova.
    """

    def __init__(self, folder, settings, nova):
        self.folder, self.nova = Path(folder), nova
        self.port = free_ports(1)[0]
        self._processes = {}
        keys = self.folder / "encryption.keys"
        keys.write_bytes(Fernet.generate_key() + b"\n")
        keys.chmod(0o600)
        url = f"sqlite:///{self.folder}/cluster.sqlite"
        self._write(url, keys, settings)
        migrate.upgrade(url, SCHEMA)
        self.database = Database(url, schema=SCHEMA)
        vault = Vault.load(str(keys))
        self.groups = GroupStore(self.database, vault)
        self.requests = RequestStore(self.database)
        self.tokens = TokenStore(self.database, vault)

    def _write(self, url, keys, settings):
        options = {
            "amp_cluster": {
                "connection": url, "encryption_key_file": keys, "poll_interval": 0.5, "threads": 4, "lease": _LEASE,
                "retry_first": 0.2, "retry_most": 1, "lock_dir": self.folder / "locks", "status_port": 0,
            },
            "amp_cluster_api": {"bind_port": self.port, "workers": 1, "threads": 8, "failed_attempts": 1000},
            "amp_cluster_cloud": {
                "without_keystone": True, "octavia_endpoint_override": settings.endpoint,
                "nova_endpoint_override": self.nova.url, "request_timeout": 10, "server_list_age": 0.2,
            },
        }  # fmt: skip
        lines = [
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in found.items())
            for group, found in options.items()
        ]
        (self.folder / "cluster.conf").write_text("".join(lines))

    # --- processes ----------------------------------------------------------------------------------------------------

    def start(self, name="controller"):
        """Start a controller, or the API."""
        module = "amphora_cluster.api.server" if name == "api" else "amphora_cluster.controller.service"
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", module],
                env={**os.environ, "AMPHORA_CLUSTER_CONFIG": str(self.folder / "cluster.conf")},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        if name == "api":
            self._await_api()

    def kill(self, name="controller", number=signal.SIGKILL):
        """End a process with all its children, unless it was ended before."""
        process = self._processes.pop(name, None)
        if process is None:
            return
        os.killpg(process.pid, number)
        process.wait(30)

    def stop(self):
        for name in list(self._processes):
            self.kill(name, signal.SIGTERM)
        self.database.dispose()

    def log(self, name="controller"):
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def _await_api(self):
        deadline = time.monotonic() + _START_SECONDS
        while True:
            with suppress(OSError):
                if self.call("GET", "/healthcheck")[0] == 200:
                    return
            assert time.monotonic() < deadline, self.log("api")
            time.sleep(0.1)

    # --- webhooks -----------------------------------------------------------------------------------------------------

    def call(self, method, path, body=None, headers=None, timeout=90):
        """Send one request to the API; return status and document."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)) as connection:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, headers or {})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def raw(self, text):
        """Send a request that no client library sends; return the answer."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
            connection.sendall(text.encode())
            return connection.makefile("rb").read().decode()

    # --- groups -------------------------------------------------------------------------------------------------------

    def group(self, balancer, pool, name="group", **more):
        """Record a group of the servers with the tag of its name; return it as a `Webhooks`."""
        member = {"ports": (8080,), "subnet_id": topology.MEMBER_SUBNET, **more.pop("member", {})}
        group = Group(
            id=str(uuid.uuid4()),
            name=name,
            project_id=PROJECT,
            load_balancer_id=balancer.id,
            pool_id=pool.id,
            member=MemberTemplate(**member),
            **{"selector": Selector(kind=SelectorKind.TAG, value=name), "drain_seconds": 2, **more},
        )
        self.groups.create(group, None)
        return Webhooks(self, group)


class Webhooks:
    """One group as its callers see it."""

    def __init__(self, lab, group):
        self.lab, self.group, self.id = lab, group, group.id
        self.token = lab.tokens.create(group.id, "test", "test")[1].reveal().decode()

    def post(self, kind, body=None, *, wait=60, key=None, **more):
        """Send a webhook and wait for its end; return status and document."""
        headers = {"Authorization": f"Bearer {self.token}", **({"Idempotency-Key": key} if key else {})}
        return self.lab.call("POST", f"/v1/groups/{self.id}/{kind}?wait={wait}", body, headers, **more)

    def done(self, kind, body=None, **more):
        """Send a webhook that must succeed; return the request."""
        status, document = self.post(kind, body, **more)
        assert status == 200, (document, self.lab.log())
        return document["request"]

    def shown(self):
        """The group as the API shows it."""
        status, found = self.lab.call("GET", f"/v1/groups/{self.id}?token={self.token}")
        assert status == 200, found
        return found["group"]

    def states(self):
        return {one.server_id: one.state for one in self.lab.groups.list_nodes(self.id)}

    def until(self, question, what, seconds=60):
        deadline = time.monotonic() + seconds
        while not (answer := question()):
            assert time.monotonic() < deadline, f"not in {seconds} s: {what}: {self.states()}\n{self.lab.log()[-5000:]}"
            time.sleep(0.1)
        return answer

    def reaches(self, states):
        """Wait until these servers, and no others, have these states."""
        wanted = {one: NodeState(state) for one, state in states.items()}
        self.until(lambda: self.states() == wanted, f"the states are {states}")

    def deleted(self):
        """Delete the group, and wait until its members are gone."""
        self.lab.groups.delete(self.id)
        self.until(
            lambda: self.id not in {one.group.id for one in self.lab.groups.list_groups()}, "the group is deleted"
        )


@contextmanager
def running(folder, settings, nova):
    """Run a controller and the API inside the block."""
    lab = Lab(folder, settings, nova)
    try:
        lab.start()
        lab.start("api")
        yield lab
    finally:
        lab.stop()
