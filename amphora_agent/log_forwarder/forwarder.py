# SPDX-License-Identifier: Apache-2.0
"""The event loop of the log forwarder: receives and renders lines for the queues of targets.

Invariant: the loop never waits for a target. Senders of lines never wait for the loop: the kernel drops datagrams
that the loop does not read in time, and counts them.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from amphora_agent import log_settings
from amphora_agent.log_forwarder.records import LONGEST_LINE, Record, Renderer, Source, parse_admin, parse_loopback
from amphora_agent.log_forwarder.target import Target
from amphora_agent.log_settings import NO_LOGS, LogSettings, LogTarget

# Maximum number of datagrams in one batch. For each batch, the log forwarder locks each queue only once.
_BATCH = 256
_REQUEST_SECONDS = 2.0
_REQUEST_BYTES, _CHUNK_BYTES = 1 << 20, 1 << 16
_SO_MEMINFO = 55
_MEMINFO = struct.Struct("=9I")


class Forwarder:
    """Targets and inputs.

    ``admin_path`` is the socket for lines of the journal or of the supervisor. ``version`` is of the sources.
    """

    def __init__(self, admin_path: str, control_path: str, version: str) -> None:
        self._version = version
        self._settings = NO_LOGS
        self._source = Source("-", "")
        self._renderer = Renderer(self._source)
        self._digest = ""
        self._admin: dict[LogTarget, Target] = {}
        self._tenant: dict[LogTarget, Target] = {}
        self._received = self._lost_before = 0
        # Sent and lost lines of removed targets. The totals include these lines, so that the totals never decrease.
        self._former = {"sent": 0, "lost": 0}
        self._input: socket.socket | None = None
        self._selector = selectors.DefaultSelector()
        self._admin_input = _bind(admin_path, socket.SOCK_DGRAM)
        self._control = _bind(control_path, socket.SOCK_STREAM)
        self._control.listen(8)
        self._selector.register(self._admin_input, selectors.EVENT_READ, self._read_admin)
        self._selector.register(self._control, selectors.EVENT_READ, self._answer)

    def run(self) -> None:
        """Serve for ever."""
        while True:
            self.run_once()

    def run_once(self, timeout: float | None = None) -> None:
        """Handle the present events."""
        for key, _ in self._selector.select(timeout):
            key.data()

    def close(self) -> None:
        """Close all targets and sockets."""
        for one in (*self._admin.values(), *self._tenant.values()):
            one.close()
        for opened in (self._input, self._admin_input, self._control):
            if opened is not None:
                opened.close()
        self._selector.close()

    def _read_input(self) -> None:
        now, received = time.time(), _receive(self._input)
        if self._tenant:
            found = (parse_loopback(data, self._source, now) for data in received)
            self._put(self._tenant, [one for one in found if one is not None])

    def _read_admin(self) -> None:
        now, received = time.time(), _receive(self._admin_input)
        if self._admin:
            found = (parse_admin(data, now) for data in received)
            self._put(self._admin, [one for one in found if one is not None])

    def _put(self, targets: Mapping[LogTarget, Target], records: Sequence[Record]) -> None:
        if not records:
            return
        self._received += len(records)
        for is_json, render in ((False, self._renderer.syslog), (True, self._renderer.json)):
            receiving: list[Target] = []
            for one in targets.values():
                if one.is_json is is_json:
                    # A target with a full queue drops its lines, so rendering them would waste processor time.
                    one.queue.drop(len(records)) if one.queue.is_full else receiving.append(one)
            if receiving:
                lines = [render(one) for one in records]
                for target in receiving:
                    target.queue.put(lines)

    def _answer(self) -> None:
        """Answer one request of the agent. It is short, so the loop waits for it."""
        with suppress(OSError):
            connection, _ = self._control.accept()
            with connection:
                connection.settimeout(_REQUEST_SECONDS)
                received, descriptors = _read_request(connection)
                try:
                    answer = self._handle(json.loads(received), descriptors)
                except (ValueError, KeyError, TypeError, OSError) as error:
                    answer = {"error": f"{type(error).__name__}: {error}"}
                finally:
                    for descriptor in descriptors:
                        os.close(descriptor)
                connection.sendall(json.dumps(answer).encode() + b"\n")

    def _handle(self, request: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        if request["op"] == "configure":
            wanted = log_settings.parse(request["logs"])
            source = Source(
                str(request["hostname"]), str(request["amphora_id"]), wanted.project_id, wanted.load_balancer_id
            )
            self._configure(wanted, source)
            self._digest = str(request["digest"])
            if descriptors:
                self._use_input(socket.socket(fileno=descriptors.pop()))
        return self._status()

    def _configure(self, wanted: LogSettings, source: Source) -> None:
        """Replace targets that have changed. A target with equal settings keeps its queue and its connection.

        A target with the same URL and other secrets or CA certificates gets the waiting lines of its predecessor.
        Raises ValueError or OSError for unusable certificates. The former targets then stay in use.
        """
        same = (wanted.authorities, wanted.queue_bytes) == (self._settings.authorities, self._settings.queue_bytes)
        made: list[Target] = []

        def choose(known: Mapping[LogTarget, Target], chosen: Sequence[LogTarget]) -> dict[LogTarget, Target]:
            found = {one: known[one] for one in chosen if same and one in known}
            for one in chosen:
                if one not in found:
                    found[one] = Target(one, wanted.authorities, wanted.queue_bytes)
                    made.append(found[one])
            return found

        try:
            admin, tenant = choose(self._admin, wanted.admin), choose(self._tenant, wanted.tenant)
        except (ValueError, OSError):
            for target in made:
                target.close()
            raise
        for known, used in ((self._admin, admin), (self._tenant, tenant)):
            for one, target in known.items():
                if used.get(one) is not target:
                    successors = (new for new in used.values() if new in made and new.endpoint == target.endpoint)
                    self._retire(target, next(successors, None))
        self._admin, self._tenant = admin, tenant
        self._settings, self._source, self._renderer = wanted, source, Renderer(source)

    def _retire(self, target: Target, successor: Target | None) -> None:
        if successor is not None:
            successor.queue.put(target.queue.hand_over())
        target.close()
        counters = target.counters()
        self._former["sent"] += counters["sent"]
        self._former["lost"] += counters["dropped"] + counters["uncertain"]

    def _use_input(self, opened: socket.socket) -> None:
        if self._input is not None:
            self._lost_before += _drops(self._input)
            self._selector.unregister(self._input)
            self._input.close()
        opened.setblocking(False)
        self._input = opened
        self._selector.register(opened, selectors.EVENT_READ, self._read_input)

    def _status(self) -> dict[str, Any]:
        lost = self._lost_before + (0 if self._input is None else _drops(self._input))
        return {
            "version": self._version,
            "digest": self._digest,
            "has_input": self._input is not None,
            "received": self._received,
            "lost": lost,
            "admin": [one.counters() for one in self._admin.values()],
            "tenant": [one.counters() for one in self._tenant.values()],
            "former": self._former,
        }


def _receive(opened: socket.socket | None) -> list[bytes]:
    """Return the waiting datagrams, at most `_BATCH`."""
    found: list[bytes] = []
    with suppress(OSError):
        while opened is not None and len(found) < _BATCH:
            found.append(opened.recv(LONGEST_LINE))
    return found


def _read_request(connection: socket.socket) -> tuple[bytes, list[int]]:
    received, descriptors = bytearray(), []
    while not received.endswith(b"\n") and len(received) < _REQUEST_BYTES:
        data, arrived, *_ = socket.recv_fds(connection, _CHUNK_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        descriptors += arrived
        if not data:
            break
        received += data
    return bytes(received), descriptors


def _bind(path: str, kind: socket.SocketKind) -> socket.socket:
    """Return a socket at a path, for root only. A socket of an ended process is replaced."""
    opened = socket.socket(socket.AF_UNIX, kind)
    with suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108 (pathlib needs a megabyte)
    before = os.umask(0o177)
    try:
        opened.bind(path)
    finally:
        os.umask(before)
    opened.setblocking(False)
    return opened


def _drops(opened: socket.socket) -> int:
    """Return the number of datagrams that a socket has dropped (linux/sock_diag.h, SK_MEMINFO_DROPS)."""
    found = opened.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMINFO.size)
    return int(_MEMINFO.unpack(found)[-1]) if len(found) == _MEMINFO.size else 0
