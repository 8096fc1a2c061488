# SPDX-License-Identifier: Apache-2.0
"""GET /v2/configuration: the confirmed bundle beside the state of the amphora, for the drift audit.

Invariant: files appear with name and digest only. Secret values of a configuration are hidden as in the diagnostics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flask import Blueprint
from flask.typing import ResponseReturnValue

from amphora_agent.apply.applier import Applier
from amphora_agent.bundle import Bundle
from amphora_agent.drift.report import DriftReport
from amphora_agent.errors import AgentError
from amphora_agent.haproxy import config_file
from amphora_agent.network import interfaces
from amphora_agent.network.namespace import Namespace
from amphora_agent.paths import Paths
from amphora_agent.redaction import redacted


def blueprint(paths: Paths, applier: Applier, inner: Namespace, drift: DriftReport) -> Blueprint:
    """Return the route."""
    routes = Blueprint("configuration", __name__)

    @routes.get("/v2/configuration")
    def get_configuration() -> ResponseReturnValue:
        confirmed = applier.confirmed
        return {
            "generation": applier.generation,
            "digest": confirmed.digest if confirmed is not None else None,
            "haproxy": _text(paths),
            "bundle": _without_text(confirmed.bundle) if confirmed is not None else None,
            "interfaces": _described(lambda: interfaces.describe(inner)),
            "drift": drift.document(),
        }

    return routes


def _text(paths: Paths) -> str | None:
    """Return the load balancer's part of HAProxy's file; None if there is no file."""
    try:
        content = paths.configuration.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    return redacted(config_file.read(content).text, ())


def _without_text(bundle: Bundle) -> dict[str, Any]:
    """Return a bundle without HAProxy's text, which is long and in the answer already."""
    return {name: value for name, value in bundle.to_document().items() if name != "haproxy"}


def _described(ask: Callable[[], Any]) -> Any:
    try:
        with interfaces.kernel_errors():
            return ask()
    except AgentError as error:
        return {"error": str(error)}
