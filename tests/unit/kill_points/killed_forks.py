# SPDX-License-Identifier: Apache-2.0
"""Forks of the test's process run parts of the control plane and get SIGKILL at a point.

A fork imports nothing, so a kill costs milliseconds. SIGKILL removes the memory of the fork. The test's folder keeps
its commits and its effects on machines.
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

from amphora_driver import failpoints

_REACHED_THE_END, _FAILED = 0, 70
# Seconds of processor time for a fork. Time on the wall would let a test fail on a busy machine.
_MOST_SECONDS = 30
# Seconds between two reads of the clock: of two rows the later one has the later time.
_LOOK = 1e-5


class Clock:
    """The time of all processes, in a page of memory that forks share.

    The time does not depend on the machine's load: a test sets it, and each read adds `_LOOK`.
    """

    def __init__(self, monkeypatch):
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        wall, monotonic = time.time(), time.monotonic()
        monkeypatch.setattr(time, "time", lambda: wall + self._look())
        monkeypatch.setattr(time, "monotonic", lambda: monotonic + self._look())

    @property
    def ahead(self):
        return struct.unpack_from("d", self._page)[0]

    def advance(self, seconds):
        struct.pack_into("d", self._page, 0, self.ahead + seconds)

    def _look(self):
        self.advance(_LOOK)
        return self.ahead


class Points:
    """The points of this process and of its forks."""

    def __init__(self, folder, monkeypatch):
        self._folder, self._armed = Path(folder, "points"), Path(folder, "armed")
        for one in (self._folder, self._armed):
            one.mkdir()
        self._visits = Counter()
        self._stop = failpoints._stop
        monkeypatch.setattr(failpoints, "_DIRECTORY", str(self._folder))
        monkeypatch.setattr(failpoints, "_stop", self._reached)

    def arm(self, names, visit=1):
        """A process is killed once at each of these points, at its given visit to the point."""
        for name in names:
            (self._armed / name).write_text(str(visit), encoding="ascii")

    def armed(self):
        return {path.name for path in self._armed.iterdir()}

    def disarm(self):
        for path in self._armed.iterdir():
            path.unlink()

    def forget(self):
        """A new process begins, without a visit to any point."""
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
        """Yields the number of visits of this process to each point; no point is armed."""
        self.forget()
        yield self._visits


class Endless(BaseException):
    """A process has used its processor time. It is no `Exception`, because the product catches and retries those."""


@contextmanager
def limited(seconds):
    """Interrupts the block after so many seconds of processor time of this process."""

    def interrupt(_signal, _frame):
        raise Endless(f"it did not end in {seconds} s of processor time")

    before = signal.signal(signal.SIGPROF, interrupt)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def run_in_fork(part, armed):
    """Run `part` in a fork; returns the point that killed the fork, or None if it reached its end.

    Args:
        part: the function of the fork; the parent has closed its connections to the database before.
        armed: the `Points`.
    """
    before = armed.armed()
    # The garbage collector writes to each object that it visits, and each write copies a page in the fork.
    gc.freeze()
    child = os.fork()
    if child == 0:
        _run(part, armed)
    gc.unfreeze()
    try:
        _, outcome = os.waitpid(child, 0)
    except BaseException:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    met = before - armed.armed()
    if os.WIFSIGNALED(outcome):
        assert os.WTERMSIG(outcome) == signal.SIGKILL, f"the process ended by signal {os.WTERMSIG(outcome)}"
        assert len(met) == 1, f"the process was killed, but not at one point: {met}"
        return met.pop()
    assert os.WEXITSTATUS(outcome) == _REACHED_THE_END, "the process failed before its end and before a point"
    assert not met, f"the process came to {met} and was not killed"
    return None


def _run(part, armed):
    """Run a part and end this process without pytest's cleanup."""
    status = _FAILED
    try:
        gc.disable()
        armed.forget()
        signal.setitimer(signal.ITIMER_PROF, _MOST_SECONDS)
        part()
        status = _REACHED_THE_END
    except BaseException:  # noqa: BLE001 - the parent sees the exit status only
        traceback.print_exc(file=sys.__stderr__)
    finally:
        sys.__stderr__.flush()
        os._exit(status)


class StoredValue:
    """A value in a file, which outlives the process that changed it."""

    def __init__(self, path, load, dump):
        self._path = Path(path)
        self._load, self._dump = load, dump
        # A push asks several agents in threads.
        self._lock = threading.Lock()

    @contextmanager
    def open(self):
        """Yields the value and writes it to the file at the end of the block."""
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
