# SPDX-License-Identifier: Apache-2.0
"""Renders agent.conf, the file that an amphora's agent reads at its start."""

from __future__ import annotations

from amphora_driver.render.agent_settings import AgentSettings

_AGENT_CONF = """\
[agent]
amphora_id = {amphora_id}
bind_address = {{management_address}}
bind_port = {port}
services = {services}

[heartbeat]
interval = {interval}
targets = {targets}

[audit]
interval = {audit_interval}
"""


def render_agent_conf(amphora_id: str, *, port: int, services: str, settings: AgentSettings) -> str:
    """Return the content of agent.conf. The compute backend fills in `{management_address}`."""
    return _AGENT_CONF.format(
        amphora_id=amphora_id,
        port=port,
        services=services,
        interval=settings.heartbeat.interval,
        targets=", ".join(settings.heartbeat.targets),
        audit_interval=settings.audit_interval,
    )
