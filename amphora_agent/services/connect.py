# SPDX-License-Identifier: Apache-2.0
"""The service manager of this amphora."""

from __future__ import annotations

from amphora_agent.errors import SettingsError
from amphora_agent.paths import Paths
from amphora_agent.services.control import ServiceManager
from amphora_agent.services.sd_notify import NOTHING_INHERITED, Inherited
from amphora_agent.services.supervisor_client import SupervisorClient
from amphora_agent.services.systemd import Systemd


def connect_service_manager(kind: str, paths: Paths, inherited: Inherited = NOTHING_INHERITED) -> ServiceManager:
    """Return the service manager of agent.conf: ``systemd`` or ``supervisor``; raises SettingsError."""
    if kind == "supervisor":
        return SupervisorClient(paths.supervisor_socket)
    if kind == "systemd":
        return Systemd(paths, inherited)
    raise SettingsError(
        f"run daemons through {kind!r}",
        "this agent supports systemd and supervisor only",
        "Set services = systemd in agent.conf; an amphora in namespaces has services = supervisor.",
    )
