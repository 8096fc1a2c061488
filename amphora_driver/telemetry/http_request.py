# SPDX-License-Identifier: Apache-2.0
"""Parses the head of an HTTP request and decides whether its client is authorized.

Invariant: the functions do no I/O. They refuse an unexpected or ambiguous head with a status, for example a head with
two Host headers (RFC 9112, section 3.2). Source: RFC 9110 and RFC 9112.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
from contextlib import suppress
from urllib.parse import parse_qs, urlsplit

import msgspec

from amphora_driver.secret import Secret

MAX_HEAD_SIZE = 8192
_MAX_HEADERS = 64
_METHODS = ("GET", "HEAD")
# Headers that a proxy adds when it forwards requests of other machines. Without a token, the status page refuses
# requests with these headers.
_FORWARDED = {
    *("forwarded", "via", "x-real-ip"),
    *("x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-forwarded-server"),
}
# Many proxies send HTTP/1.0 without these headers, while local clients send HTTP/1.1. So without a token, the status
# page also refuses HTTP/1.0.
_PROXY_VERSION = "HTTP/1.0"


class RequestRefused(Exception):
    """The request is refused with an HTTP status and a sentence for the client."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A valid request. The names of the headers are in lower case."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    version: str = "HTTP/1.1"

    def query_value(self, name: str) -> str:
        """Return the first value of a query field; empty without the field."""
        with suppress(ValueError):
            return parse_qs(self.query, max_num_fields=8).get(name, [""])[0]
        return ""


def parse_request(head: bytes) -> Request:
    """Parse a head without the empty line at the end; raises RequestRefused for an invalid head."""
    try:
        lines = head.decode("ascii").split("\r\n")
    except UnicodeDecodeError:
        raise RequestRefused(400, "The head of the request is not ASCII.") from None
    words = lines[0].split(" ")
    if len(words) != 3 or words[2] not in {_PROXY_VERSION, "HTTP/1.1"}:
        raise RequestRefused(400, "The request line is not one of HTTP/1.1.")
    method, target, version = words
    if method not in _METHODS:
        raise RequestRefused(405, "This server supports GET and HEAD only.")
    if not target.startswith("/"):
        raise RequestRefused(400, "The request target does not begin with a slash.")
    if len(lines) - 1 > _MAX_HEADERS:
        raise RequestRefused(431, "The request has too many headers.")
    try:
        parts = urlsplit("//host" + target)
    except ValueError:
        raise RequestRefused(400, "The request target is invalid.") from None
    headers = _parse_headers(lines[1:])
    return Request(method=method, path=parts.path, query=parts.query, headers=headers, version=version)


def _parse_headers(lines: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip() or "\n" in line or "\r" in line:
            raise RequestRefused(400, "A header line is invalid.")
        key = name.lower()
        if key in found and key in {"host", "authorization"}:
            raise RequestRefused(400, f"The request has more than one {key} header.")
        found[key] = value.strip()
    if found.get("content-length", "0") != "0" or "transfer-encoding" in found:
        raise RequestRefused(413, "The request has a body.")
    return found


def authorize(request: Request, peer: str, token: Secret | None) -> None:
    """Check that a request has the configured token, or comes from this machine if no token is configured.

    Args:
        peer: source address of the request.

    Raises:
        RequestRefused: 401 without the token; 403 from another machine, or with a host name of another machine.
    """
    if token is not None:
        # The comparison of two Secret objects takes constant time, so its duration does not reveal the token.
        if Secret(_presented_token(request.headers.get("authorization", ""))) != token:
            raise RequestRefused(401, "This page requires its token, as a bearer token or as a password.")
        return
    reason = "Without [amp_status_page] token_file, this page answers"
    if not _is_loopback(peer):
        raise RequestRefused(403, f"{reason} requests from its own machine only.")
    if request.version == _PROXY_VERSION or _FORWARDED & request.headers.keys():
        raise RequestRefused(403, f"{reason} no requests of a proxy.")
    if not _is_local_name(request.headers.get("host", "")):
        raise RequestRefused(403, f"{reason} requests for localhost only.")


def _presented_token(authorization: str) -> bytes:
    """Return the token of an Authorization header (RFC 6750, RFC 7617); empty without one."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip().encode()
    if scheme.lower() == "basic":
        with suppress(binascii.Error, ValueError):
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
    return b""


def _is_loopback(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback


def _is_local_name(host: str) -> bool:
    """Whether a Host header names this machine. Another name may be an attacker's (DNS rebinding)."""
    with suppress(ValueError):
        name = urlsplit(f"//{host}").hostname
        return name is not None and (name == "localhost" or _is_loopback(name))
    return False
