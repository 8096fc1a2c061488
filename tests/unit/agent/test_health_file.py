# SPDX-License-Identifier: Apache-2.0
"""The health file of a service: running, dead, frozen or busy, with a clock that the test sets."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import time

import pytest

from amphora_agent.services import health_file
from amphora_agent.services.health_file import ALIVE, BUSY_SECONDS, DEAD, Activity, HealthFile, Probe, read_activity

INTERVAL, TIME_LIMIT = 0.1, 0.6


class Watched:
    """A service with answers from the test."""

    def __init__(self, directory) -> None:
        self.file = directory / "health"
        self.selector = selectors.DefaultSelector()
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind(str(directory / "socket"))
        self.listening.listen(8)
        probe = Probe(str(directory / "socket"), "well?\n", INTERVAL, TIME_LIMIT)
        self.health = HealthFile(self.selector, self.file, probe)
        self.asked: list[socket.socket] = []

    @property
    def said(self) -> str:
        return self.file.read_text() if self.file.exists() else ""

    def answer(self) -> None:
        """Answer the newest question and deliver the answer."""
        self.listening.settimeout(0.0)
        try:
            while True:
                self.asked.append(self.listening.accept()[0])
        except BlockingIOError:
            pass
        self.asked[-1].sendall(b"yes\n")
        for key, _ in self.selector.select(1):
            key.data()

    def pass_time(self, seconds: float) -> None:
        """Do the due work of this period at its times."""
        until = self.health.due + seconds
        while self.health.due is not None and self.health.due <= until:
            self.health.run_due(self.health.due)

    def close(self) -> None:
        self.health.stop_probing()
        for each in (*self.asked, self.listening, self.selector):
            each.close()


@pytest.fixture
def watched(tmp_path, monkeypatch):
    made = Watched(tmp_path)
    made.did = Activity(0, ready=False)
    monkeypatch.setattr(health_file, "read_activity", lambda pid: made.did)
    yield made
    made.close()


def serving(watched) -> Watched:
    watched.health.started(os.getpid())
    watched.answer()
    assert watched.said == ALIVE
    return watched


def test_a_started_daemon_is_not_judged_at_once(watched):
    watched.health.started(1)
    watched.pass_time(10 * TIME_LIMIT)
    assert watched.said == ""


def test_a_daemon_is_frozen_and_continues(watched):
    serving(watched)
    watched.pass_time(TIME_LIMIT * 0.8)
    assert watched.said == ALIVE
    watched.pass_time(TIME_LIMIT)
    assert watched.said == DEAD
    watched.answer()
    assert watched.said == ALIVE


@pytest.mark.parametrize("ready", [True, False], ids=["waits for a processor", "computes"])
def test_a_busy_daemon_is_not_frozen(watched, ready):
    serving(watched)
    for number in range(6):
        watched.did = Activity(0 if ready else number, ready)
        watched.health.run_due(watched.health.due)
    assert watched.said == ALIVE
    watched.did = Activity(99, ready=True)
    watched.pass_time(BUSY_SECONDS)
    assert watched.said == DEAD


def test_a_late_watcher_reports_no_daemon(watched):
    serving(watched)
    watched.health.run_due(watched.health.due)  # the watcher has sent a probe
    watched.health.run_due(watched.health.due + 60.0)  # then the watcher's process did not run for a minute
    assert watched.said == ALIVE
    watched.pass_time(2 * TIME_LIMIT)
    assert watched.said == DEAD


def test_a_daemon_is_dead_until_it_answers_again(watched):
    serving(watched)
    watched.health.exited(wanted=True)
    assert (watched.said, watched.health.due) == (DEAD, None)
    watched.health.started(os.getpid())
    assert watched.said == DEAD
    watched.answer()
    assert watched.said == ALIVE


def test_unwanted_daemons_are_no_problem(watched):
    serving(watched)
    watched.health.exited(wanted=False)
    assert (watched.said, watched.health.due) == (ALIVE, None)


def test_activity_of_a_process_and_its_children():
    nap = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    with subprocess.Popen([sys.executable, "-c", nap], start_new_session=True) as process:
        try:
            deadline = time.monotonic() + 10
            while not read_activity(process.pid).ready:
                assert time.monotonic() < deadline
            before = read_activity(process.pid).ticks
            while read_activity(process.pid).ticks == before:
                assert time.monotonic() < deadline
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert read_activity(process.pid) == Activity(0, ready=False)
