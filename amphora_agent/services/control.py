# SPDX-License-Identifier: Apache-2.0
"""The interface of a service manager, which is the parent of all daemons instead of the agent."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from amphora_agent.services.health_file import Probe


@dataclass(frozen=True)
class ServiceStatus:
    """The status of a daemon: ``pid`` is None while it does not run, ``last_exit`` negative for a signal."""

    pid: int | None
    starts: int
    last_exit: int | None
    wanted: bool


@dataclass(frozen=True)
class ServicePolicy:
    """The supervision of a daemon.

    The file ``health`` holds 0 while the daemon serves or is not wanted, and 1 after the daemon exits or freezes.
    ``probe`` shows that the daemon serves; without it, a running daemon counts as serving. ``restart_delay`` is in
    seconds. ``leftovers`` are files that are removed before each start.
    """

    health: Path | None = None
    probe: Probe | None = None
    restart_delay: float = 0.0
    leftovers: tuple[Path, ...] = ()

    def document(self) -> dict[str, Any]:
        """Return the policy as JSON values for the supervisor."""
        paths = {"health": self.health and str(self.health), "leftovers": [str(path) for path in self.leftovers]}
        return {**asdict(self), **paths, "probe": None if self.probe is None else self.probe._asdict()}


DEFAULT_POLICY = ServicePolicy()


class ServiceManager(Protocol):
    """A service manager. Each method raises `ServiceError`."""

    def start(
        self, name: str, argv: Sequence[str], *, inner: bool, policy: ServicePolicy = DEFAULT_POLICY
    ) -> ServiceStatus:
        """Start a daemon and keep it running. For a running daemon only the policy changes."""

    def stop(self, name: str, *, missed: bool = False) -> None:
        """Stop a daemon and wait for its exit. The health file of a ``missed`` daemon holds 1."""

    def dismiss(self, name: str) -> None:
        """Do not restart a daemon that is about to exit; its exit is not a failure."""

    def signal(self, name: str, number: signal.Signals) -> None: ...

    def status(self, name: str) -> ServiceStatus | None:
        """Return the daemon's status; None if the daemon was never started."""

    def log(self, name: str) -> list[str]: ...

    def keep(self, name: str, descriptor: int) -> None:
        """Store a copy of an open file under a name. The copy survives the exit of the agent."""

    def kept(self) -> dict[str, int]:
        """Return new copies of all stored files, by name."""

    def drop(self, name: str) -> None:
        """Close the file that is stored under a name; no error without such a file."""
