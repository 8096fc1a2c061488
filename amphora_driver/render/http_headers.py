# SPDX-License-Identifier: Apache-2.0
"""Headers that a listener inserts into requests and responses.

Invariant: HAProxy replaces a client's header with the same name. HAProxy extends X-Forwarded-For only.
"""

from __future__ import annotations

from amphora_driver.model.enums import ListenerProtocol
from amphora_driver.model.loadbalancer import Listener
from amphora_driver.render import quoting
from amphora_driver.render.quoting import Quoted
from amphora_driver.validation.insert_headers import ABOUT_CERTIFICATE, ABOUT_CONNECTION, FORWARDED_FOR


def _line(name: str, value: str) -> Quoted:
    return quoting.words(
        (quoting.keywords("http-request set-header"), quoting.token(name, "a header"), quoting.text(value, name))
    )


# HAProxy writes control characters in log-formats as %XX, so a value of a client certificate cannot add a header.
_VALUES = {
    "X-Forwarded-Port": "%[dst_port]",
    "X-Forwarded-IP": "%[src]",
    "X-Client-IP": "%[src]",
    "X-Real-IP": "%[src]",
    "X-SSL-Client-Verify": "%[ssl_c_verify]",
    "X-SSL-Client-Has-Cert": "%[ssl_c_used]",
    "X-SSL-Client-DN": "%[ssl_c_s_dn]",
    "X-SSL-Client-CN": "%[ssl_c_s_dn(cn)]",
    "X-SSL-Issuer": "%[ssl_c_i_dn]",
    "X-SSL-Client-SHA1": "%[ssl_c_sha1,hex]",
    "X-SSL-Client-Not-Before": "%[ssl_c_notbefore]",
    "X-SSL-Client-Not-After": "%[ssl_c_notafter]",
}

_LINES = {name: _line(name, value) for name, value in _VALUES.items()}
_PROTO = {
    ListenerProtocol.HTTP: _line("X-Forwarded-Proto", "http"),
    ListenerProtocol.TERMINATED_HTTPS: _line("X-Forwarded-Proto", "https"),
}


def inserted_headers(listener: Listener) -> tuple[Quoted, ...]:
    """Return the lines that set request headers in a fixed order, without X-Forwarded-For."""
    return tuple(
        _PROTO[listener.protocol] if name == "X-Forwarded-Proto" else _LINES[name]
        for name in ABOUT_CONNECTION + ABOUT_CERTIFICATE
        if name in (listener.insert_headers or ()) and name != FORWARDED_FOR
    )


def appends_forwarded_for(listener: Listener) -> bool:
    """Return whether HAProxy appends the client's address to X-Forwarded-For."""
    return FORWARDED_FOR in (listener.insert_headers or ())


def strict_transport_security(listener: Listener) -> Quoted | None:
    """Return the value of Strict-Transport-Security; None without the header."""
    age = listener.hsts_max_age
    if age is None:
        return None
    parts = [f"max-age={quoting.integer(age, 'hsts_max_age', low=0, object_id=listener.id)}"]
    if listener.hsts_include_subdomains:
        parts.append("includeSubDomains")
    if listener.hsts_preload:
        parts.append("preload")
    # Each directive ends with a semicolon, as in the HSTS header of Octavia's own amphora provider.
    return quoting.text(" ".join(f"{part};" for part in parts), "the HSTS header", listener.id)
