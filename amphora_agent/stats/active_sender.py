# SPDX-License-Identifier: Apache-2.0
"""Whoever reports at the moment.

Invariant: at any time at most one thread reports, and it does so as the settings of now say.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from amphora_agent.config import Settings


class Sends(Protocol):
    """What sends heartbeats of one format with settings that do not change."""

    def start(self) -> None: ...

    def close(self) -> None: ...

    def send_now(self) -> None: ...

    def send_soon(self) -> None: ...

    def errors(self) -> dict[str, dict[str, Any]]: ...


class Reporter:
    """A sender that can be replaced by another one.

    Args:
        make: makes the sender for settings.
    """

    def __init__(self, settings: Settings, make: Callable[[Settings], Sends]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._settings = settings
        self._sender = make(settings)

    @property
    def settings(self) -> Settings:
        """Those of now."""
        return self._settings

    def start(self) -> None:
        self._sender.start()

    def send_now(self) -> None:
        """Report at once, where the format knows such a thing; returns without waiting."""
        self._sender.send_now()

    def send_soon(self) -> None:
        """Report a change; returns without waiting."""
        self._sender.send_soon()

    def errors(self) -> dict[str, dict[str, Any]]:
        """By target or task: how often it failed and how the last time."""
        return self._sender.errors()

    def change(self, settings: Settings) -> None:
        """Report with other settings from now on."""
        with self._lock:
            self._sender.close()
            self._settings = settings
            self._sender = self._make(settings)
            self._sender.start()
