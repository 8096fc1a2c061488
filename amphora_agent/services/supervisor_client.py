# SPDX-License-Identifier: Apache-2.0
"""The client of the supervisor, the service manager of an amphora in namespaces."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from amphora_agent.errors import ServiceError
from amphora_agent.services.control import DEFAULT_POLICY, ServicePolicy, ServiceStatus

ANSWER_SECONDS = 10.0
_MOST_KEPT, _LARGEST_LIST = 64, 65536


class SupervisorClient:
    """A `ServiceManager` over the supervisor's control socket: one JSON line for each request and answer."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def start(
        self, name: str, argv: Sequence[str], *, inner: bool, policy: ServicePolicy = DEFAULT_POLICY
    ) -> ServiceStatus:
        request = {"op": "start", "name": name, "argv": list(argv), "inner": inner, "restart": True}
        return _status(self._call(f"start {name}", {**request, "policy": policy.document()}))

    def stop(self, name: str, *, missed: bool = False) -> None:
        if self.status(name) is not None:
            self._call(f"stop {name}", {"op": "stop", "name": name, "missed": missed})

    def dismiss(self, name: str) -> None:
        self._call(f"dismiss {name}", {"op": "dismiss", "name": name})

    def signal(self, name: str, number: signal.Signals) -> None:
        self._call(f"send {number.name} to {name}", {"op": "signal", "name": name, "signal": int(number)})

    def status(self, name: str) -> ServiceStatus | None:
        answer = self._call(f"read the status of {name}", {"op": "status", "name": name})
        found = answer["services"].get(name)
        return None if found is None else _status(found)

    def log(self, name: str) -> list[str]:
        if self.status(name) is None:
            return []
        return [str(line) for line in self._call(f"read the log of {name}", {"op": "log", "name": name})["lines"]]

    def keep(self, name: str, descriptor: int) -> None:
        self._call(f"store descriptor {name}", {"op": "keep", "name": name}, [descriptor])

    def drop(self, name: str) -> None:
        self._call(f"drop descriptor {name}", {"op": "drop", "name": name})

    def kept(self) -> dict[str, int]:
        answer, descriptors = self._exchange("read the stored descriptors", {"op": "kept"})
        return dict(zip(answer["names"], descriptors, strict=True))

    def _call(self, wanted: str, request: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        return self._exchange(wanted, request, descriptors)[0]

    def _exchange(
        self, wanted: str, request: dict[str, Any], sent: Sequence[int] = ()
    ) -> tuple[dict[str, Any], list[int]]:
        """Send a request with descriptors; returns the answer and the descriptors that came with it."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(ANSWER_SECONDS)
                connection.connect(str(self._path))
                line = json.dumps(request).encode() + b"\n"
                if sent:
                    socket.send_fds(connection, [line], list(sent))
                else:
                    connection.sendall(line)
                data, received, *_ = socket.recv_fds(connection, _LARGEST_LIST, _MOST_KEPT, socket.MSG_CMSG_CLOEXEC)
                with connection.makefile("rb") as lines:
                    answer: dict[str, Any] = json.loads(data if data.endswith(b"\n") else data + lines.readline())
        except (OSError, ValueError) as error:
            raise ServiceError(wanted, f"the supervisor does not answer: {error}") from error
        if not answer.get("ok"):
            raise ServiceError(wanted, str(answer.get("error", "the supervisor refused the request")))
        return answer, received


def _status(answer: dict[str, Any]) -> ServiceStatus:
    return ServiceStatus(answer["pid"], answer["starts"], answer["last_exit"], answer["wanted"])
