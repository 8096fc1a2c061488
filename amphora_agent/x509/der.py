# SPDX-License-Identifier: Apache-2.0
"""The structure of DER (X.690): elements with a tag and a content.

Invariant: pure. An element that is longer than what contains it is an error, never a shorter element.
"""

from __future__ import annotations

from collections.abc import Iterator


def first(der: bytes) -> bytes:
    """The content of the first element.

    Raises:
        ValueError: there is none.
        IndexError: it ends in its header.
    """
    for _, content in elements(der):
        return content
    raise ValueError("there is nothing in it")


def elements(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Tag and content of each element.

    Raises:
        ValueError: an element is longer than what it is in.
        IndexError: one ends in its header.
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
            raise ValueError("an element is longer than what it is in")
        yield tag, der[at : at + length]
        at += length
