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

from amphora_agent import log_settings
from amphora_driver.secret import Secret

_LAST_PORT = 65535
_PORT = re.compile(r"[0-9]{1,10}")


class HeartbeatSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The health managers as address:port, and the interval of heartbeats in seconds."""

    targets: tuple[str, ...]
    interval: float


class LogTarget(msgspec.Struct, frozen=True):
    """One target of log lines.

    `authorization` is the value of an HTTP header. `client_certificate` has the certificate that amphorae show, its
    chain and its key in PEM. Both are empty for none.
    """

    url: str
    authorization: Secret = Secret(b"")
    client_certificate: Secret = Secret(b"")

    def to_document(self) -> dict[str, str]:
        """Return JSON values; without a client certificate, agents of earlier versions accept them."""
        shown = {"url": self.url, "authorization": self.authorization.reveal().decode()}
        certificate = self.client_certificate.reveal().decode()
        return {**shown, "client_certificate": certificate} if certificate else shown


class LogSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The log targets of an amphora, and the ids that its lines have.

    `authorities` has the CA certificates of the targets in PEM. `queue_bytes` limits the waiting lines of each target.
    The ids are empty for a warm spare.
    """

    admin: tuple[LogTarget, ...] = ()
    tenant: tuple[LogTarget, ...] = ()
    authorities: str = ""
    queue_bytes: int = log_settings.DEFAULT_QUEUE
    project_id: str = ""
    load_balancer_id: str = ""

    def to_document(self) -> dict[str, object]:
        document = {name: getattr(self, name) for name in self.__struct_fields__}
        for kind in ("admin", "tenant"):
            document[kind] = [one.to_document() for one in document[kind]]
        return document


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings that can change at run time; `audit_interval` is in seconds."""

    heartbeat: HeartbeatSettings
    audit_interval: float
    logs: LogSettings = LogSettings()

    def encode(self) -> bytes:
        """Return the document.

        Without log targets it has no logs, so that agents of earlier versions accept it.
        """
        document: dict[str, object] = {
            "heartbeat": msgspec.to_builtins(self.heartbeat),
            "audit_interval": self.audit_interval,
        }
        if self.logs.admin or self.logs.tenant:
            document["logs"] = self.logs.to_document()
        return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()

    @property
    def digest(self) -> str:
        """The SHA-256 of the document; an agent with these settings reports the same."""
        return hashlib.sha256(self.encode()).hexdigest()


def render_agent_settings(
    targets: Sequence[str], interval: float, audit_interval: float, logs: LogSettings | None = None
) -> AgentSettings:
    """Return the settings. Raises ValueError for a target without an IP address or a port."""
    heartbeat = HeartbeatSettings(targets=tuple(map(_canonical_target, targets)), interval=float(interval))
    return AgentSettings(heartbeat=heartbeat, audit_interval=float(audit_interval), logs=logs or LogSettings())


def render_log_settings(
    admin: Sequence[LogTarget],
    tenant: Sequence[LogTarget],
    authorities: str,
    queue_bytes: int,
    *,
    project_id: str = "",
    load_balancer_id: str = "",
) -> LogSettings:
    """Return log settings with canonical URLs, as an agent accepts them.

    Raises:
        ValueError: a target is invalid, is listed twice, or needs a CA certificate.
    """

    def canonical(targets: Sequence[LogTarget]) -> tuple[LogTarget, ...]:
        return tuple(msgspec.structs.replace(one, url=str(log_settings.parse_endpoint(one.url))) for one in targets)

    found = LogSettings(
        admin=canonical(admin),
        tenant=canonical(tenant),
        authorities=authorities,
        queue_bytes=queue_bytes,
        project_id=project_id,
        load_balancer_id=load_balancer_id,
    )
    log_settings.parse(found.to_document())
    return found


def _canonical_target(text: str) -> str:
    host, _, port = text.strip("'\" ").rpartition(":")
    if not _PORT.fullmatch(port) or not 0 < int(port) <= _LAST_PORT:
        raise ValueError(f"{text!r} does not end with a port from 1 to {_LAST_PORT}")
    address = str(ipaddress.ip_address(host.strip("[]")))
    return f"[{address}]:{int(port)}" if ":" in address else f"{address}:{int(port)}"
