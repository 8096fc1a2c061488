# SPDX-License-Identifier: Apache-2.0
"""Serve again after a start of the agent.

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
