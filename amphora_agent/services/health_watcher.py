# SPDX-License-Identifier: Apache-2.0
"""The process that keeps health files current in a virtual machine.

Invariant: the watcher starts, stops and owns no daemon, so that its exit changes nothing; a new watcher reads its state
from files. In an amphora of namespaces the supervisor does this work with the same `health_file`. Without a watcher the
script around the daemon (`templates/daemon.sh`) records exits, a little later.

    python -I -S health_watcher.py DIRECTORY

DIRECTORY has one directory for each unit. The agent and the script write the files in it.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    # Python's options -I and -S save a megabyte, but remove the package from the search path. So this line adds the
    # package again.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from amphora_agent.services.health_file import HealthFile, Probe

POLICY_FILE, WANTED_FILE, PID_FILE = "policy.json", "wanted", "pid"
# With one of these words in the file `wanted`, an exit of the daemon is a failure.
_FAILURES = ("wanted", "missed")
LOOK_SECONDS = 0.15
_READ_AGAIN = 50
_READ_SECONDS = 0.002


def read_line(file: Path) -> str | None:
    """Return the content of a file of one line, when the line is complete; None if there is no file."""
    for _ in range(_READ_AGAIN):
        try:
            text = file.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        if text.endswith("\n"):
            return text[:-1]
        time.sleep(_READ_SECONDS)
    return None


def is_in_unit(pid: int, unit: str) -> bool:
    """Return whether a process belongs to a unit (cgroups(7)), because the kernel reuses process ids."""
    with suppress(OSError):
        return any(line.endswith(f"/{unit}") for line in Path(f"/proc/{pid}/cgroup").read_text("utf-8").splitlines())
    return False


def running_pid(directory: Path, unit: str) -> int | None:
    """Return the first process of a unit if it runs; the unit's directory holds the process id."""
    line = read_line(directory / PID_FILE)
    if line is None or not line.isdecimal() or not is_in_unit(int(line), unit):
        return None
    return int(line)


class WatchedService:
    """One daemon, its process, and its health file."""

    def __init__(self, selector: selectors.BaseSelector, directory: Path, policy: str) -> None:
        self.policy = policy
        self._selector = selector
        self._directory = directory
        parsed = json.loads(policy)
        probe = parsed["probe"]
        self.health = HealthFile(selector, Path(parsed["health"]), probe and Probe(**probe))
        self._wanted: str | None = None
        self._descriptor: int | None = None

    def update(self) -> None:
        """Read the files of the unit and follow a change."""
        before, self._wanted = self._wanted, read_line(self._directory / WANTED_FILE)
        if self._descriptor is not None and before == self._wanted:
            return
        is_needed, pid = self._wanted in _FAILURES, running_pid(self._directory, self._directory.name)
        if self._descriptor is not None:
            if not is_needed:
                self.health.exited(wanted=False)
            elif before not in _FAILURES and pid is not None:
                self.health.started(pid)
        elif pid is not None and self._watch_process(pid) and is_needed:
            self.health.started(pid)
        elif pid is None and self._wanted != "wanted":
            self.health.exited(wanted=is_needed)

    def _watch_process(self, pid: int) -> bool:
        try:
            self._descriptor = os.pidfd_open(pid)
        except (ProcessLookupError, FileNotFoundError):
            # pidfd_open fails with ESRCH after the end of the process. If the process ends during the call, some
            # versions of Linux return ENOENT.
            return False
        self._selector.register(self._descriptor, selectors.EVENT_READ, self._process_exited)
        return True

    def _process_exited(self) -> None:
        self._release_process()
        self._wanted = read_line(self._directory / WANTED_FILE)
        self.health.exited(wanted=self._wanted in _FAILURES)

    def _release_process(self) -> None:
        if self._descriptor is not None:
            self._selector.unregister(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def close(self) -> None:
        """Stop the watch; the content of the health file stays."""
        self._release_process()
        self.health.stop_probing()


class HealthWatcher:
    """Watches each daemon that has a health file, in one thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._selector = selectors.DefaultSelector()
        self._watched: dict[str, WatchedService] = {}
        self._stopping = False
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._pipe = (reader, writer)
        self._selector.register(reader, selectors.EVENT_READ, partial(os.read, reader, 64))

    def stop(self) -> None:
        self._stopping = True
        os.write(self._pipe[1], b"\n")

    def _update(self) -> None:
        with suppress(FileNotFoundError):
            for directory in self._directory.iterdir():
                with suppress(FileNotFoundError):
                    policy = (directory / POLICY_FILE).read_text(encoding="utf-8")
                    known = self._watched.get(directory.name)
                    if known is None or known.policy != policy:
                        if known is not None:
                            known.close()
                        self._watched[directory.name] = WatchedService(self._selector, directory, policy)
        for watched in self._watched.values():
            watched.update()

    def run(self) -> None:
        """Keep the health files current until `stop` is called."""
        due = time.monotonic()
        while not self._stopping:
            now = time.monotonic()
            if now >= due:
                self._update()
                due = now + LOOK_SECONDS
            for watched in self._watched.values():
                watched.health.run_due(now)
            times = [due, *(w.health.due for w in self._watched.values() if w.health.due is not None)]
            for key, _ in self._selector.select(max(0.0, min(times) - time.monotonic())):
                key.data()

    def close(self) -> None:
        for watched in self._watched.values():
            watched.close()
        self._selector.close()
        for descriptor in self._pipe:
            os.close(descriptor)


def main() -> None:
    """Run the watcher; the argument is the directory of the units."""
    watcher = HealthWatcher(Path(sys.argv[1]))
    signal.signal(signal.SIGTERM, lambda *_: watcher.stop())
    watcher.run()
    watcher.close()


if __name__ == "__main__":
    main()
