# SPDX-License-Identifier: Apache-2.0
"""Run daemons.

Invariant: the agent never is the parent of a daemon, so its own death ends nothing.
"""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from amphora_agent.errors import ServiceError, SettingsError
from amphora_agent.paths import Paths
from amphora_agent.services.sd_notify import NOTHING, Inheritance

ANSWER_SECONDS = 10.0
_MOST_KEPT, _LARGEST_LIST = 64, 65536


@dataclass(frozen=True)
class ServiceStatus:
    """What is known of a daemon. ``pid`` is None while it does not run."""

    pid: int | None
    starts: int
    last_exit: int | None
    wanted: bool


@dataclass(frozen=True)
class Probe:
    """A question on a daemon's Unix socket; times are in seconds.

    It is asked every ``interval``; a daemon that neither answers for ``patience`` nor does anything meanwhile is
    frozen.
    """

    socket: Path
    question: str
    interval: float
    patience: float


@dataclass(frozen=True)
class Care:
    """What a service manager does for a daemon besides running it.

    ``health`` is a file that says 0 while the daemon serves, or is not wanted, and 1 from the moment at which it died
    or froze until it answers again; without a ``probe`` a daemon that runs is taken to serve. ``restart_delay``
    (seconds) is waited before a daemon that died is started again. ``leftovers`` are files that are removed before each
    start.
    """

    health: Path | None = None
    probe: Probe | None = None
    restart_delay: float = 0.0
    leftovers: tuple[Path, ...] = ()

    def document(self) -> dict[str, Any]:
        """For the supervisor."""
        probe = self.probe
        return {
            "health": None if self.health is None else str(self.health),
            "probe": None if probe is None else {**asdict(probe), "socket": str(probe.socket)},
            "restart_delay": self.restart_delay,
            "leftovers": [str(path) for path in self.leftovers],
        }


NO_CARE = Care()


class Services(Protocol):
    """What can be asked of whoever runs the daemons. Every method raises `ServiceError`."""

    def start(self, name: str, argv: Sequence[str], *, inner: bool, care: Care = NO_CARE) -> ServiceStatus:
        """Run a daemon and keep it running; if it runs already with these arguments, only the care changes."""

    def stop(self, name: str, *, missed: bool = False) -> None:
        """End a daemon and return when it has ended; no error if it does not run.

        Args:
            missed: it would be wanted, but is not fit to run; its health file says so.
        """

    def dismiss(self, name: str) -> None:
        """Let a daemon end by itself: that it does so is no fault, and it is not started again."""

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a daemon."""

    def status(self, name: str) -> ServiceStatus | None:
        """The daemon's status, or None if it was never started."""

    def log(self, name: str) -> list[str]:
        """The last lines it said."""

    def keep(self, name: str, descriptor: int) -> None:
        """Keep a copy of an open file under a name, while there is no agent too."""

    def kept(self) -> dict[str, int]:
        """New copies of all that is kept, by name."""

    def drop(self, name: str) -> None:
        """Close what is kept under a name; no error if there is nothing."""


class Supervisor:
    """The supervisor of an amphora made of namespaces, over its control socket."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def start(self, name: str, argv: Sequence[str], *, inner: bool, care: Care = NO_CARE) -> ServiceStatus:
        request = {
            "op": "start",
            "name": name,
            "argv": list(argv),
            "inner": inner,
            "restart": True,
            "care": care.document(),
        }
        return _status(self._call(f"start {name}", request))

    def stop(self, name: str, *, missed: bool = False) -> None:
        if self.status(name) is not None:
            self._call(f"stop {name}", {"op": "stop", "name": name, "missed": missed})

    def dismiss(self, name: str) -> None:
        self._call(f"dismiss {name}", {"op": "dismiss", "name": name})

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

    def keep(self, name: str, descriptor: int) -> None:
        self._call(f"have {name} kept", {"op": "keep", "name": name}, [descriptor])

    def drop(self, name: str) -> None:
        self._call(f"have {name} kept no longer", {"op": "drop", "name": name})

    def kept(self) -> dict[str, int]:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(ANSWER_SECONDS)
                connection.connect(str(self._path))
                connection.sendall(b'{"op": "kept"}\n')
                data, descriptors, *_ = socket.recv_fds(connection, _LARGEST_LIST, _MOST_KEPT, socket.MSG_CMSG_CLOEXEC)
                names = json.loads(data)["names"]
        except (OSError, ValueError, KeyError) as error:
            raise ServiceError("learn what is kept", f"the supervisor does not answer: {error}") from error
        return dict(zip(names, descriptors, strict=True))

    def _call(self, wanted: str, request: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(ANSWER_SECONDS)
                connection.connect(str(self._path))
                said = json.dumps(request).encode() + b"\n"
                if descriptors:
                    socket.send_fds(connection, [said], list(descriptors))
                else:
                    connection.sendall(said)
                with connection.makefile("rb") as lines:
                    answer: dict[str, Any] = json.loads(lines.readline())
        except (OSError, ValueError) as error:
            raise ServiceError(wanted, f"the supervisor does not answer: {error}") from error
        if not answer.get("ok"):
            raise ServiceError(wanted, str(answer.get("error", "the supervisor said no")))
        return answer


def _status(answer: dict[str, Any]) -> ServiceStatus:
    return ServiceStatus(answer["pid"], answer["starts"], answer["last_exit"], answer["wanted"])


def connect(kind: str, paths: Paths, inheritance: Inheritance = NOTHING) -> Services:
    """The service manager that agent.conf names.

    Args:
        inheritance: what whoever started the agent gave it.

    Raises:
        SettingsError: it is not one this agent can speak to.
    """
    if kind == "supervisor":
        return Supervisor(paths.supervisor_socket)
    if kind == "systemd":
        from amphora_agent.services.systemd import Systemd  # noqa: PLC0415 (it is made of what is defined above)

        return Systemd(paths, inheritance)
    raise SettingsError(
        f"run daemons through {kind!r}",
        "this agent speaks to systemd and to the supervisor only",
        "Set services = systemd in agent.conf; an amphora made of namespaces has services = supervisor.",
    )
