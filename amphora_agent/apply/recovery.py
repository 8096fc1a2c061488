# SPDX-License-Identifier: Apache-2.0
"""Serve again after a start of the agent, or after a change that failed half-way.

Invariant: an amphora that once confirmed a bundle tries to serve it until it does; each new attempt is caused
by a change of its interfaces, or by the passing of a few seconds.
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
PATIENCE_SECONDS = 5.0


def serve_again(attempt: Callable[[], bool]) -> threading.Thread:
    """Call `attempt` until it returns True, in a thread of its own."""
    thread = threading.Thread(target=_run, args=(attempt,), name="serve-again", daemon=True)
    thread.start()
    return thread


class Healer:
    """Sees to it that a change that failed half-way leaves nothing of it, even if nobody pushes again.

    Args:
        attempt: whether there is nothing of it any more; tries to bring that about.
    """

    def __init__(self, attempt: Callable[[], bool]) -> None:
        self._attempt = attempt
        self._lock = threading.Lock()
        self._running = False

    def start(self) -> None:
        """Begin, in a thread of its own; does nothing if it has begun."""
        with self._lock:
            if not self._running:
                self._running = True
                serve_again(self._try)

    def _try(self) -> bool:
        done = self._attempt()
        with self._lock:
            self._running = not done
        return done


def _run(attempt: Callable[[], bool]) -> None:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, _NETLINK_ROUTE) as links:
        links.bind((0, _GROUP_LINK))
        while True:
            try:
                if attempt():
                    return
            except Exception:  # noqa: BLE001 (the next attempt may go better, and there must be one)
                _log.exception("Serving the last confirmed bundle again")
            select.select([links], [], [], PATIENCE_SECONDS)
            _drain(links)


def _drain(links: socket.socket) -> None:
    with suppress(OSError):  # BlockingIOError: all read. ENOBUFS: something changed, that is all we ask
        while True:
            links.recv(65536)
