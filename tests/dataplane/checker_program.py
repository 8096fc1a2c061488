# SPDX-License-Identifier: Apache-2.0
"""A checker process whose engine records its rules instead of writing them into the kernel.

python -I -S checker_program.py RUN-DIRECTORY SOCKET
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))  # noqa: PTH100, PTH118, PTH120

from amphora_agent.errors import ConfigurationRefused, VirtualServersError
from amphora_agent.l4.counters import Counters
from amphora_agent.l4_daemon.__main__ import serve


class Fake:
    """Refuses port 666, fails while the file `broken` exists, and reads counters from a file."""

    def __init__(self, directory):
        self._directory = directory

    def check_servers(self, servers):
        for server in servers:
            if server.port == 666:
                raise ConfigurationRefused("serve it", "no", object_id=server.id)

    def apply(self, servers, up, *, paired=False):
        if os.path.exists(f"{self._directory}/broken"):  # noqa: PTH110
            raise VirtualServersError("forward", "it is broken")
        self._write({"at": time.time(), "up": {name: value for (_, name), value in up.items()}, "paired": paired})

    def find_drift(self, servers, up, *, paired=False):
        return []

    def rebalance(self, servers, up, *, paired=False):
        self._write({"at": time.time(), "balanced": len(servers)})
        if os.path.exists(f"{self._directory}/unbalanced"):  # noqa: PTH110
            os.unlink(f"{self._directory}/unbalanced")  # noqa: PTH108
            raise VirtualServersError("apply LEAST_CONNECTIONS", "it is refused")

    def member_counters(self):
        return {}

    def counters(self):
        try:
            with open(f"{self._directory}/counters") as file:  # noqa: PTH123
                return {name: Counters(*numbers) for name, numbers in json.load(file).items()}
        except FileNotFoundError:
            return {}

    def release(self):
        self._write({"at": time.time(), "released": True})

    def _write(self, line):
        with open(f"{self._directory}/engine.log", "a") as file:  # noqa: PTH123
            file.write(json.dumps(line) + "\n")


_, directory, path = sys.argv
if serve(Fake(directory), directory, path) == signal.SIGHUP:
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
