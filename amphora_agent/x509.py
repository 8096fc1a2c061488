# SPDX-License-Identifier: Apache-2.0
"""Reads the DER form (X.690) of certificates and revocation lists.

Invariant: pure. The serial numbers identify a revocation list; trust does not depend on them. Source: RFC 5280, 4.1 and
4.2.1.12 (certificates), 5.1 (lists).
"""

from __future__ import annotations

import re
import ssl
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

_EXTENSIONS = 0xA3
_EXTENDED_KEY_USAGE = bytes.fromhex("551d25")
_SERVER_AUTH = bytes.fromhex("2b06010505070301")
AMPHORA_PURPOSE = "client certificate has the purpose serverAuth, as amphorae's have"
AMPHORA_NAME = "client certificate is named by a UUID, as amphorae's are"

_LIST = re.compile(r"-----BEGIN X509 CRL-----(.*?)-----END X509 CRL-----", re.DOTALL)
_SHOWN = re.compile(r"^ +Serial Number: ([0-9A-F]+)$", re.MULTILINE)
_SHOWN_LIST = re.compile(r"^Certificate Revocation List #\d+:$", re.MULTILINE)
_SEQUENCE, _TIMES = 0x30, (0x17, 0x18)


def client_refusal(certificate: bytes, said: Mapping[str, Any]) -> str | None:
    """Return why a client with the certificate of an amphora is refused; None for a controller.

    TLS has verified the certificate (its DER form, and the result of `ssl.SSLSocket.getpeercert`). TLS has also refused
    an extended key usage without clientAuth. A certificate without this extension is accepted, because procedures of
    operators issue such certificates to controllers.
    """
    try:
        if _SERVER_AUTH in _purposes(certificate):
            return AMPHORA_PURPOSE
    except (ValueError, IndexError):
        return "client certificate cannot be read"
    return AMPHORA_NAME if any(map(_is_uuid, _names(said))) else None


def _purposes(certificate: bytes) -> list[bytes]:
    found = []
    for tag, content in _elements(_first(_first(certificate))):
        if tag != _EXTENSIONS:
            continue
        for _, extension in _elements(_first(content)):
            parts = list(_elements(extension))
            if parts[0][1] == _EXTENDED_KEY_USAGE:
                found += [purpose for _, purpose in _elements(_first(parts[-1][1]))]
    return found


def _names(said: Mapping[str, Any]) -> Iterator[str]:
    yield from (value for kind, value in said.get("subjectAltName", ()) if kind == "DNS")
    yield from (value for part in said.get("subject", ()) for kind, value in part if kind == "commonName")


def _is_uuid(name: str) -> bool:
    try:
        return str(uuid.UUID(name)) == name.lower()
    except ValueError:
        return False


def revoked_serials(text: str) -> tuple[int, list[int]] | None:
    """Return the number of revocation lists in a PEM text and their serial numbers; None if invalid."""
    blocks = dict.fromkeys(_LIST.findall(text))
    try:
        found = [serial for block in blocks for serial in _serials(block)]
    except (ValueError, IndexError):
        return None
    return len(blocks), sorted(found)


def shown_serials(answer: str) -> tuple[int, list[int]]:
    """Return the same for HAProxy's answer to ``show ssl crl-file``."""
    return len(_SHOWN_LIST.findall(answer)), sorted(int(serial, 16) for serial in _SHOWN.findall(answer))


def _serials(block: str) -> Iterator[int]:
    """Yield the serial numbers of one list in PEM, which are in the sequence after one or two times."""
    der = ssl.PEM_cert_to_DER_cert(f"-----BEGIN CERTIFICATE-----{block}-----END CERTIFICATE-----\n")
    seen_time = False
    for tag, content in _elements(_first(_first(der))):
        if tag == _SEQUENCE and seen_time:
            for _, entry in _elements(content):
                yield int.from_bytes(_first(entry), "big")
            return
        seen_time = seen_time or tag in _TIMES


def _first(der: bytes) -> bytes:
    """Return the content of the first element. Raises ValueError or IndexError without one."""
    for _, content in _elements(der):
        return content
    raise ValueError("there is no element")


def _elements(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield tag and content of each element. Raises ValueError or IndexError for incomplete elements."""
    at = 0
    while at < len(der):
        tag, length = der[at], der[at + 1]
        at += 2
        if length & 0x80:
            octets = length & 0x7F
            length = int.from_bytes(der[at : at + octets], "big")
            at += octets
        if at + length > len(der):
            raise ValueError("an element is longer than its container")
        yield tag, der[at : at + length]
        at += length
