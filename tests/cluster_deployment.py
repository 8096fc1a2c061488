# SPDX-License-Identifier: Apache-2.0
"""One deployment of cluster membership in a test: its files, database and API, and its groups as callers see them."""

import http.client
import json
import time
import uuid
from contextlib import closing
from pathlib import Path

from cryptography.fernet import Fernet
from free_ports import free_ports

from amphora_cluster.database.groups import GroupStore
from amphora_cluster.database.requests import RequestStore
from amphora_cluster.database.tables import SCHEMA
from amphora_cluster.database.tokens import TokenStore
from amphora_cluster.model import TAG_PREFIX, Group, MemberTemplate, Selector, SelectorKind
from amphora_driver.database import migrate
from amphora_driver.database.engine import Database
from amphora_driver.database.vault import Vault
from sandbox import demo_hosts


class ClusterDeployment:
    """The base of a deployment with a database of its own; subclasses run the processes, and have their logs in `log`.

    Args:
        folder: of its files.
        options: by group.
        project_id: of the owner of all groups.
        subnet_id: of the members.
        credential: the application credential of all groups; None without Keystone.
        url: of an empty database; by default an SQLite file with the tables of this version.

    Attributes:
        ports: the ports of the APIs by name.
    """

    def __init__(self, folder, options, *, project_id, subnet_id, credential=None, url=None):
        self.folder = Path(folder)
        self.configuration = self.folder / "cluster.conf"
        self.ports = {"api": free_ports(1)[0]}
        keys = self.folder / "encryption.keys"
        if url is None:
            url = f"sqlite:///{self.folder}/cluster.sqlite"
            migrate.upgrade(url, SCHEMA)
        keys.write_bytes(Fernet.generate_key() + b"\n")
        keys.chmod(0o600)
        own = {
            "amp_cluster": {
                "connection": url, "encryption_key_file": keys, "lock_dir": self.folder / "locks", "status_port": 0,
            },
            "amp_cluster_api": {"workers": 1},
        }  # fmt: skip
        self._options = {group: {**own.get(group, {}), **options.get(group, {})} for group in {**own, **options}}
        self.configure()
        self.database = Database(url, schema=SCHEMA)
        vault = Vault.load(str(keys))
        self.groups = GroupStore(self.database, vault)
        self.requests = RequestStore(self.database)
        self.tokens = TokenStore(self.database, vault)
        self._project_id, self._subnet_id, self._credential = project_id, subnet_id, credential

    def configure(self, **options):
        """Write the configuration file, with these options of the controller from now on."""
        self._options["amp_cluster"] |= options
        self.write(self.configuration)

    def write(self, file, api="api"):
        """Write the configuration file of a process; `api` is the API whose port it has."""
        served = {**self._options["amp_cluster_api"], "bind_port": self.ports[api]}
        lines = [
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in found.items())
            for group, found in {**self._options, "amp_cluster_api": served}.items()
        ]
        file.write_text("".join(lines))

    def call(self, method, path, body=None, headers=None, *, timeout=180, api="api"):
        """Send one request to an API; return status and document."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.ports[api], timeout=timeout)) as connection:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, headers or {})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def answers(self, api="api"):
        """Whether an API answers."""
        try:
            return self.call("GET", "/healthcheck", api=api)[0] == 200
        except OSError:
            return False

    def group(self, balancer_id, pool_id, name, **more):
        """Record a group, by default of the servers with the tag of its name; return it as its callers see it."""
        member = {"ports": (demo_hosts.MEMBER_PORT,), "subnet_id": self._subnet_id, **more.pop("member", {})}
        group = Group(
            id=str(uuid.uuid4()),
            name=name,
            project_id=self._project_id,
            load_balancer_id=balancer_id,
            pool_id=pool_id,
            member=MemberTemplate(**member),
            **{"selector": Selector(kind=SelectorKind.TAG, value=name), "drain_seconds": 2, **more},
        )
        self.groups.create(group, self._credential)
        return GroupCaller(self, group.id, self.tokens.create(group.id, "test", "test")[1].reveal().decode())


class GroupCaller:
    """One group as its callers see it.

    Attributes:
        id: of the group.
        token: a valid token.
        tag: of its members.
    """

    def __init__(self, deployment, group_id, token):
        self.id, self.token, self.tag = group_id, token, TAG_PREFIX + group_id
        self._deployment = deployment

    def post(self, kind, body=None, *, wait=120, key=None, **more):
        """Send a webhook and wait for its end; return status and document."""
        headers = {"Authorization": f"Bearer {self.token}", **({"Idempotency-Key": key} if key else {})}
        path = f"/v1/groups/{self.id}/{kind}?wait={wait}"
        return self._deployment.call("POST", path, body, headers, timeout=wait + 60, **more)

    def done(self, kind, body=None, **more):
        """Send a webhook that must succeed; return the request."""
        status, document = self.post(kind, body, **more)
        assert status == 200, (document, self._deployment.log())
        return document["request"]

    def shown(self, **more):
        """The group as the API shows it."""
        status, found = self._deployment.call("GET", f"/v1/groups/{self.id}?token={self.token}", **more)
        assert status == 200, found
        return found["group"]

    def states(self):
        """The state of each server."""
        return {one["server_id"]: one["state"] for one in self.shown()["nodes"]}

    def until(self, question, what, seconds=120):
        """Poll until the result is true; return it."""
        deadline = time.monotonic() + seconds
        while not (answer := question()):
            if time.monotonic() > deadline:
                raise AssertionError(f"not in {seconds} s: {what}: {self.states()}\n{self._deployment.log()[-5000:]}")
            time.sleep(0.1)
        return answer

    def reaches(self, states):
        """Wait until these servers, and no others, have these states."""
        self.until(lambda: self.states() == states, f"the states are {states}")

    def fails(self, reason):
        """Wait until the group reports an error with this text."""
        self.until(lambda: reason in (self.shown()["error"] or ""), f"the error contains {reason!r}")

    def deleted(self):
        """Delete the group, and wait until its members are gone."""
        groups = self._deployment.groups
        groups.delete(self.id)
        self.until(lambda: self.id not in {one.group.id for one in groups.list_groups()}, "the group is deleted")
