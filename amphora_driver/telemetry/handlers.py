# SPDX-License-Identifier: Apache-2.0
"""Answers HTTP requests for the status page, its JSON, records, the metrics and the health check.

Invariant: no request changes anything. All requests within a second share one result, so a hundred viewers cost as much
as one. The health check of the process needs no authorization; all other paths need it. Records need a token.
"""

from __future__ import annotations

import gzip
import logging
import stat
import threading
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from amphora_driver.errors import AmphoraDriverError
from amphora_driver.metrics import OURS
from amphora_driver.secret import Secret
from amphora_driver.telemetry import fleet_metrics, status_page
from amphora_driver.telemetry.http_request import Request, RequestRefused, authorize
from amphora_driver.telemetry.records import Scope

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from amphora_driver.telemetry.records import RecordReader
    from amphora_driver.telemetry.snapshot_cache import SnapshotCache, View

LOG = logging.getLogger(__name__)
_HTML = "text/html; charset=utf-8"
_JSON = "application/json"
_TEXT = "text/plain; charset=utf-8"
_MAX_CACHED = 16
_MAX_ID = 36
# Minimum size in bytes of a body that the server compresses. Compression of a shorter body saves little.
_MIN_COMPRESSED = 1024
_COMMON_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Content-Security-Policy": status_page.POLICY,
    "Connection": "close",
}
_REFUSAL_HEADERS: dict[int, dict[str, str]] = {
    401: {"WWW-Authenticate": 'Basic realm="amphorae", charset="UTF-8"'},
    405: {"Allow": "GET, HEAD"},
}


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """Status, content type, body and further headers of a response."""

    status: int = 200
    content_type: str = _TEXT
    body: bytes = b""
    headers: dict[str, str] = {}

    def encode(self, method: str, *, accepts_gzip: bool = False) -> bytes:
        """Return the bytes to send. The response to the method HEAD has no body."""
        body, headers = self.body, _COMMON_HEADERS | self.headers
        if accepts_gzip and len(body) > _MIN_COMPRESSED:
            body = gzip.compress(body, compresslevel=1, mtime=0)
            headers["Content-Encoding"] = "gzip"
        headers |= {"Vary": "Accept-Encoding", "Content-Type": self.content_type, "Content-Length": str(len(body))}
        lines = [f"{name}: {value}" for name, value in headers.items()]
        head = [f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}", *lines, "", ""]
        return "\r\n".join(head).encode() + (b"" if method == "HEAD" else body)


class TokenFile:
    """Reads the token from a file; None for no token. A changed file takes effect without a restart."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._known: tuple[tuple[int, ...], Secret] | None = None
        self._logged = ""

    def read_token(self) -> Secret | None:
        """Return the required token, or None; raises RequestRefused if the file is not usable or not safe."""
        if not self._path:
            return None
        try:
            found = Path(self._path).stat()
            if found.st_mode & stat.S_IROTH:
                # Other users may have read the token already, so the operator must also replace the token.
                problem = "other users can read it; run chmod o-r, and write a new token into it"
            else:
                token = self._read_file(found)
                if token.reveal():
                    self._logged = ""
                    return token
                problem = "its first line is empty"
        except OSError as error:
            problem = error.strerror or str(error)
        if self._logged != problem:
            self._logged = problem
            words = "the status page refuses all requests, because [amp_status_page] token_file %s is unusable: %s"
            LOG.error(words, self._path, problem)
        raise RequestRefused(503, "The token of this page cannot be read: see the log of its process.")

    def _read_file(self, found: os.stat_result) -> Secret:
        """Return the token of a file with this state."""
        # Every write of the token file changes at least one of inode, size, mtime and ctime, so all four are compared.
        mark = (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        if self._known is None or self._known[0] != mark:
            line = Path(str(self._path)).read_bytes().split(b"\n", 1)[0].strip()
            self._known = (mark, Secret(line))
        return self._known[1]


@dataclass
class RequestHandler:
    """Answers all paths of the server. `is_working` returns the result of the health check."""

    snapshots: SnapshotCache
    records: RecordReader
    process: status_page.ProcessIdentity
    tokens: TokenFile
    is_working: Callable[[], bool]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _cached: dict[tuple[str, str], bytes] = field(default_factory=dict)
    _cached_number: int = 0

    def handle(self, request: Request, peer: str) -> Response:
        try:
            if request.path == "/healthz":
                working = self.is_working()
                return Response(status=200 if working else 503, body=b"ok\n" if working else b"not working\n")
            token = self.tokens.read_token()
            authorize(request, peer, token)
            if request.path == "/records.json":
                return self._respond_with_records(request, token)
            return self._respond(request)
        except RequestRefused as refusal:
            return refusal_response(refusal)

    def _respond(self, request: Request) -> Response:
        path, accept, process = request.path, request.headers.get("accept", ""), self.process
        query = request.query_value("q")[: status_page.MAX_QUERY]
        if path in {"/", "/page.json"}:
            view = self.snapshots.get_view()
            page = self._cache(view, ("page", query), lambda: status_page.render_page(view, process, query))
            if path == "/":
                return Response(content_type=_HTML, body=page)
            body = self._cache(view, ("parts", query), lambda: status_page.encode_parts(view, page))
            return Response(content_type=_JSON, body=body)
        if path == "/status.json":
            view = self.snapshots.get_view()
            body = self._cache(view, ("facts", ""), lambda: status_page.encode_status(view, process))
            return Response(content_type=_JSON, body=body)
        if path in {"/metrics", "/metrics/process", "/metrics/fleet"}:
            own = None if path == "/metrics/fleet" else OURS.registry
            fleet_view = None if path == "/metrics/process" else self.snapshots.get_view()
            text, content_type = fleet_metrics.encode_metrics(accept, own, fleet_view, process.version, process.kind)
            return Response(content_type=content_type, body=text)
        raise RequestRefused(404, "There is no such page.")

    def _respond_with_records(self, request: Request, token: Secret | None) -> Response:
        if token is None:
            # Without a token, every user of this host could read the records, which have more details than the page.
            raise RequestRefused(403, "The records need a token: [amp_status_page] token_file is not set.")
        scope = parse_scope(request)
        try:
            return Response(content_type=_JSON, body=self.records.encode(scope))
        except AmphoraDriverError as error:
            LOG.warning("the status page server could not read records for a request and responds with 503: %s", error)
            raise RequestRefused(503, "The database does not answer.") from None

    def _cache(self, view: View, key: tuple[str, str], make: Callable[[], bytes]) -> bytes:
        """Return the cached result for this view. One thread computes a missing result while others wait."""
        with self._lock:
            if self._cached_number != view.number or len(self._cached) >= _MAX_CACHED:
                self._cached, self._cached_number = {}, view.number
            if key not in self._cached:
                self._cached[key] = make()
            return self._cached[key]


def parse_scope(request: Request) -> Scope:
    """Return the scope of a request for records; raises RequestRefused for an invalid one."""
    failover, prefix = request.query_value("failover"), request.query_value("load_balancer")
    # A number of more than 18 digits may exceed the integers of a database.
    if failover and not (failover.isascii() and failover.isdigit() and len(failover) <= 18):
        raise RequestRefused(400, "The number of the fail-over is invalid.")
    if len(prefix) > _MAX_ID or (failover and prefix):
        raise RequestRefused(400, "The scope of the records is invalid.")
    return Scope(load_balancer=prefix or None, failover=int(failover) if failover else None)


def refusal_response(refusal: RequestRefused) -> Response:
    """Return the response to a refused request."""
    headers = _REFUSAL_HEADERS.get(refusal.status, {})
    return Response(status=refusal.status, body=f"{refusal.reason}\n".encode(), headers=headers)
