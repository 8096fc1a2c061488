# SPDX-License-Identifier: Apache-2.0
"""The health file of a daemon: 0 while the daemon serves, 1 after it exits or freezes.

Invariant: the file holds 1 from the moment at which the exit or freeze is known, and 0 again only after an answer of
the daemon. A daemon that is not wanted counts as healthy. No method blocks: the selector and `due` drive all work. The
module imports only the standard library (see `amphora_agent.services.supervisor`).

A daemon is frozen if it leaves a question unanswered for `Probe.time_limit` *and* uses no processor time meanwhile. A
daemon that computes or waits for a processor is busy, not frozen. A busy daemon has `BUSY_SECONDS`, because a move of
the VIPs ends all open connections and brings the same load to the partner. Time in which this process itself did not
run does not count.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections import namedtuple
from contextlib import suppress
from functools import partial
from pathlib import Path

ALIVE, DEAD = "0", "1"
BUSY_SECONDS = 5.0
# A new HAProxy worker never answers a probe that a frozen worker has accepted. So a daemon is probed again after this
# number of seconds without an answer.
REPEAT_SECONDS = 2.0
_LATE_SECONDS = 0.1
_STATE, _USER_TIME, _SYSTEM_TIME = 0, 11, 12


class Probe(namedtuple("Probe", ("socket", "question", "interval", "time_limit"))):  # noqa: PYI024 (see below)
    """A question on a daemon's Unix socket; times are in seconds.

    Each answer to ``question`` shows that the daemon serves. ``interval`` is the time between two questions. A daemon
    without an answer and without activity for ``time_limit`` is frozen.
    """

    # Each amphora in namespaces has a supervisor, which imports this module. An import of `dataclasses` or `typing`
    # would add a megabyte to each supervisor.
    __slots__ = ()


class Activity(namedtuple("Activity", ("ticks", "ready"))):  # noqa: PYI024 (saves memory)
    """The processor time of a process tree in clock ticks, and whether one of its processes is runnable."""

    __slots__ = ()


def read_activity(pid: int) -> Activity:
    """Return the activity of a process and its descendants (proc(5), /proc/pid/stat)."""
    ticks, ready = 0, False
    pending = [pid]
    while pending:
        process = pending.pop()
        with suppress(OSError, IndexError, ValueError):
            fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(") ")[2].split()
            ticks += int(fields[_USER_TIME]) + int(fields[_SYSTEM_TIME])
            ready = ready or fields[_STATE] == "R"
            children = Path(f"/proc/{process}/task/{process}/children").read_text(encoding="ascii")
            pending += [int(word) for word in children.split()]
    return Activity(ticks, ready)


class HealthFile:
    """The health file of one daemon, and its probe. ``due`` is the monotonic time of the next `run_due`."""

    def __init__(self, selector: selectors.BaseSelector, file: Path | None, probe: Probe | None) -> None:
        self._selector = selector
        self._file = file
        self._probe = probe
        self._written: str | None = None
        self._pid: int | None = None
        self._answered = False
        self._connection: socket.socket | None = None
        self._asked_at = 0.0
        self._silent_since: float | None = None
        self._last_activity: Activity | None = None
        self.due: float | None = None

    def started(self, pid: int) -> None:
        """Record a start. With a probe, the file changes with the first answer."""
        self._pid, self._answered = pid, False
        # The script that runs the daemon may have written DEAD into the file. So the remembered content is dropped, and
        # the next write is not skipped.
        self._written = None
        if self._probe is None:
            self._write(ALIVE)
        else:
            self._ask(time.monotonic())

    def exited(self, *, wanted: bool) -> None:
        self._pid = None
        self.stop_probing()
        self._write(DEAD if wanted else ALIVE)

    def stop_probing(self) -> None:
        """Send no more questions; the content of the file stays."""
        self._close_connection()
        self._silent_since = self.due = None

    def _write(self, content: str) -> None:
        if self._file is None or content == self._written:
            return
        # The content is written in place, so that a watcher of the file, such as keepalived, sees one change only.
        with suppress(OSError):
            self._file.write_text(content, encoding="ascii")
            self._written = content

    def run_due(self, now: float) -> None:
        """Ask a question or evaluate a missing answer, if `due` has passed."""
        if self.due is None or now < self.due or self._probe is None:
            return
        if self._silent_since is None and self._connection is None:
            self._ask(now)
            return
        late = now - self.due
        if late > _LATE_SECONDS and self._silent_since is not None:
            self._silent_since += late
            self._asked_at += late
        self._evaluate_silence(now, self._probe)
        if self._connection is None or now - self._asked_at >= REPEAT_SECONDS:
            self._ask(now)

    def _ask(self, now: float) -> None:
        self._close_connection()
        if self._probe is None:
            return
        self._asked_at = now
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            connection.connect(self._probe.socket)
            connection.send(self._probe.question.encode())
        except OSError:
            # The daemon has no listening socket yet, or the backlog of its socket is full. So the probe is repeated.
            connection.close()
            self.due = now + self._probe.interval
        else:
            self._connection = connection
            self._selector.register(connection, selectors.EVENT_READ, partial(self._receive_answer, self._probe))
            self.due = now + self._probe.time_limit / 2
        if self._silent_since is None:
            self._silent_since, self._last_activity = now, None

    def _receive_answer(self, probe: Probe) -> None:
        answer = b""
        with suppress(OSError):
            answer = self._connection.recv(4096) if self._connection is not None else b""
        self._close_connection()
        self.due = time.monotonic() + probe.interval
        if answer:
            self._answered, self._silent_since = True, None
            self._write(ALIVE)

    def _close_connection(self) -> None:
        if self._connection is not None:
            self._selector.unregister(self._connection)
            self._connection.close()
            self._connection = None

    def _evaluate_silence(self, now: float, probe: Probe) -> None:
        """Write DEAD if the daemon is frozen, or busy for too long."""
        self.due = now + probe.time_limit / 2
        silent = now - (self._silent_since if self._silent_since is not None else now)
        if not self._answered or self._pid is None:
            # A daemon that has never answered may still be starting, so it does not count as frozen.
            self.due = now + probe.interval
            return
        activity = read_activity(self._pid)
        last = self._last_activity
        idle = last is not None and activity.ticks == last.ticks and not activity.ready
        self._last_activity = activity
        if silent >= BUSY_SECONDS or (silent >= probe.time_limit and idle):
            self._write(DEAD)
