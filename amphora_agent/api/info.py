# SPDX-License-Identifier: Apache-2.0
"""GET /v2/info: versions, generation, certificate and capabilities of this amphora.

Invariant: the version of a program comes from the program. It is read once, because it does not change while the agent
runs.
"""

from __future__ import annotations

import re
import socket
import subprocess
from functools import cache

from flask import Blueprint
from flask.typing import ResponseReturnValue

from amphora_agent.apply.applier import Applier
from amphora_agent.config import Settings
from amphora_agent.drift.report import DriftReport
from amphora_agent.keepalived.vrrp_state import VrrpState
from amphora_agent.tls_identity import Identity
from amphora_agent.version import agent_version

CAPABILITIES = [
    "bundle-1",
    "heartbeat-1",
    "haproxy-reload",
    "haproxy-runtime",
    "vrrp",
    "certificate",
    "audit",
    "configuration",
]


def blueprint(
    settings: Settings, applier: Applier, vrrp_state: VrrpState, identity: Identity, drift: DriftReport
) -> Blueprint:
    """Return the route."""
    routes = Blueprint("info", __name__)

    @routes.get("/v2/info")
    def get_info() -> ResponseReturnValue:
        shown = identity.certificate()
        return {
            "amphora_id": str(settings.amphora_id),
            "agent_version": agent_version(),
            "haproxy_version": program_version("haproxy"),
            "keepalived_version": program_version("keepalived"),
            "hostname": socket.gethostname(),
            "generation": applier.generation,
            "certificate_expires_at": shown.expires_at if shown is not None else None,
            "holds_vip": vrrp_state.holds_vip,
            "changes": applier.change_counts(),
            "drift": drift.document(),
            "capabilities": CAPABILITIES,
        }

    return routes


@cache
def program_version(program: str) -> str | None:
    """Return the version that a program reports; None if it is not installed."""
    try:
        result = subprocess.run([program, "-v"], capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"\bv?(\d+\.\d+\.\d+\S*)", result.stdout + result.stderr)
    return found.group(1) if found else None
