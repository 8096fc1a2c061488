# SPDX-License-Identifier: Apache-2.0
"""Which client certificates, all of them of an authority of controllers, are an amphora's and command nothing.

Invariant: pure. A certificate that is an amphora's by its purpose or by its name is refused, whatever authority has
issued it. TLS itself has refused a certificate whose extended key usage lacks clientAuth. A certificate without that
extension is not refused for this reason: operators' own procedures issue such ones to controllers.
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
    """Why a caller is refused; None for a caller that may be a controller.

    Args:
        certificate: in DER. TLS has verified it.
        said: the same as `ssl.SSLSocket.getpeercert` has it.
    """
    try:
        if _SERVER_AUTH in _purposes(certificate):
            return AMPHORA_PURPOSE
    except (ValueError, IndexError):
        return "client certificate cannot be read"
    return AMPHORA_NAME if any(map(_is_uuid, _names(said))) else None


def _purposes(certificate: bytes) -> list[bytes]:
    """The object identifiers in the extended key usage; none if there is no such extension."""
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
