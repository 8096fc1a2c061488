# SPDX-License-Identifier: Apache-2.0
"""The routes of the API.

Invariant: a webhook is recorded before it is answered, so that no accepted request is lost. Each route authenticates
the caller for the group in its path first. No answer and no log line contains a token.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
from flask import Blueprint, Response, current_app, request

from amphora_cluster.api.attempts import Caller, FailedAttempts
from amphora_cluster.api.authentication import Received, Unauthenticated, authenticate, credential_of
from amphora_cluster.api.parameters import read_parameters
from amphora_cluster.api.responses import failure_json, group_json, request_json, state_of, unfinished_json
from amphora_cluster.database.groups import GroupStore
from amphora_cluster.database.requests import RequestStore
from amphora_cluster.database.tokens import TokenStore
from amphora_cluster.model import Request, RequestKind
from amphora_driver.errors import RequestError

_FIRST_LOOK, _LONGEST_LOOK = 0.1, 1.0
EXTENSION = "amphora-cluster"

routes = Blueprint("groups", __name__, url_prefix="/v1/groups/<group_id>")


class Service(msgspec.Struct, kw_only=True):
    """What the routes use.

    Args:
        longest_wait: longest time in seconds that a request can wait for its end.
        waiting: limits the number of threads that wait, so that other requests find a free thread.
        attempts: limits failed authentications.
        behind_proxy: the last address in X-Forwarded-For is the source address of a request.
    """

    groups: GroupStore
    requests: RequestStore
    tokens: TokenStore
    longest_wait: float = 300.0
    waiting: threading.Semaphore = msgspec.field(default_factory=lambda: threading.Semaphore(14))
    attempts: FailedAttempts = msgspec.field(default_factory=lambda: FailedAttempts(0))
    behind_proxy: bool = False


def respond(status: int, document: Any, **headers: str) -> Response:
    """Return an answer in JSON that no cache keeps."""
    made = Response(msgspec.json.encode(document) + b"\n", status, content_type="application/json")
    made.headers["Cache-Control"] = "no-store"
    for name, value in headers.items():
        made.headers[name.replace("_", "-")] = value
    return made


@routes.post("/<any(join, leave, sync):kind>")
def record_request(group_id: str, kind: str) -> Response:
    """Record a join, leave or sync; with `?wait=SECONDS` answer at its end.

    With `?final=true`, the status of a request that has not ended is an error.
    """
    service = _service()
    received = _authenticated(service, group_id)
    wanted = RequestKind(kind)
    query = {name: request.args.getlist(name) for name in request.args}
    parameters = read_parameters(wanted, query, received.body, received.headers)
    seconds, final = _wait_seconds(service), _final()
    recorded = service.requests.add(
        parameters.request(group_id, wanted), key=parameters.key, digest=parameters.digest(wanted)
    )
    return _answered(_ended(service, recorded, seconds), final=final)


@routes.get("/requests/<request_id>")
def show_request(group_id: str, request_id: str) -> Response:
    """Show a request; with `?wait=SECONDS` at its end."""
    service = _service()
    _authenticated(service, group_id)
    seconds = _wait_seconds(service)
    found = service.requests.get(group_id, request_id)
    return respond(200, {"request": request_json(_ended(service, found, seconds))})


@routes.get("")
def show_group(group_id: str) -> Response:
    """Show the status of a group."""
    service = _service()
    _authenticated(service, group_id)
    record = service.groups.get(group_id)
    return respond(200, {"group": group_json(record, service.groups.list_nodes(group_id))})


def _service() -> Service:
    found: Service = current_app.extensions[EXTENSION]
    return found


def _authenticated(service: Service, group_id: str) -> Received:
    """Authenticate the request; raises Throttled before the database is read."""
    headers = {name.lower(): value for name, value in request.headers.items()}
    tokens = request.args.getlist("token")
    source = _source(service)
    caller = Caller(source=source, group_id=group_id, credential=credential_of(headers, tokens, source))
    service.attempts.check(caller)
    received = Received(
        method=request.method,
        path=request.path,
        query=request.query_string.decode("latin-1"),
        tokens=tokens,
        headers=headers,
        body=request.get_data(cache=False),
    )
    try:
        authenticate(received, group_id, service.tokens)
    except Unauthenticated as error:
        refused = error
    else:
        service.attempts.add_success(caller)
        return received
    # add_failure() is called outside of the `except` block. Inside the block, oslo.log would append the exception to
    # each log line.
    service.attempts.add_failure(caller)
    raise refused


def _source(service: Service) -> str:
    """Return the source address of the request: a proxy adds that of its client at the end of a header."""
    peer = request.remote_addr or ""
    # A client on this host can forge the header. This is no additional risk, because such a client could also stop the
    # API.
    behind_proxy = service.behind_proxy or peer in {"127.0.0.1", "::1"}
    forwarded = request.headers.get("X-Forwarded-For", "") if behind_proxy else ""
    return forwarded.rpartition(",")[2].strip() or peer


def _wait_seconds(service: Service) -> float:
    text = request.args.get("wait", "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise RequestError("read the request", "wait is not a number of seconds", "Send wait=30, for example.")
    return min(seconds, service.longest_wait)


def _final() -> bool:
    text = request.args.get("final", "false")
    if text not in {"true", "false"}:
        raise RequestError("read the request", "final is neither true nor false", "Send final=true, or nothing.")
    return text == "true"


def _ended(service: Service, recorded: Request, seconds: float) -> Request:
    """Wait until a request has ended, for a limited time; return its state then."""
    if seconds <= 0 or recorded.ended_at is not None or not service.waiting.acquire(blocking=False):
        return recorded
    try:
        return _watch(lambda: service.requests.get(recorded.group_id, recorded.id), seconds)
    finally:
        service.waiting.release()


def _watch(read: Callable[[], Request], seconds: float) -> Request:
    end = time.monotonic() + seconds
    pause = _FIRST_LOOK
    while True:
        left = end - time.monotonic()
        time.sleep(max(min(pause, left), 0))
        found = read()
        if found.ended_at is not None or left <= pause:
            return found
        pause = min(pause * 1.5, _LONGEST_LOOK)


def _answered(found: Request, *, final: bool) -> Response:
    match state_of(found):
        case "open":
            place = f"/v1/groups/{found.group_id}/requests/{found.id}"
            if final:
                return respond(504, {**unfinished_json(found), "url": place}, Location=place, Retry_After="5")
            return respond(202, {"request": request_json(found), "url": place}, Location=place)
        case "succeeded":
            return respond(200, {"request": request_json(found)})
        case _:
            return respond(409, failure_json(found))
