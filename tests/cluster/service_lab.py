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

from sandbox import topology

PROJECT = "sandbox"
_START_SECONDS = 60.0


class Lab(ClusterDeployment):
    """One deployment of cluster membership, with its own database.

    Args:
        folder: of its files.
        settings: of the sandbox.
        nova: the stub of Nova.
    """

    def __init__(self, folder, settings, nova):
        options = {
            "amp_cluster": {
                "poll_interval": 0.5, "threads": 4, "lease": 3, "retry_first": 0.2, "retry_most": 1,
                "statistics_age": 10,
            },
            "amp_cluster_api": {"threads": 8, "failed_attempts": 1000},
            "amp_cluster_cloud": {
                "without_keystone": True, "octavia_endpoint_override": settings.endpoint,
                "nova_endpoint_override": nova.url, "request_timeout": 10, "server_list_age": 0.2,
            },
        }  # fmt: skip
        super().__init__(folder, options, project_id=PROJECT, subnet_id=topology.MEMBER_SUBNET)
        self._processes = {}

    def start(self, name="controller"):
        """Start a controller, or the API."""
        module = "amphora_cluster.api.server" if name == "api" else "amphora_cluster.controller.service"
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", module],
                env={**os.environ, "AMPHORA_CLUSTER_CONFIG": str(self.configuration)},
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

    def raw(self, text):
        """Send a request that no client library sends; return the answer."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
            connection.sendall(text.encode())
            return connection.makefile("rb").read().decode()

    def _await_api(self):
        deadline = time.monotonic() + _START_SECONDS
        while not self.answers():
            assert time.monotonic() < deadline, self.log("api")
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
