# SPDX-License-Identifier: Apache-2.0
"""The serial numbers of a certificate revocation list, to compare it with the list in HAProxy.

Invariant: pure. The result identifies a list; it is not a base for trust.
Source: RFC 5280, 5.1 (the list); X.690 (DER).
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator

from amphora_agent.x509.der import elements, first

_BLOCK = re.compile(r"-----BEGIN X509 CRL-----(.*?)-----END X509 CRL-----", re.DOTALL)
_SHOWN = re.compile(r"^ +Serial Number: ([0-9A-F]+)$", re.MULTILINE)
_SHOWN_LIST = re.compile(r"^Certificate Revocation List #\d+:$", re.MULTILINE)
_SEQUENCE, _TIMES = 0x30, (0x17, 0x18)


def revoked(text: str) -> tuple[int, list[int]] | None:
    """Return the number of lists in a PEM text and their serial numbers; None if it is invalid."""
    blocks = dict.fromkeys(_BLOCK.findall(text))
    try:
        found = [serial for block in blocks for serial in _serials(_decoded(block))]
    except (ValueError, IndexError):
        return None
    return len(blocks), sorted(found)


def shown(answer: str) -> tuple[int, list[int]]:
    """Return the same for HAProxy's answer to ``show ssl crl-file``."""
    return len(_SHOWN_LIST.findall(answer)), sorted(int(serial, 16) for serial in _SHOWN.findall(answer))


def _decoded(block: str) -> bytes:
    return ssl.PEM_cert_to_DER_cert(f"-----BEGIN CERTIFICATE-----{block}-----END CERTIFICATE-----\n")


def _serials(der: bytes) -> Iterator[int]:
    """Yield the serial numbers of one list: the sequence after the one or two times of its validity."""
    whole = first(der)
    seen_time = False
    for tag, content in elements(first(whole)):
        if tag == _SEQUENCE and seen_time:
            for _, entry in elements(content):
                yield int.from_bytes(first(entry), "big")
            return
        seen_time = seen_time or tag in _TIMES
