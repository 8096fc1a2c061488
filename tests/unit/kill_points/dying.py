# SPDX-License-Identifier: Apache-2.0
"""Processes that really die: a fork of the test's process runs a part of the control plane and gets SIGKILL at a point.

A fork imports nothing, so a death costs milliseconds. What the dead process had in memory is lost. What the process
had committed, or had done to machines, is in files of the test's folder. The clock is shared by all of them.
"""

import gc
import mmap
import os
import signal
import struct
import sys
import threading
import time
import traceback
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

from amphora_driver import points

_REACHED_THE_END, _FAILED = 0, 70
# A child that hangs says where, and ends; its parent reports that as a failure.
_MOST_SECONDS = 60


class Clock:
    """The time of all processes, in a page of memory that forks share; a test moves it."""

    def __init__(self, monkeypatch):
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        wall, monotonic = time.time, time.monotonic
        monkeypatch.setattr(time, "time", lambda: wall() + self.ahead)
        monkeypatch.setattr(time, "monotonic", lambda: monotonic() + self.ahead)

    @property
    def ahead(self):
        return struct.unpack_from("d", self._page)[0]

    def advance(self, seconds):
        struct.pack_into("d", self._page, 0, self.ahead + seconds)


class Points:
    """The points of this process and of its forks."""

    def __init__(self, folder, monkeypatch):
        self._folder, self._armed = Path(folder, "points"), Path(folder, "armed")
        for one in (self._folder, self._armed):
            one.mkdir()
        self._visits = Counter()
        self._stop = points._stop
        monkeypatch.setattr(points, "_DIRECTORY", str(self._folder))
        monkeypatch.setattr(points, "_stop", self._reached)

    def arm(self, names, visit=1):
        """The process that comes to one of these points for this number of times dies there, once."""
        for name in names:
            (self._armed / name).write_text(str(visit), encoding="ascii")

    def armed(self):
        return {path.name for path in self._armed.iterdir()}

    def disarm(self):
        for path in self._armed.iterdir():
            path.unlink()

    def forget(self):
        """A process begins: it has come to no point."""
        self._visits.clear()

    def _reached(self, point):
        self._visits[point.name] += 1
        armed = self._armed / point.name
        if armed.exists() and int(armed.read_text(encoding="ascii")) == self._visits[point.name]:
            armed.unlink()
            point.write_text("die", encoding="ascii")
        self._stop(point)

    @contextmanager
    def recorded(self):
        """Yields how often this process comes to each point; no process dies."""
        self.forget()
        yield self._visits


def dies(part, armed):
    """Run `part` in a fork; returns the point at which the fork has died, or None if it reached its end.

    Args:
        part: what the fork runs; the parent has closed its connections to the database before.
        armed: the `Points`.
    """
    before = armed.armed()
    # A look at each object of the parent's would copy the page on which that is.
    gc.freeze()
    child = os.fork()
    if child == 0:
        _run(part, armed)
    gc.unfreeze()
    _, outcome = os.waitpid(child, 0)
    met = before - armed.armed()
    if os.WIFSIGNALED(outcome):
        assert os.WTERMSIG(outcome) == signal.SIGKILL, f"the process ended by signal {os.WTERMSIG(outcome)}"
        assert len(met) == 1, f"the process was killed, but not at one point: {met}"
        return met.pop()
    assert os.WEXITSTATUS(outcome) == _REACHED_THE_END, "the process failed before it came to its end or to a point"
    assert not met, f"the process came to {met} and did not die"
    return None


def _run(part, armed):
    """Run a part and end this process, without anything that pytest would do at the end of its own."""
    status = _FAILED
    try:
        gc.disable()
        armed.forget()
        signal.alarm(_MOST_SECONDS)
        part()
        status = _REACHED_THE_END
    except BaseException:  # noqa: BLE001 - whatever it is, only the exit status tells the parent
        traceback.print_exc(file=sys.__stderr__)
    finally:
        sys.__stderr__.flush()
        os._exit(status)


class Kept:
    """A dictionary in a file, which outlives the process that has changed it."""

    def __init__(self, path, load, dump):
        self._path = Path(path)
        self._load, self._dump = load, dump
        # A push asks several agents at once.
        self._lock = threading.Lock()

    @contextmanager
    def open(self):
        """Yields the value; what the block makes of it is there for all processes after the block."""
        with self._lock:
            value = self._load(self._path.read_bytes())
            try:
                yield value
            finally:
                fresh = self._path.with_suffix(".new")
                fresh.write_bytes(self._dump(value))
                fresh.rename(self._path)

    def begin(self, value):
        self._path.write_bytes(self._dump(value))

    def read(self):
        with self._lock:
            return self._load(self._path.read_bytes())
