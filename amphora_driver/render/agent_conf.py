# SPDX-License-Identifier: Apache-2.0
"""Renders agent.conf, the file that an amphora's agent reads at its start."""

from __future__ import annotations

from collections.abc import Sequence

_AGENT_CONF = """\
[agent]
amphora_id = {amphora_id}
bind_address = {{management_address}}
bind_port = {port}
services = {services}

[heartbeat]
interval = {interval:g}
targets = {targets}

[audit]
interval = {audit_interval:g}
"""


def render_agent_conf(
    amphora_id: str,
    *,
    port: int,
    services: str,
    heartbeat_interval: float,
    heartbeat_targets: Sequence[str],
    audit_interval: float,
) -> str:
    """Return the content of agent.conf. The compute backend fills in `{management_address}`."""
    return _AGENT_CONF.format(
        amphora_id=amphora_id,
        port=port,
        services=services,
        interval=heartbeat_interval,
        targets=", ".join(heartbeat_targets),
        audit_interval=audit_interval,
    )
