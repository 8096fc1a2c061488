# SPDX-License-Identifier: Apache-2.0
"""The head of a request: what is asked, and by whom.

Invariant: pure. Whatever is not plainly a request for something of ours is refused with a status, and nothing is
guessed: two Host headers are none (RFC 9112, section 3.2). Source: RFC 9110 and RFC 9112.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
from urllib.parse import parse_qs, urlsplit

import msgspec

from amphora_driver.secret import Secret

LONGEST_HEAD = 8192
_MOST_HEADERS = 64
_METHODS = ("GET", "HEAD")
# Under these names a browser on this machine finds it. Any other name may be a stranger's that was made to point here.
_LOCAL_NAMES = ("localhost",)
# A proxy on this machine says so that it asks for others.
_FORWARDED = {
    *("forwarded", "via", "x-real-ip"),
    *("x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-forwarded-server"),
}
# What many of them speak that say nothing; what looks from here speaks the other one.
_OF_PROXIES = "HTTP/1.0"


class Refused(Exception):
    """The request is not answered.

    Args:
        status: HTTP status.
        reason: a sentence for whoever asked.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request of ours: headers by their names in small letters; `version` as in its first line."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    version: str = "HTTP/1.1"

    def wants(self, name: str) -> str:
        """The first value of a field of the query; empty without."""
        try:
            found = parse_qs(self.query, max_num_fields=8)
        except ValueError:
            return ""
        return found.get(name, [""])[0]


def parse(head: bytes) -> Request:
    """Read a head, without the empty line at its end.

    Raises:
        Refused: it is none, or asks for something that nobody does here.
    """
    try:
        lines = head.decode("ascii").split("\r\n")
    except UnicodeDecodeError:
        raise Refused(400, "The head of a request is ASCII.") from None
    words = lines[0].split(" ")
    if len(words) != 3 or words[2] not in {_OF_PROXIES, "HTTP/1.1"}:
        raise Refused(400, "This is not a request of HTTP/1.1.")
    method, target, version = words
    if method not in _METHODS:
        raise Refused(405, "Nothing can be changed here.")
    if not target.startswith("/"):
        raise Refused(400, "What is asked for begins with a slash.")
    if len(lines) - 1 > _MOST_HEADERS:
        raise Refused(431, "There are too many headers.")
    try:
        parts = urlsplit("//host" + target)
    except ValueError:
        raise Refused(400, "What is asked for cannot be understood.") from None
    headers = _headers(lines[1:])
    return Request(method=method, path=parts.path, query=parts.query, headers=headers, version=version)


def _headers(lines: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip() or "\n" in line or "\r" in line:
            raise Refused(400, "There is a line that is no header.")
        key = name.lower()
        if key in found and key in {"host", "authorization"}:
            raise Refused(400, f"There is more than one {key}.")
        found[key] = value.strip()
    if found.get("content-length", "0") != "0" or "transfer-encoding" in found:
        raise Refused(413, "Nothing is to be sent here.")
    return found


def admit(request: Request, peer: str, token: Secret | None) -> None:
    """Let a request pass, or not.

    Args:
        request: what is asked.
        peer: the address it comes from.
        token: who knows it may look; None: whoever is on this machine may.

    Raises:
        Refused: 401 without the token; 403 from elsewhere, or under a name that is not this machine's.
    """
    if token is not None:
        # Compared in constant time.
        if Secret(_shown(request.headers.get("authorization", ""))) != token:
            raise Refused(401, "The token of this page is needed: as a bearer token, or as a password.")
        return
    if not _is_loopback(peer):
        raise Refused(403, "Only this machine is answered: no [status] token_file is set.")
    if request.version == _OF_PROXIES or _FORWARDED & request.headers.keys():
        raise Refused(403, "A proxy asks for somebody else: no [status] token_file is set.")
    if not _is_local_name(request.headers.get("host", "")):
        raise Refused(403, "Under this name nobody is answered: no [status] token_file is set.")


def _shown(authorization: str) -> bytes:
    """The token in a header (RFC 6750, RFC 7617); empty if there is none."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip().encode()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return b""
    return b""


def _is_loopback(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback


def _is_local_name(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    return name is not None and (name in _LOCAL_NAMES or _is_loopback(name))
