# SPDX-License-Identifier: Apache-2.0
"""The agent's side of the responder, which outlives the agent: start, replacement, ping targets."""

from __future__ import annotations

import http.client
import logging
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from amphora_agent.errors import AgentError, ServiceError
from amphora_agent.network.namespace import Namespace
from amphora_agent.paths import Paths, write_atomically
from amphora_agent.responder import ELSEWHERE, PACKAGES, http_server, ping_targets
from amphora_agent.services.control import ServiceManager
from amphora_agent.source_checksum import source_checksum

_log = logging.getLogger(__name__)
SERVICE = "amphora-responder"
ANSWER_SECONDS = 1.0
# Seconds to wait for the first answer of a new responder. The former responder first finishes its open scrapes.
REPLACEMENT_SECONDS = 15.0
_RETRY_SECONDS = 5.0
_POLL_SECONDS = 0.02


class ResponderDaemon:
    """Starts the responder and keeps its code current."""

    def __init__(self, paths: Paths, services: ServiceManager, inner: Namespace, port: int) -> None:
        self._paths = paths
        self._services = services
        self._inner = inner
        self._port = port
        self._written: str | None = None
        self._ready = threading.Event()

    def set_targets(self, pings: Mapping[str, object]) -> None:
        """Set the members to ping; raises OSError if the file cannot be written."""
        text = ping_targets.text_of(pings)
        if text != self._written:
            # The responder runs as another user and must read this file.
            write_atomically(self._paths.pings, text, durable=False, mode=0o644)
            self._written = text

    def start(self) -> None:
        """Start the responder in a thread, with retries."""
        threading.Thread(target=self._keep_trying, name="responder", daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Wait until the responder answers, because HAProxy would report pinged members as down before."""
        return self._ready.wait(seconds)

    def _keep_trying(self) -> None:
        while True:
            try:
                self.ensure()
            except AgentError as error:
                _log.warning(
                    "The agent gets no answer from the responder (for pings and metrics), and starts the responder "
                    "again in %.0f s: %s",
                    _RETRY_SECONDS,
                    error,
                )
                time.sleep(_RETRY_SECONDS)
            else:
                return

    def ensure(self) -> None:
        """Start the responder, replace one with other code, and wait for its answer; raises AgentError."""
        wanted = source_checksum(PACKAGES, ELSEWHERE)
        self._start()
        present = self._await(None)
        self._ready.set()
        if present != wanted:
            _log.info(
                "The agent replaces the running responder, because the responder runs code version %s, but the "
                "installed files have version %s",
                present,
                wanted,
            )
            self._services.signal(SERVICE, signal.SIGHUP)
            self._await(wanted)

    def _start(self) -> None:
        script = str(Path(http_server.__file__).with_name("__main__.py"))
        words = [str(self._port), *map(str, (self._paths.stats_socket, self._paths.pings, self._paths.earlier))]
        argv = [sys.executable, "-I", "-S", script, *words]
        try:
            self._services.start(SERVICE, argv, inner=True)
        except ServiceError:
            # An upgrade may change the path of Python or of the script. The service manager refuses other arguments for
            # a running process, so the agent first stops the responder.
            self._services.stop(SERVICE)
            self._services.start(SERVICE, argv, inner=True)

    def _await(self, wanted: str | None) -> str:
        """Poll the version until it is `wanted`; with None until any answer."""
        deadline = time.monotonic() + REPLACEMENT_SECONDS
        while True:
            found = self._inner.run(ask_version, self._port)
            if found is not None and wanted in (None, found):
                return found
            if time.monotonic() > deadline:
                said = self._services.log(SERVICE)
                why = said[-1] if said else f"no answer within {REPLACEMENT_SECONDS:.0f} s"
                remedy = "Without it, HAProxy reports members with PING monitors as down. See the responder's log."
                raise ServiceError("start the responder for pings and metrics", why, remedy)
            # The responder sends no notification when it is ready, so the agent polls it.
            time.sleep(_POLL_SECONDS)


def ask_version(port: int) -> str | None:
    """Return the version of the responder's code; None without an answer. Runs in its namespace."""
    connection = http.client.HTTPConnection(http_server.ADDRESS, port, timeout=ANSWER_SECONDS)
    with suppress(OSError, http.client.HTTPException):
        try:
            connection.request("GET", "/version")
            with connection.getresponse() as answer:
                return answer.read().decode("latin-1").strip() if answer.status == 200 else ""
        finally:
            connection.close()
    return None
