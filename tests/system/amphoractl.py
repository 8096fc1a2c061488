# SPDX-License-Identifier: Apache-2.0
"""Runs amphoractl as an operator does, with the sandbox's configuration.

It runs in this process, because a separate program takes one to ten seconds to start.
"""

import io
import json
import logging
import subprocess
import sys
from pathlib import Path

from amphora_driver.cli.main import Amphoractl as Application


class Amphoractl:
    """Runs command lines; their human output is also printed here, for the test's log.

    Args:
        settings: the sandbox's.
    """

    def __init__(self, settings):
        self._settings = settings

    def run(self, *words):
        """Run a command; return exit status, standard output and standard error."""
        out, err = io.StringIO(), io.StringIO()
        root = logging.getLogger()
        handlers, level = root.handlers[:], root.level
        try:
            status = Application(stdout=out, stderr=err).run(
                ["--config-file", str(self._settings.driver_configuration), *words]
            )
        finally:
            # Cliff gives the root logger a handler of its own.
            root.handlers[:] = handlers
            root.setLevel(level)
        sys.stdout.write(f"$ amphoractl {' '.join(words)}\n{out.getvalue()}{err.getvalue()}[{status}]\n\n")
        return status, out.getvalue(), err.getvalue()

    def program(self, *words):
        """Run amphoractl as a program, in the environment of a shell in the sandbox."""
        program = str(Path(sys.executable).with_name("amphoractl"))
        done = subprocess.run(
            [program, *words],
            env=self._settings.environment(),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    def json(self, *words):
        """Return the JSON output."""
        status, out, err = self.run(*words, "-f", "json")
        assert out, err
        assert status in {0, 1, 2}, err
        return json.loads(out)

    def check(self):
        """Return the results of `status check` by name, and its exit status."""
        status, out, err = self.run("status", "check", "-f", "json")
        assert out, err
        return {one["Check"]: one["Result"] for one in json.loads(out)}, status
