# SPDX-License-Identifier: Apache-2.0
"""The health watcher of a virtual machine, with real processes."""

from __future__ import annotations

import json
import subprocess
import threading
import time

import pytest

from amphora_agent.services import health_watcher
from amphora_agent.services.health_watcher import PID_FILE, POLICY_FILE, WANTED_FILE, HealthWatcher

UNIT = "amphora-daemon.service"


class Daemon:
    """A daemon's directory in the format of agent and script."""

    def __init__(self, root) -> None:
        self.place = root / "services" / UNIT
        self.place.mkdir(parents=True)
        self.health = root / "health"
        self.process: subprocess.Popen | None = None

    def want(self, word: str) -> None:
        (self.place / WANTED_FILE).write_text(f"{word}\n")

    def care(self) -> None:
        # The agent replaces this file atomically, so the watcher never reads a part of it.
        new = self.place.parent.parent / "policy.new"
        new.write_text(json.dumps({"health": str(self.health), "probe": None}))
        new.replace(self.place / POLICY_FILE)

    def begin(self) -> None:
        self.process = subprocess.Popen(["sleep", "1000"])
        (self.place / PID_FILE).write_text(f"{self.process.pid}\n")

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    @property
    def said(self) -> str | None:
        return self.health.read_text() if self.health.exists() else None

    def says(self, what: str) -> None:
        until = time.monotonic() + 30  # a host shared with other users
        while self.said != what:
            assert time.monotonic() < until, self.said
            time.sleep(0.005)

    def goes_on_saying(self, what: str) -> None:
        time.sleep(3 * health_watcher.LOOK_SECONDS)
        assert self.said == what


@pytest.fixture
def daemon(tmp_path, monkeypatch):
    # The process has no cgroup.
    monkeypatch.setattr(health_watcher, "is_in_unit", lambda pid, unit: unit == UNIT)
    made = Daemon(tmp_path)
    watching = HealthWatcher(tmp_path / "services")
    thread = threading.Thread(target=watching.run)
    thread.start()
    yield made
    watching.stop()
    thread.join()
    watching.close()
    made.end()


def test_the_watcher_follows_start_and_end(daemon):
    daemon.want("wanted")
    daemon.care()
    daemon.goes_on_saying(None)  # the daemon was requested a moment ago
    daemon.begin()
    daemon.says("0")
    daemon.end()
    daemon.says("1")
    daemon.goes_on_saying("1")
    daemon.begin()
    daemon.says("0")


@pytest.mark.parametrize(("word", "health"), [("dismissed", "0"), ("stopped", "0"), ("missed", "1")])
def test_the_end_of_an_unwanted_daemon_is_no_problem(daemon, word, health):
    daemon.want("wanted")
    daemon.care()
    daemon.begin()
    daemon.says("0")
    daemon.want(word)
    daemon.end()
    daemon.says(health)
    daemon.goes_on_saying(health)


def test_a_daemon_that_is_no_longer_required_is_no_problem(daemon):
    daemon.want("missed")
    daemon.care()
    daemon.says("1")
    daemon.want("stopped")
    daemon.says("0")


def test_a_daemon_is_stopped_and_started_again(daemon):
    daemon.want("wanted")
    daemon.care()
    daemon.begin()
    daemon.says("0")
    daemon.want("dismissed")
    time.sleep(2 * health_watcher.LOOK_SECONDS)
    daemon.want("wanted")
    time.sleep(2 * health_watcher.LOOK_SECONDS)
    daemon.end()
    daemon.says("1")


def test_restarted_watcher_reads_the_file(daemon):
    daemon.health.write_text("1")
    daemon.want("wanted")
    daemon.care()
    daemon.goes_on_saying("1")  # the script recorded the end of the daemon


def test_an_incomplete_line_is_ignored(tmp_path):
    file = tmp_path / "word"
    assert health_watcher.read_line(file) is None
    file.write_text("12")
    threading.Timer(0.03, lambda: file.write_text("1234\n")).start()
    assert health_watcher.read_line(file) == "1234"


def test_the_owner_of_a_process_is_found():
    assert not health_watcher.is_in_unit(1, UNIT)
    assert not health_watcher.is_in_unit(2**22 + 1, UNIT)
