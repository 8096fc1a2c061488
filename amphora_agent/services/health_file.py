# SPDX-License-Identifier: Apache-2.0
"""Whether a service is alive, as a file that others can watch.

Invariant: the file says 1 from the moment on at which the service is known to be dead or frozen, and 0 again only when
it has answered; a service that nobody wants is not missing. Nothing here waits: everything is driven by the selector
and by `due`. Only the standard library is imported (see `amphora_agent.services.supervisor`).

Frozen is a service that leaves a question unanswered for `Probe.patience` *and* does nothing meanwhile. One that uses
the processor, or waits for its turn, is busy or on a busy machine; it is given `BUSY_SECONDS`, because to move the
VIPs costs every open connection and brings the same load to the partner. One's own lateness is nobody else's fault:
time during which this process did not run either does not count.
"""

from __future__ import annotations

import selectors
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ALIVE, DEAD = "0", "1"
BUSY_SECONDS = 5.0
# A question to a frozen worker stays with it, even when another one has taken its place.
REPEAT_SECONDS = 2.0
_LATE_SECONDS = 0.1
_STATE, _USER_TIME, _SYSTEM_TIME = 0, 11, 12


@dataclass(frozen=True)
class Probe:
    """A question that a living service answers; times are in seconds."""

    socket: str
    question: str
    interval: float
    patience: float


@dataclass(frozen=True)
class Activity:
    """What some processes have done so far: clock ticks of processor time, and whether one would like to go on."""

    ticks: int
    ready: bool


def activity(pid: int) -> Activity:
    """What a process and its descendants have done (proc(5), /proc/pid/stat)."""
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


class Pulse:
    """One service's file, and the questions that keep it true.

    Attributes:
        due: when `tick` has to be called (monotonic seconds); None if there is nothing to wait for.
    """

    def __init__(self, selector: selectors.BaseSelector, file: Path | None, probe: Probe | None) -> None:
        self._selector = selector
        self._file = file
        self._probe = probe
        self._said: str | None = None
        self._pid: int | None = None
        self._answered = False
        self._asking: socket.socket | None = None
        self._asked = 0.0
        self._silent_since: float | None = None
        self._before: Activity | None = None
        self.due: float | None = None

    # -- what happens to the service -------------------------------------------------------------------------

    def born(self, pid: int) -> None:
        """The service was started. What the file says stays until it answers, or does not."""
        self._pid, self._answered = pid, False
        if self._probe is None:
            self._say(ALIVE)
        else:
            self._ask(time.monotonic())

    def died(self, *, wanted: bool) -> None:
        """The service has ended."""
        self._pid = None
        self.end()
        self._say(DEAD if wanted else ALIVE)

    def end(self) -> None:
        """Ask no more; what the file says stays."""
        self._forget()
        self._silent_since = self.due = None

    def _say(self, what: str) -> None:
        if self._file is None or what == self._said:
            return
        # In place and in one write: watchers see one change, and never an empty file for longer than a moment.
        with suppress(OSError):
            self._file.write_text(what, encoding="ascii")
            self._said = what

    # -- questions -------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self.due is None or now < self.due or self._probe is None:
            return
        if self._silent_since is None and self._asking is None:
            self._ask(now)
            return
        late = now - self.due
        if late > _LATE_SECONDS and self._silent_since is not None:
            self._silent_since += late
            self._asked += late
        self._judge(now, self._probe)
        if self._asking is None or now - self._asked >= REPEAT_SECONDS:
            self._ask(now)

    def _ask(self, now: float) -> None:
        self._forget()
        if self._probe is None:
            return
        self._asked = now
        asking = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            asking.connect(self._probe.socket)
            asking.send(self._probe.question.encode())
        except OSError:  # nobody listens, or nobody has accepted for long
            asking.close()
            self.due = now + self._probe.interval
        else:
            self._asking = asking
            self._selector.register(asking, selectors.EVENT_READ, partial(self._hear, self._probe))
            self.due = now + self._probe.patience / 2
        if self._silent_since is None:
            self._silent_since, self._before = now, None

    def _hear(self, probe: Probe) -> None:
        heard = b""
        with suppress(OSError):
            heard = self._asking.recv(4096) if self._asking is not None else b""
        self._forget()
        self.due = time.monotonic() + probe.interval
        if heard:
            self._answered, self._silent_since = True, None
            self._say(ALIVE)

    def _forget(self) -> None:
        if self._asking is not None:
            self._selector.unregister(self._asking)
            self._asking.close()
            self._asking = None

    def _judge(self, now: float, probe: Probe) -> None:
        """It has not answered so far."""
        self.due = now + probe.patience / 2
        silent = now - (self._silent_since if self._silent_since is not None else now)
        if not self._answered or self._pid is None:
            # It has only just been started: who starts it waits for its answer, or for its end.
            self.due = now + probe.interval
            return
        so_far = activity(self._pid)
        idle = self._before is not None and so_far.ticks == self._before.ticks and not so_far.ready
        self._before = so_far
        if silent >= BUSY_SECONDS or (silent >= probe.patience and idle):
            self._say(DEAD)
