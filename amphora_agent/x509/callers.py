# SPDX-License-Identifier: Apache-2.0
"""The check that a client certificate belongs to a controller and not to an amphora.

Invariant: pure. A certificate with the purpose or the name of an amphora is refused, whichever authority issued it. TLS
has already refused a certificate whose extended key usage lacks clientAuth. A certificate without this extension is
accepted: procedures of operators issue such certificates to controllers.
Source: RFC 5280, 4.1 and 4.2.1.12.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from amphora_agent.x509.der import elements, first

_EXTENSIONS = 0xA3
_EXTENDED_KEY_USAGE = bytes.fromhex("551d25")
_SERVER_AUTH = bytes.fromhex("2b06010505070301")
AMPHORA_PURPOSE = "client certificate has the purpose serverAuth, as amphorae's have"
AMPHORA_NAME = "client certificate is named by a UUID, as amphorae's are"


def refusal(certificate: bytes, said: Mapping[str, Any]) -> str | None:
    """Return the reason why a client is refused; None if it may be a controller.

    Args:
        certificate: the DER form. TLS has verified it.
        said: the same certificate as `ssl.SSLSocket.getpeercert` returns it.
    """
    try:
        if _SERVER_AUTH in _purposes(certificate):
            return AMPHORA_PURPOSE
    except (ValueError, IndexError):
        return "client certificate cannot be read"
    return AMPHORA_NAME if any(map(_is_uuid, _names(said))) else None


def _purposes(certificate: bytes) -> list[bytes]:
    """Return the object identifiers in the extended key usage; empty without this extension."""
    found = []
    for tag, content in elements(first(first(certificate))):
        if tag != _EXTENSIONS:
            continue
        for _, extension in elements(first(content)):
            parts = list(elements(extension))
            if parts[0][1] == _EXTENDED_KEY_USAGE:
                found += [purpose for _, purpose in elements(first(parts[-1][1]))]
    return found


def _names(said: Mapping[str, Any]) -> Iterator[str]:
    yield from (value for kind, value in said.get("subjectAltName", ()) if kind == "DNS")
    yield from (value for part in said.get("subject", ()) for kind, value in part if kind == "commonName")


def _is_uuid(name: str) -> bool:
    try:
        return str(uuid.UUID(name)) == name.lower()
    except ValueError:
        return False
