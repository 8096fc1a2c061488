# SPDX-License-Identifier: Apache-2.0
"""The agent, put together.

Invariant: everything the agent is made of is made here, once for each worker process and after its fork, so
that no thread or socket is ever shared between processes.
"""

from __future__ import annotations

import logging

from flask import Flask, jsonify
from flask.typing import ResponseReturnValue
from werkzeug.exceptions import HTTPException

from amphora_agent import reboot
from amphora_agent import services as service_managers
from amphora_agent.api import bundle, diagnostics, info
from amphora_agent.apply import Applier
from amphora_agent.config import Settings
from amphora_agent.errors import AgentError
from amphora_agent.haproxy.process import RESPONDER_PORT, Haproxy
from amphora_agent.network import interfaces
from amphora_agent.network.namespace import Namespace
from amphora_agent.paths import Paths
from amphora_agent.responder import metrics
from amphora_agent.responder.server import Responder
from amphora_agent.stats.ledger import Ledger
from amphora_agent.stats.sender import Sender

_log = logging.getLogger(__name__)
LARGEST_BODY = 32 * 1024 * 1024


def create(settings: Settings, paths: Paths) -> Flask:
    """Make the application and start its threads."""
    services = service_managers.connect(settings.services, paths)
    inner = Namespace(paths.inner_namespace)
    interfaces.prepare(inner)
    ledger = Ledger(paths)
    haproxy = Haproxy(paths, services, inner, before_leaving=ledger.hold)
    sender = Sender(settings, paths, ledger, lambda: applier.generation)
    applier = Applier(settings, paths, haproxy, inner, after=sender.send_now)
    responder = Responder(inner, RESPONDER_PORT, lambda: metrics.scrape(haproxy.worker), lambda: applier.pings)
    app = Flask("amphora_agent")
    app.config["MAX_CONTENT_LENGTH"] = LARGEST_BODY
    app.register_blueprint(bundle.blueprint(applier))
    app.register_blueprint(info.blueprint(settings, applier))
    app.register_blueprint(diagnostics.blueprint(paths, services, haproxy, inner, sender))
    _answer_errors(app)
    responder.start()
    reboot.serve_again(applier.apply_confirmed)
    sender.start()
    return app


def _answer_errors(app: Flask) -> None:
    """Answer every error as docs/agent-api.md says."""

    @app.errorhandler(AgentError)
    def ours(error: AgentError) -> ResponseReturnValue:
        _log.warning("%s", error)
        return jsonify(error.document()), error.status

    @app.errorhandler(HTTPException)
    def protocol(error: HTTPException) -> ResponseReturnValue:
        said = AgentError("serve the request", error.description or error.name, "See docs/agent-api.md.")
        return jsonify(said.document()), error.code or 500

    @app.errorhandler(Exception)
    def unforeseen(error: Exception) -> ResponseReturnValue:
        _log.exception("Unforeseen error")
        said = AgentError("serve the request", f"{type(error).__name__}: {error}", "This is an error of the agent.")
        return jsonify(said.document()), 500
