# SPDX-License-Identifier: Apache-2.0
"""GET /v2/diagnostics: the state of the amphora for fault finding, as one document.

Invariant: the document has no secret and no content of clients' requests. Its time and size are limited.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import partial
from typing import Any

from flask import Blueprint, Response
from flask.typing import ResponseReturnValue

from amphora_agent import host_info, runtime_settings
from amphora_agent.apply.applier import Applier
from amphora_agent.config import Settings
from amphora_agent.haproxy.process import SERVICE, Haproxy
from amphora_agent.haproxy.runtime_socket import Socket
from amphora_agent.keepalived import process as keepalived
from amphora_agent.keepalived.vrrp_state import VrrpState
from amphora_agent.l4_daemon import client as checker
from amphora_agent.l4_daemon.client import ANSWER_TIMEOUT_SECONDS, CheckerClient
from amphora_agent.log_forwarder import daemon as log_forwarder
from amphora_agent.log_forwarder.daemon import LogForwarding
from amphora_agent.network import interfaces, libnftables, nft_apply
from amphora_agent.network.namespace import Namespace
from amphora_agent.paths import Paths, read_if_exists
from amphora_agent.redaction import Part, TimeBudget, document, errors_without_content, sessions
from amphora_agent.responder import responder_daemon as responder
from amphora_agent.services.control import ServiceManager
from amphora_agent.stats.active_sender import ActiveSender
from amphora_agent.tls_identity import Identity
from amphora_agent.version import agent_version

VIRTUAL_TABLE = "amphora_virtual"
# Maximum size in bytes of one HAProxy answer in the diagnostics.
_MOST = 8 << 20
# These HAProxy commands return no keys and no entries of stick tables, so operators can share the answers.
_QUESTIONS = {
    "show info": "show info",
    "show stat": "show stat -1 7 -1",
    "show servers state": "show servers state",
    "show activity": "show activity",
    "show table": "show table",
    "show ssl cert": "show ssl cert",
    "show peers": "show peers",
    "show startup-logs": "show startup-logs",
}
_SERVICES = {
    "haproxy": SERVICE, "keepalived": keepalived.SERVICE, "responder": responder.SERVICE, "checker": checker.SERVICE,
    "log forwarder": log_forwarder.SERVICE,
}  # fmt: skip


def blueprint(
    paths: Paths,
    services: ServiceManager,
    haproxy: Haproxy,
    inner: Namespace,
    sender: ActiveSender,
    applier: Applier,
    vrrp_state: VrrpState,
    identity: Identity,
    virtual: CheckerClient,
    forwarding: LogForwarding,
) -> Blueprint:
    """Return the route."""
    routes = Blueprint("diagnostics", __name__)
    parts_of_agent: dict[str, Part] = {
        "time": time.time,
        "versions": _versions,
        "agent.conf": partial(read_if_exists, paths.etc / "agent.conf"),
        "settings": lambda: runtime_settings.current(sender.settings).to_document(hidden=runtime_settings.HIDDEN),
        "logs": forwarding.status,
        "machine.cfg": partial(read_if_exists, paths.machine_configuration),
        "haproxy.cfg": partial(read_if_exists, paths.configuration),
        "keepalived.conf": partial(read_if_exists, paths.keepalived_configuration),
        "generation": lambda: applier.generation,
        "changes": applier.change_counts,
        "holds_vip": lambda: vrrp_state.holds_vip,
        "certificate": partial(_certificate, identity),
        "interfaces": partial(interfaces.describe, inner),
        "routing": partial(interfaces.describe_routing, inner),
        "neighbours": partial(interfaces.describe_neighbours, inner),
        "firewall": partial(inner.run, nft_apply.list_table, counters=True),
        "virtual servers": partial(_virtual, virtual),
        "virtual table": partial(inner.run, _virtual_table),
        "services": partial(_statuses, services),
        "agent log": partial(services.log, "amphora-agent"),
        **{f"{name} log": partial(services.log, service) for name, service in _SERVICES.items()},
        "heartbeat errors": sender.errors,
        "processes": host_info.processes,
        "memory": host_info.memory,
        "load": host_info.load,
        "disk": partial(host_info.disk, paths.var, paths.run),
    }

    @routes.get("/v2/diagnostics")
    def get_diagnostics() -> ResponseReturnValue:
        parts = {**parts_of_agent, **_haproxy_parts(haproxy, TimeBudget())}
        return Response(document(parts, _secrets(sender.settings)), mimetype="application/json")

    return routes


def _haproxy_parts(haproxy: Haproxy, budget: TimeBudget) -> dict[str, Part]:
    def ask(question: str, process: Socket = haproxy.worker) -> str:
        return budget.ask(lambda seconds: process.ask(question, seconds=seconds, most=_MOST))

    return {
        **{name: partial(ask, question) for name, question in _QUESTIONS.items()},
        "show errors": lambda: errors_without_content(ask("show errors")),
        "show sess": lambda: sessions(ask("show sess")),
        "show proc": lambda: ask("show proc", haproxy.master),
    }


def _secrets(settings: Settings) -> list[str]:
    """Return the heartbeat key in all its forms, because a key from Octavia is any text."""
    key = settings.heartbeat_key
    return [key.hex(), key.decode(errors="replace")] if key else []


def _virtual(checker: CheckerClient) -> dict[str, Any] | None:
    """Return the state of UDP and SCTP listeners; None without listeners or without an answer."""
    state = checker.read_state(ANSWER_TIMEOUT_SECONDS, members=True)
    return None if state is None else asdict(state)


def _virtual_table() -> str:
    """Return the nftables rules of UDP and SCTP listeners; empty without a table."""
    if not libnftables.table_exists("inet", VIRTUAL_TABLE):
        return ""
    return libnftables.run_commands(f"list table inet {VIRTUAL_TABLE}\n")


def _versions() -> dict[str, Any]:
    programs = {name: host_info.program_version(name) for name in ("haproxy", "keepalived")}
    return {"agent": agent_version(), **programs, **host_info.versions()}


def _certificate(identity: Identity) -> dict[str, Any]:
    shown = identity.certificate()
    return {
        "expires_at": None if shown is None else shown.expires_at,
        "fingerprint": None if shown is None else shown.fingerprint,
        "refused_handshakes": dict(identity.refused),
    }


def _statuses(services: ServiceManager) -> dict[str, Any]:
    found = {}
    for service in ("amphora-agent", *_SERVICES.values()):
        status = services.status(service)
        found[service] = None if status is None else vars(status)
    return found
