# SPDX-License-Identifier: Apache-2.0
"""Octavia's worker code as a separate process beside the amphora's controller."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

from amphora_lab import FIXED, VIP, Amphora, Network
from throwaway_authority import CLIENT, Authority

HERE = Path(__file__).parent


def interpreter() -> str:
    """Return a Python with Octavia: this process's, or the sandbox's."""
    if importlib.util.find_spec("octavia") is not None:
        return sys.executable
    return str(HERE.parents[1] / ".sandbox/venv/bin/python")


class Refused(Exception):
    """The exception of Octavia's code."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name


class Worker:
    """Octavia's worker, in the controller's network namespace."""

    def __init__(self, network: Network, authority: Authority, directory: Path, secrets) -> None:
        certificate, trust = directory / "worker.pem", directory / "trust.pem"
        certificate.write_text(authority.issue("worker", CLIENT))
        trust.write_text(authority.pem)
        options = {
            "haproxy_amphora.client_cert": str(certificate),
            "haproxy_amphora.server_ca": str(trust),
            "haproxy_amphora.connection_max_retries": 2,
            "haproxy_amphora.connection_retry_interval": 0,
        }
        given = json.dumps({"options": options, "secrets": secrets})
        command = ["nsenter", f"--net=/run/netns/{network.name('ctl')}", "--", interpreter()]
        self._log = (directory / "worker.log").open("wb")
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "--", *command, str(HERE / "octavia_worker.py"), given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def drive(self, amphora: Amphora, fixed: str = FIXED, priority: int = 100) -> None:
        """Use this amphora in the following requests.

        Args:
            fixed: its own address on the VIP's network.
            priority: its VRRP priority in a pair.
        """
        vrrp = {"vrrp_ip": fixed, "ha_ip": VIP, "vrrp_interface": "eth1", "vrrp_id": 1, "vrrp_priority": priority}
        self("drive", {"id": amphora.id, "lb_network_ip": amphora.address, **vrrp})

    def __call__(self, do: str, *arguments, **options):
        """Send a request to the worker; return its answer."""
        self.begin(do, *arguments, **options)
        return self.end()

    def begin(self, do: str, *arguments, **options) -> None:
        request = {"do": do, "arguments": arguments, "options": options}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def end(self):
        line = self._process.stdout.readline()
        assert line, f"the worker has ended: {Path(self._log.name).read_text()}"
        answer = json.loads(line)
        if "error" in answer:
            raise Refused(answer["error"], answer["text"])
        return answer["answer"]

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()
        self._log.close()
