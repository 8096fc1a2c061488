# SPDX-License-Identifier: Apache-2.0
"""Validation of health monitors, and the parser of their HTTP requests.

Invariant: the renderer prints the parsed request, never the text of the user, so HAProxy receives only checked values.
Each parser raises `UnsupportedOption` for an invalid value. Patterns match the full text, because `$` accepts a
trailing newline.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from amphora_driver.model.enums import MonitorType
from amphora_driver.model.loadbalancer import HealthMonitor
from amphora_driver.validation.unsupported import refuse, require_between, require_one_of

SPEAK_HTTP = (MonitorType.HTTP, MonitorType.HTTPS)
SPEAK_TLS = (MonitorType.HTTPS, MonitorType.TLS_HELLO)
"""Types that use TLS with the member even if the pool does not."""
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "TRACE", "OPTIONS", "CONNECT", "PATCH")
VERSIONS = {1.0: "HTTP/1.0", 1.1: "HTTP/1.1"}
MAX_SECONDS = (2**31 - 1) // 1000
"""Longest delay and timeout: HAProxy's timers hold signed 32-bit milliseconds (manual section 2.5)."""
MAX_RETRIES = 10
_RANGES = {"delay": MAX_SECONDS, "timeout": MAX_SECONDS, "max_retries": MAX_RETRIES, "max_retries_down": MAX_RETRIES}
MAX_PATH = 255
"""Longest url_path: the width of Octavia's column."""

# A request line of HTTP has visible ASCII characters only (RFC 9112, section 3).
_PATH = re.compile(r"/[!-~]*")
# Octavia's domain names: labels of letters, digits, hyphens and underscores, and an optional dot at the end.
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_DOMAIN = re.compile(rf"(?=.{{1,253}}\.?\Z){_LABEL}(?:\.{_LABEL})*\.?")
_CODES = re.compile(r"([1-5][0-9]{2})(?:-([1-5][0-9]{2}))?")


_OPTION = "health monitor option"


class HTTPRequest(NamedTuple):
    """The request of a monitor and the expected status codes in canonical form (`200,202-204`)."""

    method: str
    path: str
    version: str
    host: str | None
    expected: str


def parse_monitor(monitor: HealthMonitor) -> HTTPRequest | None:
    """Check the options of a monitor and return its HTTP request; None for other protocols.

    The function ignores HTTP options of a monitor without HTTP, except domain_name. `udp.check_monitor_type` checks the
    type against the pool.
    """
    require_one_of("health monitor type", monitor.type, tuple(MonitorType))
    for name, high in _RANGES.items():
        require_between(f"health monitor option {name}", getattr(monitor, name), 1, high)
    if monitor.type in SPEAK_HTTP:
        return parse_http_request(monitor)
    parse_domain_name(monitor)
    return None


def parse_http_request(monitor: HealthMonitor) -> HTTPRequest:
    """Return the request of an HTTP monitor, with Octavia's defaults: GET, /, 200, HTTP 1.0."""
    method = monitor.http_method or "GET"
    if method not in METHODS:
        refuse(f"{_OPTION} http_method", method, "it is not an HTTP method", f"Use one of {', '.join(METHODS)}.")
    path = monitor.url_path or "/"
    if len(path) > MAX_PATH or not _PATH.fullmatch(path):
        form = f"Use at most {MAX_PATH} characters, begin with '/', and percent-encode spaces and special characters."
        refuse(f"{_OPTION} url_path", path, "it is not the path of a URL", form)
    version = VERSIONS.get(monitor.http_version or 1.0)
    if version is None:
        reason = "HAProxy does not support this HTTP version"
        refuse(f"{_OPTION} http_version", str(monitor.http_version), reason, "Use 1.0 or 1.1.")
    codes = parse_expected_codes(monitor.expected_codes or "200")
    return HTTPRequest(method, path, version, parse_domain_name(monitor), codes)


def parse_domain_name(monitor: HealthMonitor) -> str | None:
    """Return the domain name of the monitor. With TLS, the certificate of a member must match the name."""
    name = monitor.domain_name or None
    if name is not None and not _DOMAIN.fullmatch(name):
        refuse(f"{_OPTION} domain_name", name, "it is not a domain name", "Use letters, digits, '-', '_' and '.'.")
    return name


def parse_expected_codes(text: str) -> str:
    """Return status codes (`200, 202-204`) without spaces, as in HAProxy's `http-check expect status`."""
    codes = []
    for part in text.split(","):
        match = _CODES.fullmatch(part.strip(" "))
        if match is None or (match[2] is not None and match[2] < match[1]):
            form = "Use codes from 100 to 599: '200', '200,202' or '200-204'."
            refuse(f"{_OPTION} expected_codes", text, "it is not a list of HTTP status codes", form)
        codes.append(match[0])
    return ",".join(codes)
