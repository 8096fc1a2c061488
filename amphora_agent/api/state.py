# SPDX-License-Identifier: Apache-2.0
"""GET /v2/info, GET and PUT /v2/bundle, GET /v2/configuration.

Invariant: the agent answers a PUT after the amphora serves the bundle, or after the rollback. An answer has names and
digests of files only, and no secret values.
"""

from __future__ import annotations

import socket
from typing import Any

from flask import Blueprint, request
from flask.typing import ResponseReturnValue

from amphora_agent import host_info
from amphora_agent.api.settings import LiveSettings
from amphora_agent.apply.applier import Applier
from amphora_agent.config import Settings
from amphora_agent.drift.report import DriftReport
from amphora_agent.errors import AgentError
from amphora_agent.haproxy import config_file
from amphora_agent.keepalived.vrrp_state import VrrpState
from amphora_agent.log_forwarder.daemon import LogForwarding
from amphora_agent.network import interfaces
from amphora_agent.network.namespace import Namespace
from amphora_agent.paths import Paths, read_if_exists
from amphora_agent.redaction import redacted
from amphora_agent.tls_identity import Identity
from amphora_agent.version import agent_version

CAPABILITIES = [
    "bundle-1", "heartbeat-1", "haproxy-reload", "haproxy-runtime", "vrrp", "certificate", "audit", "configuration",
    "settings", "logs",
]  # fmt: skip


def blueprint(
    settings: Settings,
    paths: Paths,
    applier: Applier,
    inner: Namespace,
    vrrp_state: VrrpState,
    identity: Identity,
    drift: DriftReport,
    live: LiveSettings,
    forwarding: LogForwarding,
) -> Blueprint:
    """Return the routes."""
    routes = Blueprint("state", __name__)

    @routes.get("/v2/info")
    def get_info() -> ResponseReturnValue:
        shown = identity.certificate()
        return {
            "amphora_id": str(settings.amphora_id),
            "agent_version": agent_version(),
            "haproxy_version": host_info.program_version("haproxy"),
            "keepalived_version": host_info.program_version("keepalived"),
            "hostname": socket.gethostname(),
            "generation": applier.generation,
            "certificate_expires_at": shown.expires_at if shown is not None else None,
            "holds_vip": vrrp_state.holds_vip,
            "changes": applier.change_counts(),
            "drift": drift.document(),
            "settings_digest": live.current().digest,
            "logs": forwarding.status(),
            "capabilities": CAPABILITIES,
        }

    @routes.put("/v2/bundle")
    def put_bundle() -> ResponseReturnValue:
        with applier.priority.changing():
            return applier.apply_body(request.get_data()).document()

    @routes.get("/v2/bundle")
    def get_bundle() -> ResponseReturnValue:
        confirmed, lost = applier.confirmed, applier.lost
        return {
            "generation": applier.generation,
            "applied_at": confirmed.applied_at if confirmed is not None else None,
            "digest": confirmed.digest if confirmed is not None else None,
            "lost_generation": lost.bundle.generation if lost is not None else None,
            "settings_digest": live.current().digest,
            "log_lines": forwarding.line_counts(),
        }

    @routes.get("/v2/configuration")
    def get_configuration() -> ResponseReturnValue:
        confirmed = applier.confirmed
        content = read_if_exists(paths.configuration, "replace")
        document = {} if confirmed is None else confirmed.bundle.to_document()
        document.pop("haproxy", None)
        return {
            "generation": applier.generation,
            "digest": confirmed.digest if confirmed is not None else None,
            "haproxy": None if content is None else redacted(config_file.read(content).text, ()),
            "bundle": document if confirmed is not None else None,
            "interfaces": _interfaces(inner),
            "drift": drift.document(),
        }

    return routes


def _interfaces(inner: Namespace) -> Any:
    try:
        with interfaces.kernel_errors():
            return interfaces.describe(inner)
    except AgentError as error:
        return {"error": str(error)}
