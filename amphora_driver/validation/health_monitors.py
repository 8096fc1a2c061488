# SPDX-License-Identifier: Apache-2.0
"""Validation of health monitors, and the parser of their HTTP requests.

Invariant: the renderer prints the parsed request, never the text of the user, so HAProxy receives only checked values.
Patterns match the full text: `$` accepts a trailing newline.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from amphora_driver.errors import UnsupportedOption
from amphora_driver.model.enums import MonitorType
from amphora_driver.model.loadbalancer import HealthMonitor
from amphora_driver.validation.unsupported import require_between, require_one_of

TYPES = tuple(MonitorType)
"""All types; `udp.check_monitor_type` checks the type against the pool."""
SPEAK_HTTP = (MonitorType.HTTP, MonitorType.HTTPS)
SPEAK_TLS = (MonitorType.HTTPS, MonitorType.TLS_HELLO)
"""Types that use TLS with the member even if the pool does not."""
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "TRACE", "OPTIONS", "CONNECT", "PATCH")
VERSIONS = {1.0: "HTTP/1.0", 1.1: "HTTP/1.1"}
MAX_SECONDS = (2**31 - 1) // 1000
"""Longest delay and timeout: HAProxy's timers hold signed 32-bit milliseconds (manual section 2.5)."""
MAX_RETRIES = 10
MAX_PATH = 255
"""Longest url_path: the width of Octavia's column."""

# Visible ASCII, as in an HTTP request line (RFC 9112 section 3). A fragment is never sent.
_PATH = re.compile(r"/[!-~]*")
# Octavia's rule: labels of letters, digits, - and _, with an optional dot at the end.
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_DOMAIN = re.compile(rf"(?=.{{1,253}}\.?\Z){_LABEL}(?:\.{_LABEL})*\.?")
_CODES = re.compile(r"([1-5][0-9]{2})(?:-([1-5][0-9]{2}))?")


class HTTPRequest(NamedTuple):
    """The request of a monitor and the expected status codes in canonical form (`200,202-204`)."""

    method: str
    path: str
    version: str
    host: str | None
    expected: str


def parse_monitor(monitor: HealthMonitor) -> HTTPRequest | None:
    """Check the options of a monitor and return its HTTP request; None for other protocols.

    HTTP options of a monitor without HTTP are ignored, except domain_name.

    Raises:
        UnsupportedOption: an option or its value is not supported.
    """
    require_one_of("health monitor type", monitor.type, TYPES)
    require_between("health monitor option delay", monitor.delay, 1, MAX_SECONDS)
    require_between("health monitor option timeout", monitor.timeout, 1, MAX_SECONDS)
    require_between("health monitor option max_retries", monitor.max_retries, 1, MAX_RETRIES)
    require_between("health monitor option max_retries_down", monitor.max_retries_down, 1, MAX_RETRIES)
    if monitor.type in SPEAK_HTTP:
        return parse_http_request(monitor)
    parse_domain_name(monitor)
    return None


def parse_http_request(monitor: HealthMonitor) -> HTTPRequest:
    """Return the request of an HTTP monitor, with Octavia's defaults: GET, /, 200, HTTP 1.0.

    Raises:
        UnsupportedOption: the method, path, version, name or a status code is not valid.
    """
    method = monitor.http_method or "GET"
    if method not in METHODS:
        raise _refusal("http_method", method, "it is not an HTTP method", f"Use one of {', '.join(METHODS)}.")
    path = monitor.url_path or "/"
    if len(path) > MAX_PATH or not _PATH.fullmatch(path):
        raise _refusal(
            "url_path",
            path,
            "it is not the path of a URL",
            f"Use at most {MAX_PATH} characters, begin with '/', and percent-encode spaces and special characters.",
        )
    version = VERSIONS.get(monitor.http_version or 1.0)
    if version is None:
        raise _refusal(
            "http_version", str(monitor.http_version), "HAProxy does not support this HTTP version", "Use 1.0 or 1.1."
        )
    return HTTPRequest(
        method, path, version, parse_domain_name(monitor), parse_expected_codes(monitor.expected_codes or "200")
    )


def parse_domain_name(monitor: HealthMonitor) -> str | None:
    """Return the domain name of the monitor. With TLS, the certificate of a member must match it.

    Raises:
        UnsupportedOption: the text is not a domain name.
    """
    name = monitor.domain_name or None
    if name is not None and not _DOMAIN.fullmatch(name):
        raise _refusal("domain_name", name, "it is not a domain name", "Use letters, digits, '-', '_' and '.'.")
    return name


def parse_expected_codes(text: str) -> str:
    """Return status codes without spaces, in the form of HAProxy's `http-check expect status`.

    Args:
        text: codes and ranges of codes with commas between them: `200`, `200, 202`, `200-204`.

    Raises:
        UnsupportedOption: the text is not such a list, or a code is not between 100 and 599, or a range is empty.
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
