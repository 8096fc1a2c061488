# SPDX-License-Identifier: Apache-2.0
"""Writes a line for each ended flow of UDP and SCTP listeners, from conntrack events.

Invariant: checks have priority. Lines take at most one part in `SHARE` of the time, and a check waits for at most
`_MAX_AT_ONCE` lines. The log reports flows without a line, for lack of time or of a reader.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from amphora_agent.l4.eligible_members import MemberHealth
from amphora_agent.l4.event_loop import EventLoop, Timer
from amphora_agent.l4.model import VirtualServer
from amphora_agent.l4.netlink import NETFILTER, attach_filter
from amphora_agent.l4.stderr_log import log
from amphora_agent.l4_flow_log import conntrack_events
from amphora_agent.l4_flow_log.attribution import FlowAttribution, FlowTimeouts
from amphora_agent.l4_flow_log.datagram_writer import DatagramWriter
from amphora_agent.l4_flow_log.stdout_writer import StdoutWriter

SHARE = 5
REPORT_SECONDS = 10.0
# Before its close, the flow log handles the kernel's remaining messages for at most this number of seconds.
_CLOSE_SECONDS = 1.0
_MAX_AT_ONCE = 100
_GROUP_DESTROYED = 1 << 2
_SOL_NETLINK, _NETLINK_NO_ENOBUFS = 270, 5
_SO_RCVBUFFORCE, _SO_MEMINFO = 33, 55
_MEMINFO = struct.Struct("=9I")
_BUFFER, _MAX_MESSAGE_BYTES = 8 << 20, 1 << 16
_SETTINGS = "/proc/sys/net/netfilter/nf_conntrack_"
# Conntrack settings without which the kernel reports no bytes, packets and times of a flow.
_REQUIRED_SETTINGS = ("acct", "timestamp", "events")
# A classic BPF program (linux/filter.h) that accepts conntrack messages with a mark. The kernel's extension
# SKF_AD_NLATTR finds the attribute of the mark.
_ONLY_MARKED = (
    (0x00, 0, 0, 20),  # The BPF accumulator gets the offset of the first attribute.
    (0x01, 0, 0, 8),  # The BPF index register gets the attribute number of the mark.
    (0x20, 0, 0, 0xFFFFF00C),  # The BPF accumulator gets the offset of the mark's attribute.
    (0x15, 3, 0, 0),  # The BPF program drops a message that has no mark.
    (0x07, 0, 0, 0),
    (0x40, 0, 0, 4),  # The BPF accumulator gets the value of the mark.
    (0x15, 0, 1, 0),
    (0x06, 0, 0, 0),
    (0x06, 0, 0, 0xFFFFFFFF),
)


class FlowLog:
    """Receives events while a listener has a flow log. Created in the namespace of the flows."""

    def __init__(self, loop: EventLoop, *, make_writer: Callable[[], StdoutWriter] = StdoutWriter) -> None:
        self._loop = loop
        self._make_writer = make_writer
        self._writer: StdoutWriter | None = None
        self._datagrams: DatagramWriter | None = None
        self._socket: socket.socket | None = None
        self._attribution = FlowAttribution()
        self._logged = self._dropped = self._lost_on_former_sockets = self._reported = 0
        self._pause_timer: Timer | None = None
        self._report_timer: Timer | None = None

    def start(self, servers: Sequence[VirtualServer]) -> None:
        """Begin to log the flows of these listeners, before they are served."""
        wanted = any(one.log_format is not None for one in servers)
        if wanted and self._socket is None:
            self._open()
        if self._socket is not None:
            self._attribution.add_servers(servers)

    def servers_applied(self, servers: Sequence[VirtualServer], up: MemberHealth, begun: int, *, done: bool) -> None:
        """See `FlowAttribution.servers_applied`; called after an attempt to serve them."""
        if self._socket is None:
            return
        self._attribution.servers_applied(servers, up, begun, done=done)
        if done and all(one.log_format is None for one in servers):
            self.close()

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of logged flows, and of flows without a line."""
        return {"logged": self._logged, "lost": self._lost}

    @property
    def _lost(self) -> int:
        return self._lost_on_former_sockets + self._dropped + (0 if self._socket is None else _drops(self._socket))

    def _open(self) -> None:
        for name in _REQUIRED_SETTINGS:
            _enable_setting(name)
        try:
            self._socket = self._open_socket()
            self._writer = self._make_writer()
            self._datagrams = DatagramWriter()
        except OSError as error:
            if self._socket is not None:
                self._socket.close()
                self._socket = None
            log(f"the L4 daemon cannot open the flow log, and serves clients without the flow log: {error}")
            return
        self._loop.add_reader(self._socket, self._on_readable)

    def _open_socket(self) -> socket.socket:
        opened = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETFILTER)
        try:
            opened.setblocking(False)
            opened.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER)
            # The flow log reads the number of lost messages from the socket's counter. This option suppresses ENOBUFS
            # errors, which would report these losses a second time.
            opened.setsockopt(_SOL_NETLINK, _NETLINK_NO_ENOBUFS, 1)
            attach_filter(opened, _ONLY_MARKED)
            opened.bind((0, _GROUP_DESTROYED))
        except OSError:
            opened.close()
            raise
        return opened

    def _on_readable(self) -> None:
        """Write some lines, then pause so that checks have their time."""
        if self._socket is None:
            return
        begun = time.monotonic()
        self._write()
        if self._report_timer is None:
            self._report_timer = self._loop.call_at(begun + REPORT_SECONDS, self._report_losses)
        self._loop.remove(self._socket)
        now = time.monotonic()
        self._pause_timer = self._loop.call_at(now + (SHARE - 1) * (now - begun), self._resume)

    def _resume(self) -> None:
        self._pause_timer = None
        if self._socket is not None:
            self._loop.add_reader(self._socket, self._on_readable)

    def _write(self) -> int:
        """Read at most `_MAX_AT_ONCE` messages and write their lines; returns the number of messages."""
        lines: list[str] = []
        timeouts, read = FlowTimeouts(), 0
        with suppress(OSError):
            while self._socket is not None and read < _MAX_AT_ONCE:
                flows = conntrack_events.parse_events(self._socket.recv(_MAX_MESSAGE_BYTES))
                read += 1
                lines += filter(None, (self._attribution.render(flow, timeouts) for flow in flows))
        if self._datagrams is not None:
            self._datagrams.write(lines)
        dropped = len(lines) if self._writer is None else self._writer.write(lines)
        self._dropped += dropped
        self._logged += len(lines) - dropped
        return read

    def _report_losses(self) -> None:
        """Report new losses, and retry buffered lines."""
        self._report_timer = None
        if self._writer is not None and self._writer.has_backlog:
            self._writer.write(())
            self._report_timer = self._loop.call_at(time.monotonic() + REPORT_SECONDS, self._report_losses)
        lost = self._lost
        if lost > self._reported:
            log(
                f"the L4 daemon lost the flow log lines of {lost - self._reported} flows, because too many "
                "flows ended at once; traffic is not affected"
            )
        self._reported = lost

    def close(self) -> None:
        """Write the lines of remaining messages, and close the socket."""
        if self._socket is None:
            return
        until = time.monotonic() + _CLOSE_SECONDS
        while self._write() and time.monotonic() < until:
            pass
        self._report_losses()
        for timer in (self._pause_timer, self._report_timer):
            if timer is not None:
                timer.cancel()
        self._pause_timer = self._report_timer = None
        self._lost_on_former_sockets += _drops(self._socket)
        self._loop.remove(self._socket)
        self._socket.close()
        self._socket = None
        for writer in (self._writer, self._datagrams):
            if writer is not None:
                writer.close()
        self._writer = self._datagrams = None


def _enable_setting(name: str) -> None:
    path = f"{_SETTINGS}{name}"
    try:
        with open(path, encoding="ascii") as file:  # noqa: PTH123 (pathlib needs a megabyte)
            present = file.read().strip()
        if present != "1":
            with open(path, "w", encoding="ascii") as file:  # noqa: PTH123 (pathlib needs a megabyte)
                file.write("1")
    except OSError as error:
        log(
            f"the L4 daemon cannot enable the kernel setting nf_conntrack_{name}, so lines of the flow log are "
            f"incomplete: {error}"
        )


def _drops(one: socket.socket) -> int:
    """Return the number of messages that a socket has dropped (linux/sock_diag.h, SK_MEMINFO_DROPS)."""
    found = one.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMINFO.size)
    return int(_MEMINFO.unpack(found)[-1]) if len(found) == _MEMINFO.size else 0
