# SPDX-License-Identifier: Apache-2.0
"""The settings that a controller can change at run time (docs/reference/agent-api.md).

Invariant: these settings have the validation of agent.conf. A stored document replaces the values of agent.conf; an
unreadable one is ignored, so that it never prevents the start of the agent. The disk never has a secret of a log target
(authorization, client certificate with its key): after a reboot the digest differs, and a controller sends the settings
again. Only `stored` and `keep` do I/O.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass, replace
from typing import Any

from amphora_agent import log_settings
from amphora_agent.config import Settings, Target, check_interval, parse_target
from amphora_agent.errors import AgentError, MachineError, MalformedSettings
from amphora_agent.log_settings import NO_LOGS, LogSettings
from amphora_agent.paths import Paths, write_atomically

_log = logging.getLogger(__name__)
# Maximum size of a settings document in bytes. The largest valid document is smaller.
LARGEST = 512 * 1024
_ACTION = "read the settings"
HIDDEN = "***"


@dataclass(frozen=True)
class HeartbeatSettings:
    """The receivers of heartbeats, and the interval in seconds."""

    targets: tuple[Target, ...]
    interval: float


@dataclass(frozen=True)
class RuntimeSettings:
    """All settings that can change at run time; ``audit_interval`` is in seconds."""

    heartbeat: HeartbeatSettings
    audit_interval: float
    logs: LogSettings = NO_LOGS

    def to_document(self, *, hidden: str | None = None) -> dict[str, Any]:
        """Return JSON values; with ``hidden``, this word replaces each secret.

        Without log targets there is no key for logs, and the digest is that of earlier versions.
        """
        heartbeat = {"targets": [str(one) for one in self.heartbeat.targets], "interval": self.heartbeat.interval}
        logs = {"logs": self.logs.to_document(hidden=hidden)} if self.logs else {}
        return {"heartbeat": heartbeat, "audit_interval": self.audit_interval, **logs}

    @property
    def digest(self) -> str:
        """The SHA-256 of the document with sorted keys and without spaces, as in the controller."""
        text = json.dumps(self.to_document(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def applied_to(self, settings: Settings) -> Settings:
        """Return all settings of the agent with these values."""
        return replace(
            settings,
            targets=self.heartbeat.targets,
            interval=self.heartbeat.interval,
            audit_interval=self.audit_interval,
            logs=self.logs,
        )


def current(settings: Settings) -> RuntimeSettings:
    """Return the part of the settings that can change at run time."""
    return RuntimeSettings(
        HeartbeatSettings(settings.targets, settings.interval), settings.audit_interval, settings.logs
    )


def parse(body: bytes) -> RuntimeSettings:
    """Read a document. Raises MalformedSettings, which names the invalid value."""
    if len(body) > LARGEST:
        raise MalformedSettings(_ACTION, f"the document is longer than {LARGEST} bytes")
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedSettings(_ACTION, f"the document is not JSON: {error}") from error
    given = ("logs",) if isinstance(document, dict) and "logs" in document else ()
    found = _object(document, "the document", "heartbeat", "audit_interval", *given)
    heartbeat = _object(found["heartbeat"], "heartbeat", "targets", "interval")
    return RuntimeSettings(
        HeartbeatSettings(_targets(heartbeat["targets"]), _interval(heartbeat["interval"], "heartbeat.interval")),
        _interval(found["audit_interval"], "audit_interval"),
        _logs(found["logs"]) if given else NO_LOGS,
    )


def stored(settings: Settings, paths: Paths) -> Settings:
    """Return the settings with the values that a controller sent last."""
    for file in (paths.log_settings, paths.settings):
        try:
            return parse(file.read_bytes()).applied_to(settings)
        except FileNotFoundError:
            continue
        except (OSError, AgentError) as error:
            _log.error(
                "The agent ignores the stored settings in file %s, until a controller sends the settings again: %s",
                file.name,
                error,
            )
    return settings


def keep(found: RuntimeSettings, paths: Paths) -> None:
    """Store the settings for the next start of the agent.

    Raises MachineError. After a restart the agent can then have other settings than the controller, which sends them
    again.
    """
    try:
        write_atomically(paths.settings, json.dumps(found.to_document(hidden="")))
        if found.logs.has_secrets:
            write_atomically(paths.log_settings, json.dumps(found.to_document()), durable=False)
        else:
            paths.log_settings.unlink(missing_ok=True)
    except OSError as error:
        raise MachineError("store the settings", str(error), "The former settings stay in use.") from error


def _object(value: Any, name: str, *keys: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise MalformedSettings(_ACTION, f"{name} is not an object")
    if value.keys() != set(keys):
        raise MalformedSettings(_ACTION, f"{name} has other keys than {', '.join(keys)}")
    return value


def _logs(value: Any) -> LogSettings:
    try:
        found = log_settings.parse(value)
    except ValueError as error:
        raise MalformedSettings(_ACTION, str(error)) from error
    if not found:
        raise MalformedSettings(_ACTION, "logs has no target; without a target the document has no logs")
    return found


def _targets(value: Any) -> tuple[Target, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise MalformedSettings(_ACTION, "heartbeat.targets is not a list of strings")
    try:
        return tuple(parse_target(one) for one in value)
    except ValueError as error:
        raise MalformedSettings(_ACTION, f"heartbeat.targets: {error}") from error


def _interval(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise MalformedSettings(_ACTION, f"{name} is not a number")
    try:
        return check_interval(float(value))
    except (ValueError, OverflowError) as error:
        raise MalformedSettings(_ACTION, f"{name}: {error}") from error
