# SPDX-License-Identifier: Apache-2.0
"""Routes of Octavia's amphora API 1.0 that change the amphora (docs/reference/amphora-api-v1.md).

Invariant: a route reads its request, calls one method, and answers in the format of the API.
"""

from __future__ import annotations

import hashlib
import uuid
from http import HTTPStatus
from typing import Any

from flask import Blueprint, Response, jsonify, request
from flask.typing import ResponseReturnValue
from werkzeug.exceptions import HTTPException

from amphora_agent.errors import AgentError, RequestRefused
from amphora_agent.octavia_api_v1.amphora import ACTIONS, NO_LOAD_BALANCER, OctaviaAmphora

API_VERSION = "1.0"
_NO_UDP = "UDP and SCTP listeners are not served by this amphora"


def answer_errors(routes: Blueprint) -> None:
    """Answer errors of a blueprint in the format of Octavia's API."""

    @routes.errorhandler(AgentError)
    def ours(error: AgentError) -> ResponseReturnValue:
        if isinstance(error, RequestRefused):
            return jsonify(error.document()), error.status
        # The API has no 422: the worker would interpret it as success.
        status = 400 if error.status == HTTPStatus.UNPROCESSABLE_ENTITY else error.status
        return jsonify({"message": f"Could not {error.wanted}", "details": error.happened}), status

    @routes.errorhandler(HTTPException)
    def protocol(error: HTTPException) -> ResponseReturnValue:
        return jsonify({"error": str(error), "http_code": error.code}), error.code or 500


def fingerprint(content: bytes) -> str:
    """Return the ETag of an upload: Octavia's API compares contents by MD5."""
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def _tagged(document: dict[str, Any], content: bytes, status: int = 200) -> Response:
    answer = jsonify(document)
    answer.status_code = status
    answer.headers["ETag"] = fingerprint(content)
    return answer


def blueprint(amphora: OctaviaAmphora) -> Blueprint:
    """Return the routes."""
    routes = Blueprint("octavia", __name__)
    answer_errors(routes)

    @routes.get("/")
    def version() -> ResponseReturnValue:
        return {"api_version": API_VERSION}

    _load_balancers(routes, amphora)
    _certificates(routes, amphora)
    _plugging(routes, amphora)
    _vrrp(routes, amphora)
    _udp(routes, amphora)
    return routes


def _load_balancers(routes: Blueprint, amphora: OctaviaAmphora) -> None:
    @routes.put("/1.0/loadbalancer/<amphora_id>/<load_balancer_id>/haproxy")
    def upload(amphora_id: str, load_balancer_id: str) -> ResponseReturnValue:
        body = request.get_data()
        amphora.upload(amphora_id, _id(load_balancer_id), body)
        return _tagged({"message": "OK"}, body, 202)

    @routes.get("/1.0/loadbalancer/<load_balancer_id>/haproxy")
    def uploaded(load_balancer_id: str) -> ResponseReturnValue:
        state = amphora.state
        if state.uploaded is None or state.load_balancer_id != load_balancer_id:
            raise RequestRefused(NO_LOAD_BALANCER, f"{load_balancer_id} was not uploaded", 404)
        content = state.uploaded.encode()
        return Response(content, headers={"ETag": fingerprint(content)}, content_type="text/plain; charset=utf-8")

    @routes.put("/1.0/loadbalancer/<object_id>/<action>")
    def act(object_id: str, action: str) -> ResponseReturnValue:
        done = _action(action)
        outcome = amphora.act(object_id, done)
        details = f"Listener {object_id} {_past(done)}"
        return {"message": "OK", "details": details, "how": outcome.how, "reason": outcome.reason}, 202

    @routes.delete("/1.0/listeners/<object_id>")
    def delete(object_id: str) -> ResponseReturnValue:
        amphora.delete(object_id)
        return {"message": "OK"}


def _certificates(routes: Blueprint, amphora: OctaviaAmphora) -> None:
    place = "/1.0/loadbalancer/<load_balancer_id>/certificates/<name>"

    @routes.put(place)
    def put_file(load_balancer_id: str, name: str) -> ResponseReturnValue:
        body = request.get_data()
        amphora.put_file(_id(load_balancer_id), name, body)
        return _tagged({"message": "OK"}, body)

    @routes.get(place)
    def get_file(load_balancer_id: str, name: str) -> ResponseReturnValue:
        content = amphora.file(_id(load_balancer_id), name)
        if content is None:
            raise RequestRefused("Certificate Not Found", f"No certificate with filename: {name}", 404)
        return _tagged({"md5sum": fingerprint(content)}, content)

    @routes.delete(place)
    def delete_file(load_balancer_id: str, name: str) -> ResponseReturnValue:
        amphora.delete_file(_id(load_balancer_id), name)
        return {"message": "OK"}


def _plugging(routes: Blueprint, amphora: OctaviaAmphora) -> None:
    @routes.post("/1.0/plug/vip/<vip>")
    def plug_vip(vip: str) -> ResponseReturnValue:
        port = amphora.plug_vip(vip, request.get_json(force=True))
        vips = ", ".join(str(each.ip) for each in port.vips)
        return {"message": "OK", "details": f"VIPs plugged on interface {port.name}: {vips}"}, 202

    @routes.post("/1.0/plug/network")
    def plug_network() -> ResponseReturnValue:
        port = amphora.plug_network(request.get_json(force=True))
        return {"message": "OK", "details": f"Plugged on interface {port.name}"}, 202


def _vrrp(routes: Blueprint, amphora: OctaviaAmphora) -> None:
    @routes.put("/1.0/vrrp/upload")
    def upload_vrrp() -> ResponseReturnValue:
        body = request.get_data()
        amphora.upload_vrrp(body)
        return _tagged({"message": "OK"}, body)

    @routes.put("/1.0/vrrp/<action>")
    def act_vrrp(action: str) -> ResponseReturnValue:
        done = _action(action)
        amphora.act_vrrp(done)
        return {"message": "OK", "details": f"keepalived {_past(done)}"}, 202


def _udp(routes: Blueprint, amphora: OctaviaAmphora) -> None:
    """Refuse LVS: the worker sets its listener to ERROR and logs this message."""

    @routes.put("/1.0/listeners/<amphora_id>/<listener_id>/udp_listener")
    def upload_udp(amphora_id: str, listener_id: str) -> ResponseReturnValue:
        with amphora.changing():
            raise RequestRefused(_NO_UDP, f"listener {_id(listener_id)} of amphora {_id(amphora_id)}", 500)

    @routes.get("/1.0/listeners/<listener_id>/udp_listener")
    def uploaded_udp(listener_id: str) -> ResponseReturnValue:
        raise RequestRefused("UDP Listener Not Found", f"No UDP listener with UUID: {_id(listener_id)}", 404)


def _id(text: str) -> str:
    """Return an id of a URL in canonical form."""
    try:
        return str(uuid.UUID(text))
    except ValueError as error:
        raise RequestRefused("Invalid request", f"{text!r} is not an id") from error


def _action(text: str) -> str:
    action = text.lower()
    if action not in ACTIONS:
        raise RequestRefused("Invalid Request", f"Unknown action: {action}")
    return action


def _past(action: str) -> str:
    return {"start": "started", "stop": "stopped", "reload": "reloaded"}[action]
