# SPDX-License-Identifier: Apache-2.0
"""The agent's side of the responder: start it, replace it when its code changed, tell it whom to ping.

Invariant: the responder outlives the agent. Nothing here ends it but a change of how it is started; an agent
that begins, or knows nothing yet, leaves it what it has.
"""

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
from amphora_agent.responder import http_server, ping_targets
from amphora_agent.responder.code_version import version
from amphora_agent.services.control import ServiceManager

_log = logging.getLogger(__name__)
SERVICE = "amphora-responder"
ANSWER_SECONDS = 1.0
# Its predecessor may have to tell scrapes to their ends first.
REPLACEMENT_SECONDS = 15.0
_RETRY_SECONDS = 5.0
_POLL_SECONDS = 0.02


class Launcher:
    """Sees to it that there is a responder."""

    def __init__(self, paths: Paths, services: ServiceManager, inner: Namespace, port: int) -> None:
        self._paths = paths
        self._services = services
        self._inner = inner
        self._port = port
        self._told: str | None = None
        self._ready = threading.Event()

    def tell(self, pings: Mapping[str, object]) -> None:
        """Have these members pinged from now on, and no others.

        Raises:
            OSError: there is no room for the file.
        """
        text = ping_targets.text_of(pings)
        if text != self._told:
            write_atomically(self._paths.pings, text, durable=False, mode=0o644)  # the responder is a user of its own
            self._told = text

    def start(self) -> None:
        """Begin to see to it, in a thread of its own."""
        threading.Thread(target=self._keep_trying, name="responder", daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Wait until it answers. Before that, HAProxy would take pinged members for down."""
        return self._ready.wait(seconds)

    def _keep_trying(self) -> None:
        while True:
            try:
                self.ensure()
            except AgentError as error:
                _log.warning("%s", error)
                time.sleep(_RETRY_SECONDS)
            else:
                return

    def ensure(self) -> None:
        """Return when a responder answers that runs the code that is here.

        Raises:
            AgentError: there is none.
        """
        wanted = version()
        self._start()
        present = self._await(None)
        self._ready.set()
        if present != wanted:
            _log.info("The responder is replaced: it runs %s, this is %s", present, wanted)
            self._services.signal(SERVICE, signal.SIGHUP)
            self._await(wanted)

    def _start(self) -> None:
        script = str(Path(http_server.__file__).with_name("__main__.py"))
        words = [str(self._port), *map(str, (self._paths.stats_socket, self._paths.pings, self._paths.earlier))]
        argv = [sys.executable, "-I", "-S", script, *words]
        try:
            self._services.start(SERVICE, argv, inner=True)
        except ServiceError:
            self._services.stop(SERVICE)  # another Python, or another place: no way to go on with what is there
            self._services.start(SERVICE, argv, inner=True)

    def _await(self, wanted: str | None) -> str:
        """Ask for its version until it is this one; None: until there is an answer at all."""
        deadline = time.monotonic() + REPLACEMENT_SECONDS
        while True:
            found = self._inner.run(ask_version, self._port)
            if found is not None and wanted in (None, found):
                return found
            if time.monotonic() > deadline:
                said = self._services.log(SERVICE)
                why = said[-1] if said else f"no answer within {REPLACEMENT_SECONDS:.0f} s"
                raise ServiceError("start the responder", why, "Pinged members are taken for down without it.")
            time.sleep(_POLL_SECONDS)  # it announces itself to nobody


def ask_version(port: int) -> str | None:
    """Which code the responder runs, asked in its namespace; None if it does not answer."""
    connection = http.client.HTTPConnection(http_server.ADDRESS, port, timeout=ANSWER_SECONDS)
    with suppress(OSError, http.client.HTTPException):
        try:
            connection.request("GET", "/version")
            with connection.getresponse() as answer:
                return answer.read().decode("latin-1").strip() if answer.status == 200 else ""
        finally:
            connection.close()
    return None
