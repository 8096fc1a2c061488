# SPDX-License-Identifier: Apache-2.0
"""Typed responses of agents (docs/reference/agent-api.md).

Invariant: unknown keys are ignored, for compatibility with newer agents.
"""

from __future__ import annotations

import datetime as dt
from typing import Annotated

import msgspec

Generation = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
"""A generation within the range of every database. The agent's value is untrusted."""


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration that HAProxy reports: ids of its listeners, and number of members."""

    listeners: tuple[str, ...] = ()
    members: int = 0


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a push. `how` is start, unchanged, runtime, reload or stop; `reason` explains it."""

    generation: Generation
    how: str
    reason: str = ""
    loaded: Loaded = Loaded()


class LogLines(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of forwarded log lines since the start of the log forwarder, over all targets."""

    sent: int = 0
    lost: int = 0


class BundleState(msgspec.Struct, frozen=True, kw_only=True):
    """The last confirmed bundle. Its fields are None before the first bundle.

    Older agents report no digest of their settings. Agents without `log_lines` refuse settings with log targets.
    """

    generation: Generation | None = None
    applied_at: dt.datetime | None = None
    digest: str | None = None
    settings_digest: str | None = None
    log_lines: LogLines | None = None


class SettingsState(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that an agent uses."""

    digest: str


class Info(msgspec.Struct, frozen=True, kw_only=True):
    """Versions and state of an agent and its machine."""

    amphora_id: str
    agent_version: str
    haproxy_version: str | None = None
    keepalived_version: str | None = None
    hostname: str | None = None
    generation: Generation | None = None
    holds_vip: bool | None = None
    certificate_expires_at: dt.datetime | None = None
    capabilities: tuple[str, ...] = ()


class Vrrp(msgspec.Struct, frozen=True, kw_only=True):
    """VIP state of an amphora. `draining` is the rest of the drain time-out in seconds; None at its end."""

    holds_vip: bool | None = None
    connections: int = 0
    draining: float | None = None


class Renewed(msgspec.Struct, frozen=True, kw_only=True):
    """The new certificate of an agent. Its `fingerprint` is the SHA-256 of its DER in hexadecimal."""

    expires_at: dt.datetime
    fingerprint: str
