# SPDX-License-Identifier: Apache-2.0
"""Failpoints: the named process is killed once or waits at the named point, and no other process is affected."""

import os
import signal
import subprocess
import sys
import time

import pytest

from amphora_driver import failpoints
from amphora_driver.failpoints import Moment, Point

_REACH = """
from amphora_driver import failpoints
failpoints.reach(failpoints.Point.CLAIMED)
failpoints.reach_step("Boot", failpoints.Moment.DONE)
print("through")
"""


def start(folder):
    return subprocess.Popen(
        [sys.executable, "-c", _REACH],
        env={**os.environ, failpoints.VARIABLE: str(folder)},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("name", ["claimed", "Boot-done"])
def test_the_process_ends_once(tmp_path, name):
    (tmp_path / name).write_text("die")
    with start(tmp_path) as process:
        assert process.wait(60) == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []
    with start(tmp_path) as process:
        assert process.communicate(timeout=60)[0] == "through\n"


def test_every_process_at_the_failpoint_is_killed(tmp_path):
    (tmp_path / "claimed").write_text("die again")
    for _ in range(2):
        with start(tmp_path) as process:
            assert process.wait(60) == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == ["claimed"]


def test_the_process_waits_for_its_release(tmp_path):
    (tmp_path / "claimed").write_text("wait")
    with start(tmp_path) as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / "claimed.here").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert process.poll() is None
        (tmp_path / "claimed").unlink()
        assert process.communicate(timeout=60)[0] == "through\n"


def test_no_effect_without_a_request(monkeypatch, tmp_path):
    monkeypatch.setattr(failpoints, "_DIRECTORY", None)
    monkeypatch.setattr(failpoints, "_stop", pytest.fail)
    failpoints.reach(Point.CLAIMED)
    failpoints.reach_step("Boot", Moment.BEFORE)
