# SPDX-License-Identifier: Apache-2.0
"""The agent's side of the log forwarder: starts, configures and stops its process.

Invariant: the log forwarder runs only while a target exists, and outlives the agent. Settings with secrets pass through
a socket only. A log forwarder that restarts gets targets and input socket again within `POLL_SECONDS`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from amphora_agent.errors import AgentError, ServiceError
from amphora_agent.log_forwarder import ELSEWHERE, PACKAGES, forwarder
from amphora_agent.log_settings import LOG_ADDRESS, LOG_PORT, NO_LOGS, LogSettings
from amphora_agent.network.namespace import Namespace
from amphora_agent.paths import Paths
from amphora_agent.services.control import ServiceManager
from amphora_agent.source_checksum import source_checksum

_log = logging.getLogger(__name__)
SERVICE = "amphora-log-forwarder"
POLL_SECONDS = 5.0
_ANSWER_SECONDS = 3.0
_START_SECONDS = 15.0
_RETRY_SECONDS = 0.05
# Size in bytes of the receive buffer for lines to the log forwarder. The kernel drops lines that do not fit, and counts
# them.
_INPUT_BYTES = 8 << 20
_SO_RCVBUFFORCE = 33
# Maximum number of messages that wait at a local datagram socket. The kernel's default of 10 would lose lines of a
# burst.
_QUEUE_SYSCTL, _QUEUE_MESSAGES = Path("/proc/sys/net/unix/max_dgram_qlen"), 2048


class LogForwarding:
    """Keeps the log forwarder in the state of the wanted settings, in a thread."""

    def __init__(self, paths: Paths, services: ServiceManager, inner: Namespace, amphora_id: str) -> None:
        self._paths = paths
        self._services = services
        self._inner = inner
        self._amphora_id = amphora_id
        self._version = source_checksum(PACKAGES, ELSEWHERE)
        self._wanted = NO_LOGS
        self._wakeup = threading.Event()
        self._status: dict[str, Any] | None = None
        self._error = ""

    def start(self, settings: LogSettings) -> None:
        self._wanted = settings
        if settings:
            # At its start, the agent reads the counters of a running log forwarder. Without these counters, a
            # controller would count all earlier lines again.
            with suppress(AgentError, OSError, ValueError):
                found = self._ask_once({"op": "status"}, None)
                # A log forwarder of another version is replaced, and its counters are not used.
                self._status = found if found.get("version") == self._version else None
        threading.Thread(target=self._run, name="log-forwarding", daemon=True).start()

    def use(self, settings: LogSettings) -> None:
        """Use other targets soon; does not wait."""
        self._wanted = settings
        self._wakeup.set()

    def status(self) -> dict[str, Any] | None:
        """Return the last counters of the log forwarder, and the agent's error; None without targets."""
        if not self._wanted:
            return None
        counters = self._status or {}
        shown = {name: counters.get(name) for name in ("received", "lost", "admin", "tenant")}
        return {**shown, "error": self._error}

    def line_counts(self) -> dict[str, int]:
        """Return the sums of sent and lost lines since the start of the log forwarder, also of former targets."""
        counters = self._status
        if counters is None:
            return {"sent": 0, "lost": 0}
        former, targets = counters["former"], (*counters["admin"], *counters["tenant"])
        lost = counters["lost"] + sum(one["dropped"] + one["uncertain"] for one in targets)
        return {"sent": former["sent"] + sum(one["sent"] for one in targets), "lost": former["lost"] + lost}

    def _run(self) -> None:
        while True:
            try:
                self.converge()
            except (AgentError, OSError, ValueError) as error:
                if str(error) != self._error:
                    _log.warning(
                        "The agent cannot start or configure the log forwarder, and tries again after %.0f s: %s",
                        POLL_SECONDS,
                        error,
                    )
                self._error = str(error)
            else:
                self._error = ""
            # Without targets, the log forwarder is stopped, and the thread waits without a time-out.
            self._wakeup.wait(POLL_SECONDS if self._wanted or self._error else None)
            self._wakeup.clear()

    def converge(self) -> None:
        """Start, configure or stop the log forwarder if necessary. Raises AgentError, OSError and ValueError."""
        wanted = self._wanted
        if not wanted:
            self._stop()
            return
        self._ensure_running()
        body = {
            "op": "configure",
            "logs": wanted.to_document(),
            "hostname": socket.gethostname(),
            "amphora_id": self._amphora_id,
        }
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        status = self._ask({"op": "status"})
        if status["version"] != self._version:
            _log.info("The agent replaces the log forwarder, because the code of the agent has changed")
            self._services.stop(SERVICE)
            self._ensure_running()
            status = self._ask({"op": "status"})
        if status["digest"] != digest or not status["has_input"]:
            opened = None if status["has_input"] else self._inner.run(open_input)
            try:
                status = self._ask({**body, "digest": digest}, opened)
            finally:
                if opened is not None:
                    opened.close()
        self._status = status

    def _stop(self) -> None:
        self._status = None
        present = self._services.status(SERVICE)
        if present is not None and present.wanted:
            self._services.stop(SERVICE)

    def _ensure_running(self) -> None:
        present = self._services.status(SERVICE)
        if present is not None and present.pid is not None and present.wanted:
            return
        directory = self._paths.log_forwarder
        directory.mkdir(mode=0o711, parents=True, exist_ok=True)
        with suppress(OSError):
            if int(_QUEUE_SYSCTL.read_text()) < _QUEUE_MESSAGES:
                _QUEUE_SYSCTL.write_text(str(_QUEUE_MESSAGES))
        script = str(Path(forwarder.__file__).with_name("__main__.py"))
        argv = [sys.executable, "-I", "-S", script, str(directory)]
        try:
            self._services.start(SERVICE, argv, inner=False)
        except ServiceError:
            # A change of Python's search path changes the arguments. The service manager refuses other arguments for a
            # running process, so the agent stops the process first.
            self._services.stop(SERVICE)
            self._services.start(SERVICE, argv, inner=False)

    def _ask(self, request: dict[str, Any], sent: socket.socket | None = None) -> dict[str, Any]:
        """Send a request, after the start of the process if necessary."""
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                return self._ask_once(request, sent)
            except (FileNotFoundError, ConnectionError) as error:
                if time.monotonic() > deadline:
                    raise ServiceError("configure the log forwarder", f"it does not answer: {error}") from error
                # The log forwarder sends no notification when its socket exists, so the agent polls it.
                time.sleep(_RETRY_SECONDS)

    def _ask_once(self, request: dict[str, Any], sent: socket.socket | None) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_ANSWER_SECONDS)
            connection.connect(os.fspath(self._paths.log_forwarder / "control.sock"))
            data = json.dumps(request).encode() + b"\n"
            if sent is not None:
                data = data[socket.send_fds(connection, [data], [sent.fileno()]) :]
            connection.sendall(data)
            received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        if not received:
            raise ConnectionResetError("the connection ended without an answer")
        answer: dict[str, Any] = json.loads(received)
        if "error" in answer:
            raise ServiceError("configure the log forwarder", str(answer["error"]))
        return answer


def open_input() -> socket.socket:
    """Return the socket that receives the lines of HAProxy and of the L4 daemon. Runs in their namespace."""
    opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    try:
        opened.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _INPUT_BYTES)
        opened.bind((LOG_ADDRESS, LOG_PORT))
    except OSError:
        opened.close()
        raise
    return opened
