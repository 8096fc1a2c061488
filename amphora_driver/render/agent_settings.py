# SPDX-License-Identifier: Apache-2.0
"""Renders the settings that an agent receives at its boot and through PUT /v2/settings.

Invariant: equal settings have the same document and digest as in the agent (docs/reference/agent-api.md).
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
from collections.abc import Sequence

import msgspec

_LAST_PORT = 65535
_PORT = re.compile(r"[0-9]{1,10}")


class HeartbeatSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The health managers as address:port, and the interval of heartbeats in seconds."""

    targets: tuple[str, ...]
    interval: float


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings that can change at run time; `audit_interval` is in seconds."""

    heartbeat: HeartbeatSettings
    audit_interval: float

    def encode(self) -> bytes:
        return json.dumps(msgspec.to_builtins(self), sort_keys=True, separators=(",", ":")).encode()

    @property
    def digest(self) -> str:
        """The SHA-256 of the document; an agent with these settings reports the same."""
        return hashlib.sha256(self.encode()).hexdigest()


def render_agent_settings(targets: Sequence[str], interval: float, audit_interval: float) -> AgentSettings:
    """Return the settings. Raises ValueError for a target without an IP address or a port."""
    heartbeat = HeartbeatSettings(targets=tuple(map(_canonical_target, targets)), interval=float(interval))
    return AgentSettings(heartbeat=heartbeat, audit_interval=float(audit_interval))


def _canonical_target(text: str) -> str:
    host, _, port = text.strip("'\" ").rpartition(":")
    if not _PORT.fullmatch(port) or not 0 < int(port) <= _LAST_PORT:
        raise ValueError(f"{text!r} does not end with a port from 1 to {_LAST_PORT}")
    address = str(ipaddress.ip_address(host.strip("[]")))
    return f"[{address}]:{int(port)}" if ":" in address else f"{address}:{int(port)}"
