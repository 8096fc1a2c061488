# SPDX-License-Identifier: Apache-2.0
"""What a health monitor asks, parsed.

Invariant: the renderer prints the parsed request, never the text it was parsed from, so what was checked is
what is used.  Everything is matched over its full length: `$` would let a trailing newline through.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from amphora_driver.errors import UnsupportedOption
from amphora_driver.model.enums import MonitorType
from amphora_driver.model.loadbalancer import HealthMonitor
from amphora_driver.validation.unsupported import between, one_of

TYPES = tuple(MonitorType)
"""Which of them go with a pool: `virtual_servers.check_monitor`."""
SPEAK_HTTP = (MonitorType.HTTP, MonitorType.HTTPS)
SPEAK_TLS = (MonitorType.HTTPS, MonitorType.TLS_HELLO)
"""These speak TLS with the member whether or not its pool does."""
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "TRACE", "OPTIONS", "CONNECT", "PATCH")
VERSIONS = {1.0: "HTTP/1.0", 1.1: "HTTP/1.1"}
MAX_SECONDS = (2**31 - 1) // 1000
"""Longest delay and timeout: HAProxy's timers hold signed 32-bit milliseconds (manual section 2.5)."""
MAX_RETRIES = 10
MAX_PATH = 255
"""Longest url_path: the width of Octavia's column."""

# Visible ASCII: what an HTTP request line can carry (RFC 9112 section 3). A fragment is never sent.
_PATH = re.compile(r"/[!-~]*")
# As Octavia's own rule: labels of letters, digits, - and _, with an optional dot at the end.
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_DOMAIN = re.compile(rf"(?=.{{1,253}}\.?\Z){_LABEL}(?:\.{_LABEL})*\.?")
_CODES = re.compile(r"([1-5][0-9]{2})(?:-([1-5][0-9]{2}))?")


class HTTPRequest(NamedTuple):
    """The request a monitor sends and the answers it is happy with (canonical, e.g. `200,202-204`)."""

    method: str
    path: str
    version: str
    host: str | None
    expected: str


def checked(monitor: HealthMonitor) -> HTTPRequest | None:
    """Check the options of a monitor. HTTP options of one that does not speak HTTP say nothing, but for the name.

    Returns:
        What it asks, if it speaks HTTP.

    Raises:
        UnsupportedOption: an option, or a value of it, is not served.
    """
    one_of("health monitor type", monitor.type, TYPES)
    between("health monitor option delay", monitor.delay, 1, MAX_SECONDS)
    between("health monitor option timeout", monitor.timeout, 1, MAX_SECONDS)
    between("health monitor option max_retries", monitor.max_retries, 1, MAX_RETRIES)
    between("health monitor option max_retries_down", monitor.max_retries_down, 1, MAX_RETRIES)
    if monitor.type in SPEAK_HTTP:
        return http_request(monitor)
    host(monitor)
    return None


def http_request(monitor: HealthMonitor) -> HTTPRequest:
    """Parse what an HTTP monitor asks; what is not given is Octavia's default (GET, /, 200, HTTP 1.0).

    Raises:
        UnsupportedOption: a method, path, version, name or code that cannot be asked or expected.
    """
    method = monitor.http_method or "GET"
    if method not in METHODS:
        raise _refusal("http_method", method, "it is not a method", f"Use one of {', '.join(METHODS)}.")
    path = monitor.url_path or "/"
    if len(path) > MAX_PATH or not _PATH.fullmatch(path):
        raise _refusal(
            "url_path",
            path,
            "it is not the path of a URL",
            "Begin it with '/', percent-encode spaces and special characters.",
        )
    version = VERSIONS.get(monitor.http_version or 1.0)
    if version is None:
        raise _refusal("http_version", str(monitor.http_version), "there is no such version", "Use 1.0 or 1.1.")
    return HTTPRequest(method, path, version, host(monitor), expected_codes(monitor.expected_codes or "200"))


def host(monitor: HealthMonitor) -> str | None:
    """The name the monitor asks for; members of a pool that encrypts have to prove it.

    Raises:
        UnsupportedOption: it is not a domain name.
    """
    name = monitor.domain_name or None
    if name is not None and not _DOMAIN.fullmatch(name):
        raise _refusal("domain_name", name, "it is not a domain name", "Use letters, digits, '-' and '.'.")
    return name


def expected_codes(text: str) -> str:
    """Status codes in canonical form.

    Args:
        text: codes and ranges of codes with commas between them: `200`, `200, 202`, `200-204`.

    Returns:
        The same without spaces: what HAProxy's `http-check expect status` takes.

    Raises:
        UnsupportedOption: not such a list, not 100 to 599, or a range that ends before it begins.
    """
    codes = []
    for part in text.split(","):
        match = _CODES.fullmatch(part.strip(" "))
        if match is None or (match[2] is not None and match[2] < match[1]):
            raise _refusal(
                "expected_codes",
                text,
                "it is not a list of HTTP status codes",
                "Use codes from 100 to 599: '200', '200,202' or '200-204'.",
            )
        codes.append(match[0])
    return ",".join(codes)


def _refusal(option: str, value: str, reason: str, remedy: str) -> UnsupportedOption:
    shown = ascii(value)
    if len(shown) > 80:
        shown = f"{shown[:77]}..."
    return UnsupportedOption(f"use health monitor option {option} {shown}", reason, remedy)
