# SPDX-License-Identifier: Apache-2.0
"""What agents answer, as typed values (docs/agent-api.md).

Invariant: unknown keys are passed over, so that an agent of a newer version is understood.
"""

from __future__ import annotations

import datetime as dt
from typing import Annotated

import msgspec

Generation = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
"""What every database can hold, and go on counting from: an agent may say anything."""


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """What HAProxy itself says it serves: the ids of its listeners, and how many members."""

    listeners: tuple[str, ...] = ()
    members: int = 0


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle is served: `how` is start, unchanged, runtime, reload or stop, `reason` says why not less."""

    generation: Generation
    how: str
    reason: str = ""
    loaded: Loaded = Loaded()


class BundleState(msgspec.Struct, frozen=True, kw_only=True):
    """The last confirmed bundle; all None before the first one."""

    generation: Generation | None = None
    applied_at: dt.datetime | None = None
    digest: str | None = None


class Info(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent says about itself and its machine."""

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
    """What an agent says of its VIPs.

    `connections` are those that clients have to VIPs through this amphora; `draining` the seconds for which they may
    go on after the VIPs went, None when the last one has ended or that time is over.
    """

    holds_vip: bool | None = None
    connections: int = 0
    draining: float | None = None


class Renewed(msgspec.Struct, frozen=True, kw_only=True):
    """The certificate that an agent shows from now on; `fingerprint` is the SHA-256 of its DER in hexadecimal."""

    expires_at: dt.datetime
    fingerprint: str
