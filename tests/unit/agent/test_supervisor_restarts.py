# SPDX-License-Identifier: Apache-2.0
"""The supervisor: pauses between restarts of a daemon that exits, and its imports."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from amphora_agent.errors import ServiceError
from amphora_agent.paths import Paths
from amphora_agent.services.supervisor import AGENT, restart_backoff
from amphora_agent.services.supervisor_client import SupervisorClient

# The program of the namespace's first process, without the mounts, which need root.
PROGRAM = """
import sys
from pathlib import Path
from amphora_agent.paths import Paths
from amphora_agent.services import supervisor
supervisor.LONGEST_AGENT_BACKOFF, supervisor.HEALTHY_SECONDS = 0.4, float(sys.argv[2])
running = supervisor.Supervisor(Paths(Path(sys.argv[1])))
running.start(supervisor.Service(supervisor.AGENT, ["sh", "-c", sys.argv[3]], inner=False, restart=True))
running.run()
"""


@pytest.mark.parametrize(
    ("name", "quick_deaths", "seconds"),
    [
        ("haproxy", 0, 0.0),
        ("haproxy", 1, 0.1),
        ("haproxy", 2, 0.2),
        ("haproxy", 6, 3.2),
        ("haproxy", 7, 5.0),
        ("haproxy", 1_000_000, 5.0),
        (AGENT, 0, 0.0),
        (AGENT, 1, 0.1),
        (AGENT, 2, 0.2),
        (AGENT, 4, 0.8),
        (AGENT, 6, 1.0),
        (AGENT, 1_000_000, 1.0),
    ],
)
def test_the_back_off_grows_to_a_limit(name, quick_deaths, seconds):
    assert restart_backoff(name, quick_deaths) == pytest.approx(seconds)


@pytest.fixture
def folder():
    """A folder with a short path, because the path of a Unix socket is limited to 107 bytes."""
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


@contextmanager
def supervised(folder, script, healthy=5.0):
    """Run a supervisor with a script as the agent."""
    paths = Paths(folder)
    paths.supervisor_socket.parent.mkdir(parents=True)
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), str(healthy), script], stderr=subprocess.PIPE, text=True
    )
    try:
        yield SupervisorClient(paths.supervisor_socket), process
    finally:
        process.terminate()
        process.communicate(timeout=30)


def starts(services) -> int:
    try:
        return services.status(AGENT).starts
    except ServiceError:
        return 0  # the supervisor has no socket yet


def wait_for(services, number) -> float:
    """Return the time at which the agent has been started this number of times."""
    until = time.monotonic() + 30
    while starts(services) < number:
        assert time.monotonic() < until
        time.sleep(0.02)
    return time.monotonic()


def test_an_agent_that_is_killed_at_each_start_is_restarted_with_pauses(folder):
    """So does the kernel if the memory is too small for the agent."""
    with supervised(folder, "kill -9 $$") as (services, _):
        begin = wait_for(services, 4)
        # From the fourth start, each pause has the limit of 0.4 s. The first one may be over already.
        assert wait_for(services, 8) - begin > 3 * 0.4


def test_an_agent_that_is_killed_after_a_healthy_time_is_restarted_at_once(folder):
    with supervised(folder, "sleep 0.3; kill -9 $$", healthy=0.2) as (services, process):
        wait_for(services, 2)
        line = process.stderr.readline()
        assert "daemon amphora-agent exited with -9" in line
        assert "restarts it in 0.0 s" in line


def test_the_supervisor_does_not_import_large_modules():
    """Each amphora in namespaces has a supervisor; each of these modules needs up to a megabyte."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import amphora_agent.services.supervisor; "
        "print(*{'dataclasses', 'inspect', 'logging', 'subprocess', 'threading', 'typing'} & set(sys.modules))"
    )
    # Without -S, the packages of the test environment may import such modules.
    command = [sys.executable, "-S", "-c", program, str(Path(__file__).parents[3])]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.split() == []
