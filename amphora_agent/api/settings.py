# SPDX-License-Identifier: Apache-2.0
"""GET and PUT /v2/settings: heartbeat targets, intervals and log targets, without a restart.

Invariant: the agent stores settings before it uses them. A refused request changes nothing. No answer has a secret.
"""

from __future__ import annotations

from typing import Any

from flask import Blueprint, request
from flask.typing import ResponseReturnValue

from amphora_agent import runtime_settings
from amphora_agent.config import Settings
from amphora_agent.drift.repair import DriftRepair
from amphora_agent.errors import SettingsRefused
from amphora_agent.log_forwarder.daemon import LogForwarding
from amphora_agent.paths import Paths
from amphora_agent.runtime_settings import RuntimeSettings
from amphora_agent.stats.active_sender import ActiveSender


class LiveSettings:
    """The settings in use: of the sender of heartbeats, of the drift check, and of the log forwarder."""

    def __init__(self, paths: Paths, sender: ActiveSender, repair: DriftRepair, forwarding: LogForwarding) -> None:
        self._paths = paths
        self._sender = sender
        self._repair = repair
        self._forwarding = forwarding

    def current(self) -> RuntimeSettings:
        return runtime_settings.current(self._sender.settings)

    def change(self, wanted: RuntimeSettings) -> None:
        """Store settings, then use them.

        Raises SettingsRefused and MachineError. The former settings then stay in use.
        """

        def adopt(present: Settings) -> Settings:
            if present.heartbeat_format == "octavia":
                raise SettingsRefused(
                    "change the settings",
                    "Octavia's worker controls the heartbeats of this amphora",
                    "Use PUT /1.0/config.",
                )
            if wanted != runtime_settings.current(present):
                runtime_settings.keep(wanted, self._paths)
                self._repair.set_interval(wanted.audit_interval)
                self._forwarding.use(wanted.logs)
            return wanted.applied_to(present)

        self._sender.update(adopt)


def blueprint(live: LiveSettings) -> Blueprint:
    """Return the routes."""
    routes = Blueprint("settings", __name__)

    @routes.get("/v2/settings")
    def get_settings() -> ResponseReturnValue:
        return _describe(live.current())

    @routes.put("/v2/settings")
    def put_settings() -> ResponseReturnValue:
        live.change(runtime_settings.parse(request.get_data()))
        return _describe(live.current())

    return routes


def _describe(found: RuntimeSettings) -> dict[str, Any]:
    return {**found.to_document(hidden=runtime_settings.HIDDEN), "digest": found.digest}
