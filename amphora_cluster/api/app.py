# SPDX-License-Identifier: Apache-2.0
"""The WSGI application of the API.

Invariant: each error is JSON with the keys `wanted`, `happened` and `remedy`. An unexpected exception is logged by the
method and the path, without the query, because the query may contain a token; the caller gets no detail of it.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import sqlalchemy as sa
from flask import Flask, Response, current_app, request
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from werkzeug.exceptions import HTTPException

from amphora_cluster.api import counters
from amphora_cluster.api.attempts import FailedAttempts, Throttled
from amphora_cluster.api.authentication import Replayed, Unauthenticated
from amphora_cluster.api.counters import SharedCounters
from amphora_cluster.api.parameters import MOST_BYTES
from amphora_cluster.api.responses import error_json
from amphora_cluster.api.webhooks import EXTENSION, Service, respond, routes
from amphora_cluster.database.groups import GroupStore
from amphora_cluster.database.requests import RequestStore, TooManyOpen
from amphora_cluster.database.tables import SCHEMA, group_row
from amphora_cluster.database.tokens import TokenStore
from amphora_driver.errors import AmphoraDriverError, Conflict, RequestError, StoreError, UnknownObject
from amphora_driver.telemetry.handlers import TokenFile
from amphora_driver.telemetry.http_request import RequestRefused
from amphora_driver.untrusted_text import printable

if TYPE_CHECKING:
    from oslo_config.cfg import ConfigOpts

LOG = logging.getLogger(__name__)
# Requests with the parameter `wait` leave this number of threads free, so the API can always answer other requests.
FREE_THREADS = 2
_RETRY_SECONDS = "5"
_COUNTERS = "amphora-cluster-counters"


def create_app(
    conf: ConfigOpts | None = None, shared: SharedCounters | None = None, attempts: FailedAttempts | None = None
) -> Flask:
    """Return the application for these options; by default for those of the usual file.

    Args:
        conf: the options.
        shared: counters of all worker processes; None for counters of this process.
        attempts: failed authentications of all worker processes; None for those of this process.
    """
    from amphora_cluster import config  # noqa: PLC0415 - tests make the application without options
    from amphora_driver.database.engine import Database  # noqa: PLC0415

    conf = conf or config.load()
    database, vault = Database(conf.amp_cluster.connection, schema=SCHEMA), config.load_vault(conf)
    own = conf.amp_cluster_api
    service = Service(
        groups=GroupStore(database, vault),
        requests=RequestStore(database),
        tokens=TokenStore(database, vault),
        longest_wait=own.longest_wait,
        waiting=threading.Semaphore(own.threads - FREE_THREADS),
        attempts=attempts or FailedAttempts(own.failed_attempts),
        behind_proxy=own.tls_proxy,
    )
    # A query shows whether the database answers. `database.now()` estimates the time and would not detect an outage.
    alive = partial(database.read, lambda connection: connection.execute(sa.select(group_row.c.id).limit(1)).first())
    return make_app(service, alive, shared, TokenFile(conf.amp_status_page.token_file))


def make_app(
    service: Service,
    alive: Callable[[], object] = lambda: None,
    shared: SharedCounters | None = None,
    token_file: TokenFile | None = None,
) -> Flask:
    """Return the application for a service.

    Args:
        service: what the routes use.
        alive: raises an error if the database does not answer, for /healthcheck.
        shared: see `create_app`.
        token_file: of the page /metrics.
    """
    found, tokens = shared or SharedCounters(), token_file or TokenFile(None)
    app = Flask("amphora-cluster-api", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = MOST_BYTES
    app.extensions[EXTENSION] = service
    app.extensions[_COUNTERS] = found
    app.register_blueprint(routes)
    app.register_error_handler(AmphoraDriverError, _refused)
    app.register_error_handler(HTTPException, _http_error)
    app.register_error_handler(Exception, _failed)

    @app.get("/healthcheck")
    def healthcheck() -> Response:
        alive()
        return respond(200, {"status": "ok"})

    @app.get("/metrics")
    def metrics() -> Response:
        try:
            page = counters.metrics_page(found, request, tokens.read_token())
        except RequestRefused as refusal:
            document = {"wanted": "read the metrics", "happened": refusal.reason, "remedy": "See [amp_status_page]."}
            challenge = {"WWW_Authenticate": "Bearer"} if refusal.status == 401 else {}
            return respond(refusal.status, document, **challenge)
        return Response(page, content_type=CONTENT_TYPE_LATEST)

    return app


def _refused(error: AmphoraDriverError) -> Response:
    match error:
        case Throttled():
            # The API logs the begin of a pause and only counts refusals during the pause. A line for each refusal would
            # fill the log.
            _count(counters.LIMITED)
            return respond(429, error_json(error), Retry_After=str(math.ceil(error.seconds)))
        case Unauthenticated():
            _count(counters.INVALID)
            LOG.info(
                "the API refused the unauthenticated request %s %s from %s: %s",
                request.method,
                _path(),
                request.remote_addr,
                error.happened,
            )
            return respond(401, error_json(error), WWW_Authenticate="Bearer")
        case Replayed():
            _count(counters.REPLAYED)
            LOG.warning(
                "the API refused the repeated signed request %s %s from %s: %s",
                request.method,
                _path(),
                request.remote_addr,
                error.happened,
            )
            return respond(409, error_json(error))
        case UnknownObject():
            return respond(404, error_json(error))
        case Conflict():
            return respond(409, error_json(error))
        case TooManyOpen():
            return respond(429, error_json(error), Retry_After=_RETRY_SECONDS)
        case RequestError():
            return respond(400, error_json(error))
        case StoreError():
            LOG.error(
                "the API could not answer the request %s %s, because it cannot use the database: %s",
                request.method,
                _path(),
                error,
            )
            document = {"wanted": "answer the request", "happened": "the database of this service does not answer"}
            return respond(503, {**document, "remedy": "Send the request again."}, Retry_After=_RETRY_SECONDS)
        case _:
            return _failed(error)


def _count(reason: str) -> None:
    found: SharedCounters = current_app.extensions[_COUNTERS]
    found.count(reason)


def _http_error(error: HTTPException) -> Response:
    status = error.code or 500
    document = {"wanted": "read the request", "happened": error.name, "remedy": "Check method, URL and size."}
    return respond(status, document, **({"Allow": ", ".join(_allowed(error))} if status == 405 else {}))


def _allowed(error: HTTPException) -> list[str]:
    return sorted(getattr(error, "valid_methods", None) or ())


def _failed(error: Exception) -> Response:
    LOG.error(
        "the API could not answer the request %s %s because of an unexpected error",
        request.method,
        _path(),
        exc_info=error,
    )
    happened, remedy = "an internal error", "Look into the log of the service."
    return respond(500, {"wanted": "answer the request", "happened": happened, "remedy": remedy})


def _path() -> str:
    return printable(request.path, 200)
