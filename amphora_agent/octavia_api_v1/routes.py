# SPDX-License-Identifier: Apache-2.0
"""Routes of Octavia's amphora API 1.0 (docs/reference/amphora-api-v1.md)."""

from __future__ import annotations

import hashlib
import ipaddress
import socket
import uuid
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from flask import Blueprint, Response, jsonify, request
from flask.typing import ResponseReturnValue
from werkzeug.exceptions import HTTPException

from amphora_agent.apply.applier import Applier
from amphora_agent.errors import AgentError, RequestRefused
from amphora_agent.haproxy import config_parser
from amphora_agent.haproxy.process import Haproxy
from amphora_agent.host_info import program_version
from amphora_agent.network import interfaces
from amphora_agent.network.namespace import Namespace
from amphora_agent.octavia_api_v1 import host_info
from amphora_agent.octavia_api_v1.amphora import NO_LOAD_BALANCER, OctaviaAmphora

API_VERSION = "1.0"
_OK = {"message": "OK"}
_NO_UDP = "UDP and SCTP listeners are not served by this amphora"
_PAST = {"start": "started", "stop": "stopped", "reload": "reloaded"}


def blueprint(
    amphora: OctaviaAmphora,
    applier: Applier,
    haproxy: Haproxy,
    inner: Namespace,
    configure: Callable[[str], None],
    take_certificate: Callable[[bytes], None],
) -> Blueprint:
    """Return the routes.

    `configure` applies the text of Octavia's agent configuration; `take_certificate` replaces the agent's certificate
    and key.
    """
    routes = Blueprint("octavia", __name__)
    _answer_errors(routes)
    _machine(routes, amphora, applier, haproxy, inner)
    _agent(routes, amphora, configure, take_certificate)
    _load_balancers(routes, amphora)
    _certificates(routes, amphora)
    _plugging(routes, amphora, inner)
    _vrrp_and_udp(routes, amphora)
    return routes


def _answer_errors(routes: Blueprint) -> None:
    @routes.errorhandler(AgentError)
    def ours(error: AgentError) -> ResponseReturnValue:
        if isinstance(error, RequestRefused):
            return jsonify(error.document()), error.status
        # Octavia's worker treats the status 422 as success, so the agent sends the status 400 instead.
        status = 400 if error.status == HTTPStatus.UNPROCESSABLE_ENTITY else error.status
        return jsonify({"message": f"Could not {error.wanted}", "details": error.happened}), status

    @routes.errorhandler(HTTPException)
    def protocol(error: HTTPException) -> ResponseReturnValue:
        return jsonify({"error": str(error), "http_code": error.code}), error.code or 500


def _machine(routes: Blueprint, amphora: OctaviaAmphora, applier: Applier, haproxy: Haproxy, inner: Namespace) -> None:
    @routes.get("/")
    def version() -> ResponseReturnValue:
        return {"api_version": API_VERSION}

    @routes.get("/1.0/info")
    def info() -> ResponseReturnValue:
        return _info()

    @routes.get("/1.0/details")
    def details() -> ResponseReturnValue:
        return {
            **_info(),
            **host_info.figures(inner),
            "active": True,
            "haproxy_count": int(haproxy.is_running()),
            "listeners": sorted(each["uuid"] for each in _listeners(applier)),
            "active_tuned_profiles": "",
            "topology": "ACTIVE_STANDBY" if amphora.state.wanted.vrrp is not None else "SINGLE",
            "topology_status": "OK",
            "packages": {},
            "lvs_listener_process_count": 0,
        }

    @routes.get("/1.0/listeners")
    def listeners() -> ResponseReturnValue:
        return _listeners(applier)


def _agent(
    routes: Blueprint,
    amphora: OctaviaAmphora,
    configure: Callable[[str], None],
    take_certificate: Callable[[bytes], None],
) -> None:
    @routes.put("/1.0/certificate")
    def certificate() -> ResponseReturnValue:
        take_certificate(request.get_data())
        return _OK, 202

    @routes.put("/1.0/config")
    def config() -> ResponseReturnValue:
        with amphora.changing():
            try:
                configure(request.get_data().decode())
            except (AgentError, OSError, UnicodeDecodeError) as error:
                why = error.details if isinstance(error, RequestRefused) else str(error)
                raise RequestRefused("Unable to update amphora-agent configuration.", why, 500) from error
        return _OK, 202


def _load_balancers(routes: Blueprint, amphora: OctaviaAmphora) -> None:
    @routes.put("/1.0/loadbalancer/<amphora_id>/<load_balancer_id>/haproxy")
    def upload(amphora_id: str, load_balancer_id: str) -> ResponseReturnValue:
        body = request.get_data()
        amphora.upload(amphora_id, _id(load_balancer_id), body)
        return _tagged(_OK, body, 202)

    @routes.get("/1.0/loadbalancer/<load_balancer_id>/haproxy")
    def uploaded(load_balancer_id: str) -> ResponseReturnValue:
        state = amphora.state
        if state.uploaded is None or state.load_balancer_id != load_balancer_id:
            raise RequestRefused(NO_LOAD_BALANCER, f"{load_balancer_id} was not uploaded", 404)
        content = state.uploaded.encode()
        return Response(content, headers={"ETag": _md5(content)}, content_type="text/plain; charset=utf-8")

    @routes.put("/1.0/loadbalancer/<object_id>/<action>")
    def act(object_id: str, action: str) -> ResponseReturnValue:
        done = _action(action)
        outcome = amphora.act(object_id, done)
        return {**_OK, "details": f"Listener {object_id} {_PAST[done]}", **vars(outcome.change)}, 202

    @routes.delete("/1.0/listeners/<object_id>")
    def delete(object_id: str) -> ResponseReturnValue:
        amphora.delete(object_id)
        return _OK


def _certificates(routes: Blueprint, amphora: OctaviaAmphora) -> None:
    place = "/1.0/loadbalancer/<load_balancer_id>/certificates/<name>"

    @routes.put(place)
    def put_file(load_balancer_id: str, name: str) -> ResponseReturnValue:
        body = request.get_data()
        amphora.put_file(_id(load_balancer_id), name, body)
        return _tagged(_OK, body)

    @routes.get(place)
    def get_file(load_balancer_id: str, name: str) -> ResponseReturnValue:
        content = amphora.file(_id(load_balancer_id), name)
        if content is None:
            raise RequestRefused("Certificate Not Found", f"No certificate with filename: {name}", 404)
        return _tagged({"md5sum": _md5(content)}, content)

    @routes.delete(place)
    def delete_file(load_balancer_id: str, name: str) -> ResponseReturnValue:
        amphora.delete_file(_id(load_balancer_id), name)
        return _OK


def _plugging(routes: Blueprint, amphora: OctaviaAmphora, inner: Namespace) -> None:
    @routes.post("/1.0/plug/vip/<vip>")
    def plug_vip(vip: str) -> ResponseReturnValue:
        port = amphora.plug_vip(vip, request.get_json(force=True))
        vips = ", ".join(str(each.ip) for each in port.vips)
        return {**_OK, "details": f"VIPs plugged on interface {port.name}: {vips}"}, 202

    @routes.post("/1.0/plug/network")
    def plug_network() -> ResponseReturnValue:
        port = amphora.plug_network(request.get_json(force=True))
        return {**_OK, "details": f"Plugged on interface {port.name}"}, 202

    @routes.get("/1.0/interface/<address>")
    def interface(address: str) -> ResponseReturnValue:
        return {**_OK, "interface": _interface(address, amphora, inner)}

    @routes.put("/1.0/interface/<address>/rules")
    def rules(address: str) -> ResponseReturnValue:
        _interface(address, amphora, inner)
        amphora.set_rules(request.get_json(force=True))
        return _OK


def _vrrp_and_udp(routes: Blueprint, amphora: OctaviaAmphora) -> None:
    @routes.put("/1.0/vrrp/upload")
    def upload_vrrp() -> ResponseReturnValue:
        body = request.get_data()
        amphora.upload_vrrp(body)
        return _tagged(_OK, body)

    @routes.put("/1.0/vrrp/<action>")
    def act_vrrp(action: str) -> ResponseReturnValue:
        done = _action(action)
        amphora.act_vrrp(done)
        return {**_OK, "details": f"keepalived {_PAST[done]}"}, 202

    @routes.put("/1.0/listeners/<amphora_id>/<listener_id>/udp_listener")
    def upload_udp(amphora_id: str, listener_id: str) -> ResponseReturnValue:
        with amphora.changing():
            # After this error, Octavia's worker sets the UDP listener to ERROR and logs the message.
            raise RequestRefused(_NO_UDP, f"listener {_id(listener_id)} of amphora {_id(amphora_id)}", 500)

    @routes.get("/1.0/listeners/<listener_id>/udp_listener")
    def uploaded_udp(listener_id: str) -> ResponseReturnValue:
        raise RequestRefused("UDP Listener Not Found", f"No UDP listener with UUID: {_id(listener_id)}", 404)


def _md5(content: bytes) -> str:
    """Return the ETag of an upload: Octavia's API compares contents by MD5."""
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def _tagged(document: dict[str, Any], content: bytes, status: int = 200) -> Response:
    answer = jsonify(document)
    answer.status_code = status
    answer.headers["ETag"] = _md5(content)
    return answer


def _id(text: str) -> str:
    """Return an id of a URL in canonical form."""
    try:
        return str(uuid.UUID(text))
    except ValueError as error:
        raise RequestRefused("Invalid request", f"{text!r} is not an id") from error


def _action(text: str) -> str:
    action = text.lower()
    if action not in _PAST:
        raise RequestRefused("Invalid Request", f"Unknown action: {action}")
    return action


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
    return host_info.listeners(config_parser.parse(confirmed.bundle.haproxy))


def _interface(text: str, amphora: OctaviaAmphora, inner: Namespace) -> str:
    """Return the interface that has an address, or will have it as a VIP."""
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
