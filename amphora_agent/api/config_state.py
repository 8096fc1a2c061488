# SPDX-License-Identifier: Apache-2.0
"""GET /v2/configuration: what this amphora has confirmed and what it has, side by side, for whoever compares.

Invariant: no content of a file is in it, only names and digests; words of a configuration whose value is a secret are
hidden as in the diagnostics.
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
    """The route."""
    routes = Blueprint("configuration", __name__)

    @routes.get("/v2/configuration")
    def get_configuration() -> ResponseReturnValue:
        confirmed = applier.confirmed
        return {
            "generation": applier.generation,
            "digest": confirmed.digest if confirmed is not None else None,
            "haproxy": _text(paths),
            "bundle": _stored(confirmed.bundle) if confirmed is not None else None,
            "interfaces": _had(lambda: interfaces.describe(inner)),
            "drift": drift.document(),
        }

    return routes


def _text(paths: Paths) -> str | None:
    """The load balancer's part of the file that HAProxy has read, or would read; None if there is none."""
    try:
        content = paths.configuration.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    return redacted(config_file.read(content).text, ())


def _stored(bundle: Bundle) -> dict[str, Any]:
    """What was confirmed, but for HAProxy's text, which is long, and here already."""
    return {name: value for name, value in bundle.to_document().items() if name != "haproxy"}


def _had(ask: Callable[[], Any]) -> Any:
    try:
        with interfaces.kernel_errors():
            return ask()
    except AgentError as error:
        return {"error": str(error)}
