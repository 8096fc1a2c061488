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
from two_versions import environment, run_command

from amphora_cluster import config
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
        url: of an empty database; by default an SQLite file with the tables of this version.
        more: options of the group [amp_cluster].

    Attributes:
        ports: the ports of the APIs by name.
    """

    def __init__(self, folder, settings, nova, url=None, **more):
        self.folder, self.nova = Path(folder), nova
        self.ports = {"api": free_ports(1)[0]}
        self._processes = {}
        keys = self.folder / "encryption.keys"
        keys.write_bytes(Fernet.generate_key() + b"\n")
        keys.chmod(0o600)
        with_tables = f"sqlite:///{self.folder}/cluster.sqlite"
        if url is None:
            migrate.upgrade(with_tables, SCHEMA)
        url = url or with_tables
        self._options = {
            "amp_cluster": {
                "connection": url, "encryption_key_file": keys, "poll_interval": 0.5, "threads": 4, "lease": _LEASE,
                "retry_first": 0.2, "retry_most": 1, "lock_dir": self.folder / "locks", "status_port": 0, **more,
            },
            "amp_cluster_api": {"workers": 1, "threads": 8, "failed_attempts": 1000},
            "amp_cluster_cloud": {
                "without_keystone": True, "octavia_endpoint_override": settings.endpoint,
                "nova_endpoint_override": self.nova.url, "request_timeout": 10, "server_list_age": 0.2,
            },
        }  # fmt: skip
        self.database = Database(url, schema=SCHEMA)
        vault = Vault.load(str(keys))
        self.groups = GroupStore(self.database, vault)
        self.requests = RequestStore(self.database)
        self.tokens = TokenStore(self.database, vault)

    def _configured(self, name):
        """Write the configuration of a process; return the variable of the environment that names the file."""
        if name.startswith("api"):
            self.ports.setdefault(name, free_ports(1)[0])
        api = {**self._options["amp_cluster_api"], "bind_port": self.ports.get(name, self.ports["api"])}
        lines = [
            f"[{group}]\n" + "".join(f"{option} = {value}\n" for option, value in found.items())
            for group, found in {**self._options, "amp_cluster_api": api}.items()
        ]
        file = self.folder / f"{name}.conf"
        file.write_text("".join(lines))
        return {config.FILE_VARIABLE: str(file)}

    # --- processes ----------------------------------------------------------------------------------------------------

    def start(self, name="controller", version=None):
        """Start a controller, or an API if the name begins with `api`; `version` is the folder of another version."""
        is_api = name.startswith("api")
        module = "amphora_cluster.api.server" if is_api else "amphora_cluster.controller.service"
        other = {} if version is None else environment(version)
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", module],
                env={**os.environ, **self._configured(name), **other},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        if is_api:
            self._await_api(name)

    def ended(self, name):
        """Wait until a process ends by itself; return its status."""
        return self._processes.pop(name).wait(_START_SECONDS)

    def amphoractl(self, *words, version=None):
        """Run a command of this version, or of the version in a folder; return its status and its output."""
        return run_command(self._configured("amphoractl"), *words, folder=version)

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

    def _await_api(self, name):
        deadline = time.monotonic() + _START_SECONDS
        while True:
            with suppress(OSError):
                if self.call("GET", "/healthcheck", api=name)[0] == 200:
                    return
            assert time.monotonic() < deadline, self.log(name)
            time.sleep(0.1)

    # --- webhooks -----------------------------------------------------------------------------------------------------

    def call(self, method, path, body=None, headers=None, *, timeout=90, api="api"):
        """Send one request to an API; return status and document."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.ports[api], timeout=timeout)) as connection:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, headers or {})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def raw(self, text):
        """Send a request that no client library sends; return the answer."""
        with socket.create_connection(("127.0.0.1", self.ports["api"]), timeout=30) as connection:
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


class Caller:
    """One group as the callers of its webhooks see it."""

    def __init__(self, lab, group_id, token):
        self.lab, self.id, self.token = lab, group_id, token

    def post(self, kind, body=None, *, wait=60, key=None, **more):
        """Send a webhook and wait for its end; return status and document."""
        headers = {"Authorization": f"Bearer {self.token}", **({"Idempotency-Key": key} if key else {})}
        return self.lab.call("POST", f"/v1/groups/{self.id}/{kind}?wait={wait}", body, headers, **more)

    def done(self, kind, body=None, **more):
        """Send a webhook that must succeed; return the request."""
        status, document = self.post(kind, body, **more)
        assert status == 200, (document, self.lab.log())
        return document["request"]

    def shown(self, **more):
        """The group as the API shows it."""
        status, found = self.lab.call("GET", f"/v1/groups/{self.id}?token={self.token}", **more)
        assert status == 200, found
        return found["group"]


class Webhooks(Caller):
    """A group of this version's tables."""

    def __init__(self, lab, group):
        super().__init__(lab, group.id, lab.tokens.create(group.id, "test", "test")[1].reveal().decode())
        self.group = group

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
