# SPDX-License-Identifier: Apache-2.0
"""./quickstart and ./run-tests clean up after an interrupted installation of packages."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCED = f"cd {ROOT}; . scripts/environment.sh; . scripts/packages.sh; "


@pytest.fixture
def place(tmp_path):
    """An apt-get that never ends, and a policy file for the test."""
    (tmp_path / "apt-get").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\nexec sleep 60\n")
    (tmp_path / "apt-get").chmod(0o755)
    return tmp_path


def as_on_a_terminal():
    """A background run ignores SIGINT, and a run under nohup ignores SIGHUP.

    Children inherit that, and bash cannot trap them.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def bash(place, script):
    environment = {**os.environ, "PATH": f"{place}:{os.environ['PATH']}"}
    words = ["bash", "-c", f"{SOURCED} policy={place}/policy; {script}"]
    return subprocess.Popen(
        words,
        env=environment,
        start_new_session=True,
        stderr=subprocess.DEVNULL,
        preexec_fn=as_on_a_terminal,  # noqa: PLW1509 - this process has one thread
    )


def interrupted(place, number):
    """Send a signal to the whole process group, as a terminal does, while packages are installed."""
    with bash(place, "install_quietly something") as process:
        until = time.monotonic() + 20
        while not (place / "started").exists():
            assert time.monotonic() < until
            time.sleep(0.01)
        assert (place / "policy").read_text().startswith("#!/bin/sh\n# Written by scripts/packages.sh, process ")
        os.killpg(process.pid, number)
        try:
            assert process.wait(20) != 0
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_installation_leaves_no_policy(place, number):
    interrupted(place, number)
    until = time.monotonic() + 20
    while (place / "policy").exists():
        assert time.monotonic() < until, "services of this machine are not restarted after updates"
        time.sleep(0.01)


def test_remains_of_a_killed_installation_are_removed(place):
    interrupted(place, signal.SIGKILL)
    assert (place / "policy").exists()
    # The process that wrote the file may take a moment to end.
    until = time.monotonic() + 20
    while (place / "policy").exists():
        assert time.monotonic() < until
        with bash(place, "remove_stale_policy") as process:
            assert process.wait(20) == 0


def test_a_policy_of_the_operator_stays(place):
    (place / "policy").write_text("#!/bin/sh\nexit 101\n")
    with bash(place, "remove_stale_policy") as process:
        assert process.wait(20) == 0
    assert (place / "policy").read_text() == "#!/bin/sh\nexit 101\n"
