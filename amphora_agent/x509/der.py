# SPDX-License-Identifier: Apache-2.0
"""The parser of DER (X.690): elements with a tag and a content.

Invariant: pure. An element that is longer than its container is an error.
"""

from __future__ import annotations

from collections.abc import Iterator


def first(der: bytes) -> bytes:
    """Return the content of the first element.

    Raises:
        ValueError: there is no element.
        IndexError: the element ends in its header.
    """
    for _, content in elements(der):
        return content
    raise ValueError("there is no element")


def elements(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield tag and content of each element.

    Raises:
        ValueError: an element is longer than its container.
        IndexError: an element ends in its header.
    """
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
