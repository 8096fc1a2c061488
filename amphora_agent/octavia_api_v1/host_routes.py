# SPDX-License-Identifier: Apache-2.0
"""Routes of Octavia's amphora API 1.0 that concern machine and agent.

See docs/reference/amphora-api-v1.md.

Invariant: reading requests change nothing. They are answered for every kind of controller.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from typing import Any

from flask import Blueprint, request
from flask.typing import ResponseReturnValue

from amphora_agent.api.info import program_version
from amphora_agent.apply.applier import Applier
from amphora_agent.errors import AgentError, RequestRefused
from amphora_agent.haproxy import config_parser as text_of
from amphora_agent.haproxy.process import Haproxy
from amphora_agent.network import interfaces
from amphora_agent.network.namespace import Namespace
from amphora_agent.octavia_api_v1 import host_info
from amphora_agent.octavia_api_v1.amphora import OctaviaAmphora
from amphora_agent.octavia_api_v1.routes import API_VERSION, answer_errors


def blueprint(
    amphora: OctaviaAmphora,
    applier: Applier,
    haproxy: Haproxy,
    inner: Namespace,
    configure: Callable[[str], None],
    take_certificate: Callable[[bytes], None],
) -> Blueprint:
    """Return the routes.

    Args:
        configure: applies the text of Octavia's agent configuration.
        take_certificate: replaces the agent's certificate and key.
    """
    routes = Blueprint("octavia machine", __name__)
    answer_errors(routes)

    @routes.get("/1.0/info")
    def info() -> ResponseReturnValue:
        return _info()

    @routes.get("/1.0/details")
    def details() -> ResponseReturnValue:
        found = [each["uuid"] for each in _listeners(applier)]
        return {
            **_info(),
            **host_info.figures(inner),
            "active": True,
            "haproxy_count": int(haproxy.is_running()),
            "listeners": sorted(found),
            "active_tuned_profiles": "",
            "topology": "ACTIVE_STANDBY" if amphora.state.wanted.vrrp is not None else "SINGLE",
            "topology_status": "OK",
            "packages": {},
            "lvs_listener_process_count": 0,
        }

    @routes.get("/1.0/listeners")
    def listeners() -> ResponseReturnValue:
        return _listeners(applier)

    @routes.get("/1.0/interface/<address>")
    def interface(address: str) -> ResponseReturnValue:
        return {"message": "OK", "interface": _interface(address, amphora, inner)}

    @routes.put("/1.0/interface/<address>/rules")
    def rules(address: str) -> ResponseReturnValue:
        _interface(address, amphora, inner)
        amphora.set_rules(request.get_json(force=True))
        return {"message": "OK"}

    @routes.put("/1.0/certificate")
    def certificate() -> ResponseReturnValue:
        take_certificate(request.get_data())
        return {"message": "OK"}, 202

    @routes.put("/1.0/config")
    def config() -> ResponseReturnValue:
        with amphora.changing():
            try:
                configure(request.get_data().decode())
            except (AgentError, OSError, UnicodeDecodeError) as error:
                why = error.details if isinstance(error, RequestRefused) else str(error)
                raise RequestRefused("Unable to update amphora-agent configuration.", why, 500) from error
        return {"message": "OK"}, 202

    return routes


def _info() -> dict[str, Any]:
    return {
        "hostname": socket.gethostname(),
        "haproxy_version": program_version("haproxy") or "",
        "api_version": API_VERSION,
        "keepalived_version": program_version("keepalived") or "",
        "ipvsadm_version": "",
    }


def _listeners(applier: Applier) -> list[dict[str, str]]:
    confirmed = applier.confirmed
    if confirmed is None or confirmed.bundle.haproxy is None:
        return []
    return host_info.listeners(text_of.parse(confirmed.bundle.haproxy))


def _interface(text: str, amphora: OctaviaAmphora, inner: Namespace) -> str:
    """Return the interface that has an address, or gets it together with the VIPs."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError as error:
        raise RequestRefused("Invalid IP address", str(error)) from error
    for each in interfaces.describe(inner):
        if address in {ipaddress.ip_interface(found).ip for found in each["addresses"]}:
            return str(each["name"])
    for port in amphora.state.interfaces:
        if address in {vip.ip for vip in port.vips}:
            return port.name
    raise RequestRefused("Error interface not found for IP address", f"no interface has {address}", 404)
