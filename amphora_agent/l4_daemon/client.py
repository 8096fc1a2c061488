# SPDX-License-Identifier: Apache-2.0
"""The agent's side of the checker: start it when there are virtual servers, replace it when its code changed, ask it.

Invariant: the checker outlives the agent. Nothing here ends it but that nothing is wanted any more, or a change of how
it is started; the kernel forwards meanwhile. Where no virtual server was ever wanted there is no checker.
"""

from __future__ import annotations

import hashlib
import json
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from amphora_agent.errors import ConfigurationRefused, ServiceError, VirtualServersError
from amphora_agent.l4 import model
from amphora_agent.l4.model import VirtualServer
from amphora_agent.l4_daemon.code_version import version
from amphora_agent.paths import Paths
from amphora_agent.services.control import ServiceManager, ServicePolicy

_log = logging.getLogger(__name__)
SERVICE = "amphora-checker"
# Heartbeats wait for it, those of all listeners: what it said last is believed for longer (`stats/virtual`).
STATE_SECONDS = 0.3
ANSWER_SECONDS = 1.0
# To change the kernel's table takes milliseconds; on a machine that has much else to do, more.
SERVE_SECONDS = 60.0
# An emulated machine with other things to do took more than fifteen.
START_SECONDS = 60.0
_RESTART_DELAY = 0.1
_POLL_SECONDS = 0.02
_PIECE = 1 << 18
_GIVEN = ("active_connections", "total_connections", "bytes_in", "bytes_out")


@dataclass(frozen=True)
class Sums:
    """What one virtual server has counted since the amphora's kernel began."""

    total_connections: int
    bytes_in: int
    bytes_out: int
    request_errors: int


@dataclass(frozen=True)
class Pool:
    """The pool of a virtual server; ``members`` are their words, ``reasons`` why they are so.

    ``given`` is what they were given, where that was asked for.
    """

    id: str
    status: str
    members: dict[str, str]
    reasons: dict[str, str]
    weights: dict[str, int]
    given: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Listener:
    """One virtual server as the checker sees it."""

    status: str
    active_connections: int
    pool: Pool | None


@dataclass(frozen=True)
class State:
    """One answer of the checker's.

    ``sums`` are also of virtual servers that are wanted no longer; ``birth`` is the name of the counters' life, after
    which they begin at zero. ``flow_log`` is how many flows have a line in it, and how many have none, since the
    checker's process began.
    """

    digest: str | None
    birth: str
    error: str | None
    listeners: dict[str, Listener]
    sums: dict[str, Sums]
    flow_log: dict[str, int] = field(default_factory=dict)


def digest(servers: Sequence[VirtualServer], *, paired: bool = False) -> str:
    """SHA-256 of what is wanted, in hexadecimal."""
    document = {"paired": paired, "servers": model.document(servers)}
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


class Checker:
    """Whoever wants virtual servers served. Safe to use from several threads."""

    def __init__(self, paths: Paths, services: ServiceManager) -> None:
        self._paths = paths
        self._services = services
        self._lock = threading.Lock()
        self._version = version()
        # A lock of its own: who asks for them waits for no checker.
        self._words_lock = threading.Lock()
        self._last_words: State | None = None

    def check(self, servers: Sequence[VirtualServer]) -> None:
        """Ask whether these could be served; changes nothing.

        Raises:
            ConfigurationRefused: they cannot.
            VirtualServersError, ServiceError: nobody can tell.
        """
        if not servers:
            return
        with self._lock:
            self._ensure()
            self._ask({"op": "check", "servers": model.document(servers)}, SERVE_SECONDS)

    def serve(self, servers: Sequence[VirtualServer], *, paired: bool = False) -> None:
        """Have these served and no others; returns when it is so.

        Args:
            paired: the amphora has a partner.

        Raises:
            ConfigurationRefused, VirtualServersError, ServiceError: what was served before is still served.
        """
        wish = digest(servers, paired=paired)
        with self._lock:
            if not servers and not self._exists():
                return
            document = {"op": "serve", "digest": wish, "paired": paired, "servers": model.document(servers)}
            if not servers and not self._serves():
                # It may never have come up: then that is known at once. One that is busy with what failed is awaited.
                with suppress(VirtualServersError, ConfigurationRefused):
                    if (state := _state(self._ask(document, SERVE_SECONDS))).sums:
                        self._keep_words(state)
                self._end()
                return
            self._ensure()
            state = _state(self._ask(document, SERVE_SECONDS))
            if not servers:
                self._keep_words(state)
                self._end()

    def differs(self, servers: Sequence[VirtualServer], *, paired: bool = False) -> list[str]:
        """What is otherwise than `serve` would leave it, as sentences."""
        if not servers and not self._exists():
            return []
        document = {"op": "differs", "digest": digest(servers, paired=paired), "paired": paired}
        try:
            said = self._ask({**document, "servers": model.document(servers)}, SERVE_SECONDS)
            return [str(one) for one in said["differs"]]
        except (VirtualServersError, ConfigurationRefused) as error:
            return [f"the checker of UDP and SCTP listeners: {error.happened}"]

    def state(self, seconds: float = STATE_SECONDS, *, members: bool = False) -> State | None:
        """What is found and counted; None: nothing is wanted, or nobody answers for so long.

        Args:
            members: also what each member was given, which takes the checker longer.
        """
        if not self._paths.checker_socket.exists():
            return None
        try:
            return _state(self._ask({"op": "state", "members": members}, seconds))
        except (VirtualServersError, ConfigurationRefused):
            return None

    def last_words(self) -> State | None:
        """What was counted when the last virtual server was given up; it is told once. Waits for nobody."""
        with self._words_lock:
            said, self._last_words = self._last_words, None
            return said

    def _keep_words(self, said: State) -> None:
        with self._words_lock:
            self._last_words = said

    # -- the process ----------------------------------------------------------------------------------------

    def _exists(self) -> bool:
        """Whether there is, or should be, a checker."""
        if self._paths.checker_socket.exists() or self._paths.virtual_servers.exists():
            return True
        status = self._services.status(SERVICE)
        return status is not None and status.wanted

    def _serves(self) -> bool:
        """Whether the kernel may forward something that only a checker can take back."""
        try:
            return bool(json.loads(self._paths.virtual_servers.read_text(encoding="utf-8"))["servers"])
        except FileNotFoundError:
            return False
        except (OSError, ValueError, KeyError, TypeError):
            return True  # nobody can tell

    def _ensure(self) -> None:
        """Return when a checker answers that runs the code that is here.

        Raises:
            ServiceError, VirtualServersError: there is none.
        """
        self._start()
        present = self._await(None)
        if present != self._version:
            _log.info("The checker is replaced: it runs %s, this is %s", present, self._version)
            self._services.signal(SERVICE, signal.SIGHUP)
            self._await(self._version)

    def _start(self) -> None:
        script = str(Path(__file__).with_name("__main__.py"))
        argv = [sys.executable, "-I", "-S", script, str(self._paths.checker), str(self._paths.checker_socket)]
        policy = ServicePolicy(restart_delay=_RESTART_DELAY)
        # In a virtual machine systemd gives it to the checker's user.
        self._paths.checker.mkdir(mode=0o711, parents=True, exist_ok=True)
        try:
            self._services.start(SERVICE, argv, inner=True, policy=policy)
        except ServiceError:
            self._services.stop(SERVICE)  # another Python, other arguments: it cannot go on as it is
            self._services.start(SERVICE, argv, inner=True, policy=policy)

    def _await(self, version_wanted: str | None) -> str:
        """Ask for its version until it is this one; None: until there is an answer at all."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            with suppress(VirtualServersError):
                found = str(self._ask({"op": "version"}, ANSWER_SECONDS)["version"])
                if version_wanted in (None, found):
                    return found
            if time.monotonic() > deadline:
                said = self._services.log(SERVICE)
                why = said[-1] if said else f"no answer within {START_SECONDS:.0f} s"
                raise VirtualServersError("start the checker of UDP and SCTP listeners", why)
            time.sleep(_POLL_SECONDS)  # it announces itself to nobody

    def _end(self) -> None:
        """Nothing is wanted any more, and the kernel holds nothing of it."""
        self._services.stop(SERVICE)
        for path in (self._paths.checker_socket, self._paths.virtual_servers, self._paths.virtual_states):
            path.unlink(missing_ok=True)

    def _ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(seconds)
                connection.connect(str(self._paths.checker_socket))
                connection.sendall(json.dumps(question).encode() + b"\n")
                with connection.makefile("rb", _PIECE) as lines:
                    answer: dict[str, Any] = json.loads(lines.readline())
        except (OSError, ValueError) as error:
            raise VirtualServersError(
                f"have the checker do '{question['op']}'", f"it does not answer: {error or type(error).__name__}"
            ) from error
        if isinstance(said := answer.get("error"), dict):
            kind = ConfigurationRefused if said.get("refused") else VirtualServersError
            raise kind(said["wanted"], said["happened"], said["remedy"], object_id=said.get("object_id"))
        return answer


def _state(answer: dict[str, Any]) -> State:
    listeners, sums = {}, {name: _sums(found) for name, found in answer["former"].items()}
    for name, found in answer["servers"].items():
        pool = found["pool"]
        sums[name] = _sums(found)
        listeners[name] = Listener(
            found["status"], found["active_connections"], None if pool is None else _pool(pool, pool["members"])
        )
    logged = answer.get("flow_log", {})
    return State(answer["digest"], answer["birth"], answer["error"], listeners, sums, logged)


def _pool(found: dict[str, Any], members: dict[str, dict[str, Any]]) -> Pool:
    return Pool(
        id=found["id"],
        status=found["status"],
        members={name: one["status"] for name, one in members.items()},
        reasons={name: one["reason"] for name, one in members.items()},
        weights={name: one["weight"] for name, one in members.items()},
        given={name: {key: one[key] for key in _GIVEN} for name, one in members.items() if _GIVEN[0] in one},
    )


def _sums(found: dict[str, Any]) -> Sums:
    return Sums(found["total_connections"], found["bytes_in"], found["bytes_out"], found["request_errors"])
