# SPDX-License-Identifier: Apache-2.0
"""Retries of the confirmed bundle after a start of the agent, or after a failed change.

Invariant: an amphora with a confirmed bundle retries until it serves that bundle. A change of an interface, or a
time-out of a few seconds, starts the next attempt.
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


def start_retrying(attempt: Callable[[], bool]) -> threading.Thread:
    """Call `attempt` in a new thread until it returns True."""
    thread = threading.Thread(target=_retry, args=(attempt,), name="serve-again", daemon=True)
    thread.start()
    return thread


class RecoveryLoop:
    """Retries after a failed change until `attempt` returns True."""

    def __init__(self, attempt: Callable[[], bool]) -> None:
        self._attempt = attempt
        self._lock = threading.Lock()
        self._running = False

    def start(self) -> None:
        """Start retrying in a new thread, unless that thread runs already."""
        with self._lock:
            if not self._running:
                self._running = True
                start_retrying(self._try)

    def _try(self) -> bool:
        done = self._attempt()
        with self._lock:
            self._running = not done
        return done


def _retry(attempt: Callable[[], bool]) -> None:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, _NETLINK_ROUTE) as links:
        links.bind((0, _GROUP_LINK))
        while True:
            try:
                if attempt():
                    return
            except Exception:  # noqa: BLE001 (the loop must go on: a later attempt may succeed)
                _log.exception("Applying the confirmed bundle failed; retrying")
            select.select([links], [], [], RETRY_SECONDS)
            # The kernel raises BlockingIOError after the last event, and ENOBUFS after lost events.
            with suppress(OSError):
                while True:
                    links.recv(65536)
