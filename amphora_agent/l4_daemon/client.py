# SPDX-License-Identifier: Apache-2.0
"""The agent's side of the L4 daemon: starts, replaces, and queries its process.

Invariant: the L4 daemon outlives the agent. The agent stops the L4 daemon only when no virtual server is wanted any
more, or when its command line changes; the kernel forwards meanwhile. Without a virtual server the agent never starts
the L4 daemon.
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
from amphora_agent.l4 import edits, model
from amphora_agent.l4.counters import SUMMED, Counters
from amphora_agent.l4.model import VirtualServer
from amphora_agent.l4_daemon import ELSEWHERE, PACKAGES
from amphora_agent.l4_nftables import limits
from amphora_agent.paths import Paths
from amphora_agent.services.control import ServiceManager, ServicePolicy
from amphora_agent.source_checksum import source_checksum

_log = logging.getLogger(__name__)
SERVICE = "amphora-checker"
# A heartbeat waits at most this number of seconds for the L4 daemon's state. After a time-out, the heartbeat contains
# the previous state (`stats.udp_stats`).
STATE_TIMEOUT_SECONDS = 0.3
ANSWER_TIMEOUT_SECONDS = 1.0
# Seconds to wait until the L4 daemon has changed the kernel's nftables table. The change takes milliseconds on an idle
# machine, but much longer on a busy one.
SERVE_TIMEOUT_SECONDS = 60.0
# Seconds to wait for the start of the L4 daemon, which took fifteen seconds on a busy emulated machine.
START_TIMEOUT_SECONDS = 60.0
_RESTART_DELAY = 0.1
_POLL_SECONDS = 0.02
_READ_BYTES = 1 << 18
_MEMBER_COUNTERS = ("active_connections", "total_connections", "bytes_in", "bytes_out")


@dataclass(frozen=True)
class PoolState:
    """A pool of a virtual server; ``reasons`` explain the latest change of the status words of members."""

    id: str
    status: str
    members: dict[str, str]
    reasons: dict[str, str]
    weights: dict[str, int]
    counters: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class ListenerState:
    """The state of one virtual server."""

    status: str
    active_connections: int
    pool: PoolState | None


@dataclass(frozen=True)
class CheckerState:
    """The state that the L4 daemon reports.

    ``sums`` include removed virtual servers. ``birth`` identifies the counters: with another value they began at zero.
    ``flow_log`` has the numbers of logged and lost flows since the start of the process.
    """

    digest: str | None
    birth: str
    error: str | None
    listeners: dict[str, ListenerState]
    sums: dict[str, Counters]
    flow_log: dict[str, int] = field(default_factory=dict)


_Desired = tuple[str, tuple[VirtualServer, ...]]


def _digest(servers: Sequence[VirtualServer], *, paired: bool) -> str:
    """Return the SHA-256 of a desired state in hexadecimal."""
    return hashlib.sha256(f"{paired} {model.to_json(servers)}".encode()).hexdigest()


class CheckerClient:
    """Controls and queries the L4 daemon. Safe to use from several threads."""

    def __init__(self, paths: Paths, services: ServiceManager) -> None:
        self._paths = paths
        self._services = services
        self._lock = threading.Lock()
        self._version = source_checksum(PACKAGES, ELSEWHERE)
        # The virtual servers that the L4 daemon has confirmed, with their digest. The next request contains only the
        # differences from them. None if they are unknown.
        self._served: _Desired | None = None
        # Last state of an ended L4 daemon. This state has a separate lock, because `_lock` is held during each request
        # to the daemon, and readers must not wait for a request.
        self._final_state_lock = threading.Lock()
        self._final_state: CheckerState | None = None

    def check_servers(self, servers: Sequence[VirtualServer]) -> None:
        """Raise ConfigurationRefused if virtual servers cannot be served; changes nothing."""
        if not servers:
            return
        with self._lock:
            self._ensure_running()
            limits.check_servers(servers)

    def serve(self, servers: Sequence[VirtualServer], *, paired: bool = False) -> None:
        """Serve exactly these virtual servers; returns when the kernel does.

        ``paired`` is whether the amphora has a partner. After a ConfigurationRefused, VirtualServersError or
        ServiceError, the previous virtual servers are still served.
        """
        with self._lock:
            if not servers and not self._exists():
                return
            desired = _digest(servers, paired=paired), tuple(servers)
            if not servers and not self._may_be_forwarding():
                # After a failed change, the L4 daemon may answer late, so the time-out is long. If no daemon runs, the
                # request fails at once.
                with suppress(VirtualServersError, ConfigurationRefused):
                    if (state := _parse_state(self._serve(desired, paired=paired))).sums:
                        self._keep_final_state(state)
                self._stop()
                return
            self._ensure_running()
            answer = self._serve(desired, paired=paired)
            if not servers:
                self._keep_final_state(_parse_state(answer))
                self._stop()

    def _serve(self, desired: _Desired, *, paired: bool) -> dict[str, Any]:
        """Request a desired state by its differences, or completely if the L4 daemon has another former state."""
        digest, servers = desired
        request: dict[str, Any] = {"op": "serve", "digest": digest, "paired": paired}
        known, self._served = self._served, None
        answer: dict[str, Any] = {"unknown": True}
        if known is not None:
            change = {"base": known[0], "change": edits.change_document(known[1], servers)}
            answer = self._request({**request, **change}, SERVE_TIMEOUT_SECONDS)
        if answer.get("unknown"):
            answer = self._request({**request, "servers": model.to_document(servers)}, SERVE_TIMEOUT_SECONDS)
        self._served = desired
        return answer

    def find_drift(self, servers: Sequence[VirtualServer], *, paired: bool = False) -> list[str]:
        """Return the differences from the state that `serve` would leave, as sentences."""
        if not servers and not self._exists():
            return []
        try:
            request = {"op": "differs", "digest": _digest(servers, paired=paired), "empty": not servers}
            answer = self._request(request, SERVE_TIMEOUT_SECONDS)
            return [str(one) for one in answer["differs"]]
        except (VirtualServersError, ConfigurationRefused) as error:
            return [f"the L4 daemon for UDP and SCTP listeners: {error.happened}"]

    def read_state(self, seconds: float = STATE_TIMEOUT_SECONDS, *, members: bool = False) -> CheckerState | None:
        """Return the state; None without an answer. Counters of ``members`` take longer."""
        if not self._paths.checker_socket.exists():
            return None
        try:
            return _parse_state(self._request({"op": "state", "members": members}, seconds))
        except (VirtualServersError, ConfigurationRefused):
            return None

    def take_final_state(self) -> CheckerState | None:
        """Return the state at the removal of the last virtual server, once. Does not wait for the L4 daemon."""
        with self._final_state_lock:
            state, self._final_state = self._final_state, None
            return state

    def _keep_final_state(self, state: CheckerState) -> None:
        with self._final_state_lock:
            self._final_state = state

    def _exists(self) -> bool:
        """Return whether an L4 daemon runs, or is wanted."""
        if self._paths.checker_socket.exists() or self._paths.virtual_servers.exists():
            return True
        status = self._services.status(SERVICE)
        return status is not None and status.wanted

    def _may_be_forwarding(self) -> bool:
        """Return whether the kernel may forward for virtual servers, so that an L4 daemon has to remove them."""
        try:
            return bool(json.loads(self._paths.virtual_servers.read_text(encoding="utf-8"))["servers"])
        except FileNotFoundError:
            return False
        except (OSError, ValueError, KeyError, TypeError):
            # An unreadable file does not show whether virtual servers exist. The agent assumes that they exist, so that
            # the L4 daemon removes their rules from the kernel.
            return True

    def _ensure_running(self) -> None:
        """Start the L4 daemon, or replace it if it runs other code; returns when the L4 daemon answers."""
        self._start()
        present = self._wait_for_version(None)
        if present != self._version:
            _log.info(
                "The agent replaces the running L4 daemon, because the daemon runs code version %s, but the installed "
                "sources have version %s",
                present,
                self._version,
            )
            self._services.signal(SERVICE, signal.SIGHUP)
            self._wait_for_version(self._version)

    def _start(self) -> None:
        script = str(Path(__file__).with_name("__main__.py"))
        argv = [sys.executable, "-I", "-S", script, str(self._paths.checker), str(self._paths.checker_socket)]
        policy = ServicePolicy(restart_delay=_RESTART_DELAY)
        self._paths.checker.mkdir(mode=0o711, parents=True, exist_ok=True)
        try:
            self._services.start(SERVICE, argv, inner=True, policy=policy)
        except ServiceError:
            # The service manager refuses to start a running daemon with another command line, so the agent stops the
            # daemon first.
            self._services.stop(SERVICE)
            self._services.start(SERVICE, argv, inner=True, policy=policy)

    def _wait_for_version(self, version_wanted: str | None) -> str:
        """Poll the version until it equals the wanted version; None accepts any. Returns the version."""
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while True:
            with suppress(VirtualServersError):
                found = str(self._request({"op": "version"}, ANSWER_TIMEOUT_SECONDS)["version"])
                if version_wanted in (None, found):
                    return found
            if time.monotonic() > deadline:
                lines = self._services.log(SERVICE)
                reason = lines[-1] if lines else f"no answer within {START_TIMEOUT_SECONDS:.0f} s"
                raise VirtualServersError("start the L4 daemon for UDP and SCTP listeners", reason)
            time.sleep(_POLL_SECONDS)

    def _stop(self) -> None:
        self._served = None
        self._services.stop(SERVICE)
        for path in (self._paths.checker_socket, self._paths.virtual_servers, self._paths.virtual_states):
            path.unlink(missing_ok=True)

    def _request(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(seconds)
                connection.connect(str(self._paths.checker_socket))
                connection.sendall(json.dumps(request).encode() + b"\n")
                with connection.makefile("rb", _READ_BYTES) as lines:
                    answer: dict[str, Any] = json.loads(lines.readline())
        except (OSError, ValueError) as error:
            raise VirtualServersError(
                f"send the request '{request['op']}' to the L4 daemon",
                f"the daemon does not answer: {error or type(error).__name__}",
            ) from error
        if isinstance(found := answer.get("error"), dict):
            kind = ConfigurationRefused if found.get("refused") else VirtualServersError
            raise kind(found["wanted"], found["happened"], found["remedy"], object_id=found.get("object_id"))
        return answer


def _parse_state(answer: dict[str, Any]) -> CheckerState:
    listeners, sums = {}, {name: _parse_totals(found) for name, found in answer["former"].items()}
    for name, found in answer["servers"].items():
        sums[name] = _parse_totals(found)
        pool = None if found["pool"] is None else _parse_pool(found["pool"])
        listeners[name] = ListenerState(found["status"], found["active_connections"], pool)
    logged = answer.get("flow_log", {})
    return CheckerState(answer["digest"], answer["birth"], answer["error"], listeners, sums, logged)


def _parse_pool(found: dict[str, Any]) -> PoolState:
    members = found["members"]
    keys = ("status", "reason", "weight")
    statuses, reasons, weights = ({name: one[key] for name, one in members.items()} for key in keys)
    counted = {name: one for name, one in members.items() if _MEMBER_COUNTERS[0] in one}
    counters = {name: {key: one[key] for key in _MEMBER_COUNTERS} for name, one in counted.items()}
    return PoolState(found["id"], found["status"], statuses, reasons, weights, counters)


def _parse_totals(found: dict[str, Any]) -> Counters:
    return Counters(**{name: found[name] for name in SUMMED})
