# SPDX-License-Identifier: Apache-2.0
"""A program in a namespace that executes orders, one per line.

Invariant: the program ends with its test in all cases. A failed order fails the test. The program is a separate
process, because two programs and an amphora share two processors.

    program = Program("dl1-cl", Path("load.py"))
    program.ask("report")                                # one line of JSON each way
"""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

ENDING_SECONDS = 10.0


class Program:
    """The test's connection to a running program.

    Args:
        namespace: the name of a network namespace.
        file: a Python program that calls `obey`.
    """

    def __init__(self, namespace: str, file: Path) -> None:
        self._process = subprocess.Popen(
            [
                *("setpriv", "--pdeathsig", "KILL", "--"),
                *("nsenter", f"--net=/run/netns/{namespace}", "--"),
                *(sys.executable, str(file)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, op: str, **more):
        """Send an order and return its result."""
        self._process.stdin.write(json.dumps({"op": op, **more}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the program ended during '{op}'"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def close(self) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def obey(line: str, orders: Mapping[str, Callable]) -> None:
    """Execute one order in the program, and write its result or error."""
    try:
        request = json.loads(line)
        answer = {"result": orders[request.pop("op")](**request)}
    except Exception:  # noqa: BLE001 - the test receives every error
        answer = {"error": traceback.format_exc()}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
