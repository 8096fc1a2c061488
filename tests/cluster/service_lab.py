# SPDX-License-Identifier: Apache-2.0
"""The processes of cluster membership beside a sandbox: controllers, the API, and a stub of Nova."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

from cluster_deployment import ClusterDeployment
from free_ports import free_ports
from two_versions import environment, run_command

from amphora_cluster import config
from sandbox import topology

PROJECT = "sandbox"
_START_SECONDS = 60.0


class Lab(ClusterDeployment):
    """One deployment of cluster membership, with its own database.

    Args:
        folder: of its files.
        settings: of the sandbox.
        nova: the stub of Nova.
        url: of an empty database; by default an SQLite file with the tables of this version.
        more: options of the group [amp_cluster].
    """

    def __init__(self, folder, settings, nova, url=None, **more):
        options = {
            "amp_cluster": {
                "poll_interval": 0.5, "threads": 4, "lease": 3, "retry_first": 0.2, "retry_most": 1,
                "statistics_age": 10, **more,
            },
            "amp_cluster_api": {"threads": 8, "failed_attempts": 1000},
            "amp_cluster_cloud": {
                "without_keystone": True, "octavia_endpoint_override": settings.endpoint,
                "nova_endpoint_override": nova.url, "request_timeout": 10, "server_list_age": 0.2,
            },
        }  # fmt: skip
        super().__init__(folder, options, project_id=PROJECT, subnet_id=topology.MEMBER_SUBNET, url=url)
        self._processes = {}

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

    def raw(self, text):
        """Send a request that no client library sends; return the answer."""
        with socket.create_connection(("127.0.0.1", self.ports["api"]), timeout=30) as connection:
            connection.sendall(text.encode())
            return connection.makefile("rb").read().decode()

    def _configured(self, name):
        """Write the configuration of a process; return the variable of the environment that names the file."""
        api = name if name.startswith("api") else "api"
        if api not in self.ports:
            self.ports[api] = free_ports(1)[0]
        file = self.folder / f"{name}.conf"
        self.write(file, api)
        return {config.FILE_VARIABLE: str(file)}

    def _await_api(self, name):
        deadline = time.monotonic() + _START_SECONDS
        while not self.answers(name):
            assert time.monotonic() < deadline, self.log(name)
            time.sleep(0.1)


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
