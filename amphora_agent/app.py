# SPDX-License-Identifier: Apache-2.0
"""The application: creates all parts of the agent and connects them.

Invariant: the agent is one process with one application, so that each part exists once.
"""

from __future__ import annotations

import logging

from flask import Flask, jsonify
from flask.typing import ResponseReturnValue
from werkzeug.exceptions import HTTPException

from amphora_agent import runtime_settings
from amphora_agent.api import certificate, diagnostics, state, vips, vrrp
from amphora_agent.api import settings as settings_api
from amphora_agent.apply.applier import Applier
from amphora_agent.apply.components import Components
from amphora_agent.apply.recovery import RecoveryLoop
from amphora_agent.config import Settings
from amphora_agent.drift.check import DriftChecker
from amphora_agent.drift.repair import DriftRepair
from amphora_agent.drift.report import DriftReport
from amphora_agent.errors import AgentError
from amphora_agent.haproxy.config_file import RESPONDER_PORT
from amphora_agent.haproxy.process import Haproxy
from amphora_agent.keepalived.process import Keepalived
from amphora_agent.keepalived.vip_handover import VipHandover
from amphora_agent.keepalived.vrrp_state import VrrpState
from amphora_agent.l4_daemon.client import CheckerClient
from amphora_agent.log_forwarder.daemon import LogForwarding
from amphora_agent.network import sysctls
from amphora_agent.network.namespace import Namespace
from amphora_agent.octavia_api_v1 import agent_conf as octavia_settings
from amphora_agent.octavia_api_v1 import routes
from amphora_agent.octavia_api_v1.amphora import OctaviaAmphora
from amphora_agent.paths import Paths
from amphora_agent.responder.responder_daemon import ResponderDaemon
from amphora_agent.services.connect import connect_service_manager
from amphora_agent.services.sd_notify import NOTHING_INHERITED, Inherited
from amphora_agent.stats.active_sender import ActiveSender, Sender
from amphora_agent.stats.collector import Collector
from amphora_agent.stats.heartbeat_sender import HeartbeatSender
from amphora_agent.stats.octavia_heartbeat import OctaviaSender
from amphora_agent.stats.udp_stats import UdpStats
from amphora_agent.stats.usage import UsageMeter
from amphora_agent.tls_identity import Identity

_log = logging.getLogger(__name__)
LARGEST_BODY = 32 * 1024 * 1024
# Seconds to wait for the responder daemon before HAProxy starts. Without the responder daemon, HAProxy would report
# members with PING monitors as down.
RESPONDER_SECONDS = 3.0


def create(settings: Settings, paths: Paths, identity: Identity, inheritance: Inherited = NOTHING_INHERITED) -> Flask:
    """Create the application and start its threads."""
    services = connect_service_manager(settings.services, paths, inheritance)
    inner = Namespace(paths.inner_namespace)
    sysctls.apply_settings(inner)
    virtual = CheckerClient(paths, services)
    collector = Collector(paths, services, UdpStats(paths, virtual))
    drift = DriftReport()
    haproxy = Haproxy(paths, services, inner, collector)
    usage = UsageMeter(lambda: collector.load, inner, shares_machine=settings.services == "supervisor")

    def sender_for(wanted: Settings) -> Sender:
        if wanted.heartbeat_format == "octavia":
            # The lambda runs later, after `octavia` below has been assigned.
            return OctaviaSender(wanted, paths, collector, lambda: octavia.draining())  # noqa: PLW0108
        return HeartbeatSender(
            wanted,
            paths,
            collector,
            lambda: applier.generation,
            lambda: vrrp_state.holds_vip,
            drift.heartbeat,
            usage.measure,
        )

    sender = ActiveSender(octavia_settings.stored(runtime_settings.stored(settings, paths), paths), sender_for)
    responder = ResponderDaemon(paths, services, inner, RESPONDER_PORT)
    keepalived = Keepalived(paths, services, inner)
    vrrp_state = VrrpState(inner, lambda: applier.vrrp_instance, changed=sender.send_now)

    def after() -> None:
        vrrp_state.refresh()
        sender.send_soon()

    parts = Components(paths, haproxy, keepalived, inner, virtual, collector.priority)
    applier = Applier(settings, parts, on_applied=after, set_ping_targets=responder.set_targets)
    drift_checker = DriftChecker(applier, parts)
    repair = DriftRepair(drift_checker, drift, sender.settings.audit_interval, sender.send_now)
    forwarding = LogForwarding(paths, services, inner, str(settings.amphora_id))
    live = settings_api.LiveSettings(paths, sender, repair, forwarding)
    handover = VipHandover(paths, inner, vrrp_state, lambda: applier.vrrp_instance)
    app = Flask("amphora_agent")
    app.config["MAX_CONTENT_LENGTH"] = LARGEST_BODY
    app.register_blueprint(
        state.blueprint(settings, paths, applier, inner, vrrp_state, identity, drift, live, forwarding)
    )
    app.register_blueprint(settings_api.blueprint(live))
    app.register_blueprint(vrrp.blueprint(handover))
    app.register_blueprint(vips.blueprint(applier, inner))
    app.register_blueprint(certificate.blueprint(settings, identity))
    app.register_blueprint(
        diagnostics.blueprint(
            paths, services, haproxy, inner, sender, applier, vrrp_state, identity, virtual, forwarding
        )
    )
    octavia = OctaviaAmphora(lambda: sender.settings, paths, applier, inner)

    def configure(text: str) -> None:
        wanted = octavia_settings.changed(sender.settings, text)
        octavia_settings.keep(text, paths)
        sender.change(wanted)

    set_certificate = certificate.certificate_setter(settings, identity)
    app.register_blueprint(routes.blueprint(octavia, applier, haproxy, inner, configure, set_certificate))
    _answer_errors(app)
    responder.start()
    forwarding.start(sender.settings.logs)

    def serve_confirmed() -> bool:
        responder.wait(RESPONDER_SECONDS)
        return applier.apply_confirmed()

    RecoveryLoop(serve_confirmed).start()
    vrrp_state.start()
    handover.start()
    sender.start()
    repair.start()
    return app


def _answer_errors(app: Flask) -> None:
    @app.errorhandler(AgentError)
    def ours(error: AgentError) -> ResponseReturnValue:
        _log.warning("A request to the API of the agent failed, and the client receives this error: %s", error)
        return jsonify(error.document()), error.status

    @app.errorhandler(HTTPException)
    def protocol(error: HTTPException) -> ResponseReturnValue:
        said = AgentError("serve the request", error.description or error.name, "See docs/reference/agent-api.md.")
        return jsonify(said.document()), error.code or 500

    @app.errorhandler(Exception)
    def unforeseen(error: Exception) -> ResponseReturnValue:
        _log.exception(
            "A request to the API of the agent failed with an unexpected error, and the client receives status 500"
        )
        said = AgentError("serve the request", f"{type(error).__name__}: {error}", "This is an error of the agent.")
        return jsonify(said.document()), 500
