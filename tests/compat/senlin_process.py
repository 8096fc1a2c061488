# SPDX-License-Identifier: Apache-2.0
"""Senlin's code as a separate process, because its libraries are no part of the environment of the tests."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
CLOUD_VENV = HERE.parents[1] / ".sandbox/cloud-venv"


def interpreter() -> Path:
    """The Python with Senlin: the environment of all OpenStack services (./run-tests --all)."""
    return Path(os.environ.get("AMPHORA_OPENSTACK_VENV", CLOUD_VENV), "bin/python")


class Refused(Exception):
    """The exception of Senlin's code."""


class Senlin:
    """The process; a call sends a request to `senlin_program.py` and returns the answer.

    Args:
        directory: for the log of the process.
    """

    def __init__(self, directory: Path) -> None:
        self._log = (directory / "senlin.log").open("wb")
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "--", interpreter(), HERE / "senlin_program.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def __call__(self, do: str, *arguments):
        self._process.stdin.write(json.dumps({"do": do, "arguments": arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"Senlin has ended: {self.log()}"
        answer = json.loads(line)
        if "error" in answer:
            raise Refused(f"{answer['error']}: {answer['text']}")
        return answer["answer"]

    def log(self) -> str:
        return Path(self._log.name).read_text(errors="replace")[-5000:]

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()
        self._log.close()
