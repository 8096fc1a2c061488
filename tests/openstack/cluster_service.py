# SPDX-License-Identifier: Apache-2.0
"""The processes of cluster membership on the complete cloud, and servers of Nova that answer requests."""

from __future__ import annotations

import http.client
import json
import os
import sys
import threading
from collections import Counter
from contextlib import closing
from pathlib import Path

from cloud_lab import run_command, write_ini
from cryptography.fernet import Fernet
from free_ports import free_ports

from amphora_cluster.database.tables import SCHEMA
from amphora_driver.database import migrate
from amphora_driver.host import namespaces
from sandbox import demo_hosts

_PROGRAMS = {
    "amphora-cluster": "amphora_cluster.controller.service",
    "amphora-cluster-api": "amphora_cluster.api.server",
}


class ClusterService:
    """One controller and the API, with the options of an operator, on the services of a cloud.

    Args:
        cloud: a started `WholeCloud`.
        folder: of the files.
    """

    def __init__(self, cloud, folder):
        self.cloud, self.folder = cloud, Path(folder)
        self.configuration = self.folder / "cluster.conf"
        [self.port] = free_ports(1)

    def start(self):
        keys, url = self.folder / "encryption.keys", f"sqlite:///{self.folder}/cluster.sqlite"
        keys.write_bytes(Fernet.generate_key() + b"\n")
        keys.chmod(0o600)
        options = {
            "amp_cluster": {
                "connection": url, "encryption_key_file": keys, "poll_interval": 1, "status_port": 0,
                "lock_dir": self.folder / "locks", "notification_url": self.cloud.transport.replace("rabbit:", "amqp:"),
            },
            "amp_cluster_cloud": {"auth_url": self.cloud.auth_url, "region_name": "RegionOne"},
            "amp_cluster_api": {"bind_port": self.port, "workers": 1},
        }  # fmt: skip
        write_ini(self.configuration, options)
        migrate.upgrade(url, SCHEMA)
        for name, module in _PROGRAMS.items():
            environment = {**os.environ, "AMPHORA_CLUSTER_CONFIG": str(self.configuration)}
            self.cloud.run(name, [sys.executable, "-m", module], environment)
        self.cloud.until("amphora-cluster-api", self._answers)

    def stop(self):
        for name in _PROGRAMS:
            self.cloud.kill(name)

    def amphoractl(self, *words):
        """Run `amphoractl group …`; return its JSON output."""
        program = Path(sys.executable).with_name("amphoractl")
        return json.loads(run_command(program, "--config-file", self.configuration, "group", *words, "-f", "json"))

    def call(self, method, path, token, body=None):
        """Send one request to the API; return status and document."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)) as connection:
            headers = {"Authorization": f"Bearer {token}"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def _answers(self):
        try:
            return self.call("GET", "/healthcheck", "")[0] == 200
        except OSError:
            return False


def serve_requests(user, server_id):
    """Run a web server, which answers with the id, at the address of a server without a guest."""
    cloud, admin = user.cloud, user.admin.network
    [port] = admin.ports(device_id=server_id)
    network = admin.get_network(port.network_id)
    addresses = [
        {"address": one["ip_address"], "prefix": int(admin.get_subnet(one["subnet_id"]).cidr.rpartition("/")[2])}
        for one in port.fixed_ips
    ]
    told = {"id": port.id, "mac": port.mac_address, "network_id": network.id, "mtu": network.mtu}
    name = f"s{server_id[:6]}"
    cloud.ask("plug", name=cloud.namespace(name), port={**told, "addresses": addresses})
    place = namespaces.path(cloud.namespace(name))
    program = (sys.executable, "-S", demo_hosts.__file__, server_id, str(demo_hosts.MEMBER_PORT))
    cloud.run(name, ["nsenter", f"--net={place}", "--", *program], os.environ)


class Traffic:
    """Requests of a client, one after another, while the block runs.

    Attributes:
        answers: number of requests by answer; an error counts by its name.
    """

    def __init__(self, user, address):
        self._user, self._address = user, address
        self.answers, self._ending = Counter(), threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ending.set()
        self._thread.join()

    def _run(self):
        while not self._ending.wait(0.05):
            try:
                self.answers[self._user.get(self._address)] += 1
            except (OSError, http.client.HTTPException, AssertionError) as error:
                self.answers[f"{type(error).__name__}: {error}"] += 1
