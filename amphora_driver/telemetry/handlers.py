# SPDX-License-Identifier: Apache-2.0
"""What is answered to a request.

Invariant: nothing is changed by any request. What was made for one who looks is given to all who look in the same
second; so who answers has as much to do for a hundred viewers as for one. Whether the process does its duty is told to
everybody, and nothing else without access.
"""

from __future__ import annotations

import gzip
import logging
import stat
import threading
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from amphora_driver.metrics import OURS
from amphora_driver.secret import Secret
from amphora_driver.telemetry import fleet_metrics, status_page
from amphora_driver.telemetry.http_request import Refused, Request, admit

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from amphora_driver.telemetry.snapshot_cache import Looking, View

LOG = logging.getLogger(__name__)
_HTML = "text/html; charset=utf-8"
_JSON = "application/json"
_TEXT = "text/plain; charset=utf-8"
_MOST_KEPT = 16
# Less is not worth packing.
_SMALL = 1024
_ALWAYS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Content-Security-Policy": status_page.POLICY,
    "Connection": "close",
}
_ASK = {"WWW-Authenticate": 'Basic realm="amphorae", charset="UTF-8"'}


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Status, type and body, with further headers."""

    status: int = 200
    content_type: str = _TEXT
    body: bytes = b""
    headers: dict[str, str] = {}

    def written(self, method: str, *, packs: bool = False) -> bytes:
        """As it is sent.

        Args:
            method: of the request; HEAD is told everything but the body.
            packs: whether who asks takes gzip.
        """
        body = self.body
        more = dict(self.headers)
        if packs and len(body) > _SMALL:
            body = gzip.compress(body, compresslevel=1, mtime=0)
            more["Content-Encoding"] = "gzip"
        more |= {"Vary": "Accept-Encoding", "Content-Type": self.content_type, "Content-Length": str(len(body))}
        phrase = HTTPStatus(self.status).phrase
        lines = [f"HTTP/1.1 {self.status} {phrase}", *(f"{name}: {value}" for name, value in (_ALWAYS | more).items())]
        return "\r\n".join([*lines, "", ""]).encode() + (b"" if method == "HEAD" else body)


class TokenFile:
    """The token as its file has it now: a new one counts without a restart.

    Args:
        path: of the file; None: no token is asked for.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._known: tuple[tuple[int, ...], Secret] | None = None
        self._said = ""

    def token(self) -> Secret | None:
        """What has to be shown; None: nothing.

        Raises:
            Refused: there is to be one, and it cannot be read, or others can: then nobody is let in.
        """
        if not self._path:
            return None
        try:
            found = Path(self._path).stat()
            if found.st_mode & stat.S_IROTH:
                # Whoever has an account here might have read it.
                trouble = "others can read it; take that from them (chmod o-r), and write another token into it"
            else:
                token = self._read(found)
                if token.reveal():
                    self._said = ""
                    return token
                trouble = "its first line is empty"
        except OSError as error:
            trouble = error.strerror or str(error)
        if self._said != trouble:
            self._said = trouble
            LOG.error("nobody is shown the status page: [status] token_file %s: %s", self._path, trouble)
        raise Refused(503, "The token of this page cannot be read: see the log of its process.")

    def _read(self, found: os.stat_result) -> Secret:
        """The token of a file that is like this now."""
        # Two writes within a tick of the clock, or a time that was put back, leave some of these as they were.
        mark = (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        if self._known is None or self._known[0] != mark:
            line = Path(str(self._path)).read_bytes().split(b"\n", 1)[0].strip()
            self._known = (mark, Secret(line))
        return self._known[1]


class Answers:
    """Everything that can be asked for.

    Args:
        looking: at the fleet.
        who: answers.
        tokens: who may look.
        does_its_duty: whether this process does.
    """

    def __init__(
        self, looking: Looking, who: status_page.Who, tokens: TokenFile, does_its_duty: Callable[[], bool]
    ) -> None:
        self._looking = looking
        self._who = who
        self._tokens = tokens
        self._does_its_duty = does_its_duty
        self._making = threading.Lock()
        self._made: dict[tuple[str, str], bytes] = {}
        self._made_of = 0

    def to(self, request: Request, peer: str) -> Answer:
        """The answer to a request that came from an address."""
        try:
            if request.path == "/healthz":
                well = self._does_its_duty()
                return Answer(status=200 if well else 503, body=b"ok\n" if well else b"not at work\n")
            admit(request, peer, self._tokens.token())
            return self._shown(request)
        except Refused as refusal:
            return refused(refusal)

    def _shown(self, request: Request) -> Answer:
        path, accept = request.path, request.headers.get("accept", "")
        who = self._who
        if path == "/":
            return Answer(content_type=_HTML, body=self._page(self._looking.view(), request))
        if path == "/page.json":
            view = self._looking.view()
            whole = self._page(view, request)
            body = self._once(view, ("parts", _query(request)), lambda: status_page.refreshed(view, whole))
            return Answer(content_type=_JSON, body=body)
        if path == "/status.json":
            view = self._looking.view()
            body = self._once(view, ("facts", ""), lambda: status_page.facts(view, who))
            return Answer(content_type=_JSON, body=body)
        if path in {"/metrics", "/metrics/process", "/metrics/fleet"}:
            own = None if path == "/metrics/fleet" else OURS.registry
            seen = None if path == "/metrics/process" else self._looking.view()
            text, content_type = fleet_metrics.answer(accept, own, seen, who.version, who.kind)
            return Answer(content_type=content_type, body=text)
        raise Refused(404, "There is no such page.")

    def _page(self, view: View, request: Request) -> bytes:
        query = _query(request)
        return self._once(view, ("page", query), lambda: status_page.document(view, self._who, query))

    def _once(self, view: View, key: tuple[str, str], make: Callable[[], bytes]) -> bytes:
        """What was made of this view already, or is made now by one while others wait."""
        with self._making:
            if self._made_of != view.number or len(self._made) >= _MOST_KEPT:
                self._made, self._made_of = {}, view.number
            if key not in self._made:
                self._made[key] = make()
            return self._made[key]


def refused(refusal: Refused) -> Answer:
    """A refusal as an answer."""
    headers = dict(_ASK) if refusal.status == HTTPStatus.UNAUTHORIZED else {}
    if refusal.status == HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = "GET, HEAD"
    return Answer(status=refusal.status, body=f"{refusal.reason}\n".encode(), headers=headers)


def _query(request: Request) -> str:
    return request.wants("q")[: status_page.LONGEST_QUERY]
