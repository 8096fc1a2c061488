# SPDX-License-Identifier: Apache-2.0
"""The heartbeat sender in use, which can be replaced at run time.

Invariant: at most one thread sends heartbeats, and it uses the present settings.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from amphora_agent.config import Settings


class Sender(Protocol):
    """Sends heartbeats of one format with fixed settings."""

    def start(self) -> None: ...

    def close(self) -> None: ...

    def send_now(self) -> None: ...

    def send_soon(self) -> None: ...

    def errors(self) -> dict[str, dict[str, Any]]: ...


class ActiveSender:
    """A sender that is replaced when the settings change.

    Args:
        settings: the first settings.
        make: returns a sender for settings.
    """

    def __init__(self, settings: Settings, make: Callable[[Settings], Sender]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._settings = settings
        self._sender = make(settings)

    @property
    def settings(self) -> Settings:
        """The present settings."""
        return self._settings

    def start(self) -> None:
        self._sender.start()

    def send_now(self) -> None:
        """Send a heartbeat at once, if the format supports this; does not wait."""
        self._sender.send_now()

    def send_soon(self) -> None:
        """Send a heartbeat about a change; does not wait."""
        self._sender.send_soon()

    def errors(self) -> dict[str, dict[str, Any]]:
        """Return the number of failures and the last error, by target or task."""
        return self._sender.errors()

    def change(self, settings: Settings) -> None:
        """Replace the sender by one with other settings."""
        with self._lock:
            self._sender.close()
            self._settings = settings
            self._sender = self._make(settings)
            self._sender.start()
