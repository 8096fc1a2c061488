# SPDX-License-Identifier: Apache-2.0
"""The thread that sends heartbeats, and the change of its settings or of its format."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from amphora_agent.config import Settings, Target
from amphora_agent.stats.collector import Collector

_log = logging.getLogger(__name__)
SAMPLE_SECONDS = 1.0
# A sample or a heartbeat of many members waits this number of seconds for changes, altogether.
GIVE_WAY_SECONDS = 0.2


class Sender:
    """A thread that samples all daemons and sends heartbeats of one format.

    The sockets have no peer, so one socket of each family serves all targets, also after a change of the settings.
    """

    def __init__(self, settings: Settings, collector: Collector) -> None:
        self._settings = settings
        self._collector = collector
        self._sequence = 0
        self._wakeup = threading.Event()
        self._stopping = threading.Event()
        self._errors: dict[str, dict[str, Any]] = {}
        self._sockets: dict[int, socket.socket] = {}
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._wakeup.set()
        self._thread.join()

    def update(self, settings: Settings) -> None:
        """Use other targets or another interval from the next heartbeat on, which is sent at once."""
        self._settings = settings
        # Errors of the former heartbeat targets are obsolete.
        self._errors = {}
        self.send_now()

    def send_now(self) -> None:
        """Send a heartbeat at once, if the format supports this; does not wait."""

    def send_soon(self) -> None:
        """Send a heartbeat about a change, if the format supports this; does not wait."""

    def errors(self) -> dict[str, dict[str, Any]]:
        """Return the number of failures and the last error, by target or task."""
        return dict(self._errors)

    def _is_requested(self) -> bool:
        """Return whether a heartbeat is sent before the end of the interval. Called once in each pass."""
        return False

    def _send(self) -> None:
        raise NotImplementedError

    def _run(self) -> None:
        due = sample_due = time.monotonic()
        while not self._stopping.is_set():
            try:
                if time.monotonic() >= sample_due:
                    self._collector.sample(self._collector.priority.background(GIVE_WAY_SECONDS))
                    sample_due = time.monotonic() + self._collector.pause
                if self._is_requested() or time.monotonic() >= due:
                    due = time.monotonic() + self._settings.interval
                    self._send()
            except Exception as error:  # noqa: BLE001 - the controller replaces an amphora without heartbeats
                self._record_error("report", error)
            self._wakeup.wait(min(SAMPLE_SECONDS, self._settings.interval))
        for link in self._sockets.values():
            link.close()

    def _send_to(self, target: Target, datagram: bytes) -> None:
        family = socket.AF_INET6 if ":" in target.host else socket.AF_INET
        try:
            if family not in self._sockets:
                self._sockets[family] = socket.socket(family, socket.SOCK_DGRAM)
            self._sockets[family].sendto(datagram, (target.host, target.port))
        except OSError as error:
            self._record_error(str(target), error)

    def _record_error(self, what: str, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        known = self._errors.get(what, {"count": 0, "last": ""})
        if known["last"] != text:
            _log.warning(
                "The agent could not prepare or send a heartbeat (failed task or address of the receiver: %s), and "
                "tries again at the next interval: %s",
                what,
                text,
            )
        self._errors[what] = {"count": known["count"] + 1, "last": text}


class ActiveSender:
    """The sender in use; ``make`` returns a sender for settings."""

    def __init__(self, settings: Settings, make: Callable[[Settings], Sender]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self.settings = settings
        self._sender = make(settings)

    def start(self) -> None:
        self._sender.start()

    def send_now(self) -> None:
        self._sender.send_now()

    def send_soon(self) -> None:
        self._sender.send_soon()

    def errors(self) -> dict[str, dict[str, Any]]:
        return self._sender.errors()

    def update(self, change: Callable[[Settings], Settings]) -> None:
        """Change targets or intervals of the sender. It continues, so no heartbeat is lost or numbered anew.

        `change` returns the new settings, of the same format; if it raises an exception, nothing changes.
        """
        with self._lock:
            self.settings = change(self.settings)
            self._sender.update(self.settings)

    def change(self, settings: Settings) -> None:
        """Replace the sender by one with other settings, perhaps of another format."""
        with self._lock:
            self._sender.close()
            self.settings = settings
            self._sender = self._make(settings)
            self._sender.start()
