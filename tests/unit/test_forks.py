# SPDX-License-Identifier: Apache-2.0
"""The processes that fork programs for tests end with the run and end their remaining forks."""

import os
import select
import subprocess
import sys
from pathlib import Path

import forks
import pytest

TESTS = Path(__file__).parents[1]
PROGRAM = f"""
import os, signal, sys
sys.path.insert(0, {str(TESTS)!r})
import forks

def become(request, descriptors):
    # A program with a worker of its own, as a service has them.
    worker = os.fork()
    if worker:
        with open(request["told"], "w") as told:
            told.write(str(worker))
    signal.pause()

forks.serve(become)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of tests: a process that does nothing."""
    with subprocess.Popen(["sleep", "600"]) as process:
        monkeypatch.setenv(forks.FOLDER, str(tmp_path))
        monkeypatch.setenv(forks.RUN, str(process.pid))
        yield process
        process.kill()


def ends(pidfd):
    return select.select([pidfd], [], [], 20)[0] == [pidfd]


def test_a_killed_run_leaves_no_fork_and_no_worker(run, tmp_path):
    program, told = tmp_path / "program.py", tmp_path / "told"
    program.write_text(PROGRAM)
    os.mkfifo(told)
    request = {"log": str(tmp_path / "log"), "environment": {}, "told": str(told)}
    fork = os.pidfd_open(forks.ask(program, sys.executable, dict(os.environ), request, [0]))
    worker = os.pidfd_open(int(told.read_text()))
    try:
        assert not select.select([fork, worker], [], [], 0)[0]
        run.kill()
        assert ends(fork)
        assert ends(worker)
    finally:
        os.close(fork)
        os.close(worker)
