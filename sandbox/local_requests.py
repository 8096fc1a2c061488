# SPDX-License-Identifier: Apache-2.0
"""Which requests the sandbox's APIs take: those of programs on this machine, and none that a web page has caused.

Both APIs listen on loopback and ask for no password. A browser on this machine sends them requests of a web page, with
the page's host name in `Host` if its name resolves to loopback, or with the page's address in `Origin` (RFC 9110,
section 7.2; RFC 6454, section 7).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

Application = Callable[[dict[str, Any], Any], Iterable[bytes]]

_LOCAL = re.compile(r"(?:localhost|127\.\d{1,3}\.\d{1,3}\.\d{1,3}|\[::1\])(?::\d{1,5})?", re.IGNORECASE)


def rejection_reason(host: str | None, origin: str | None) -> str | None:
    """Why a request is refused; None if it is not.

    Args:
        host: the header `Host`.
        origin: the header `Origin`, None without one.
    """
    if host is None or not _LOCAL.fullmatch(host):
        return "Could not answer: the header Host does not name this machine's loopback. Use 127.0.0.1."
    if origin is not None and not _LOCAL.fullmatch(origin.removeprefix("http://")):
        return "Could not answer: a web page of another host has caused this request."
    return None


def reject_remote_requests(application: Application) -> Application:
    """A WSGI application that answers 403 to requests that `rejection_reason` names."""

    def call(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        reason = rejection_reason(environ.get("HTTP_HOST"), environ.get("HTTP_ORIGIN"))
        if reason is None:
            return application(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
        return [reason.encode()]

    return call
