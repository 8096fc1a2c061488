# SPDX-License-Identifier: Apache-2.0
"""Retries of the confirmed bundle after a start of the agent, or after a failed change.

Invariant: the agent retries until the amphora serves the bundle, after each change of an interface or after a few
seconds.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

_log = logging.getLogger(__name__)
_NETLINK_ROUTE = 0
_GROUP_LINK = 1
RETRY_SECONDS = 5.0


class RecoveryLoop:
    """Calls `attempt` in a thread of its own until the result is True."""

    def __init__(self, attempt: Callable[[], bool]) -> None:
        self._attempt = attempt
        self._lock = threading.Lock()
        self._running = False

    def start(self) -> None:
        """Start the thread, unless it runs already."""
        with self._lock:
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="serve-again", daemon=True).start()

    def _run(self) -> None:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, _NETLINK_ROUTE) as links:
            links.bind((0, _GROUP_LINK))
            while not self._try():
                select.select([links], [], [], RETRY_SECONDS)
                # The netlink events only wake this loop, and the next attempt does not need their content. recv()
                # raises BlockingIOError after the last event, and ENOBUFS if the kernel has lost events.
                with suppress(OSError):
                    while True:
                        links.recv(65536)

    def _try(self) -> bool:
        try:
            done = self._attempt()
        except Exception:  # noqa: BLE001 (the loop must go on: a later attempt may succeed)
            _log.exception(
                "The agent could not apply its last confirmed configuration because of an unexpected error, and retries"
            )
            return False
        with self._lock:
            self._running = not done
        return done
