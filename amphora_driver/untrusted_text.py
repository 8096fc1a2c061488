# SPDX-License-Identifier: Apache-2.0
"""Sanitizes text from an amphora for databases, logs and users. Pure.

Invariant: an attacker may control the amphora. The result is one line that every database accepts: PostgreSQL refuses
NUL, and MariaDB with utf8mb3 refuses characters outside the BMP.
"""

from __future__ import annotations

_CUT = " (cut)"


def printable(text: str, most: int) -> str:
    """Return a text in printable ASCII, cut to `most` characters; line breaks become `; `."""
    # An amphora may send a very long text, so the text is shortened first. This limits the time of the other
    # operations.
    head = text[: most + 1]
    line = "; ".join(part.strip() for part in head.splitlines() if part.strip())
    plain = line if line.isascii() and line.isprintable() else ascii(line)[1:-1]
    if len(text) <= most and len(plain) <= most:
        return plain
    return plain[: max(most - len(_CUT), 0)] + _CUT
