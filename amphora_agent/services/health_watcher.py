# SPDX-License-Identifier: Apache-2.0
"""The process that keeps health files true in a virtual machine.

Invariant: it starts, ends and owns nothing, so that its own death changes nothing; whoever begins anew finds in files
what it has to know. It does what the supervisor does in an amphora made of namespaces (`pulse.py` says what that is):
a daemon's death is in its file when the kernel announces it, a freeze when a question stays unanswered. Should it be
dead itself, deaths are in the file all the same, a little later, by the script around the daemon
(`templates/daemon.sh`).

    python -I -S vigil.py DIRECTORY

DIRECTORY has one directory for each unit, with what the agent and the script write there.
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
    # Started by its path: -I and -S spare a megabyte, and leave nothing of ours on the path.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from amphora_agent.services.health_file import Probe, Pulse

CARE, WANTED_FILE, PID = "care.json", "wanted", "pid"
# Whose end is amiss, and whose is not.
_AMISS = ("wanted", "missed")
LOOK_SECONDS = 0.15
_READ_AGAIN = 50
_READ_SECONDS = 0.002


def word(file: Path) -> str | None:
    """What a file of one line says; None if there is none. A line that is being written is waited for."""
    for _ in range(_READ_AGAIN):
        try:
            text = file.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        if text.endswith("\n"):
            return text[:-1]
        time.sleep(_READ_SECONDS)
    return None


def belongs(pid: int, unit: str) -> bool:
    """Whether a process is one of a unit's (cgroups(7)): numbers are given to others after an end."""
    with suppress(OSError):
        return any(line.endswith(f"/{unit}") for line in Path(f"/proc/{pid}/cgroup").read_text("utf-8").splitlines())
    return False


def running(place: Path, unit: str) -> int | None:
    """The first process of a unit, if it lives; read from its directory."""
    said = word(place / PID)
    if said is None or not said.isdecimal() or not belongs(int(said), unit):
        return None
    return int(said)


class Watched:
    """One daemon: what is known of it, and its pulse."""

    def __init__(self, selector: selectors.BaseSelector, place: Path, care: str) -> None:
        self.care = care
        self._selector = selector
        self._place = place
        wanted = json.loads(care)
        probe = wanted["probe"]
        self.pulse = Pulse(selector, Path(wanted["health"]), probe and Probe(**probe))
        self._wanted: str | None = None
        self._descriptor: int | None = None

    def look(self) -> None:
        """See what became of it."""
        before, self._wanted = self._wanted, word(self._place / WANTED_FILE)
        if self._descriptor is None:
            pid = running(self._place, self._place.name)
            if pid is not None and self._hold(pid) and self._wanted in _AMISS:
                self.pulse.born(pid)
            elif pid is None and self._wanted != "wanted":
                self.pulse.died(wanted=self._wanted in _AMISS)
        elif before != self._wanted:
            self._changed(before)

    def _changed(self, before: str | None) -> None:
        """It runs, and is wanted now, or is not any more."""
        if self._wanted not in _AMISS:
            self.pulse.died(wanted=False)
        elif before not in _AMISS and (pid := running(self._place, self._place.name)) is not None:
            self.pulse.born(pid)

    def _hold(self, pid: int) -> bool:
        try:
            self._descriptor = os.pidfd_open(pid)
        except (ProcessLookupError, FileNotFoundError):  # either says that it has ended (Linux 6.16)
            return False
        self._selector.register(self._descriptor, selectors.EVENT_READ, self._ended)
        return True

    def _ended(self) -> None:
        self._let_go()
        self._wanted = word(self._place / WANTED_FILE)
        self.pulse.died(wanted=self._wanted in _AMISS)

    def _let_go(self) -> None:
        if self._descriptor is not None:
            self._selector.unregister(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def close(self) -> None:
        """Watch it no longer; its file says what it said."""
        self._let_go()
        self.pulse.end()


class Vigil:
    """Looks after every daemon that has a health file. One thread, driven by events and by looking now and then."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._selector = selectors.DefaultSelector()
        self._watched: dict[str, Watched] = {}
        self._ending = False
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._pipe = (reader, writer)
        self._selector.register(reader, selectors.EVENT_READ, partial(os.read, reader, 64))

    def end(self) -> None:
        """Have `run` return."""
        self._ending = True
        os.write(self._pipe[1], b"\n")

    def _look(self) -> None:
        with suppress(FileNotFoundError):
            for place in self._directory.iterdir():
                with suppress(FileNotFoundError):
                    self._take_up(place, (place / CARE).read_text(encoding="utf-8"))
        for watched in self._watched.values():
            watched.look()

    def _take_up(self, place: Path, care: str) -> None:
        known = self._watched.get(place.name)
        if known is None or known.care != care:
            if known is not None:
                known.close()
            self._watched[place.name] = Watched(self._selector, place, care)

    def run(self) -> None:
        """Keep the files true until told to end."""
        due = time.monotonic()
        while not self._ending:
            now = time.monotonic()
            if now >= due:
                self._look()
                due = now + LOOK_SECONDS
            for watched in self._watched.values():
                watched.pulse.tick(now)
            times = [due, *(w.pulse.due for w in self._watched.values() if w.pulse.due is not None)]
            for key, _ in self._selector.select(max(0.0, min(times) - time.monotonic())):
                key.data()

    def close(self) -> None:
        for watched in self._watched.values():
            watched.close()
        self._selector.close()
        for descriptor in self._pipe:
            os.close(descriptor)


def main() -> None:
    """Console entry."""
    vigil = Vigil(Path(sys.argv[1]))
    signal.signal(signal.SIGTERM, lambda *_: vigil.end())
    vigil.run()
    vigil.close()


if __name__ == "__main__":
    main()
