# SPDX-License-Identifier: Apache-2.0
"""A line for each flow of UDP and SCTP listeners, when it has ended: the kernel says so, and this writes it down.

Invariant: never in the way. No more than one part in `SHARE` of the time goes into lines, a check waits for `_AT_ONCE`
of them at most, and memory is the socket's buffer. Flows for which there was no time, or whose line nobody took, are
counted, and how many they were is said. Without a listener that wants it nothing is listened to.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence

from amphora_agent.l4.eligible_members import States
from amphora_agent.l4.event_loop import Loop, Timer
from amphora_agent.l4.model import VirtualServer
from amphora_agent.l4_flow_log import conntrack_events
from amphora_agent.l4_flow_log.attribution import Owners, Silences
from amphora_agent.l4_flow_log.stdout_writer import Outlet

SHARE = 5
TELL_SECONDS = 10.0
# So long for what is there when nobody wants it any more.
_LAST_SECONDS = 1.0
_AT_ONCE = 100
_NETLINK_NETFILTER, _GROUP_DESTROYED = 12, 1 << 2
_SOL_NETLINK, _NETLINK_NO_ENOBUFS = 270, 5
_SO_ATTACH_FILTER, _SO_RCVBUFFORCE, _SO_MEMINFO = 26, 33, 55
_MEMINFO = struct.Struct("=9I")
_BUFFER, _LARGEST = 8 << 20, 1 << 16
_SETTINGS = "/proc/sys/net/netfilter/nf_conntrack_"
# Octets and packets of each flow; when it began and ended; and that its end is told of.
_WANTED = ("acct", "timestamp", "events")
# Classic BPF (linux/filter.h): an attribute of this number (SKF_AD_NLATTR), and what it says.
_ONLY_MARKED = (
    (0x00, 0, 0, 20),  # A: where attributes begin
    (0x01, 0, 0, 8),  # X: the number of the mark
    (0x20, 0, 0, 0xFFFFF00C),  # A: where it is
    (0x15, 3, 0, 0),  # nowhere
    (0x07, 0, 0, 0),
    (0x40, 0, 0, 4),  # A: what it says
    (0x15, 0, 1, 0),
    (0x06, 0, 0, 0),
    (0x06, 0, 0, 0xFFFFFFFF),
)


class FlowLog:
    """Listens while a listener wants it. Made in the namespace whose flows they are.

    Args:
        outlet: makes what lines are written to.
    """

    def __init__(self, loop: Loop, *, outlet: Callable[[], Outlet] = Outlet) -> None:
        self._loop = loop
        self._make_outlet = outlet
        self._outlet: Outlet | None = None
        self._socket: socket.socket | None = None
        self._owners = Owners()
        self._logged = self._dropped = self._lost_before = self._told = 0
        self._rest: Timer | None = None
        self._telling: Timer | None = None

    def listen(self, servers: Sequence[VirtualServer]) -> None:
        """Have the ends of these listeners' flows written down; called before they are served."""
        wanted = any(one.log_format is not None for one in servers)
        if wanted and self._socket is None:
            self._open()
        if self._socket is not None:
            self._owners.know(servers)

    def follow(self, servers: Sequence[VirtualServer], up: States, begun: int, *, done: bool) -> None:
        """See `Owners.follow`; called after they are served, or could not be."""
        if self._socket is None:
            return
        self._owners.follow(servers, up, begun, done=done)
        if done and all(one.log_format is None for one in servers):
            self.close()

    @property
    def counts(self) -> dict[str, int]:
        """How many flows have a line, and how many have none because they were too many."""
        return {"logged": self._logged, "lost": self._lost}

    @property
    def _lost(self) -> int:
        return self._lost_before + self._dropped + (0 if self._socket is None else _drops(self._socket))

    def _open(self) -> None:
        for name in _WANTED:
            _switch_on(name)
        try:
            self._socket = self._subscribed()
            self._outlet = self._make_outlet()
        except OSError as error:  # clients are served all the same
            if self._socket is not None:
                self._socket.close()
                self._socket = None
            _say(f"flows are not logged: {error}")
            return
        self._loop.read(self._socket, self._hear)

    def _subscribed(self) -> socket.socket:
        opened = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_NETFILTER)
        try:
            opened.setblocking(False)
            opened.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER)
            # What there is no room for is counted; no reader has to be told.
            opened.setsockopt(_SOL_NETLINK, _NETLINK_NO_ENOBUFS, 1)
            _filter(opened)
            opened.bind((0, _GROUP_DESTROYED))
        except OSError:
            opened.close()
            raise
        return opened

    def _hear(self) -> None:
        """Write some lines, and rest so long that others have their time."""
        if self._socket is None:
            return
        begun = time.monotonic()
        self._write()
        if self._telling is None:
            self._telling = self._loop.at(begun + TELL_SECONDS, self._tell)
        self._loop.forget(self._socket)
        now = time.monotonic()
        self._rest = self._loop.at(now + (SHARE - 1) * (now - begun), self._again)

    def _again(self) -> None:
        self._rest = None
        if self._socket is not None:
            self._loop.read(self._socket, self._hear)

    def _write(self) -> int:
        """Read at most `_AT_ONCE` messages and write their lines; how many messages there were."""
        lines: list[str] = []
        silences, read = Silences(), 0
        while read < _AT_ONCE and (message := self._message()):
            read += 1
            lines += filter(None, (self._owners.line(flow, silences) for flow in conntrack_events.read(message)))
        dropped = len(lines) if self._outlet is None else self._outlet.write(lines)
        self._dropped += dropped
        self._logged += len(lines) - dropped
        return read

    def _message(self) -> bytes:
        """The next one; empty if there is none."""
        try:
            return b"" if self._socket is None else self._socket.recv(_LARGEST)
        except OSError:
            return b""

    def _tell(self) -> None:
        """Say how many have no line, if they became more; offer once more what nobody took."""
        self._telling = None
        if self._outlet is not None and self._outlet.full:
            self._outlet.write(())
            self._telling = self._loop.at(time.monotonic() + TELL_SECONDS, self._tell)
        lost = self._lost
        if lost > self._told:
            _say(f"{lost - self._told} flows have no line in the flow log: more have ended than there was time for")
        self._told = lost

    def close(self) -> None:
        """Write down what is there, and listen no longer."""
        if self._socket is None:
            return
        until = time.monotonic() + _LAST_SECONDS
        while self._write() and time.monotonic() < until:
            pass
        self._tell()
        for timer in (self._rest, self._telling):
            if timer is not None:
                timer.cancel()
        self._rest = self._telling = None
        self._lost_before += _drops(self._socket)
        self._loop.forget(self._socket)
        self._socket.close()
        self._socket = None
        if self._outlet is not None:
            self._outlet.close()
        self._outlet = None


def _switch_on(name: str) -> None:
    path = f"{_SETTINGS}{name}"
    try:
        with open(path, encoding="ascii") as file:  # noqa: PTH123 (pathlib is a megabyte)
            present = file.read().strip()
        if present != "1":
            with open(path, "w", encoding="ascii") as file:  # noqa: PTH123 (as above)
                file.write("1")
    except OSError as error:
        _say(f"lines of the flow log lack something, nf_conntrack_{name} cannot be set: {error}")


def _filter(one: socket.socket) -> None:
    program = b"".join(struct.pack("=HBBI", *line) for line in _ONLY_MARKED)
    code = ctypes.create_string_buffer(program, len(program))
    one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", len(_ONLY_MARKED), ctypes.addressof(code)))


def _drops(one: socket.socket) -> int:
    """How many messages a socket had no room for (linux/sock_diag.h, SK_MEMINFO_DROPS)."""
    found = one.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMINFO.size)
    return int(_MEMINFO.unpack(found)[-1]) if len(found) == _MEMINFO.size else 0


def _say(text: str) -> None:
    sys.stderr.write(f"checker: {text}\n")
    sys.stderr.flush()
