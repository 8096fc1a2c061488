# SPDX-License-Identifier: Apache-2.0
"""Access check of the sandbox's APIs: they accept requests of local programs, but not of web pages.

Both APIs listen on the loopback without authentication. A web page can make a browser on this machine send requests to
them. Such a request has the page's host name in `Host` if this name resolves to the loopback, or the page's origin in
`Origin` (RFC 9110, section 7.2; RFC 6454, section 7).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

Application = Callable[[dict[str, Any], Any], Iterable[bytes]]

_LOCAL = re.compile(r"(?:localhost|127\.\d{1,3}\.\d{1,3}\.\d{1,3}|\[::1\])(?::\d{1,5})?", re.IGNORECASE)


def rejection_reason(host: str | None, origin: str | None) -> str | None:
    """The reason to reject a request with these headers; None to accept it."""
    if host is None or not _LOCAL.fullmatch(host):
        return "Could not answer: the header Host does not name the loopback of this machine. Use 127.0.0.1."
    if origin is not None and not _LOCAL.fullmatch(origin.removeprefix("http://")):
        return "Could not answer: a web page of another host sent this request."
    return None


def reject_remote_requests(application: Application) -> Application:
    """Wrap a WSGI application; requests with a `rejection_reason` get the status 403."""

    def call(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        reason = rejection_reason(environ.get("HTTP_HOST"), environ.get("HTTP_ORIGIN"))
        if reason is None:
            return application(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
        return [reason.encode()]

    return call
