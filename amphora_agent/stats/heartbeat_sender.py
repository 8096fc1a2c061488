# SPDX-License-Identifier: Apache-2.0
"""The thread that sends heartbeats.

Invariant: (epoch, sequence) grows with each datagram of this amphora, also after a change of the clock. An error of one
target does not stop the other targets; the agent logs and counts it.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from amphora_agent.config import Settings, Target
from amphora_agent.paths import Paths, write_atomically
from amphora_agent.stats import heartbeat_codec
from amphora_agent.stats.collector import Collector
from amphora_agent.version import agent_version

_log = logging.getLogger(__name__)
SAMPLE_SECONDS = 1.0


def next_epoch(paths: Paths) -> int:
    """Return a number greater than that of each former sender; it is on disk before its first use."""
    last = 0
    with suppress(FileNotFoundError, ValueError):
        last = int(paths.epoch.read_text(encoding="ascii"))
    epoch = max(time.time_ns(), last + 1)
    try:
        write_atomically(paths.epoch, str(epoch))
    except OSError:
        # The disk is full: the number has the same length as the former one and overwrites it in place.
        with paths.epoch.open("r+", encoding="ascii") as file:
            file.write(str(epoch))
            file.flush()
            os.fsync(file.fileno())
    return epoch


class HeartbeatSender:
    """The thread that samples HAProxy and the L4 daemon, and sends heartbeats."""

    def __init__(
        self,
        settings: Settings,
        paths: Paths,
        collector: Collector,
        generation: Callable[[], int | None],
        holds_vip: Callable[[], bool | None],
        drift: Callable[[], dict[str, Any]],
    ) -> None:
        self._settings = settings
        self._paths = paths
        self._collector = collector
        self._generation = generation
        self._holds_vip = holds_vip
        self._drift = drift
        self._wakeup = threading.Event()
        self._soon = False
        self._stopping = threading.Event()
        self._sequence = 0
        self._errors: dict[str, dict[str, Any]] = {}
        self._reported: dict[str, dict[str, str]] = {}
        self._sockets: dict[int, socket.socket] = {}
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and wait for it."""
        self._stopping.set()
        self._wakeup.set()
        self._thread.join()

    def send_now(self) -> None:
        """Send a heartbeat at once; does not wait."""
        self._wakeup.set()

    def send_soon(self) -> None:
        """Send a heartbeat about a change; does not wait.

        With many rows it is sent after the next sample, within `SAMPLE_SECONDS`: reading them at each change would take
        the processor time of the next change.
        """
        self._soon = True
        if not self._collector.is_large:
            self._wakeup.set()

    def errors(self) -> dict[str, dict[str, Any]]:
        """Return the number of failures and the last error, by target or task."""
        return dict(self._errors)

    def _run(self) -> None:
        step = min(SAMPLE_SECONDS, self._settings.interval)
        due = time.monotonic()
        epoch: int | None = None
        while not self._stopping.is_set():
            try:
                if epoch is None:
                    epoch = next_epoch(self._paths)
                self._collector.sample()
                requested = self._wakeup.is_set() or self._soon
                self._wakeup.clear()
                self._soon = False
                if requested or time.monotonic() >= due or self._collector.statuses() != self._reported:
                    due = time.monotonic() + self._settings.interval
                    self._send(epoch)
            except Exception as error:  # noqa: BLE001 - a silent amphora would be replaced
                self._failed("report", error)
            self._wakeup.wait(step)
        for link in self._sockets.values():
            link.close()

    def _send(self, epoch: int) -> None:
        self._reported = self._collector.statuses()
        facts = {"agent_version": agent_version(), "holds_vip": self._holds_vip(), **self._drift()}
        document = {**self._collector.document(self._generation()), **facts}
        try:
            self._collector.write()
        except OSError as error:
            self._failed("write the counters", error)
        amphora, key = self._settings.amphora_id, self._settings.heartbeat_key
        for datagram in heartbeat_codec.datagrams(amphora, key, epoch, self._sequence + 1, document):
            self._sequence += 1
            for target in self._settings.targets:
                self._send_to(target, datagram)

    def _send_to(self, target: Target, datagram: bytes) -> None:
        try:
            self._socket(target).sendto(datagram, (target.host, target.port))
        except OSError as error:
            self._failed(str(target), error)

    def _socket(self, target: Target) -> socket.socket:
        family = socket.AF_INET6 if ":" in target.host else socket.AF_INET
        if family not in self._sockets:
            self._sockets[family] = socket.socket(family, socket.SOCK_DGRAM)
        return self._sockets[family]

    def _failed(self, what: str, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        known = self._errors.get(what)
        if known is None or known["last"] != text:
            _log.warning("Heartbeat: %s: %s", what, text)
        self._errors[what] = {"count": (known["count"] if known else 0) + 1, "last": text}
