# SPDX-License-Identifier: Apache-2.0
"""Octavia starts the provider agent once; after the end of any of its processes a successor reports."""

import multiprocessing
import os
import select
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from amphora_driver.provider_agent import process as provider_agent

TIME_LIMIT = 60.0


@pytest.fixture
def agent(monkeypatch, tmp_path):
    """A provider agent whose reporter only records its identity."""

    def report(_name, watcher, ending):
        path = tmp_path / str(os.getpid())
        path.write_text(str(watcher))
        while not provider_agent._is_stopped(ending, watcher):
            time.sleep(0.01)
        path.unlink()

    monkeypatch.setattr(provider_agent, "_run_reporter", report)
    # A process that is killed while it reads the event would block all others, so the processes read it rarely.
    monkeypatch.setattr(provider_agent, "_POLL_INTERVAL", 0.2)
    made = Agent(tmp_path)
    yield made
    made.end()


class Agent:
    """Starts the provider agent like octavia-driver-agent."""

    def __init__(self, folder):
        self.folder = folder
        processes = multiprocessing.get_context("fork")
        self.exit_event = processes.Event()
        # All processes inherit one end of the pipe: the other end closes with the last process.
        self._all_ended, theirs = os.pipe()
        self.started, started = processes.Pipe(duplex=False)
        self.octavia = processes.Process(target=self._octavia, args=(theirs, started))
        self.octavia.start()
        os.close(theirs)

    def _octavia(self, theirs, started):
        made = multiprocessing.get_context("fork").Process(target=provider_agent.run, args=(self.exit_event,))
        made.start()
        os.close(theirs)
        started.send(made.pid)
        signal.pause()

    def reporters(self):
        """Return the reporters with their supervisors."""
        found = {}
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError, ValueError):
                found[int(path.name)] = int(path.read_text())
        return {pid: watcher for pid, watcher in found.items() if alive(pid)}

    def one_besides(self, *others):
        """Wait for another reporter; return it and its supervisor."""
        deadline = time.monotonic() + TIME_LIMIT
        while True:
            found = self.reporters()
            if len(found) == 1 and not found.keys() & set(others):
                return next(iter(found.items()))
            assert time.monotonic() < deadline, (found, others)
            time.sleep(0.01)

    def end(self):
        self.exit_event.set()
        self.ended()
        self.octavia.kill()
        self.octavia.join(TIME_LIMIT)
        os.close(self._all_ended)

    def ended(self):
        """Wait until all processes have ended."""
        assert select.select([self._all_ended], [], [], TIME_LIMIT)[0], "a process is still running"


def alive(pid):
    """Return whether the process runs and is no zombie."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    return False


def test_a_killed_reporter_is_replaced(agent):
    first, watcher = agent.one_besides()
    os.kill(first, signal.SIGKILL)
    second, same = agent.one_besides(first)
    started = agent.started.recv()
    assert (watcher, same) == (started, started)
    assert second != first


def test_a_killed_supervisor_is_replaced(agent):
    """Each successor is replaced too."""
    reporter, watcher = agent.one_besides()
    for _ in range(2):
        os.kill(watcher, signal.SIGKILL)
        former, former_watcher = reporter, watcher
        reporter, watcher = agent.one_besides(former)
        assert watcher != former_watcher
        os.kill(reporter, signal.SIGKILL)
        reporter, same = agent.one_besides(former, reporter)
        assert same == watcher, "the successor supervises the reporter"


def test_the_end_of_the_driver_agent_stops_all_processes(agent):
    _, watcher = agent.one_besides()
    os.kill(watcher, signal.SIGKILL)
    agent.one_besides(*agent.reporters())
    agent.exit_event.set()
    agent.ended()


@pytest.mark.parametrize("dies", ["octavia", "both"])
def test_the_provider_agent_ends_with_a_killed_driver_agent(agent, dies):
    """The provider agent ends without a message, and the successor of the driver agent starts new processes."""
    _, watcher = agent.one_besides()
    if dies == "both":
        os.kill(watcher, signal.SIGKILL)
    os.kill(agent.octavia.pid, signal.SIGKILL)
    agent.ended()
    assert not agent.exit_event.is_set()
