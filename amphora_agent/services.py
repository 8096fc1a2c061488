# SPDX-License-Identifier: Apache-2.0
"""Run daemons.

Invariant: the agent never is the parent of a daemon, so its own death ends nothing.
"""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from amphora_agent.errors import ServiceError, SettingsError
from amphora_agent.paths import Paths

ANSWER_SECONDS = 10.0


@dataclass(frozen=True)
class ServiceStatus:
    """What is known of a daemon. ``pid`` is None while it does not run."""

    pid: int | None
    starts: int
    last_exit: int | None
    wanted: bool


class Services(Protocol):
    """What can be asked of whoever runs the daemons. Every method raises `ServiceError`."""

    def start(self, name: str, argv: Sequence[str], *, inner: bool) -> ServiceStatus:
        """Run a daemon and keep it running; no error if it runs already with these arguments."""

    def stop(self, name: str) -> None:
        """End a daemon and return when it has ended; no error if it does not run."""

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a daemon."""

    def status(self, name: str) -> ServiceStatus | None:
        """The daemon's status, or None if it was never started."""

    def log(self, name: str) -> list[str]:
        """The last lines it said."""


class Supervisor:
    """The supervisor of an amphora made of namespaces, over its control socket."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def start(self, name: str, argv: Sequence[str], *, inner: bool) -> ServiceStatus:
        request = {"op": "start", "name": name, "argv": list(argv), "inner": inner, "restart": True}
        return _status(self._call(f"start {name}", request))

    def stop(self, name: str) -> None:
        if self.status(name) is not None:
            self._call(f"stop {name}", {"op": "stop", "name": name})

    def signal(self, name: str, number: signal.Signals) -> None:
        self._call(f"send {number.name} to {name}", {"op": "signal", "name": name, "signal": int(number)})

    def status(self, name: str) -> ServiceStatus | None:
        answer = self._call(f"ask for {name}", {"op": "status", "name": name})
        found = answer["services"].get(name)
        return None if found is None else _status(found)

    def log(self, name: str) -> list[str]:
        if self.status(name) is None:
            return []
        return [str(line) for line in self._call(f"read {name}'s log", {"op": "log", "name": name})["lines"]]

    def _call(self, wanted: str, request: dict[str, Any]) -> dict[str, Any]:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(ANSWER_SECONDS)
                connection.connect(str(self._path))
                connection.sendall(json.dumps(request).encode() + b"\n")
                with connection.makefile("rb") as lines:
                    answer: dict[str, Any] = json.loads(lines.readline())
        except (OSError, ValueError) as error:
            raise ServiceError(wanted, f"the supervisor does not answer: {error}") from error
        if not answer.get("ok"):
            raise ServiceError(wanted, str(answer.get("error", "the supervisor said no")))
        return answer


def _status(answer: dict[str, Any]) -> ServiceStatus:
    return ServiceStatus(answer["pid"], answer["starts"], answer["last_exit"], answer["wanted"])


def connect(kind: str, paths: Paths) -> Services:
    """The service manager that agent.conf names.

    Raises:
        SettingsError: it is not one this agent can speak to.
    """
    if kind == "supervisor":
        return Supervisor(paths.supervisor_socket)
    raise SettingsError(
        f"run daemons through {kind!r}",
        "this agent speaks to the supervisor only",
        "Set services = supervisor in agent.conf; systemd is not implemented yet.",
    )
